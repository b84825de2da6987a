"""The base of attacks that predict labels, and what they read: gradients at a cut, known victims, groups of scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from splitfed.attacks.base import Attack, Needs, Phase, Target, check_classes
from splitfed.core.errors import InvalidInput
from splitfed.core.grouping import group_pairs
from splitfed.core.messages import View
from splitfed.core.rows import flat_rows
from splitfed.registry import name_of


def example_gradients(view: View, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return the gradient of each victim's own loss by released value: value -> (victims, ...).

    The loss is the mean over a batch, so a row that arrived is that gradient divided by the rows of its batch;
    multiplying by their number makes rows of batches of different size comparable.
    """
    joined = group_pairs(
        (name, g.to(device) * len(g))
        for message in view.select(kind="gradient").messages
        for name, g in message.tensors.items()
    )
    return {name: torch.cat(parts) for name, parts in joined.items()}


def gradient_rows(view: View, device: torch.device | str = "cpu") -> Tensor:
    """Return all gradients of each victim, flattened and concatenated: (victims, numbers)."""
    return torch.cat([flat_rows(g) for g in example_gradients(view, device).values()], 1)


def only_gradient(attack: str, view: View, device: torch.device | str = "cpu") -> Tensor:
    """Return the gradients of the only value that has any, (victims, ...); raise `InvalidInput` if several have."""
    found = example_gradients(view, device)
    if len(found) != 1:
        raise InvalidInput(f"{attack} reads the gradient of one value; {view.party} receives those of {sorted(found)}")
    return next(iter(found.values()))


def check_two_classes(attack: str, classes: int | None) -> None:
    """Raise `InvalidInput` unless the labels have two classes."""
    if classes != 2:
        kind = "no classes" if classes is None else f"{classes} classes"
        raise InvalidInput(f"{attack} predicts labels of two classes; this run has {kind}")


@dataclass(frozen=True)
class LabelAttack(Attack):
    """Base of attacks that predict the labels of rows from the gradients returned in a training step.

    A subclass that needs more than the gradients redefines `requires`. One with a parameter `hints` is told that many
    victims of each class.
    """

    target: ClassVar[Target] = Target.LABELS
    phase: ClassVar[Phase] = Phase.STEP
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.GRADIENTS})

    def asks(self, classes: int | None) -> dict[int, int]:
        """Return the required number of known victims of each class: class -> `hints`, empty for 0 or without hints.

        Raises `InvalidInput` for labels that are not classes.
        """
        hints = getattr(self, "hints", 0)
        return dict.fromkeys(range(check_classes(name_of("attacks", type(self)), classes)), hints) if hints else {}


def boundary(scores: Tensor) -> float:
    """Return the midpoint between the two clusters of `scores` (n,) with the least sum of squares within.

    All splits of the sorted scores are compared, so there is no random start. For a single score, or equal ones, the
    result is that score.
    """
    ordered = scores.detach().double().cpu().sort().values
    if len(ordered) < 2:
        return float(ordered[0])
    count = torch.arange(1, len(ordered), dtype=torch.float64)
    below = ordered.cumsum(0)[:-1]
    above = ordered.sum() - below
    # The sum of squares within the groups is a constant less this.
    explained = below.square() / count + above.square() / (len(ordered) - count)
    best = int(explained.argmax())
    return float((below[best] / count[best] + above[best] / (len(ordered) - count[best])) / 2)
