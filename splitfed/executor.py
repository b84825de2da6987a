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
    """Train one batch over `lane`: forward, losses, backward, one optimizer step a party.

    Returns the loss of each head. Raises `NonFinite`, before any weight is touched, naming the first message or
    loss that is not finite.
    """
    crossed: list[Message] = []
    forward(topology, lane, link, batch, stamp, crossed)
    losses = _losses(topology, lane, link, stamp)
    backward(topology, lane, link, stamp, crossed)
    values = {name: float(loss) for name, loss in losses.items()}
    _check_finite(lane, values, crossed, stamp)
    for party in lane.parties.values():
        party.step(stamp.lane)
    return values


def forward(
    topology: Topology,
    lane: Lane,
    link: Link,
    batch: Batch,
    stamp: Stamp,
    crossed: list[Message] | None = None,
) -> None:
    """Walk the segments of `lane` in order over the rows of `batch`, carrying every message over `link`."""
    for party in lane.parties.values():
        party.begin(batch, stamp)
    arrived: dict[str, list[Message]] = {}
    for segment in topology.segments:
        party = lane.parties[segment.role]
        for message in party.forward(segment.name, arrived.pop(segment.name, []), stamp, lane.peers):
            delivered = link.deliver(message)
            arrived.setdefault(message.edge.partition("->")[2], []).append(delivered)
            if crossed is not None:
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


def _check_finite(lane: Lane, losses: Mapping[str, float], crossed: Sequence[Message], stamp: Stamp) -> None:
    # A sum is finite only if every element is; it costs a twentieth of a test of each, and a sum that merely
    # overflows is told apart below. On a GPU the sums are joined first, to wait for it only once.
    sums = [t.sum() for message in crossed for t in message.tensors.values()]
    if sums and sums[0].device.type != "cpu":
        sums = [torch.stack(sums).sum()]
    total = sum(losses.values()) + sum(map(float, sums))
    if math.isfinite(total):
        return
    where = f"at epoch {stamp.epoch}, step {stamp.step}, lane {stamp.lane}"
    for message in crossed:
        for name, tensor in message.tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                _abandon(lane)
                raise NonFinite(
                    f"{message.kind} {name!r} from {message.sender!r} to {message.receiver!r} on edge "
                    f"{message.edge!r} is not finite {where}"
                )
    for name, loss in losses.items():
        if not math.isfinite(loss):
            _abandon(lane)
            raise NonFinite(f"the loss on {name!r} is {loss} {where}")


def _abandon(lane: Lane) -> None:
    for party in lane.parties.values():
        party.abandon(lane.index)
