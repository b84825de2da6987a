"""What a step is made of for a party: the rows it uses, and what is kept between the forward and the backward."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import Tensor

from splitfed.core.messages import Stamp
from splitfed.core.payload import Layout
from splitfed.core.random import derive


def forward_seed(seed: int, party: str, segment: str, stamp: Stamp) -> int:
    """Return the seed from which a segment that draws random numbers (dropout) draws at one step."""
    return derive(seed, "forward", party, segment, *stamp)


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
    `received_labels`: those that another party has sent for a loss, by head. `crossed`: where in memory the gradients
    lie that have arrived. `layouts`: how a leaf's gradient lay when it came to it, by the leaf's identity, where that
    was otherwise.
    """

    part: str
    rows: Tensor | None
    counts_as: int | None
    task: float
    inputs: dict[str, Tensor] = field(default_factory=dict)
    labels: dict[str, Tensor] = field(default_factory=dict)
    received_labels: dict[str, Tensor] = field(default_factory=dict)
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
    layouts: dict[int, Layout] = field(default_factory=dict)
