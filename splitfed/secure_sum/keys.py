"""Keys, masks and secret sharing of a secure sum: what the trusted set-up distributes, and how seeds become masks.

Bonawitz et al. agree on a seed for every pair of clients by Diffie-Hellman. No dependency of this package implements
it, and hand-written elliptic curves do not belong in a repository of experiments, so a trusted set-up replaces it. For
every sum it gives each client a secret number, each pair of clients a seed and a key to encrypt shares with, and the
server, in place of public keys, a table of the seeds: that of a pair is encrypted by a one-time pad that either of the
two can derive from its own secret. Whoever learns a client's secret learns the seeds of its pairs, and nothing else, as
with Diffie-Hellman; so clients can drop out and return as in the paper. The set-up itself could remove every mask.

Seeds are expanded by SHAKE-256 and keys derived by keyed BLAKE2b, from Python's hashlib. All of them derive from the
run's root seed, 63 bits known to whoever configures the run, so that a run can be repeated and resumed: these masks
hide uploads from the parties of a simulation only. A deployment would use randomness of the operating system.

Secrets are shared by Shamir, "How to share a secret", Communications of the ACM 1979: any `threshold` shares determine
the secret; fewer reveal nothing about it. Secrets and shares are numbers modulo the prime 2^255 - 19, 32 bytes each.
The share of member i (counted from 0) is the value at i + 1 of a polynomial of degree threshold - 1 whose value at 0 is
the secret.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from splitfed.core.errors import InvalidInput
from splitfed.secure_sum.base import Residues

PRIME = 2**255 - 19
SIZE = 32
"""Bytes of a secret or a share."""


def prf(key: bytes, *purpose: str | int, size: int = SIZE) -> bytes:
    """Return `size` bytes, 64 at most, derived from `key` for `purpose` (pseudorandom function)."""
    text = "\x1f".join(f"{type(word).__name__}:{word}" for word in purpose)
    return hashlib.blake2b(text.encode(), key=key, digest_size=size).digest()


def number(key: bytes, *purpose: str | int) -> int:
    """Return a number modulo the prime, derived from `key` for `purpose`; of 512 bits, so within 2^-257 of uniform."""
    return int.from_bytes(prf(key, *purpose, size=64), "little") % PRIME


def xor_bytes(first: bytes, second: bytes) -> bytes:
    """Return the exclusive or of two byte strings of the same length: encryption and decryption by a one-time pad."""
    return bytes(a ^ b for a, b in zip(first, second, strict=True))


def mask(seed: bytes, count: int) -> Residues:
    """Return `count` pseudorandom numbers modulo 2^64, expanded from `seed`."""
    return np.frombuffer(hashlib.shake_256(seed).digest(8 * count), dtype="<u8").astype(np.uint64)


def as_bytes(value: int) -> bytes:
    """Return a number modulo the prime as 32 bytes."""
    return value.to_bytes(SIZE, "little")


def as_number(text: bytes) -> int:
    """Return the number that 32 bytes encode."""
    return int.from_bytes(text, "little")


class Setup:
    """The trusted set-up of one sum; `purpose` separates it from all others under the same `seed`."""

    def __init__(self, seed: int, *purpose: str | int) -> None:
        self._root = prf(seed.to_bytes(8, "little"), "secure_sum", *purpose)

    def secret(self, member: int) -> int:
        """Return the secret number of `member`, given to this member only."""
        return number(self._root, "secret", member)

    def wrapping_key(self, sender: int, receiver: int) -> bytes:
        """Return the key under which `sender` encrypts shares for `receiver`, given to these two only."""
        return prf(self._root, "wrapping", sender, receiver)

    def member_secret(self, member: int) -> bytes:
        """Return the seed of the private randomness of `member`, given to this member only."""
        return prf(self._root, "own", member)

    def row(self, member: int, others: Iterable[int]) -> dict[int, bytes]:
        """Return the public row of `member`: its pairwise seed with each of `others`, encrypted by a one-time pad."""
        secret = as_bytes(self.secret(member))
        return {other: xor_bytes(self._seed(member, other), pad(secret, other)) for other in others}

    def _seed(self, member: int, other: int) -> bytes:
        return prf(self._root, "pair", min(member, other), max(member, other))


def pad(secret: bytes, other: int) -> bytes:
    """Return the one-time pad on the pairwise seed with `other` in the public row of the member with `secret`."""
    return prf(secret, "row", other)


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
