"""The messages of a secure sum by masks and their sizes, as they are counted and planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from splitfed.secure_sum.base import Flow
from splitfed.secure_sum.shamir import SIZE


def setup_flows(members: Sequence[int], name: Callable[[int], str], server: str) -> Iterator[Flow]:
    """Yield what is sent before the clients train: a row of keys each, and shares for each other by the server."""
    others = len(members) - 1
    for member in members:
        yield "keys", server, name(member), SIZE * others
        yield "shares", name(member), server, 2 * SIZE * others
        yield "shares", server, name(member), 2 * SIZE * others


def upload_flows(
    members: Sequence[int], survivors: Sequence[int], numbers: int, name: Callable[[int], str], server: str
) -> Iterator[Flow]:
    """Yield what is sent by the clients that finish, each with `numbers` numbers to add up, and to them."""
    for member in survivors:
        yield "masked", name(member), server, 8 * (numbers + 1)
        yield "survivors", server, name(member), 8 * len(survivors)
        yield "unmasking", name(member), server, SIZE * len(members)
