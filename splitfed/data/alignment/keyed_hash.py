"""Alignment by keyed hashes: a party without data, the joiner, compares HMACs of the parties' keys.

Paper: Krawczyk, Bellare and Canetti, "HMAC: Keyed-Hashing for Message Authentication", RFC 2104, 1997.

What it reveals. The joiner, who must not know the secret, learns how many keys each party has and which of them are
equal, hence the size of every intersection, and from two alignments under the same secret, what changed: use a new
secret for each. Anyone with the secret, as every data party has, and the hashes can test guesses, and names, birthdays
and telephone numbers are guessed in seconds: the joiner must not give the hashes to a party, nor a party the secret to
the joiner. Each party learns which of its records are common to all. How the parties agree on the secret is not
simulated, and its bytes are not counted.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping, Sequence

from splitfed.core.errors import InvalidInput
from splitfed.data.alignment.keys import (
    AlignmentMessage,
    Intersect,
    Intersection,
    Key,
    intersect_keys,
    key_text,
    position_messages,
)

HASH_BYTES = 32
LEAST_SECRET = 16


def new_secret() -> bytes:
    """Return 32 random bytes from the operating system for `keyed_hash`; no seed reproduces them."""
    return secrets.token_bytes(32)


def hashes(secret: bytes, keys: Sequence[Key]) -> bytes:
    """Return the message of a party: the HMAC-SHA-256 of `key_text` in UTF-8 of each key, 32 bytes each."""
    return b"".join(hmac.digest(secret, key_text(key).encode(), "sha256") for key in keys)


def join(sent: Mapping[str, bytes]) -> dict[str, list[int]]:
    """Return party -> positions of the hashes that all parties sent, which is all that the joiner computes."""
    return intersect_keys(
        {
            party: [hashed[i : i + HASH_BYTES] for i in range(0, len(hashed), HASH_BYTES)]
            for party, hashed in sent.items()
        }
    )


def keyed_hash(secret: bytes, joiner: str = "joiner") -> Intersect:
    """Return a function for `align` in which every party sends its hashed keys to `joiner`, a party without data.

    `secret`: at least 16 bytes that all data parties know and the joiner does not, such as `new_secret()`. Rows are
    ordered by hash: equal secrets give equal orders, and the order reveals nothing about the keys.
    """
    if not isinstance(secret, bytes) or len(secret) < LEAST_SECRET:
        given = f"{len(secret)} bytes" if isinstance(secret, bytes) else f"a {type(secret).__name__}"
        raise InvalidInput(f"secret is {given}; expected at least {LEAST_SECRET} bytes, as of new_secret()")

    def intersect(keys: Mapping[str, Sequence[Key]], leader: str) -> Intersection:
        if joiner in keys:
            raise InvalidInput(f"joiner {joiner!r} is a party with data; expected one that does not know the secret")
        sent = {party: hashes(secret, mine) for party, mine in keys.items()}
        positions = join(sent)
        crossings = [AlignmentMessage(party, joiner, "hashes", len(hashed)) for party, hashed in sent.items()]
        return Intersection(positions, (*crossings, *position_messages(joiner, list(keys), len(positions[leader]))))

    return intersect
