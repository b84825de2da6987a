"""What a secure sum is asked to do: precision, range and threshold, and the way between weights and whole numbers.

A client sends its tensors times its weight in the mean (its examples), as whole numbers modulo 2^64 with `bits` bits
behind the point, and behind them the weight itself; so the server learns the weighted sum and the sum of the weights,
and divides. Rounding moves a number of a client by half a unit at most, hence the mean of n clients by no more than
n / (2 W 2^bits) for weights that add up to W: 2^-(bits + 1) or less. Whole numbers (counts of batches) are summed as
they are and their mean is rounded, where the plain mean keeps the largest: a maximum is no sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_fields, check_number, require_count, require_number
from splitfed.secure_sum.base import Carrier, Flow, Residues as Residues, SecureSumPlan
from splitfed.secure_sum.keys import Setup
from splitfed.secure_sum.masked_sum import MaskedSummation
from splitfed.secure_sum.shamir import SIZE

COUNT = 2**31
"""The largest whole number that an upload may hold."""


@dataclass(frozen=True, kw_only=True)
class SecureSum(SecureSumPlan):
    """Parameters of a secure sum of fixed-point numbers by pairwise masks.

    `bits`: binary digits after the point, in [1, 40]. `limit`: largest magnitude of a weight, > 0. `threshold`: how
    many clients must finish, >= 2 (default: more than half of those asked; see `required_members`).
    """

    sums: ClassVar[frozenset[str]] = frozenset(("masked",))
    overhead: ClassVar[frozenset[str]] = frozenset(("keys", "shares", "survivors", "unmasking"))

    bits: int = field(default=24, metadata=require_count("secure bits", low=1))
    limit: float = field(default=64.0, metadata=require_number("secure limit", low=0.0, open_low=True))
    threshold: int | None = field(default=None, metadata=require_count("secure threshold", low=2))

    def __post_init__(self) -> None:
        """Refuse numbers that leave no room to add, and a threshold at which a client's own upload is the sum."""
        check_fields(self)
        check_number("secure bits", self.bits, high=40)

    def check_weights(self, weights: Iterable[float]) -> None:
        """Refuse weights in the mean that are not whole, and such that a sum could leave the range of 64 bits."""
        weight_list = list(weights)
        super().check_weights(weight_list)
        unit = self.limit * 2.0**self.bits
        if max(weight_list) * unit > 2**53 or sum(weight_list) * max(unit, COUNT) >= 2**63:
            raise InvalidInput(
                f"secure bits={self.bits} and limit={self.limit:g} do not fit weights of {int(max(weight_list))} at "
                f"most and {int(sum(weight_list))} in all; expected max * limit * 2^bits <= 2^53 and "
                "sum * limit * 2^bits < 2^63"
            )

    def start(
        self, names: Mapping[int, str], seed: int, purpose: Sequence[str | int], carrier: Carrier
    ) -> MaskedSummation:
        """Return one sum by masks that the trusted set-up of `seed` and `purpose` deals."""
        return MaskedSummation(self, names, Setup(seed, *purpose), carrier)

    def setup_flows(self, members: Sequence[int], name: Callable[[int], str], server: str) -> Iterator[Flow]:
        """Yield what is sent before the clients train: a row of keys each, and shares for each other by the server."""
        others = len(members) - 1
        for member in members:
            yield "keys", server, name(member), SIZE * others
            yield "shares", name(member), server, 2 * SIZE * others
            yield "shares", server, name(member), 2 * SIZE * others

    def upload_flows(
        self, members: Sequence[int], survivors: Sequence[int], numbers: int, name: Callable[[int], str], server: str
    ) -> Iterator[Flow]:
        """Yield masked numbers of the clients that finish, who these are, and the shares that unmask their sum."""
        for member in survivors:
            yield "masked", name(member), server, 8 * (numbers + 1)
            yield "survivors", server, name(member), 8 * len(survivors)
            yield "unmasking", name(member), server, SIZE * len(members)

    def encode(self, tensors: Mapping[str, Tensor], weight: float, sender: str) -> Residues:
        """Return `tensors`, one after another, times `weight`, and `weight`: (numbers + 1,)."""
        self.check_weights([weight])
        parts = []
        for name, tensor in tensors.items():
            flat = tensor.detach().cpu().flatten()
            bound = self.limit if flat.is_floating_point() else COUNT
            size = float(flat.double().abs().max()) if len(flat) else 0.0
            if not size <= bound:
                raise InvalidInput(
                    f"{sender}'s {name!r} reaches {size:g}, which a secure sum would wrap round; secure "
                    f"limit={bound:g} must be larger"
                )
            if flat.is_floating_point():
                parts.append(torch.round(flat.double() * (weight * 2.0**self.bits)).long())
            else:
                parts.append(flat.long() * int(weight))
        parts.append(torch.tensor([int(weight)]))
        return torch.cat(parts).numpy().view(np.uint64)

    def decode(self, total: Residues, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean that `total`, a sum of encoded parts, stands for, with the shapes and types of `like`."""
        sums = torch.from_numpy(total.view(np.int64).copy())
        weight = float(sums[-1])
        pieces = sums[:-1].split([tensor.numel() for tensor in like.values()])
        tensors = {}
        for (name, tensor), piece in zip(like.items(), pieces, strict=True):
            scale = weight * 2.0**self.bits if tensor.is_floating_point() else weight
            mean = piece.double() / scale
            mean = mean if tensor.is_floating_point() else mean.round()
            tensors[name] = mean.reshape(tensor.shape).to(tensor.device, tensor.dtype)
        return tensors
