"""A server segment on ciphertexts: forward through its stages, and the gradient of its input back through them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from splitfed.encryption.arithmetic import add, multiply, square
from splitfed.encryption.ciphertexts import EncryptedTensor
from splitfed.encryption.linear import linear
from splitfed.encryption.stages import AffineMap, Square, affine_map
from splitfed.encryption.weight_shares import ServerShare


@dataclass(frozen=True)
class ServerProgram:
    """The stages of a `ServerShare`: an affine map each, None for a square; see there for `joins`, `returns_inner`.

    Rows are flattened. `shapes`: of a row in front of every stage, and behind the last one.
    `trains`: whether gradients come back.
    """

    maps: tuple[AffineMap | None, ...]
    shapes: tuple[tuple[int, ...], ...]
    joins: int | None = None
    returns_inner: int | None = None
    trains: bool = True

    @property
    def depth(self) -> int:
        """How many multiplications any ciphertext takes: a gradient meets what a square has read, which is lower."""
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
        """How many of the stages are squares."""
        return sum(affine is None for affine in self.maps)

    def forward(self, x: EncryptedTensor, share: EncryptedTensor | None = None) -> ForwardPass:
        """Return what the segment makes of `x`, and of the client's `share` of its first layer where there is one."""
        given, inner = [], None
        for number, affine in enumerate(self.maps):
            given.append(x)
            if number == self.returns_inner:
                inner = x
            x = square(x) if affine is None else linear(x, affine.weight, affine.bias)
            if number == self.joins and share is not None:
                x = add(x, share)
        return ForwardPass(x, inner, given)

    def send_back(
        self, done: ForwardPass, gradient: EncryptedTensor, inner: EncryptedTensor | None = None
    ) -> tuple[EncryptedTensor, EncryptedTensor | None]:
        """Return the gradient of the segment's input, and that of the client's share where there is one.

        `gradient`: of the result; `inner`: of the second layer's input, which the client has added to by itself.
        """
        of_share = None
        for number, affine in reversed(tuple(enumerate(self.maps))):
            if number == self.joins:
                of_share = gradient
            if affine is None:
                slope = multiply(gradient, done.given[number])
                gradient = add(slope, slope)
            else:
                gradient = linear(gradient, affine.weight.T)
            if number == self.returns_inner and inner is not None:
                gradient = add(gradient, inner)
        return gradient, of_share


@dataclass
class ForwardPass:
    """The `result` of a forward pass, the `inner` input that is returned too, and what each stage was `given`."""

    result: EncryptedTensor
    inner: EncryptedTensor | None
    given: list[EncryptedTensor] = field(default_factory=list)


def program_of(name: str, module: nn.Module, shape: Sequence[int]) -> ServerProgram:
    """Return the program of segment `name`, a `ServerShare` or one affine module, for rows of `shape`.

    Raises `InvalidInput` for a stage that is neither affine nor a square.
    """
    stages = module.stages if isinstance(module, ServerShare) else [module]
    maps: list[AffineMap | None] = []
    shapes = [tuple(shape)]
    for stage in stages:
        maps.append(None if isinstance(stage, Square) else affine_map(name, stage, shapes[-1]))
        affine = maps[-1]
        shapes.append(shapes[-1] if affine is None else affine.shape)
    joins, inner = (module.joins, module.returns_inner) if isinstance(module, ServerShare) else (None, None)
    return ServerProgram(tuple(maps), tuple(shapes), joins, inner)


def row_features(shape: Sequence[int]) -> int:
    """Return how many numbers a row of `shape` has."""
    return math.prod(shape)
