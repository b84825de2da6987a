"""Inverting gradients: rows whose gradient has the direction of the client's, with a total variation prior.

Paper: Geiping, Bauermeister, Dröge, Moeller, "Inverting gradients - how easy is it to break privacy in federated
learning?", NeurIPS 2020; labels of a batch counted as by Wainakh et al., "User-level label leakage from gradients in
federated learning", PETS 2022.

Minimises 1 - cos(g(x, y), g*) + tv TV(x) over x from normal noise, TV the mean absolute difference of neighbours, with
Adam on the sign of the gradient, its rate divided by ten after 3/8, 5/8 and 7/8 of the iterations, x held in the
values' range. Labels are inferred first: exactly for one row, the count of each class for a batch. The unknown
direction of the gradient at the cut of a split model is optimized too (see `gradient_matching`). Deviates: in double
precision, and rows are not standardised, so the rate is in units of the values' range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from splitfed.attacks.base import Attack, Budgets, DefenseEffect, Knowledge, Needs, Phase, Progress, unwrap
from splitfed.attacks.gradients.gradient_matching import ClientGradient, batch_logits, client_gradient
from splitfed.attacks.gradients.local_training import check_hard_labels
from splitfed.core.errors import require_count, require_number
from splitfed.core.messages import View


@dataclass(frozen=True)
class InvertingGradients(Attack):
    """Optimizes rows by `iterations` of signed Adam at rate `lr` from each of `restarts` starts.

    `tv`: weight of the total variation.
    """

    phase: ClassVar[Phase] = Phase.TRAINING
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.UPDATES})
    adapts_to = frozenset({DefenseEffect.RELEASE, DefenseEffect.GRADIENT, DefenseEffect.RECEIVER_PENALTY})
    budgets: ClassVar[Budgets] = {
        "quick": {"iterations": 600, "restarts": 1, "lr": 0.05, "tv": 1e-4},
        "full": {"iterations": 24_000, "restarts": 1, "lr": 0.1, "tv": 0.2},
    }

    iterations: int = field(default=600, metadata=require_count("inverting_gradients iterations", low=1))
    restarts: int = field(default=1, metadata=require_count("inverting_gradients restarts", low=1))
    lr: float = field(default=0.05, metadata=require_number("inverting_gradients lr", low=0.0, open_low=True))
    tv: float = field(default=1e-4, metadata=require_number("inverting_gradients tv", low=0.0))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the reconstructed rows, (rows, *shape), in no particular order."""
        check_hard_labels("InvertingGradients", unwrap(knowledge.local))
        client = client_gradient(view, knowledge)
        low, high = knowledge.value_range or (-1.0, 1.0)
        middle = torch.full((2, *knowledge.shape), (low + high) / 2, dtype=torch.float64, device=client.device)
        labels = {head.value: batch_logits(head, client, middle) for head in client.local.heads}
        found = [self._search(client, knowledge, labels, generator, start, progress) for start in range(self.restarts)]
        return min(found, key=lambda one: one[1])[0].float()

    def _search(
        self,
        client: ClientGradient,
        knowledge: Knowledge,
        labels: Mapping[str, Tensor],
        generator: torch.Generator,
        start: int,
        progress: Progress,
    ) -> tuple[Tensor, float]:
        x = client.draw((client.rows, *knowledge.shape), generator)
        _, back = client.draw_unknowns(knowledge.shape, generator)
        free = [x, *back.values()]
        optimizer = torch.optim.Adam(free, lr=self.lr)
        turns = [self.iterations * eighths // 8 for eighths in (3, 5, 7)]
        rates = torch.optim.lr_scheduler.MultiStepLR(optimizer, turns, gamma=0.1)
        misfit = math.inf
        for iteration in range(self.iterations):
            misfit_now = 1 - cosine(client.gradient(x, labels, back), client.target)
            # Which hidden gradients reach what is exchanged depends on where the client's segments end.
            slopes = torch.autograd.grad(misfit_now + self.tv * variation(x), free, materialize_grads=True)
            for tensor, g in zip(free, slopes, strict=True):
                tensor.grad = g.sign()
            optimizer.step()
            rates.step()
            if knowledge.value_range is not None:
                with torch.no_grad():
                    x.clamp_(*knowledge.value_range)
            misfit = float(misfit_now.detach())
            if iteration % 50 == 49:
                progress(start * self.iterations + iteration + 1, self.restarts * self.iterations)
        return x.detach(), misfit


def cosine(found: list[Tensor], seen: list[Tensor]) -> Tensor:
    """Return the cosine similarity of two gradients, each a list of tensors, over all their numbers."""
    inner = sum(((a * b).sum() for a, b in zip(found, seen, strict=True)), seen[0].new_zeros(()))
    norms = [sum((t.square().sum() for t in given), seen[0].new_zeros(())) for given in (found, seen)]
    return inner / (norms[0] * norms[1]).sqrt().clamp_min(1e-300)


def variation(x: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring pixels, summed over both directions.

    0 for rows that are no images.

    x: (n, channels, height, width).
    """
    if x.dim() != 4:
        return x.new_zeros(())
    steps = (x[:, :, 1:] - x[:, :, :-1], x[..., 1:] - x[..., :-1])
    return sum((s.abs().mean() for s in steps if s.numel()), x.new_zeros(()))
