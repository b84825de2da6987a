"""Keys and masks of a secure sum: what the trusted set-up deals, and how a seed becomes a mask.

Bonawitz et al. agree on a seed for every pair of clients by Diffie-Hellman. No library that this package depends on
has it, and hand-made elliptic curves are not for a repository of experiments: a trusted set-up deals in its place. For
every sum it deals each client a secret number, each pair of clients a seed and a key to wrap shares with, and the
server, as public keys are elsewhere, a table of the seeds: that of a pair, covered by a pad that either of the two can
make from its own secret. Whoever learns a client's secret learns the seeds of its pairs, and nothing else, just as with
Diffie-Hellman; so dropping out and coming back work as in the paper. The dealer itself could undo every mask.

Seeds are expanded by SHAKE-256 and keys derived by keyed BLAKE2b, from Python's hashlib. All of it starts from the
run's root seed, 63 bits that whoever configures the run knows, so that a run can be repeated and resumed: these masks
hide uploads from the parties of a simulation. A deployment would draw from the operating system.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from splitfed.secure_sum.base import Residues
from splitfed.secure_sum.shamir import PRIME, SIZE


def prf(key: bytes, *purpose: str | int, size: int = SIZE) -> bytes:
    """Return `size` bytes, 64 at most, for `purpose` under `key`."""
    text = "\x1f".join(f"{type(word).__name__}:{word}" for word in purpose)
    return hashlib.blake2b(text.encode(), key=key, digest_size=size).digest()


def number(key: bytes, *purpose: str | int) -> int:
    """Return a number modulo the prime for `purpose` under `key`; uniform but for 2^-257, as it is made of 512 bits."""
    return int.from_bytes(prf(key, *purpose, size=64), "little") % PRIME


def xor_bytes(first: bytes, second: bytes) -> bytes:
    """Return the exclusive or of two byte strings of one length: encrypts with a one-time pad, and decrypts."""
    return bytes(a ^ b for a, b in zip(first, second, strict=True))


def mask(seed: bytes, count: int) -> Residues:
    """Return `count` numbers modulo 2^64 from `seed`."""
    return np.frombuffer(hashlib.shake_256(seed).digest(8 * count), dtype="<u8").astype(np.uint64)


def as_bytes(value: int) -> bytes:
    """Return a number modulo the prime as 32 bytes."""
    return value.to_bytes(SIZE, "little")


def as_number(text: bytes) -> int:
    """Return 32 bytes as a number."""
    return int.from_bytes(text, "little")


class Setup:
    """The trusted set-up of one sum; `purpose` separates it from all others under the same `seed`."""

    def __init__(self, seed: int, *purpose: str | int) -> None:
        self._root = prf(seed.to_bytes(8, "little"), "secure_sum", *purpose)

    def secret(self, member: int) -> int:
        """Return the secret of `member`, which nobody else is given."""
        return number(self._root, "secret", member)

    def wrapping_key(self, sender: int, receiver: int) -> bytes:
        """Return the key under which `sender` encrypts shares for `receiver`, which only these two are given."""
        return prf(self._root, "wrapping", sender, receiver)

    def member_secret(self, member: int) -> bytes:
        """Return the seed of the own randomness of `member`, which nobody else is given."""
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
