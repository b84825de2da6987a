"""One step over a replica: walk the segments in order, carry each message over the link, walk back.

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
"""Given an edge and the gradient each replica would send on it: what each replica sends instead."""


@dataclass
class ClientReplica:
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
        `telling`: whether parties of this replica tell each other the norms of their gradients. `guarded`: whether some
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
        """Return what the messages of a step of this replica carry."""
        return Stamp(phase, self.circuit, epoch, step, part)


def train_step(replica: ClientReplica, link: Link, batch: Batch, stamp: Stamp) -> dict[str, float]:
    """Train one batch over `replica`: an exchange, then one optimizer step a party; returns the loss of each head."""
    losses = exchange(replica, link, batch, stamp)
    for party in replica.parties.values():
        party.update()
    return losses


def exchange(replica: ClientReplica, link: Link, batch: Batch, stamp: Stamp, scale: float = 1.0) -> dict[str, float]:
    """Walk forward, compute the losses (times `scale`), walk back: gradients are gathered, no weight is touched.

    Returns the unscaled loss of each head. Raises `NonFinite`, naming the cause, if a loss or the gradients of a
    party are not finite (see `FiniteCheck`).
    """
    return exchange_together(((replica, batch, stamp, scale),), link)[0]


def exchange_together(
    turns: Sequence[tuple[ClientReplica, Batch, Stamp, float]], link: Link, combine: Combine | None = None
) -> list[dict[str, float]]:
    """Exchange over several replicas in step: all forward, all losses, all backward, one segment at a time.

    Each turn is a replica with its batch, stamp and scale. `combine` sees the gradients of all replicas on an edge
    before they are sent. Returns the unscaled losses of each turn.
    """
    finite_check = FiniteCheck()
    try:
        losses = []
        for replica, batch, stamp, scale in turns:
            forward(replica, link, batch, stamp, finite_check, scale)
            losses.append(_losses(replica, link, stamp) if batch.task else {})
        backward([(replica, stamp) for replica, _, stamp, _ in turns], link, finite_check, combine)
        values = [{name: float(loss) for name, loss in turn_losses.items()} for turn_losses in losses]
        for (replica, _, stamp, _), turn_losses in zip(turns, values, strict=True):
            try:
                finite_check.close(
                    {} if replica.guarded else turn_losses,
                    {party.name: party.gradient_sum() for party in replica.members},
                )
            except NonFinite as error:
                _give_up([turn[0] for turn in turns], replica, stamp, error)
            if replica.exchanges_norms:
                _exchange_norms(replica, link, stamp)
    finally:
        for replica, _, stamp, _ in turns:
            _forget(replica, stamp)
    return values


def predict_step(
    replica: ClientReplica,
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
    heads, finite_check = replica.topology.answering if requested_heads is None else requested_heads, FiniteCheck()
    try:
        forward(
            replica,
            link,
            batch,
            stamp,
            finite_check,
            segments_to_run=set(replica.topology.makers(h.value for h in heads)),
        )
        outputs = {h.value: replica.parties[h.role].output(h.value, stamp.replica) for h in heads}
        finite_check.close({name: float(value.sum()) for name, value in outputs.items()}, {})
        for value, role in [(v, s.role) for s in replica.topology.segments for v in s.outputs if v in also]:
            if replica.parties[role].has_value(value, stamp.replica):
                outputs[value] = replica.parties[role].output(value, stamp.replica)
    except NonFinite as error:
        _give_up([replica], replica, stamp, error)
    finally:
        _forget(replica, stamp)
    return outputs


def _give_up(replicas: Sequence[ClientReplica], cause: ClientReplica, stamp: Stamp, error: NonFinite) -> NoReturn:
    """Leave no gradient of the step behind, and say when and in which replica it happened."""
    for replica in replicas:
        for party in replica.parties.values():
            party.drop_gradients()
    where = f"at epoch {stamp.epoch}, step {stamp.step}, replica {cause.index} ({stamp.phase})"
    raise NonFinite(f"{error} {where}") from None


def _forget(replica: ClientReplica, stamp: Stamp) -> None:
    for party in replica.members:
        party.forget(stamp.replica)


def forward(
    replica: ClientReplica,
    link: Link,
    batch: Batch,
    stamp: Stamp,
    finite_check: FiniteCheck,
    scale: float = 1.0,
    segments_to_run: Collection[str] | None = None,
) -> None:
    """Walk the segments of `replica` in order over the rows of `batch`, carrying every message over `link`.

    `segments_to_run`: the names of those that run, None: all of them; what nobody among them reads does not leave.
    """
    reader_of = None if segments_to_run is None else _read(replica.topology, segments_to_run)
    for party in replica.members:
        party.begin(batch, stamp, scale)
    arrived: dict[str, list[Message]] = {}
    for name, party in replica.walk:
        if segments_to_run is not None and name not in segments_to_run:
            continue
        for message in party.forward(name, arrived.pop(name, ()), stamp, replica.peers, reader_of):
            delivered = link.deliver(message)
            finite_check.crossed.append(delivered)
            target = message.edge.partition("->")[2] if reader_of is None else reader_of[message.edge]
            arrived.setdefault(target, []).append(delivered)


def _read(topology: Topology, walked: Collection[str]) -> dict[str, str]:
    """Return the crossings whose values some segment in `walked` reads, each with the first of these."""
    readers = {edge.name: [name for name in topology.readers(edge) if name in walked] for edge in topology.crossings}
    return {name: found[0] for name, found in readers.items() if found}


def backward(
    turns: Sequence[tuple[ClientReplica, Stamp]], link: Link, finite_check: FiniteCheck, combine: Combine | None = None
) -> None:
    """Walk the segments in reverse, carrying every gradient over `link`, the replicas in step with each other."""
    arrived: dict[tuple[int, str], list[Message]] = {}
    for number in range(len(turns[0][0].walk) - 1, -1, -1):
        leaving: list[tuple[int, Message]] = []
        for turn, (replica, stamp) in enumerate(turns):
            name, party = replica.walk[number]
            sent = party.backpropagate(name, arrived.pop((turn, name), ()), stamp, replica.peers)
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


def _exchange_norms(replica: ClientReplica, link: Link, stamp: Stamp) -> None:
    """Carry the norms of each row's gradients between the parties that clip by all of them."""
    for party in replica.parties.values():
        for message in party.tell_norms(stamp, replica.peers):
            replica.parties[message.edge.partition("->")[2]].hear_norms(link.deliver(message))


def _losses(replica: ClientReplica, link: Link, stamp: Stamp) -> dict[str, Tensor]:
    losses = {}
    for segment, head in replica.graded:
        message = _labels(replica, head, link, stamp)
        losses[head.value] = replica.parties[head.role].loss(segment, head, stamp, message)
    return losses


def _labels(replica: ClientReplica, head: Head, link: Link, stamp: Stamp) -> Message | None:
    """Carry the labels of `head` to where its loss is computed; None where they are there already."""
    message = None
    for sender, receiver in pairwise(head.path):
        name = replica.peers[receiver]
        if message is None:
            message = link.deliver(replica.parties[sender].give_labels(head, stamp, name))
        else:
            message = link.deliver(message._replace(sender=replica.peers[sender], receiver=name))
    return message
