"""Defenses on what the clients of a federated method send to the aggregation server, by kind of message.

Every tensor of a message with numbers that are not whole is defended: the rows of one with several dimensions, one with
a single dimension as one row. Names, whole numbers and single numbers cross as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from splitfed.core.defense import UPLOAD, Defense, ReleaseDefense, packed_bytes, privacy_event, same_form
from splitfed.core.defense_context import Context
from splitfed.core.messages import Message, Stamp
from splitfed.core.payload import infinite_rows
from splitfed.core.usage_counts import UsageCounts


class Keeper(NamedTuple):
    """A defense of one client on one kind of message, with its position among the run's."""

    position: int
    defense: ReleaseDefense


class Sent(NamedTuple):
    """What is sent, by whom (a party and the client it serves), and when: `turn` tells several a round apart."""

    kind: str
    tensors: Mapping[str, Tensor]
    party: str
    replica: int
    number: int
    turn: int = 0

    @property
    def place(self) -> str:
        """Its place, as a defense and the privacy ledger name it."""
        return f"{self.kind}{UPLOAD}"


def find_upload_defenses(defenses: Sequence[Defense], kind: str, client: int) -> list[Keeper]:
    """Return the defenses on messages of `kind` from `client`, in the order in which they act."""
    there = ((i, d) for i, d in enumerate(defenses) if not d.clients or client in d.clients)
    return [Keeper(i, d) for i, d in there if isinstance(d, ReleaseDefense) and kind in d.uploads]


def rows_of(tensor: Tensor) -> Tensor | None:
    """Return a view of `tensor` as rows (n, ...); None where nothing in it is defended."""
    if not tensor.is_floating_point() or tensor.dim() == 0:
        return None
    return tensor if tensor.dim() > 1 else tensor[None]


def apply_upload_defenses(sent: Sent, guards: Sequence[Keeper], seed: int) -> Message:
    """Return the message with what `guards` leave of it, and its size where they send it in a shorter form."""
    place, stamp = sent.place, Stamp("train", sent.replica, sent.number, 0)
    tensors = {}
    for name, tensor in sent.tensors.items():
        rows = rows_of(tensor)
        if rows is None:
            tensors[name] = tensor
            continue
        for position, defense in guards:
            # Noise must never be drawn twice alike, also where a kind is sent several times a round.
            context = Context(sent.party, place, stamp._replace(step=sent.turn), seed, position)
            rows = same_form(defense.release, defense.release(name, rows, context), rows)
        tensors[name] = rows.reshape(tensor.shape)
    return Message(
        sent.party, place.removeprefix(f"{sent.kind}->"), sent.kind, place, tensors, stamp, size(sent, guards)
    )


def size(sent: Sent, guards: Sequence[Keeper]) -> int | None:
    """Return the bytes of the message where some tensor is packed; None where it crosses as it is."""
    sizes = [_packed(tensor, guards) for tensor in sent.tensors.values()]
    if all(one is None for one in sizes):
        return None
    return sum(t.nbytes if n is None else n for t, n in zip(sent.tensors.values(), sizes, strict=True))


def count(uses: UsageCounts, sent: Sent, guards: Sequence[Keeper], replica: int) -> None:
    """Note in `uses` what was released: each row of each tensor is one use of every guard that promises something."""
    for position, defense in guards:
        for tensor in sent.tensors.values() if privacy_event(defense) is not None else ():
            if (rows := rows_of(tensor)) is not None:
                uses.replace(sent.place, infinite_rows(rows))
                uses.add((sent.place, position, replica, "train"), torch.arange(len(rows)))


def private_kinds(defenses: Iterable[Defense]) -> frozenset[str]:
    """Return the kinds of which every client's tensors cross under a promise."""
    return frozenset(kind for d in defenses if not d.clients and privacy_event(d) is not None for kind in d.uploads)


def _packed(tensor: Tensor, guards: Sequence[Keeper]) -> int | None:
    rows = rows_of(tensor)
    if rows is None:
        return None
    return packed_bytes([d for _, d in guards], "activation", len(rows), tuple(rows.shape[1:]), tensor.dtype)
