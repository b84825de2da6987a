"""One step over a replica: walk the segments in order, carry each message over the link, walk back.

The executor routes messages and nothing else. It holds no tensor between steps and looks into none, except to stop a
run whose loss, message or gradient is no longer finite, before any weight is touched. Looking at every message of every
step for that would cost more than the rest of a cut. What is not finite in a message shows in the loss or in the
gradients that it makes; only then are the messages of the step gone through, in the order they crossed. An infinite
value that a receiver squashes to a finite loss and finite gradients (a sigmoid, say) is not noticed in training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

from splitfed.core.errors import NonFinite
from splitfed.core.messages import Message, Stamp
from splitfed.core.step_state import Batch

if TYPE_CHECKING:
    from splitfed.core.party import Party
    from splitfed.core.topology import Head, Topology


class Link(Protocol):
    """Whatever carries messages between parties; what it returns is what arrives."""

    def deliver(self, message: Message) -> Message:
        """Carry `message` to its receiver."""


@runtime_checkable
class AskingParty(Protocol):
    """A party that may ask another one something at the end of a training step, and takes the answer."""

    def ask(self, replica: int) -> Message | None:
        """Return the question at the end of the step of `replica`, None where there is none."""

    def hear(self, message: Message) -> None:
        """Take the answer."""


@runtime_checkable
class AnsweringParty(Protocol):
    """A party that answers."""

    def answer(self, message: Message) -> Message:
        """Return the answer to a question that has arrived."""


Combine = Callable[[str, dict[int, Message]], dict[int, Message]]
"""Given an edge and the gradient each replica would send on it: what each replica sends instead."""

ClientRound = tuple["ClientReplica", Batch, Stamp, float]
"""A replica in a step: its batch, its stamp, and what its losses are multiplied by."""


@dataclass
class ClientReplica:
    """One client's instance of a topology: the party in each role.

    `pseudonym` is the number its messages carry: no party beyond the client's neighbours may learn the client by it.
    """

    index: int
    topology: Topology
    parties: Mapping[str, Party]
    pseudonym: int

    def __post_init__(self) -> None:
        """Note what every step asks for: the party names, which is all that one party knows of another, and the way.

        `walk`: each segment with its party, in order; `graded`: the segments that end in a head, with that head and the
        names of the parties that its labels pass; `exchanges_norms`: whether parties of this replica send each other
        the norms of their gradients; `asking`: the parties that need an answer at the end of a step. `guarded`: whether
        some party takes a row whose gradient is not finite for zeros; a step that stopped there would tell of that row.
        """
        self.peers = {role: party.name for role, party in self.parties.items()}
        self.members = tuple(self.parties.values())
        self.walk = tuple((s.name, self.parties[s.role]) for s in self.topology.segments)
        self.graded = tuple(
            (s.name, head, tuple(self.peers[role] for role in head.path))
            for s in self.topology.segments
            for head in self.topology.heads
            if head.value in s.outputs
        )
        self.guarded = any(party.state.privatizer is not None for party in self.members)
        self.exchanges_norms = any(
            party.state.privatizer is not None and bool(party.state.privatizer.tells) for party in self.members
        )
        self.asking = tuple(party for party in self.members if isinstance(party, AskingParty))

    def stamp(self, phase: str, epoch: int, step: int, part: str = "train") -> Stamp:
        """Return what the messages of a step of this replica carry."""
        return Stamp(phase, self.pseudonym, epoch, step, part)


def exchange(replica: ClientReplica, link: Link, batch: Batch, stamp: Stamp, scale: float = 1.0) -> dict[str, float]:
    """Walk forward, compute the losses (times `scale`), walk back: gradients are gathered, no weight is touched.

    Returns the unscaled loss of each head. Raises `NonFinite`, naming the cause, if a loss or the gradients of a
    party are not finite.
    """
    return exchange_together(((replica, batch, stamp, scale),), link)[0]


def exchange_together(
    turns: Sequence[ClientRound], link: Link, combine: Combine | None = None
) -> list[dict[str, float]]:
    """Exchange over several replicas in step: all forward, all losses, all backward, one segment at a time.

    `combine` sees the gradients of all replicas on an edge before they are sent. Returns the unscaled losses of each
    turn.
    """
    crossed: list[Message] = []
    losses: list[dict[str, Tensor]] = []
    try:
        for replica, batch, stamp, scale in turns:
            forward(replica, link, batch, stamp, crossed, scale)
            losses.append(_losses(replica, link, stamp) if batch.task else {})
        backward(turns, link, crossed, combine)
        for replica, _, stamp, _ in turns:
            for asking in replica.asking:
                crossed += _answer(replica, asking, link, stamp)
    finally:
        for replica, _, stamp, _ in turns:
            for party in replica.members:
                party.forget(stamp.replica)
    values = [{name: float(loss) for name, loss in turn_losses.items()} for turn_losses in losses]
    for (replica, _, stamp, _), turn_losses in zip(turns, values, strict=True):
        try:
            _check_finite(crossed, {} if replica.guarded else turn_losses, replica.members)
        except NonFinite as error:
            _give_up([turn[0] for turn in turns], replica, stamp, error)
        if replica.exchanges_norms:
            _exchange_norms(replica, link, stamp)
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
    heads, crossed = replica.topology.answering if requested_heads is None else requested_heads, list[Message]()
    try:
        segments_to_run = set(replica.topology.makers(h.value for h in heads))
        forward(replica, link, batch, stamp, crossed, segments_to_run=segments_to_run)
        outputs = {h.value: replica.parties[h.role].output(h.value, stamp.replica) for h in heads}
        _check_finite(crossed, {name: float(value.sum()) for name, value in outputs.items()}, ())
        for value, role in [(v, s.role) for s in replica.topology.segments for v in s.outputs if v in also]:
            if replica.parties[role].has_value(value, stamp.replica):
                outputs[value] = replica.parties[role].output(value, stamp.replica)
    except NonFinite as error:
        _give_up([replica], replica, stamp, error)
    finally:
        for party in replica.members:
            party.forget(stamp.replica)
    return outputs


def _give_up(replicas: Sequence[ClientReplica], cause: ClientReplica, stamp: Stamp, error: NonFinite) -> NoReturn:
    """Leave no gradient of the step behind, and say when and in which replica it happened."""
    for replica in replicas:
        for party in replica.parties.values():
            party.drop_gradients()
    where = f"at epoch {stamp.epoch}, step {stamp.step}, replica {cause.index} ({stamp.phase})"
    raise NonFinite(f"{error} {where}") from None


def _check_finite(crossed: Sequence[Message], values: Mapping[str, float], parties: Sequence[Party]) -> None:
    """Raise `NonFinite` where a value or a gradient is not; names the first message of `crossed`, else head or party.

    `values`: the loss (or the sum of the outputs) of each head.
    """
    sums = {party.name: party.gradient_sum() for party in parties}
    if math.isfinite(sum(values.values()) + sum(sums.values())):
        return
    for message in crossed:
        for name, tensor in message.tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise NonFinite(
                    f"{message.kind} {name!r} from {message.sender!r} to {message.receiver!r} on edge "
                    f"{message.edge!r} is not finite"
                )
    for head, value in values.items():
        if not math.isfinite(value):
            raise NonFinite(f"the loss or output on {head!r} is not finite ({value})")
    for party, value in sums.items():
        if not math.isfinite(value):
            raise NonFinite(f"a gradient within {party!r} is not finite, or its gradients add up to infinity")


def forward(
    replica: ClientReplica,
    link: Link,
    batch: Batch,
    stamp: Stamp,
    crossed: list[Message],
    scale: float = 1.0,
    segments_to_run: Collection[str] | None = None,
) -> None:
    """Walk the segments of `replica` in order over the rows of `batch`, carrying every message over `link`.

    `crossed`: takes what has arrived. `segments_to_run`: the names of those that run, None: all of them; what nobody
    among them reads does not leave.
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
            crossed.append(delivered)
            target = message.edge.partition("->")[2] if reader_of is None else reader_of[message.edge]
            arrived.setdefault(target, []).append(delivered)


