"""Quantities as people read them: three digits and a unit."""

from __future__ import annotations

SPANS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def format_bytes(count: float) -> str:
    """Write a number of bytes with three digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def format_seconds(seconds: float) -> str:
    """Write a number of seconds with three digits, in the largest unit of which there is one."""
    for length, unit in SPANS:
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"


def count_noun(count: int, word: str) -> str:
    """Write `count` and `word`, with an s unless there is one."""
    return f"{count} {word}{'' if count == 1 else 's'}"
