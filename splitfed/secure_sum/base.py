"""The contract of a secure sum: its parameters, its messages, and the steps of one sum.

Every kind of secure sum takes the clients' tensors, each with an integer weight, and gives the aggregation server their
weighted mean but no single upload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_fields, check_number, require_count, require_number

Residues = NDArray[np.uint64]
"""Whole numbers modulo 2^64; numpy's arithmetic on them wraps round."""

Flow = tuple[str, str, str, int]
"""Kind, sender, receiver and bytes of one message."""


class Carrier(Protocol):
    """Transmits tensors between a member of a secure sum and its server, as messages of a given kind."""

    def to_server(self, kind: str, member: int, tensor: Tensor) -> Tensor:
        """Send `tensor` from `member` to the server; return the received tensor."""

    def from_server(self, kind: str, member: int, tensor: Tensor) -> Tensor:
        """Send `tensor` from the server to `member`; return the received tensor."""


class Summation(Protocol):
    """One secure sum: call `open` before its members train, and `close` once it is known which of them finished."""

    def open(self) -> None:
        """Exchange the keys and shares that every member needs before any of them can drop out."""

    def close(self, uploads: Mapping[int, Mapping[str, Tensor]], weights: Mapping[int, float]) -> dict[str, Tensor]:
        """Return the weighted mean of `uploads`, member -> tensors of those that finished.

        The server sees no single upload. Raises `InvalidInput` for numbers or weights out of the plan's range, and for
        fewer members than the threshold.
        """


@dataclass(frozen=True, kw_only=True)
class SecureSumPlan:
    """Base of the plans of secure sums: frozen values that check, start and count a sum of fixed-point numbers.

    `sums`: the kinds of its messages that hold uploads, masked or encrypted, or their sum. `overhead`: the kinds that
    hold nothing computed from uploads: keys, shares of keys, weights in the mean, and the list of participants.

    `bits`: fractional binary digits, in [1, 40]. `limit`: largest magnitude of a weight, > 0. `threshold`: how many
    clients must finish, >= 2 (default: more than half of those selected; see `required_members`).
    """

    sums: ClassVar[frozenset[str]] = frozenset()
    overhead: ClassVar[frozenset[str]] = frozenset()

    bits: int = field(default=24, metadata=require_count("secure bits", low=1))
    limit: float = field(default=64.0, metadata=require_number("secure limit", low=0.0, open_low=True))
    threshold: int | None = field(default=None, metadata=require_count("secure threshold", low=2))

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for parameters out of range."""
        check_fields(self)
        check_number("secure bits", self.bits, high=40)

    def required_members(self, asked: int) -> int:
        """Return how many of `asked` selected clients must finish: the threshold, by default more than half of them."""
        return asked // 2 + 1 if self.threshold is None else self.threshold

    def check(self, asked: int) -> None:
        """Raise `InvalidInput` if `asked` clients are fewer than two or fewer than the threshold."""
        if asked < 2:
            raise InvalidInput(f"a secure sum of {asked} upload is that upload: let 2 clients or more take part")
        if self.required_members(asked) > asked:
            raise InvalidInput(
                f"secure threshold={self.threshold} is not allowed; {asked} clients take part in a round"
            )

    def check_weights(self, weights: Iterable[float]) -> None:
        """Raise `InvalidInput` for weights in the mean that are not whole numbers >= 1, or whose sum could overflow."""
        for weight in weights:
            if weight != int(weight) or weight < 1:
                raise InvalidInput(f"a weight of {weight} in a secure sum is not allowed; expected a whole number >= 1")

    def start(self, names: Mapping[int, str], seed: int, purpose: Sequence[str | int], carrier: Carrier) -> Summation:
        """Return one sum of the members in `names`, number -> party.

        `purpose` distinguishes it from all other sums of the run with this `seed`.
        """
        raise NotImplementedError

    def setup_flows(self, members: Sequence[int], name: Callable[[int], str], server: str) -> Iterator[Flow]:
        """Yield the messages of `Summation.open`; `name` maps a member to its party."""
        raise NotImplementedError

    def upload_flows(
        self, members: Sequence[int], survivors: Sequence[int], numbers: int, name: Callable[[int], str], server: str
    ) -> Iterator[Flow]:
        """Yield the messages of `Summation.close` if `survivors` add up `numbers` numbers each."""
        raise NotImplementedError


def restore(values: Tensor, like: Mapping[str, Tensor], real: float, whole: float) -> dict[str, Tensor]:
    """Return `values`, (numbers,) float64, with the names, shapes and types of `like`.

    Real numbers are given times `real`, whole ones times `whole`; the latter are rounded.
    """
    tensors = {}
    for (name, tensor), piece in zip(like.items(), values.split([t.numel() for t in like.values()]), strict=True):
        found = piece / real if tensor.is_floating_point() else (piece / whole).round()
        tensors[name] = found.reshape(tensor.shape).to(tensor.device, tensor.dtype)
    return tensors
