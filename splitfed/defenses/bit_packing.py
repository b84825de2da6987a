"""Size of whole numbers of a few bits each, packed without gaps."""

from __future__ import annotations


def packed_size(count: int, bits: int) -> int:
    """Return the bytes of `count` numbers of `bits` bits each, rounded up to a whole byte."""
    return -(-count * bits // 8)
