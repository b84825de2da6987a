"""Shamir's secret sharing: any `threshold` shares determine the secret; fewer reveal nothing about it.

Paper: Shamir, "How to share a secret", Communications of the ACM 1979.

Secrets and shares are numbers modulo the prime 2^255 - 19, 32 bytes each. The share of member i (counted from 0) is the
value at i + 1 of a polynomial of degree threshold - 1 whose value at 0 is the secret.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from splitfed.core.errors import InvalidInput

PRIME = 2**255 - 19
SIZE = 32
"""Bytes of a secret or a share."""


def share(secret: int, members: Sequence[int], coefficients: Sequence[int]) -> dict[int, int]:
    """Return member -> share of `secret`; `coefficients`: threshold - 1 random numbers modulo the prime."""
    found = {}
    for member in members:
        value = 0
        for coefficient in (*reversed(coefficients), secret):
            value = (value * (member + 1) + coefficient) % PRIME
        found[member] = value
    return found


def reconstruct(shares: Mapping[int, int], threshold: int) -> int:
    """Return the secret from `shares` (member -> share), of which the first `threshold` are used."""
    if len(shares) < threshold:
        raise InvalidInput(f"{len(shares)} shares are not enough; expected {threshold} or more")
    used = dict(list(shares.items())[:threshold])
    secret = 0
    for member, value in used.items():
        above, below = 1, 1
        for other in used:
            if other != member:
                above = above * (other + 1) % PRIME
                below = below * (other - member) % PRIME
        secret = (secret + value * above * pow(below, -1, PRIME)) % PRIME
    return secret
