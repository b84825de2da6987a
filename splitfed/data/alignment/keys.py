"""Record keys: how they are written for a message, and which of them all parties hold, found in the clear."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from splitfed.core.errors import check_names

Key: TypeAlias = str | int


@dataclass(frozen=True)
class AlignmentMessage:
    """One message of an alignment: `size` bytes of `what`, from `sender` to `receiver`."""

    sender: str
    receiver: str
    what: str
    size: int


@dataclass(frozen=True)
class Intersection:
    """What was found: party -> where its keys that all hold stand among its keys, in one common order."""

    positions: Mapping[str, list[int]]
    crossings: tuple[AlignmentMessage, ...]


# keys: party -> its keys, each once; leader: the party that holds the labels.
Intersect: TypeAlias = Callable[[Mapping[str, Sequence[Key]], str], Intersection]

POSITION_BYTES = 8


def in_clear(keys: Mapping[str, Sequence[Key]], leader: str) -> Intersection:
    """Every party sends its keys to `leader`, which sends each the positions of those that all hold, sorted.

    Reveals all keys of all parties to the leader, and the intersection to everybody. Text sorts by code point,
    whole numbers by size.
    """
    check_names("leader", keys, leader)
    positions = intersect_keys(keys)
    others = [party for party in keys if party != leader]
    sent = [AlignmentMessage(party, leader, "keys", len(pack_keys(keys[party]))) for party in others]
    return Intersection(positions, (*sent, *position_messages(leader, others, len(positions[leader]))))


def in_order(keys: Mapping[str, Sequence[Key]], leader: str) -> Intersection:
    """Take tables of one length to hold the same records, row for row; nothing crosses."""
    return Intersection({party: list(range(len(mine))) for party, mine in keys.items()}, ())


def intersect_keys(keys: Mapping[str, Sequence[Key]] | Mapping[str, Sequence[bytes]]) -> dict[str, list[int]]:
    """Return party -> positions, in its own list, of the keys that every party holds.

    All lists are in the sorted order of these keys, so that entry i of each is the same record. A key that a party has
    twice counts where it stands last.
    """
    places = {party: {key: i for i, key in enumerate(mine)} for party, mine in keys.items()}
    first, *others = places.values()
    shared = sorted(key for key in first if all(key in other for other in others))
    return {party: [place[key] for key in shared] for party, place in places.items()}


def position_messages(sender: str, receivers: Sequence[str], count: int) -> list[AlignmentMessage]:
    """Return the messages in which `sender` sends `count` positions to each of `receivers`, 8 bytes each."""
    return [AlignmentMessage(sender, party, "rows", POSITION_BYTES * count) for party in receivers]


def key_text(key: Key) -> str:
    """Return `key` as text, with a prefix for its type: 12 and "12" differ.

    >>> key_text(12), key_text("12")
    ('i12', 's12')
    """
    return f"{'s' if isinstance(key, str) else 'i'}{key}"


def pack_keys(keys: Sequence[Key]) -> bytes:
    """Return a message with these keys: each as `key_text`, in UTF-8, behind its length in four bytes.

    >>> pack_keys(["ann"])
    b'\\x00\\x00\\x00\\x04sann'
    """
    texts = [key_text(key).encode() for key in keys]
    return b"".join(len(text).to_bytes(4, "big") + text for text in texts)
