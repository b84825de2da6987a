"""How many bytes whole numbers of any few bits take, without gaps."""

from __future__ import annotations


def packed_size(count: int, bits: int) -> int:
    """Return the bytes that `count` numbers of `bits` bits take, the last byte filled up."""
    return -(-count * bits // 8)
