"""One step over a lane: walk the segments in order, carry each message over the link, walk back.

The executor routes messages and nothing else. It holds no tensor between steps and looks into none, except to
stop a run whose loss, message or gradient is no longer finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from splitfed.errors import NonFinite
from splitfed.graph import Topology
from splitfed.party import Batch, Party
from splitfed.view import Message, Stamp


class Link(Protocol):
    """Whatever carries messages between parties; what it returns is what arrives."""

    def deliver(self, message: Message) -> Message:
        """Carry `message` to its receiver."""
        ...


@dataclass
class Lane:
    """One client's instance of a topology: the party in each role."""

    index: int
    parties: Mapping[str, Party]
    peers: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        """Note the party names, which is all that one party knows of another."""
        self.peers = {role: party.name for role, party in self.parties.items()}


def train_step(topology: Topology, lane: Lane, link: Link, batch: Batch, stamp: Stamp) -> dict[str, float]:
    """Train one batch over `lane`: an exchange, then one optimizer step a party; returns the loss of each head."""
    losses = exchange(topology, lane, link, batch, stamp)
    for party in lane.parties.values():
        party.update()
    return losses


def exchange(
    topology: Topology, lane: Lane, link: Link, batch: Batch, stamp: Stamp, scale: float = 1.0
) -> dict[str, float]:
    """Walk forward, compute the losses (times `scale`), walk back: gradients are gathered, no weight is touched.

    Returns the unscaled loss of each head. Raises `NonFinite` naming the first message, loss or penalty that is
    not finite.
    """
    crossed: list[Message] = []
    forward(topology, lane, link, batch, stamp, crossed, scale)
    losses = _losses(topology, lane, link, stamp)
    backward(topology, lane, link, stamp, crossed)
    values = {name: float(loss) for name, loss in losses.items()}
    check_finite(lane, values, crossed, stamp)
    for party in lane.parties.values():
        party.forget(stamp.lane)
    return values


def predict_step(topology: Topology, lane: Lane, link: Link, batch: Batch, stamp: Stamp) -> dict[str, Tensor]:
    """Walk forward in evaluation mode; returns the output of each head, checked to be finite."""
    crossed: list[Message] = []
    forward(topology, lane, link, batch, stamp, crossed)
    outputs = {h.value: lane.parties[h.role].output(h.value, stamp.lane) for h in topology.heads}
    check_finite(lane, {name: float(value.sum()) for name, value in outputs.items()}, crossed, stamp)
    for party in lane.parties.values():
        party.forget(stamp.lane)
    return outputs


def forward(
    topology: Topology,
    lane: Lane,
    link: Link,
    batch: Batch,
    stamp: Stamp,
    crossed: list[Message],
    scale: float = 1.0,
) -> None:
    """Walk the segments of `lane` in order over the rows of `batch`, carrying every message over `link`."""
    for party in lane.parties.values():
        party.begin(batch, stamp, scale)
    arrived: dict[str, list[Message]] = {}
    for segment in topology.segments:
        party = lane.parties[segment.role]
        for message in party.forward(segment.name, arrived.pop(segment.name, []), stamp, lane.peers):
            delivered = link.deliver(message)
            arrived.setdefault(message.edge.partition("->")[2], []).append(delivered)
            crossed.append(delivered)


def backward(topology: Topology, lane: Lane, link: Link, stamp: Stamp, crossed: list[Message]) -> None:
    """Walk the segments in reverse, carrying every gradient over `link`."""
    arrived: dict[str, list[Message]] = {}
    for segment in reversed(topology.segments):
        party = lane.parties[segment.role]
        for message in party.backpropagate(segment.name, arrived.pop(segment.name, []), stamp, lane.peers):
            delivered = link.deliver(message)
            arrived.setdefault(message.edge.partition("->")[0], []).append(delivered)
            crossed.append(delivered)


def _losses(topology: Topology, lane: Lane, link: Link, stamp: Stamp) -> dict[str, Tensor]:
    losses = {}
    for segment in topology.segments:
        for head in topology.heads:
            if head.value in segment.outputs:
                message = None
                if head.labels != head.role:
                    holder = lane.parties[head.labels]
                    message = link.deliver(holder.give_labels(head, stamp, lane.peers[head.role]))
                losses[head.value] = lane.parties[head.role].loss(segment.name, head, stamp, message)
    return losses


def check_finite(lane: Lane, values: Mapping[str, float], crossed: Sequence[Message], stamp: Stamp) -> None:
    """Raise `NonFinite`, and forget the step, if a head's value, a penalty or a message is not finite."""
    # A sum is finite only if every element is; it costs a twentieth of a test of each, and a sum that merely
    # overflows is told apart below. On a GPU the sums are joined first, to wait for it only once.
    sums = [t.sum() for message in crossed for t in message.tensors.values()]
    if sums and sums[0].device.type != "cpu":
        sums = [torch.stack(sums).sum()]
    penalties = {party.name: party.penalty(stamp.lane) for party in lane.parties.values()}
    if math.isfinite(sum(values.values()) + sum(penalties.values()) + sum(map(float, sums))):
        return
    reason = _not_finite(values, penalties, crossed)
    if reason is not None:
        for party in lane.parties.values():
            party.forget(stamp.lane)
            party.drop_gradients()
        raise NonFinite(f"{reason} at epoch {stamp.epoch}, step {stamp.step}, lane {stamp.lane} ({stamp.phase})")


def _not_finite(values: Mapping[str, float], penalties: Mapping[str, float], crossed: Sequence[Message]) -> str | None:
    for message in crossed:
        for name, tensor in message.tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                return (
                    f"{message.kind} {name!r} from {message.sender!r} to {message.receiver!r} on edge "
                    f"{message.edge!r} is not finite"
                )
    for party, penalty in penalties.items():
        if not math.isfinite(penalty):
            return f"the penalty of a defense of {party!r} is not finite ({penalty})"
    for name, value in values.items():
        if not math.isfinite(value):
            return f"the loss or output on {name!r} is not finite ({value})"
    return None
