"""Shadow: trains an upstream model against the adversary's own downstream segments and inverts it; without queries.

Paper: He, Zhang, Lee, "Model inversion attacks against collaborative inference", ACSAC 2019 (query-free).

The adversary knows z, its own segments g up to the loss, and labelled rows. It trains a shadow f' by the loss of
g(f'(x)) on the labels, g frozen, and then optimizes the input until its release under f' equals z, like `rmle`.
Releases of the shadow in training pass the run's defenses, drawn afresh, and its loss has the defenses' factor and
penalties as the client's in the run's last epoch: with distance correlation it is (1 - alpha) CE + alpha DCOR. The
search takes defenses at their mean. The shadow has the architecture of the upstream segments, where the authors use a
different one; optimizer, batches, halving of the rate every ten epochs and both numbers of steps of the budget "full"
are theirs. A U-shaped server holds no loss: refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from splitfed.attacks.base import (
    FORWARD,
    Attack,
    Budgets,
    Clone,
    Knowledge,
    Needs,
    Outcome,
    Progress,
    unwrap,
)
from splitfed.attacks.networks.gradient_descent import draw_batches, take_step
from splitfed.attacks.reconstruction.inversion import invert
from splitfed.core.errors import InvalidInput, require_count, require_number
from splitfed.core.messages import View

_HALVED = 10  # epochs


@dataclass(frozen=True)
class Shadow(Attack):
    """Trains a shadow for `epochs` at rate `shadow_lr` in batches of `batch_size`.

    Inverts it by `iterations` at rate `lr`.

    `tv` and `l2`: weights of the two regularisers of the input.
    """

    requires: ClassVar[frozenset[Needs]] = frozenset(
        {Needs.RELEASES, Needs.ARCHITECTURE, Needs.DOWNSTREAM, Needs.AUXILIARY, Needs.AUXILIARY_LABELS}
    )
    adapts_to = FORWARD
    budgets: ClassVar[Budgets] = {
        "quick": {"epochs": 15, "shadow_lr": 3e-3, "iterations": 300, "lr": 0.05, "tv": 0.1},
        "full": {"epochs": 50, "shadow_lr": 1e-3, "iterations": 500, "lr": 0.1, "tv": 2.0},
    }

    epochs: int = field(default=15, metadata=require_count("shadow epochs", low=1))
    batch_size: int = field(default=32, metadata=require_count("shadow batch_size", low=1))
    shadow_lr: float = field(default=3e-3, metadata=require_number("shadow shadow_lr", low=0.0, open_low=True))
    iterations: int = field(default=300, metadata=require_count("shadow iterations", low=1))
    lr: float = field(default=0.05, metadata=require_number("shadow lr", low=0.0, open_low=True))
    tv: float = field(default=0.1, metadata=require_number("shadow tv", low=0.0))
    l2: float = field(default=0.0, metadata=require_number("shadow l2", low=0.0))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Outcome:
        """Return the reconstructions, (victims, *shape), and the shadow.

        The search starts at the middle of the value range (or at zero).
        """
        shadow = unwrap(knowledge.architecture)(int(torch.randint(2**62, (), generator=generator)))
        self._train(shadow, knowledge, generator, progress)
        found = invert(
            view, knowledge, self.lr, self.iterations, None, mean=shadow, sample=shadow.sample, tv=self.tv, l2=self.l2
        )
        progress(self.epochs + 1, self.epochs + 1)
        return Outcome(found, clone=shadow)

    def _train(self, shadow: Clone, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> None:
        weights = list(shadow.parameters())
        if not weights:
            raise InvalidInput("shadow needs an upstream with weights to train; this one has none: use rmle")
        x, y, loss_of = unwrap(knowledge.auxiliary), unwrap(knowledge.auxiliary_labels), unwrap(knowledge.loss)
        if min(len(x), self.batch_size) < shadow.least_rows:
            raise InvalidInput(
                f"shadow batch_size={self.batch_size} with {len(x)} auxiliary rows is not allowed; the run's defenses "
                f"need batches of at least {shadow.least_rows}"
            )
        optimizer = torch.optim.Adam(weights, lr=self.shadow_lr, eps=1e-3, amsgrad=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, _HALVED, 0.5)
        for epoch in range(self.epochs):
            for rows in draw_batches(len(x), self.batch_size, generator, shadow.least_rows):
                releases, penalty, weight = shadow.in_training(x[rows])
                take_step(optimizer, weight * loss_of(x[rows], releases, y[rows]) + penalty)
                shadow.defenses.learn()
            schedule.step()
            progress(epoch + 1, self.epochs + 1)