def _read(topology: Topology, walked: Collection[str]) -> dict[str, str]:
    """Return the crossings whose values some segment in `walked` reads, each with the first of these."""
    readers = {edge.name: [name for name in topology.readers(edge) if name in walked] for edge in topology.crossings}
    return {name: found[0] for name, found in readers.items() if found}


def backward(turns: Sequence[ClientRound], link: Link, crossed: list[Message], combine: Combine | None = None) -> None:
    """Walk the segments in reverse, carrying every gradient over `link`, the replicas in step with each other."""
    arrived: dict[tuple[int, str], list[Message]] = {}
    for number in range(len(turns[0][0].walk) - 1, -1, -1):
        leaving: list[tuple[int, list[Message]]] = []
        for turn, (replica, _, stamp, _) in enumerate(turns):
            name, party = replica.walk[number]
            messages = party.backpropagate(name, arrived.pop((turn, name), ()), stamp, replica.peers)
            leaving.append((turn, messages))
        for turn, messages in leaving if combine is None else _combine_gradients(leaving, combine):
            for message in messages:
                delivered = link.deliver(message)
                crossed.append(delivered)
                arrived.setdefault((turn, message.edge.partition("->")[0]), []).append(delivered)


def _combine_gradients(
    leaving: Sequence[tuple[int, list[Message]]], combine: Combine
) -> list[tuple[int, list[Message]]]:
    """Return what leaves instead of the gradients of all turns, edge by edge."""
    edges: dict[str, dict[int, Message]] = {}
    for turn, messages in leaving:
        for message in messages:
            edges.setdefault(message.edge, {})[turn] = message
    return [(turn, [changed]) for edge, sent in edges.items() for turn, changed in combine(edge, sent).items()]


def _exchange_norms(replica: ClientReplica, link: Link, stamp: Stamp) -> None:
    """Carry the norms of each row's gradients between the parties that clip by all of them."""
    for party in replica.parties.values():
        for message in party.tell_norms(stamp, replica.peers):
            replica.parties[message.edge.partition("->")[2]].hear_norms(link.deliver(message))


def _answer(replica: ClientReplica, party: AskingParty, link: Link, stamp: Stamp) -> list[Message]:
    """Carry what `party` asks at the end of a step to who answers, and the answer back; return what has crossed."""
    question = party.ask(stamp.replica)
    if question is None:
        return []
    arrived = link.deliver(question)
    who = next(p for p in replica.members if p.name == question.receiver)
    assert isinstance(who, AnsweringParty)
    answer = link.deliver(who.answer(arrived))
    party.hear(answer)
    return [arrived, answer]


def _losses(replica: ClientReplica, link: Link, stamp: Stamp) -> dict[str, Tensor]:
    """Carry the labels of each head to where its loss is computed, if they are not there already; return the losses."""
    losses = {}
    for segment, head, names in replica.graded:
        message = None
        if len(names) > 1:
            message = link.deliver(replica.parties[head.labels].give_labels(head, stamp, names[1]))
            for sender, receiver in pairwise(names[1:]):
                message = link.deliver(message._replace(sender=sender, receiver=receiver))
        losses[head.value] = replica.parties[head.role].loss(segment, head, stamp, message)
    return losses
