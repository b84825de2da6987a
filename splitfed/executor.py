"""One step over a lane: walk the segments in order, carry each message over the link, walk back.

The executor routes messages and nothing else. It holds no tensor between steps and looks into none, except to
stop a run whose loss, message or gradient is no longer finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from torch import Tensor

from splitfed.errors import NonFinite
from splitfed.finite import Watch
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

    Returns the unscaled loss of each head. Raises `NonFinite`, naming the cause, if a loss or the gradients of a
    party are not finite (see `Watch`).
    """
    watch = Watch()
    try:
        forward(topology, lane, link, batch, stamp, watch, scale)
        losses = _losses(topology, lane, link, stamp)
        backward(topology, lane, link, stamp, watch)
        values = {name: float(loss) for name, loss in losses.items()}
        watch.close(values, {party.name: party.gradient_sum() for party in lane.parties.values()})
    except NonFinite as error:
        _give_up(lane, stamp, error)
    finally:
        _forget(lane, stamp)
    return values


def predict_step(topology: Topology, lane: Lane, link: Link, batch: Batch, stamp: Stamp) -> dict[str, Tensor]:
    """Walk forward in evaluation mode; returns the output of each head, checked to be finite."""
    watch = Watch()
    try:
        forward(topology, lane, link, batch, stamp, watch)
        outputs = {h.value: lane.parties[h.role].output(h.value, stamp.lane) for h in topology.heads}
        watch.close({name: float(value.sum()) for name, value in outputs.items()}, {})
    except NonFinite as error:
        _give_up(lane, stamp, error)
    finally:
        _forget(lane, stamp)
    return outputs


def _give_up(lane: Lane, stamp: Stamp, error: NonFinite) -> NoReturn:
    """Leave no gradient of the step behind, and say when it happened."""
    for party in lane.parties.values():
        party.drop_gradients()
    where = f"at epoch {stamp.epoch}, step {stamp.step}, lane {stamp.lane} ({stamp.phase})"
    raise NonFinite(f"{error} {where}") from None


def _forget(lane: Lane, stamp: Stamp) -> None:
    for party in lane.parties.values():
        party.forget(stamp.lane)


def forward(
    topology: Topology, lane: Lane, link: Link, batch: Batch, stamp: Stamp, watch: Watch, scale: float = 1.0
) -> None:
    """Walk the segments of `lane` in order over the rows of `batch`, carrying every message over `link`."""
    for party in lane.parties.values():
        party.begin(batch, stamp, scale)
    arrived: dict[str, list[Message]] = {}
    for segment in topology.segments:
        party = lane.parties[segment.role]
        for message in party.forward(segment.name, arrived.pop(segment.name, []), stamp, lane.peers):
            delivered = link.deliver(message)
            watch.see(delivered)
            arrived.setdefault(message.edge.partition("->")[2], []).append(delivered)


def backward(topology: Topology, lane: Lane, link: Link, stamp: Stamp, watch: Watch) -> None:
    """Walk the segments in reverse, carrying every gradient over `link`."""
    arrived: dict[str, list[Message]] = {}
    for segment in reversed(topology.segments):
        party = lane.parties[segment.role]
        for message in party.backpropagate(segment.name, arrived.pop(segment.name, []), stamp, lane.peers):
            delivered = link.deliver(message)
            watch.see(delivered)
            arrived.setdefault(message.edge.partition("->")[0], []).append(delivered)


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
