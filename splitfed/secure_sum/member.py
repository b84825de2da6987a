"""A client of a secure sum, which masks its upload and holds shares that unmask the sum when others drop out.

Paper: Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth, "Practical secure aggregation for
privacy-preserving machine learning", CCS 2017.

As in the paper's protocol for an honest but curious server: every pair of clients shares a mask that cancels in the
sum, and each client adds a mask of its own. All clients hold Shamir shares of each client's secret, from which its pair
masks derive, and of the seed of its own mask; of any client one of the two is revealed, never both. Keys come from a
trusted set-up; see `keys`. Signatures and the consistency round against a malicious server are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from splitfed.core.errors import InvalidInput
from splitfed.secure_sum.base import Residues
from splitfed.secure_sum.keys import SIZE, Setup, as_bytes, as_number, mask, number, pad, prf, share, xor_bytes


class Member:
    """Client `number` of those in `members`; shares of any `threshold` of them can remove its masks."""

    def __init__(self, number: int, members: Sequence[int], threshold: int, setup: Setup) -> None:
        self.number = number
        self.members = tuple(sorted(members))
        self.others = tuple(other for other in self.members if other != number)
        self._threshold = threshold
        self._secret = setup.secret(number)
        self._wrap = {
            other: (setup.wrapping_key(number, other), setup.wrapping_key(other, number)) for other in self.others
        }
        self._own = setup.member_secret(number)
        self._seeds: dict[int, bytes] = {}
        self._held: dict[int, tuple[int, int]] = {}
        self._revealed = False

    def accept(self, row: Mapping[int, bytes]) -> None:
        """Decrypt the seeds of the member's pairs from its public `row`, other member -> ciphertext."""
        secret = as_bytes(self._secret)
        self._seeds = {other: xor_bytes(text, pad(secret, other)) for other, text in row.items()}

    def shares(self) -> dict[int, bytes]:
        """Return, for each other member, its encrypted shares of the secret and of the own seed: 64 bytes."""
        both = [self._split("secret", self._secret), self._split("seed", self._seed)]
        self._held[self.number] = (both[0][self.number], both[1][self.number])
        return {
            other: xor_bytes(as_bytes(both[0][other]) + as_bytes(both[1][other]), self._pad(self._wrap[other][0]))
            for other in self.others
        }

    def take(self, wrapped: Mapping[int, bytes]) -> None:
        """Store the encrypted shares that the other members sent."""
        for other, text in wrapped.items():
            plain = xor_bytes(text, self._pad(self._wrap[other][1]))
            self._held[other] = (as_number(plain[:SIZE]), as_number(plain[SIZE:]))

    def mask_values(self, values: Residues) -> Residues:
        """Return `values` plus the own mask and pairwise masks: added for members of higher number, else subtracted."""
        total = values + mask(as_bytes(self._seed), len(values))
        for other, seed in self._seeds.items():
            common = mask(seed, len(values))
            total = total + common if self.number < other else total - common
        return total

    def reveal(self, survivors: Collection[int]) -> dict[int, bytes]:
        """Return one share for each member: of the own seed of a survivor, of the secret of a member that dropped out.

        Raises `InvalidInput` on a second call, and for fewer survivors than the threshold: a server could otherwise
        obtain both shares of a member.
        """
        if self._revealed or len(survivors) < self._threshold:
            raise InvalidInput(
                f"member {self.number} reveals shares once, for {self._threshold} survivors or more; the server asked "
                f"again, or for {len(survivors)} survivors"
            )
        self._revealed = True
        return {other: as_bytes(self._held[other][other in survivors]) for other in self.members}

    @property
    def _seed(self) -> int:
        return number(self._own, "seed")

    def _split(self, name: str, secret: int) -> dict[int, int]:
        drawn = [number(self._own, "coefficient", name, power) for power in range(1, self._threshold)]
        return share(secret, self.members, drawn)

    def _pad(self, key: bytes) -> bytes:
        return prf(key, "shares", size=2 * SIZE)
