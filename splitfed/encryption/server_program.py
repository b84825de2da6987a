"""Program of a server segment on ciphertexts: forward through its stages, and backward to the gradient of its input.

The same program runs on the shapes of a plan: an `Arithmetic` defines the result of each operation.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.random import generator
from splitfed.core.topology import Segment
from splitfed.encryption.arithmetic import add, concatenate, multiply, square, take_features
from splitfed.encryption.ciphertexts import next_power_of_two
from splitfed.encryption.linear import linear
from splitfed.encryption.stages import AffineMap, Square, affine_map
from splitfed.encryption.weight_shares import ServerShare

T = TypeVar("T")


class Arithmetic(Protocol[T]):
    """The operations of a program on encrypted (rows, features) tensors, or on their shapes in a plan."""

    def linear(self, x: T, weight: Tensor, bias: Tensor | None = None) -> T:
        """Return x W' + b for a plaintext `weight`, (results, features)."""

    def square(self, x: T) -> T:
        """Return the square of every number."""

    def multiply(self, x: T, y: T) -> T:
        """Return the element-wise product of two tensors of the same shape."""

    def add(self, x: T, y: T) -> T:
        """Return the element-wise sum of two tensors of the same shape."""

    def concatenate(self, x: T, y: T) -> T:
        """Return the features of both tensors joined."""

    def take_features(self, x: T, first: int, end: int) -> T:
        """Return the features from `first` up to, not including, `end`."""


class CiphertextArithmetic:
    """The operations of a program on ciphertexts."""

    linear, square, multiply = staticmethod(linear), staticmethod(square), staticmethod(multiply)
    add, concatenate, take_features = staticmethod(add), staticmethod(concatenate), staticmethod(take_features)


@dataclass
class ForwardPass(Generic[T]):
    """A forward pass: its `result`, the `inner` input that is returned too, and `given`, the input of each stage."""

    result: T
    inner: T | None
    given: list[T] = field(default_factory=list)


@dataclass(frozen=True)
class ServerProgram:
    """The stages of a `ServerShare`: an affine map each, None for a square; `joins`, `returns_inner` as there.

    Rows are flattened. `shapes`: of a row before every stage, and after the last one. `trains`: whether gradients are
    computed.
    """

    maps: tuple[AffineMap | None, ...]
    shapes: tuple[tuple[int, ...], ...]
    joins: int | None = None
    returns_inner: int | None = None
    trains: bool = True

    @property
    def depth(self) -> int:
        """Largest number of multiplications on one ciphertext; the gradient of a square is a product with its input."""
        left = here = len(self.maps)
        if not self.trains:
            return here
        gradient = here
        for number, affine in reversed(tuple(enumerate(self.maps))):
            gradient = gradient - 1 if affine is not None else min(gradient, here - number) - 1
            left = min(left, gradient)
        return here - min(left, 0)

    @property
    def squares(self) -> int:
        """Number of stages that are squares."""
        return sum(affine is None for affine in self.maps)

    def forward(self, on: Arithmetic[T], x: T, share: T | None = None) -> ForwardPass[T]:
        """Return the output for `x`, and for the client's `share` of the first layer's result if there is one."""
        given, inner = [], None
        for number, affine in enumerate(self.maps):
            given.append(x)
            if number == self.returns_inner:
                inner = x
            x = on.square(x) if affine is None else on.linear(x, affine.weight, affine.bias)
            if number == self.joins and share is not None:
                x = on.add(x, share)
        return ForwardPass(x, inner, given)

    def send_back(
        self, on: Arithmetic[T], done: ForwardPass[T], gradient: T, inner: T | None = None
    ) -> tuple[T, T | None]:
        """Return the gradient of the segment's input, and that of the client's share if there is one.

        `gradient`: of the result; `inner`: of the second layer's input, including the client's part of it.
        """
        of_share = None
        for number, affine in reversed(tuple(enumerate(self.maps))):
            if number == self.joins:
                of_share = gradient
            if affine is None:
                slope = on.multiply(gradient, done.given[number])
                gradient = on.add(slope, slope)
            else:
                gradient = on.linear(gradient, affine.weight.T)
            if number == self.returns_inner and inner is not None:
                gradient = on.add(gradient, inner)
        return gradient, of_share


