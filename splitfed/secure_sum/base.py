"""The contract of a secure sum: what it is asked for, what crosses, and the steps of one sum.

Every kind takes the clients' tensors with a whole weight each and gives the aggregation server the weighted mean, and
no upload.
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
    """Carries tensors between a member of a sum and its server, as messages of a kind; returns what arrives."""

    def to_server(self, kind: str, member: int, tensor: Tensor) -> Tensor:
        """Send `tensor` from `member` to the server."""

    def from_server(self, kind: str, member: int, tensor: Tensor) -> Tensor:
        """Send `tensor` from the server to `member`."""


class Summation(Protocol):
    """One sum: `open` before its members train, `close` once it is known which of them have finished."""

    def open(self) -> None:
        """Exchange what must be there before anybody can leave."""

    def close(self, uploads: Mapping[int, Mapping[str, Tensor]], weights: Mapping[int, float]) -> dict[str, Tensor]:
        """Return the mean of `uploads`, of the members that finished, weighted; the server sees no upload.

        Raises `InvalidInput` for numbers and weights that the plan does not hold, and for too few members.
        """


@dataclass(frozen=True, kw_only=True)
class SecureSumPlan:
    """Base of the plans of secure sums: frozen values that check, start and count a sum of fixed-point numbers.

    `sums`: the kinds of its messages that hold its uploads, unreadable, or what they add up to. `overhead`: those that
    hold neither, nor anything made of them: keys, shares of keys, weights in the mean, and who takes part.

    `bits`: binary digits after the point, in [1, 40]. `limit`: largest magnitude of a weight, > 0. `threshold`: how
    many clients must finish, >= 2 (default: more than half of those asked; see `required_members`).
    """

    sums: ClassVar[frozenset[str]] = frozenset()
    overhead: ClassVar[frozenset[str]] = frozenset()

    bits: int = field(default=24, metadata=require_count("secure bits", low=1))
    limit: float = field(default=64.0, metadata=require_number("secure limit", low=0.0, open_low=True))
    threshold: int | None = field(default=None, metadata=require_count("secure threshold", low=2))

    def __post_init__(self) -> None:
        """Refuse numbers that leave no room to add, and a threshold at which a client's own upload is the sum."""
        check_fields(self)
        check_number("secure bits", self.bits, high=40)

    def required_members(self, asked: int) -> int:
        """Return how many of the clients `asked` must finish: the threshold, by default more than half of them."""
        return asked // 2 + 1 if self.threshold is None else self.threshold

    def check(self, asked: int) -> None:
        """Refuse too few clients."""
        if asked < 2:
            raise InvalidInput(f"a secure sum of {asked} upload is that upload: let 2 clients or more take part")
        if self.required_members(asked) > asked:
            raise InvalidInput(
                f"secure threshold={self.threshold} is not allowed; {asked} clients take part in a round"
            )

    def check_weights(self, weights: Iterable[float]) -> None:
        """Refuse weights in the mean that are not whole, or that a sum could not hold."""
        for weight in weights:
            if weight != int(weight) or weight < 1:
                raise InvalidInput(f"a weight of {weight} in a secure sum is not allowed; expected a whole number >= 1")

    def start(self, names: Mapping[int, str], seed: int, purpose: Sequence[str | int], carrier: Carrier) -> Summation:
        """Return one sum of the members in `names`, number -> party.

        `purpose` tells it from all other sums of a run under its `seed`.
        """
        raise NotImplementedError

    def setup_flows(self, members: Sequence[int], name: Callable[[int], str], server: str) -> Iterator[Flow]:
        """Yield the messages of `Summation.open`; `name` gives the party of a member."""
        raise NotImplementedError

    def upload_flows(
        self, members: Sequence[int], survivors: Sequence[int], numbers: int, name: Callable[[int], str], server: str
    ) -> Iterator[Flow]:
        """Yield the messages of `Summation.close` where `survivors` add up `numbers` numbers each."""
        raise NotImplementedError
