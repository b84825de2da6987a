"""Gradients at a cut as label attacks read them: one row a victim, scaled to the loss of a single example."""

from __future__ import annotations

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.grouping import group_pairs
from splitfed.core.messages import View
from splitfed.core.rows import flat_rows


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


def check_classes(attack: str, classes: int | None) -> int:
    """Return the number of classes; raise `InvalidInput` for labels that are not classes."""
    if classes is None:
        raise InvalidInput(f"{attack} predicts classes; the labels of this run are not classes")
    return classes