@dataclass(frozen=True)
class JoinProgram:
    """Join of several values by a segment without weights: their "sum", or "concat" of their flattened rows.

    `shapes`: of a row of every value. Neither takes a multiplication.
    """

    how: str
    shapes: tuple[tuple[int, ...], ...]
    depth: int = 0
    squares: int = 0
    trains: bool = True
    maps: tuple[AffineMap | None, ...] = ()

    def forward(self, on: Arithmetic[T], *values: T) -> ForwardPass[T]:
        """Return the joined values."""
        joined = values[0]
        for value in values[1:]:
            joined = on.add(joined, value) if self.how == "sum" else on.concatenate(joined, value)
        return ForwardPass(joined, None)

    def send_back(self, on: Arithmetic[T], done: ForwardPass[T], gradient: T, inner: T | None = None) -> tuple[T, ...]:
        """Return the gradient of every value: the whole gradient for a sum, its own features for a concatenation."""
        if self.how == "sum":
            return (gradient,) * len(self.shapes)
        ends = list(accumulate(map(row_features, self.shapes)))
        return tuple(on.take_features(gradient, a, b) for a, b in zip([0, *ends], ends, strict=False))


def program_of(
    name: str, module: nn.Module, inputs: Sequence[str], shapes: Mapping[str, Sequence[int]]
) -> ServerProgram | JoinProgram:
    """Return the program of segment `name`, a `ServerShare` or one affine module, that reads the values `inputs`.

    `shapes`: value -> shape of one row. A module that takes several values joins them. Raises `InvalidInput` for a
    stage that is neither affine nor a square, and for a join that is neither a sum nor a concatenation.
    """
    share = module if isinstance(module, ServerShare) else None
    # The first input alone: a segment with shares may also read the client's share, which it does not join.
    given = [tuple(shapes[value]) for value in (inputs if share is None else inputs[:1])]
    if len(given) > 1:
        return _join_of(name, module, tuple(given))
    maps: list[AffineMap | None] = []
    for stage in [module] if share is None else share.stages:
        affine = None if isinstance(stage, Square) else affine_map(name, stage, given[-1])
        maps.append(affine)
        given.append(given[-1] if affine is None else affine.shape)
    joins, inner = (None, None) if share is None else (share.joins, share.returns_inner)
    return ServerProgram(tuple(maps), tuple(given), joins, inner)


def _join_of(name: str, module: nn.Module, shapes: tuple[tuple[int, ...], ...]) -> JoinProgram:
    drawn = generator(0, "join", len(shapes))
    values = [torch.randn(3, *shape, generator=drawn) for shape in shapes]
    tried = copy.deepcopy(module).cpu()
    with torch.no_grad():
        results = [tried.train(training)(*[value.clone() for value in values]).flatten(1) for training in (True, False)]
    side_by_side = torch.cat([value.flatten(1) for value in values], 1)
    if all(torch.equal(found, side_by_side) for found in results):
        return JoinProgram("concat", shapes)
    # In float32 a sum of a few numbers may be added up in any order.
    if len(set(shapes)) == 1 and all(
        torch.allclose(found, torch.stack(values).sum(0).flatten(1), rtol=0, atol=1e-5) for found in results
    ):
        return JoinProgram("sum", shapes)
    raise InvalidInput(
        f"segment {name!r} joins {len(shapes)} values by {type(module).__name__}; on ciphertexts they can be added, "
        "or concatenated after flattening: fusion='sum' or 'concat'"
    )


def row_features(shape: Sequence[int]) -> int:
    """Return how many numbers a row of `shape` has."""
    return math.prod(shape)


def packed_width(segment: Segment, shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the slots of a packed row of the server's `segment`: the larger of its inputs and outputs."""
    return next_power_of_two(max(row_features(shapes[value]) for value in (*segment.inputs, *segment.outputs)))
