"""Key pairs that the tests of a process share: making one takes tenths of a second."""

from __future__ import annotations

from functools import cache

from splitfed.encryption.keys import KeyHolder, make_keys
from splitfed.encryption.parameters import PRESETS


@cache
def keys(name: str, rotations: bool = False, pair: int = 0) -> KeyHolder:
    """Return a key pair for a preset; another `pair` number has another."""
    return make_keys(PRESETS[name], rotations=rotations)
