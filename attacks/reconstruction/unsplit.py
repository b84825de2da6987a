"""UnSplit: optimizes input and upstream weights in turn until the release fits; needs the architecture, no data.

Paper: Erdogan, Kupcu, Cicek, "UnSplit: data-oblivious model inversion, model stealing, and label inference attacks
against split learning", WPES 2022.

In turn, for a clone f' with random weights: steps on x, by mean((f'(x) - z)^2) + tv TV(x) + l2 mean(x^2), and steps on
f', by mean((f'(x) - z)^2) alone; both with Adam (amsgrad). The authors process one image after another and keep the
clone; here all victims share one clone from the start, which is faster and constrains its weights by all releases. f'
is in evaluation mode and includes the run's defenses at their mean; noise that it measures adds to tv, as in `rmle`.

The scale of x is not determined: half the input with twice the weights has the same release, and l2 favours a small
one. With `stretch` each prediction is spread over the value range, as the authors do with CIFAR and not with MNIST:
without it a faithful but dark image of a digit may have a larger error than the mean image. Nor is the sign determined:
the negative of an image, with weights of the other sign and matching biases, has the same release. Some random clones
lead to negatives, others to no image. So among `restarts` (the authors have one) the choice is by fit and prior
together, the loss of the search itself: misfit + tv TV(u) + l2 mean(u^2), u being the prediction spread from 0 at the
low end of the value range to 1 at its high end, so that its scale does not matter. That prefers dark images to their
negatives: it is wrong for mostly bright data, and random for balanced data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from splitfed.attacks.base import (
    Attack,
    Budgets,
    Clone,
    DefenseEffect,
    Knowledge,
    Needs,
    Outcome,
    Progress,
    Releases,
    unwrap,
)
from splitfed.attacks.networks.gradient_descent import take_step
from splitfed.attacks.reconstruction.inversion import Search, misfit, start, total_variation
from splitfed.core.errors import InvalidInput, require_count, require_number
from splitfed.core.messages import View


@dataclass(frozen=True)
class Unsplit(Attack):
    """Optimizes the inputs and the clone in turn for `rounds`, from each of `restarts` freshly drawn clones.

    A round has `input_steps` on the inputs at rate `lr` and `model_steps` on the clone at rate `model_lr`. `tv` and
    `l2`: weights of the regularisers of the input; `stretch`: whether each prediction is spread over the value range.
    Of the restarts the one with the least misfit plus regularisers is kept.
    """

    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES, Needs.ARCHITECTURE})
    adapts_to = frozenset({DefenseEffect.RELEASE})
    budgets: ClassVar[Budgets] = {
        "quick": {"rounds": 30, "input_steps": 20, "model_steps": 20, "lr": 0.03, "model_lr": 0.02},
        "full": {
            "rounds": 1000, "input_steps": 100, "model_steps": 100, "lr": 1e-3, "model_lr": 1e-3,
            "tv": 0.1, "l2": 1.0, "restarts": 1,
        },
    }  # fmt: skip

    rounds: int = field(default=30, metadata=require_count("unsplit rounds", low=1))
    input_steps: int = field(default=20, metadata=require_count("unsplit input_steps", low=1))
    model_steps: int = field(default=20, metadata=require_count("unsplit model_steps", low=1))
    lr: float = field(default=0.03, metadata=require_number("unsplit lr", low=0.0, open_low=True))
    model_lr: float = field(default=0.02, metadata=require_number("unsplit model_lr", low=0.0, open_low=True))
    tv: float = field(default=0.01, metadata=require_number("unsplit tv", low=0.0))
    l2: float = field(default=0.1, metadata=require_number("unsplit l2", low=0.0))
    stretch: bool = True
    restarts: int = field(default=3, metadata=require_count("unsplit restarts", low=1))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Outcome:
        """Return the reconstructed rows (victims, *shape) and the cloned segments of the fit with the lowest loss."""
        architecture = unwrap(knowledge.architecture)
        seen = view.select(kind="activation").tensors(knowledge.device)
        best: tuple[float, Tensor, Clone] | None = None
        for restart in range(self.restarts):
            clone = architecture(int(torch.randint(2**62, (), generator=generator)))
            x = start(seen, knowledge)
            for done in self._alternate(x, clone, seen):
                progress(restart * self.rounds + done, self.restarts * self.rounds)
            with torch.no_grad():
                loss = float(misfit(clone(x), seen)) + self.prior(x, knowledge.value_range)
            if best is None or loss < best[0]:
                best = loss, x.detach(), clone
        _, prediction, clone = unwrap(best)
        return Outcome(stretch_rows(prediction, knowledge.value_range) if self.stretch else prediction, clone=clone)

    def prior(self, x: Tensor, value_range: tuple[float, float] | None) -> float:
        """Return the sum of the regularisers of rows x (n, ...), independent of their scale.

        Each row is spread from 0 at the low end of the value range to 1 at its high end; unchanged without a range.
        """
        shown = stretch_rows(x, None if value_range is None else (0.0, 1.0))
        return float(self.tv * total_variation(shown) + self.l2 * shown.square().flatten(1).mean(1).sum())

    def _alternate(self, x: Tensor, clone: Clone, seen: Releases) -> Iterator[int]:
        """Optimize x and the weights of `clone` in turn, and yield the number of finished rounds."""
        weights = list(clone.parameters())
        if not weights:
            raise InvalidInput("unsplit needs an upstream with weights to search; this one has none: use rmle")
        inputs = torch.optim.Adam([x], lr=self.lr, amsgrad=True)
        model = torch.optim.Adam(weights, lr=self.model_lr, amsgrad=True)
        search = Search(seen, clone, clone.sample, self.tv, self.l2)
        for done in range(self.rounds):
            search.advance(x, inputs, self.input_steps)
            for _ in range(self.model_steps):
                take_step(model, misfit(clone(x.detach()), seen) / len(x))
            yield done + 1


def stretch_rows(x: Tensor, value_range: tuple[float, float] | None) -> Tensor:
    """Return every row of x (n, ...) spread over the value range; constant rows are unchanged.

    Without a range x is returned as it is.
    """
    if value_range is None:
        return x
    flat = x.flatten(1)
    least, most = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    low, high = value_range
    spread = low + (high - low) * (flat - least) / (most - least)
    return torch.where(most > least, spread, flat).view_as(x)
