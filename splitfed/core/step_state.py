"""What a step is made of for a party: the rows it uses, and what is kept between the forward and the backward."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from splitfed.core.payload import extent


class Batch(NamedTuple):
    """Which rows of which part of the data a step uses; parties agree on it beforehand, it is no message.

    `expected`: by how many rows the sum of the losses is divided, where that is not their own number. `counts_as`: the
    epoch that a rehearsed step stands for, or one that is taken besides the schedule. `task` multiplies the losses of
    the heads: at 0 there are none.
    """

    part: str
    rows: Tensor
    expected: float | None = None
    counts_as: int | None = None
    task: float = 1.0


@dataclass(slots=True)
class StepState:
    """What a party keeps of one replica between the forward and the backward of a step.

    `rows` only where it counts them: parties share no tensor, and a copy costs as much as a message. `slopes`: what
    leaves, the gradient that a defense wants of it, and its version then. `losses`: with what each is multiplied by.
    `crossed`: where in memory the gradients lie that have arrived. `strides`: those in which a leaf's gradient came
    to it, by the leaf's identity.
    """

    part: str
    rows: Tensor | None
    counts_as: int | None
    task: float
    inputs: dict[str, Tensor] = field(default_factory=dict)
    labels: dict[str, Tensor] = field(default_factory=dict)
    scale: float = 1.0
    held: dict[str, Tensor] = field(default_factory=dict)
    leaves: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    sent: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    returned: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    slopes: dict[str, list[tuple[Tensor, Tensor, int]]] = field(default_factory=dict)
    losses: dict[str, list[tuple[Tensor, float]]] = field(default_factory=partial(defaultdict, list))
    objective_added: bool = False
    crossed: set[int] = field(default_factory=set)
    strides: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def make_leaf(self, value: Tensor, gradient: bool) -> Tensor:
        """Return `value`, as it was received, as a leaf; `gradient`: whether its gradient is wanted."""
        # Masks and whole numbers have none.
        gradient = gradient and value.is_floating_point()
        leaf = value.detach().requires_grad_(gradient)
        if gradient and leaf.dim() > 1:
            # torch keeps the gradient in the strides of the leaf, but the order of sums behind it follows its own.
            key, strides = id(leaf), self.strides
            leaf.register_hook(lambda found: strides.__setitem__(key, found.stride()))
        return leaf

    def gradient_of(self, leaf: Tensor) -> Tensor:
        """Return the gradient of a leaf in the strides that it has in an uncut model.

        Zeros where nothing used it in this step, so that the sender gets what it expects.
        """
        found, strides = leaf.grad, self.strides.get(id(leaf))
        if found is None:
            return torch.zeros_like(leaf)
        if strides is None or strides == found.stride() or extent(found.shape, strides) != found.numel():
            return found
        return torch.empty_strided(found.shape, strides, dtype=found.dtype, device=found.device).copy_(found)
