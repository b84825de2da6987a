"""Marvell: adds the Gaussian noise to cut gradients that makes two classes hardest to distinguish at a given power.

Paper: Li, Sun, Yang, Gao, Zhang, Xie, Smith, Wang, "Label leakage and protection in two-party split learning", ICLR
2022.

The party with the labels models the gradients of each class in the batch as Gaussians of equal variance in every
direction (the mean over coordinates of the class's variance), adds different noise to each class, along the difference
of the class means and orthogonal to it, and chooses both such that the sum of the Kullback-Leibler divergences between
the noised classes is least (`splitfed.defenses.sum_kl`). The mean power of the noise over the batch is at most s ‖mean
of positives - mean of negatives‖², as in the paper; p is the batch's own share of positives.

The paper does not treat batches of one class, and its code divides by zero there: here such a batch gets the noise of
`max_norm`, and a batch whose class means are equal is sent unchanged, as its budget is zero. A class with a single row
has variance zero. The bound on a detector's error is for one noised example and for Gaussian classes as estimated from
the batch; it is no formal guarantee for labels, and does not bound several parties that pool their gradients, or one
party over many steps. Gradients that lie on a line, as those of one logit behind a linear rest of the model, violate
the assumption: the class that varies more gets no orthogonal noise and stays on the line, the other leaves it, so the
classes are distinguished without error for any s (tested).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitfed.core.defense import GradientDefense, as_strength
from splitfed.core.defense_context import Context
from splitfed.core.errors import InvalidInput, require_number
from splitfed.core.rows import flat_rows
from splitfed.core.tasks import Task
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.defenses.aligned_noise import add_aligned_noise
from splitfed.defenses.label_edges import LabelGuard, leaking_heads
from splitfed.defenses.sum_kl import NoiseVariances, least_sum_kl


@dataclass(frozen=True)
class Marvell(LabelGuard, GradientDefense):
    """Adds Gaussian noise to the returned gradient, optimised so that two classes are hardest to distinguish.

    `s` > 0: power of the noise in units of the squared distance of the class means (the paper: .1 to 25).
    """

    s: float = field(
        default=1.0,
        metadata=require_number("marvell s", low=0.0, open_low=True)
        | as_strength("squared distances of the class means"),
    )

    @property
    def least_rows(self) -> int:
        """Smallest batch: two rows, one for each class."""
        return 2

    def check(self, topology: Topology, facts: TopologyFacts) -> None:
        """Raise `InvalidInput` unless labels have two classes, the sender holds them, and edges carry one value."""
        for name in self.edges(topology):
            edge = topology.edge(name)
            sender = topology.role_of(edge.target)
            if len(values := facts.data(edge.values)) != 1:
                raise InvalidInput(
                    f"marvell guards the gradient of one value; edge {name!r} carries {', '.join(values) or 'none'}"
                )
            if any(head.labels != sender for head in leaking_heads(topology, edge)):
                raise InvalidInput(
                    f"marvell needs the labels where the gradient on {name!r} comes from; role {sender!r} holds none "
                    "of its own, they are sent to it"
                )
            heads = [head for head in topology.heads if head.labels == sender]
            if len(heads) != 1:
                raise InvalidInput(
                    f"marvell hides one label a row; role {sender!r} holds those of {', '.join(h.value for h in heads)}"
                )
            _check_binary(heads[0].task)

    def gradient(self, name: str, g: Tensor, context: Context) -> Tensor:
        """Return `g` plus noise by class, drawn afresh for this step: same shape."""
        (y,) = context.labels.values()
        return self.add_noise(g, positives(y), context.generator(name, g.device))

    def add_noise(self, g: Tensor, positive: Tensor, generator: torch.Generator) -> Tensor:
        """Return the gradients `g` (batch, ...) plus noise for the classes `positive` (batch,) bool."""
        if not 0 < int(positive.sum()) < len(positive):
            return add_aligned_noise(g, generator)
        # In double precision: squares of small gradients would vanish in single.
        rows = flat_rows(g.detach().double())
        apart = rows[positive].mean(0) - rows[~positive].mean(0)
        noise = self.noise(g, positive)
        if noise is None:
            return g
        # Two streams of draws: one number a row along the difference, one a coordinate everywhere.
        once, each = (
            torch.randn(shape, generator=generator, device=g.device, dtype=torch.float64)
            for shape in ((len(rows), 1), rows.shape)
        )
        around = _variance_per_row(noise.around, positive)
        extra = (_variance_per_row(noise.along, positive) - around).clamp_min(0)
        drawn: Tensor = once * extra.sqrt() * (apart / apart.norm()) + each * around.sqrt()
        return g + drawn.view(g.shape).to(g.dtype)

    def noise(self, g: Tensor, positive: Tensor) -> NoiseVariances | None:
        """Return the noise variances for a batch of gradients, and their bound on detection.

        `g`: (batch, ...); `positive`: (batch,) bool, the classes. None if the means of both classes are equal, or one
        class is missing.
        """
        rows = flat_rows(g.detach().double())
        groups = rows[~positive], rows[positive]
        if min(len(group) for group in groups) == 0:
            return None
        gap = float((groups[1].mean(0) - groups[0].mean(0)).square().sum())
        if gap == 0:
            return None
        u, v = (float(group.var(0, correction=0).mean()) for group in groups)
        return least_sum_kl(u, v, rows.shape[1], gap, len(groups[1]) / len(rows), self.s * gap)


def positives(y: Tensor) -> Tensor:
    """Return which rows are positive: (batch,), for labels 0 and 1, or soft ones (batch,) or (batch, 2)."""
    return y > 0.5 if y.dim() == 1 else y[:, 1] > y[:, 0]


def _variance_per_row(variances: tuple[float, float], positive: Tensor) -> Tensor:
    return torch.tensor(variances, dtype=torch.float64, device=positive.device)[positive.long()].unsqueeze(1)


def _check_binary(task: Task | None) -> None:
    classes = None if task is None else {"binary": 2, "classification": task.outputs}.get(task.name)
    if classes != 2:
        kind = "no classes" if classes is None else f"{classes} classes"
        raise InvalidInput(f"marvell hides labels of two classes; this task has {kind}: use label_dp, max_norm or iso")
