"""One step over a lane: walk the segments in order, carry each message over the link, walk back.

The executor routes messages and nothing else. It holds no tensor between steps and looks into none, except to
stop a run whose loss, message or gradient is no longer finite.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NoReturn, Protocol

from torch import Tensor

from splitfed.core.errors import NonFinite
from splitfed.core.finite_check import FiniteCheck
from splitfed.core.messages import Message, Stamp
from splitfed.core.party import Party
from splitfed.core.step_state import Batch
from splitfed.core.topology import Head, Topology


class Link(Protocol):
    """Whatever carries messages between parties; what it returns is what arrives."""

    def deliver(self, message: Message) -> Message:
        """Carry `message` to its receiver."""
        ...


Combine = Callable[[str, dict[int, Message]], dict[int, Message]]
"""Given an edge and the gradient each lane would send on it: what each lane sends instead."""


@dataclass
class Lane:
    """One client's instance of a topology: the party in each role.

    `circuit` is the number its messages carry: no party beyond the client's neighbours may learn the client by it.
    """

    index: int
    topology: Topology
    parties: Mapping[str, Party]
    circuit: int
    peers: dict[str, str] = field(init=False)
    members: tuple[Party, ...] = field(init=False)
    walk: tuple[tuple[str, Party], ...] = field(init=False)
    graded: tuple[tuple[str, Head], ...] = field(init=False)
    exchanges_norms: bool = field(init=False)
    guarded: bool = field(init=False)

    def __post_init__(self) -> None:
        """Note what every step asks for: the party names, which is all that one party knows of another, and the way.

        `walk`: each segment with its party, in order; `graded`: the segments that end in a head, with that head;
        `telling`: whether parties of this lane tell each other the norms of their gradients. `guarded`: whether some
        party takes a row whose gradient is not finite for zeros; a step that stopped there would tell of that row.
        """
        self.peers = {role: party.name for role, party in self.parties.items()}
        self.members = tuple(self.parties.values())
        self.walk = tuple((s.name, self.parties[s.role]) for s in self.topology.segments)
        self.graded = tuple(
            (s.name, head) for s in self.topology.segments for head in self.topology.heads if head.value in s.outputs
        )
        self.guarded = any(party.state.privatizer is not None for party in self.members)
        self.exchanges_norms = any(
            party.state.privatizer is not None and bool(party.state.privatizer.tells) for party in self.members
        )

    def stamp(self, phase: str, epoch: int, step: int, part: str = "train") -> Stamp:
        """Return what the messages of a step of this lane carry."""
        return Stamp(phase, self.circuit, epoch, step, part)


def train_step(lane: Lane, link: Link, batch: Batch, stamp: Stamp) -> dict[str, float]:
    """Train one batch over `lane`: an exchange, then one optimizer step a party; returns the loss of each head."""
    losses = exchange(lane, link, batch, stamp)
    for party in lane.parties.values():
        party.update()
    return losses


def exchange(lane: Lane, link: Link, batch: Batch, stamp: Stamp, scale: float = 1.0) -> dict[str, float]:
    """Walk forward, compute the losses (times `scale`), walk back: gradients are gathered, no weight is touched.

    Returns the unscaled loss of each head. Raises `NonFinite`, naming the cause, if a loss or the gradients of a
    party are not finite (see `FiniteCheck`).
    """
    return exchange_together(((lane, batch, stamp, scale),), link)[0]


def exchange_together(
    turns: Sequence[tuple[Lane, Batch, Stamp, float]], link: Link, combine: Combine | None = None
) -> list[dict[str, float]]:
    """Exchange over several lanes in step: all forward, all losses, all backward, one segment at a time.

    Each turn is a lane with its batch, stamp and scale. `combine` sees the gradients of all lanes on an edge before
    they are sent. Returns the unscaled losses of each turn.
    """
    finite_check = FiniteCheck()
    try:
        losses = []
        for lane, batch, stamp, scale in turns:
            forward(lane, link, batch, stamp, finite_check, scale)
            losses.append(_losses(lane, link, stamp) if batch.task else {})
        backward([(lane, stamp) for lane, _, stamp, _ in turns], link, finite_check, combine)
        values = [{name: float(loss) for name, loss in turn_losses.items()} for turn_losses in losses]
        for (lane, _, stamp, _), turn_losses in zip(turns, values, strict=True):
            try:
                finite_check.close(
                    {} if lane.guarded else turn_losses, {party.name: party.gradient_sum() for party in lane.members}
                )
            except NonFinite as error:
                _give_up([turn[0] for turn in turns], lane, stamp, error)
            if lane.exchanges_norms:
                _exchange_norms(lane, link, stamp)
    finally:
        for lane, _, stamp, _ in turns:
            _forget(lane, stamp)
    return values


def predict_step(
    lane: Lane,
    link: Link,
    batch: Batch,
    stamp: Stamp,
    requested_heads: Sequence[Head] | None = None,
    also: Collection[str] = (),
) -> dict[str, Tensor]:
    """Walk forward in evaluation mode, as far as `requested_heads` take; returns their outputs, checked to be finite.

    `requested_heads`: None for all that answer by themselves. `also`: further values that are returned if
    they are made on the way, as their party has made them.
    """
    heads, finite_check = lane.topology.answering if requested_heads is None else requested_heads, FiniteCheck()
    try:
        forward(
            lane, link, batch, stamp, finite_check, segments_to_run=set(lane.topology.makers(h.value for h in heads))
        )
        outputs = {h.value: lane.parties[h.role].output(h.value, stamp.lane) for h in heads}
        finite_check.close({name: float(value.sum()) for name, value in outputs.items()}, {})
        for value, role in [(v, s.role) for s in lane.topology.segments for v in s.outputs if v in also]:
            if lane.parties[role].has_value(value, stamp.lane):
                outputs[value] = lane.parties[role].output(value, stamp.lane)
    except NonFinite as error:
        _give_up([lane], lane, stamp, error)
    finally:
        _forget(lane, stamp)
    return outputs


def _give_up(lanes: Sequence[Lane], cause: Lane, stamp: Stamp, error: NonFinite) -> NoReturn:
    """Leave no gradient of the step behind, and say when and in which lane it happened."""
    for lane in lanes:
        for party in lane.parties.values():
            party.drop_gradients()
    where = f"at epoch {stamp.epoch}, step {stamp.step}, lane {cause.index} ({stamp.phase})"
    raise NonFinite(f"{error} {where}") from None


def _forget(lane: Lane, stamp: Stamp) -> None:
    for party in lane.members:
        party.forget(stamp.lane)


def forward(
    lane: Lane,
    link: Link,
    batch: Batch,
    stamp: Stamp,
    finite_check: FiniteCheck,
    scale: float = 1.0,
    segments_to_run: Collection[str] | None = None,
) -> None:
    """Walk the segments of `lane` in order over the rows of `batch`, carrying every message over `link`.

    `segments_to_run`: the names of those that run, None: all of them; what nobody among them reads does not leave.
    """
    reader_of = None if segments_to_run is None else _read(lane.topology, segments_to_run)
    for party in lane.members:
        party.begin(batch, stamp, scale)
    arrived: dict[str, list[Message]] = {}
    for name, party in lane.walk:
        if segments_to_run is not None and name not in segments_to_run:
            continue
        for message in party.forward(name, arrived.pop(name, ()), stamp, lane.peers, reader_of):
            delivered = link.deliver(message)
            finite_check.crossed.append(delivered)
            target = message.edge.partition("->")[2] if reader_of is None else reader_of[message.edge]
            arrived.setdefault(target, []).append(delivered)


def _read(topology: Topology, walked: Collection[str]) -> dict[str, str]:
    """Return the crossings whose values some segment in `walked` reads, each with the first of these."""
    readers = {edge.name: [name for name in topology.readers(edge) if name in walked] for edge in topology.crossings}
    return {name: found[0] for name, found in readers.items() if found}


def backward(
    turns: Sequence[tuple[Lane, Stamp]], link: Link, finite_check: FiniteCheck, combine: Combine | None = None
) -> None:
    """Walk the segments in reverse, carrying every gradient over `link`, the lanes in step with each other."""
    arrived: dict[tuple[int, str], list[Message]] = {}
    for number in range(len(turns[0][0].walk) - 1, -1, -1):
        leaving: list[tuple[int, Message]] = []
        for turn, (lane, stamp) in enumerate(turns):
            name, party = lane.walk[number]
            sent = party.backpropagate(name, arrived.pop((turn, name), ()), stamp, lane.peers)
            leaving.extend([(turn, message) for message in sent])
        for turn, message in leaving if combine is None else _combine_gradients(leaving, combine):
            delivered = link.deliver(message)
            finite_check.crossed.append(delivered)
            arrived.setdefault((turn, message.edge.partition("->")[0]), []).append(delivered)


def _combine_gradients(leaving: Sequence[tuple[int, Message]], combine: Combine) -> list[tuple[int, Message]]:
    """Return what leaves instead of the gradients of all turns, edge by edge."""
    edges: dict[str, dict[int, Message]] = {}
    for turn, message in leaving:
        edges.setdefault(message.edge, {})[turn] = message
    return [changed for edge, messages in edges.items() for changed in combine(edge, messages).items()]


def _exchange_norms(lane: Lane, link: Link, stamp: Stamp) -> None:
    """Carry the norms of each row's gradients between the parties that clip by all of them."""
    for party in lane.parties.values():
        for message in party.tell_norms(stamp, lane.peers):
            lane.parties[message.edge.partition("->")[2]].hear_norms(link.deliver(message))


def _losses(lane: Lane, link: Link, stamp: Stamp) -> dict[str, Tensor]:
    losses = {}
    for segment, head in lane.graded:
        message = _labels(lane, head, link, stamp)
        losses[head.value] = lane.parties[head.role].loss(segment, head, stamp, message)
    return losses


def _labels(lane: Lane, head: Head, link: Link, stamp: Stamp) -> Message | None:
    """Carry the labels of `head` to where its loss is computed; None where they are there already."""
    message = None
    for sender, receiver in pairwise(head.path):
        name = lane.peers[receiver]
        if message is None:
            message = link.deliver(lane.parties[sender].give_labels(head, stamp, name))
        else:
            message = link.deliver(message._replace(sender=lane.peers[sender], receiver=name))
    return message
