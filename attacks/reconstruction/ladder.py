"""Ladder: trains inverse networks of several sizes and budgets, and uses the one with the least error on held-out rows.

Paper: the networks are those of He, Zhang, Lee, "Model inversion attacks against collaborative inference", ACSAC 2019
(black box); the choice among them is ours. Some of the adversary's auxiliary rows are held out of training. Their
releases are appended to those of the victims, and every network decodes both alike. The network with the smallest
squared error on the held-out rows makes the prediction; the victims' truth is not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor

from splitfed.attacks.base import FORWARD, Attack, Budgets, Knowledge, Needs, Progress, unwrap
from splitfed.attacks.reconstruction.held_out import hold_out
from splitfed.core.errors import require_count, require_counts, require_number, require_share
from splitfed.core.messages import View
from splitfed.core.random import derive
from splitfed.registry import load


@dataclass(frozen=True)
class Ladder(Attack):
    """Chooses among networks with each of `widths` and `epochs`, on the share `validation` of the auxiliary rows.

    `batch_size`, `lr` and `queries` are those of `inverse_network`.
    """

    trains_decoder: ClassVar[bool] = True
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES, Needs.QUERIES, Needs.AUXILIARY})
    adapts_to = FORWARD
    budgets: ClassVar[Budgets] = {
        "quick": {"widths": (8, 32), "epochs": (5, 15), "lr": 3e-3},
        "full": {"widths": (16, 64, 128), "epochs": (50, 200), "lr": 1e-3},
    }

    widths: tuple[int, ...] = field(default=(8, 32), metadata=require_counts("ladder widths", low=1))
    epochs: tuple[int, ...] = field(default=(5, 15), metadata=require_counts("ladder epochs", low=1))
    batch_size: int = field(default=32, metadata=require_count("ladder batch_size", low=1))
    lr: float = field(default=3e-3, metadata=require_number("ladder lr", low=0.0, open_low=True))
    queries: int = field(default=5, metadata=require_count("ladder queries", low=1))
    validation: float = field(default=0.2, metadata=require_share("ladder validation"))

    def rungs(self) -> Iterator[Attack]:
        """Yield the candidate networks, the smallest first."""
        network = load("attacks", "inverse_network")
        for width, epochs in product(self.widths, self.epochs):
            yield network(epochs=epochs, batch_size=self.batch_size, lr=self.lr, width=width, queries=self.queries)

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the chosen network's reconstructions of the releases in the view: (victims, *shape)."""
        held_out = hold_out("ladder", view, knowledge, self.validation, generator)
        best: tuple[float, Tensor] | None = None
        rungs = list(self.rungs())
        for done, attack in enumerate(rungs, 1):
            # Every rung draws its own random numbers, so that one more of them changes none of those before it.
            draws = torch.Generator().manual_seed(derive(generator.initial_seed(), "rung", done))
            predictions = attack(held_out.view, held_out.knowledge, draws).prediction
            victims, own = held_out.split(predictions)
            error = held_out.error(own)
            if best is None or error < best[0]:
                best = error, victims
            progress(done, len(rungs))
        return unwrap(best)[1]
