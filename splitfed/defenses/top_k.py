"""Top-k: sends only the numbers of greatest magnitude of each row of a release, with their positions.

Paper: Zheng, Chen, Lyu, Yao, "Reducing communication for split learning by randomized top-k sparsification", IJCAI
2023, for the sparse release and its size: a value and a place of ceil(log2 d) bits for each number kept of d.

This is their deterministic form; the randomized one, which sometimes keeps other numbers in training, is not
implemented. Dropped numbers get no gradient in the sender's segments, but the whole gradient is sent, where theirs
sends only the used part. If that would not be shorter, the release is sent uncompressed. Small numbers are not secret:
the positions of the kept ones reveal which they are. No formal guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from splitfed.core.defense import Codec, ReleaseDefense, as_strength
from splitfed.core.defense_context import Context
from splitfed.core.errors import InvalidInput, require_count
from splitfed.core.rows import flat_rows
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.defenses.binary_encoding import packed_size
from splitfed.defenses.fitted_layers import values_of


@dataclass(frozen=True)
class TopK(ReleaseDefense, Codec):
    """Keeps the largest numbers of every row of a release, and sets the others to zero.

    `k`: count of numbers kept in each row, between 1 and the row's count.
    """

    k: int = field(
        default=16, metadata=require_count("top_k k", low=1) | as_strength("numbers a row kept", rises=False)
    )

    on_uploads = True
    """It can act on uploads too, as it accepts rows of any shape."""

    def check(self, topology: Topology, facts: TopologyFacts) -> None:
        """Raise `InvalidInput` for a release with fewer than `k` numbers a row."""
        for value in values_of(topology, self.edges(topology), facts):
            if (numbers := prod(facts.shapes[value])) < self.k:
                raise InvalidInput(f"top_k k={self.k} is not allowed: {value!r} has {numbers} numbers a row")

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        """Return `z` with all but its `k` largest numbers of each row zero: same shape."""
        mask = torch.zeros_like(flat_rows(z)).scatter_(1, places(z, self.k), 1)
        return z * mask.view_as(z)

    def packed(self, kind: str, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> int | None:
        """Return the bytes of the kept values and their indices."""
        if kind != "activation":
            return None
        count = rows * self.k
        short = count * dtype.itemsize + packed_size(count, place_bits(prod(shape)))
        return min(short, rows * prod(shape) * dtype.itemsize)


def place_bits(numbers: int) -> int:
    """Return the number of bits of a position among `numbers`: ceil(log2(numbers))."""
    return (numbers - 1).bit_length()


def places(z: Tensor, k: int) -> Tensor:
    """Return the positions of the `k` numbers of greatest magnitude of each row: (batch, k), in ascending order."""
    # A stable order, so that ties fall the same way on every device.
    order = flat_rows(z.detach()).abs().sort(dim=1, descending=True, stable=True).indices
    return order[:, :k].sort(1).values
