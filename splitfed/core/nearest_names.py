"""The known names that a misspelled one may have meant, for "did you mean"."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest_names(name: str, known: Iterable[str], most: int = 2, cutoff: float = 0.5) -> list[str]:
    """Return at most `most` of the `known` names that are like `name`, the likest first.

    `cutoff`: in [0, 1], the ratio of matching characters (Ratcliff and Obershelp) that a name must reach.
    """
    return get_close_matches(name, list(known), most, cutoff)
