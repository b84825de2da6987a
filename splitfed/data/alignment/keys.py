"""Record keys: their encoding in messages, and their intersection in the clear."""

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
    """Result of an intersection: party -> positions of the common keys in its own list, in one common order.

    `positions`: these lists; `crossings`: all messages that were sent.
    """

    positions: Mapping[str, list[int]]
    crossings: tuple[AlignmentMessage, ...]


# keys: party -> its keys, each once; leader: the party that holds the labels.
Intersect: TypeAlias = Callable[[Mapping[str, Sequence[Key]], str], Intersection]

POSITION_BYTES = 8


def in_clear(keys: Mapping[str, Sequence[Key]], leader: str) -> Intersection:
    """Return the common keys, computed by `leader` from the keys of all parties and returned as sorted positions.

    Reveals all keys of all parties to the leader, and the intersection to all parties. Text is sorted by code point,
    whole numbers by size.
    """
    check_names("leader", keys, leader)
    positions = intersect_keys(keys)
    others = [party for party in keys if party != leader]
    sent = [AlignmentMessage(party, leader, "keys", len(pack_keys(keys[party]))) for party in others]
    return Intersection(positions, (*sent, *position_messages(leader, others, len(positions[leader]))))


def in_order(keys: Mapping[str, Sequence[Key]], leader: str) -> Intersection:
    """Return all rows as common, for tables of equal length with the same records in the same order; sends nothing."""
    return Intersection({party: list(range(len(mine))) for party, mine in keys.items()}, ())


def intersect_keys(keys: Mapping[str, Sequence[Key]] | Mapping[str, Sequence[bytes]]) -> dict[str, list[int]]:
    """Return party -> positions, in its own list, of the keys that every party holds.

    All lists are in the sorted order of these keys, so that entry i of each is the same record. Of a key that occurs
    twice at a party, the last position counts.
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
    """Return a message with these keys: each as `key_text`, in UTF-8, after its length in four bytes.

    >>> pack_keys(["ann"])
    b'\\x00\\x00\\x00\\x04sann'
    """
    texts = [key_text(key).encode() for key in keys]
    return b"".join(len(text).to_bytes(4, "big") + text for text in texts)
