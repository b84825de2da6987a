"""Counts of ciphertexts, their levels and the operations on them, from shapes alone.

Every operation of `splitfed.encryption` that a run uses has its counterpart here, which computes nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from splitfed.encryption.ciphertexts import ROW_RESULTS, ROWS, ciphertext_count, message_bytes, next_power_of_two
from splitfed.encryption.noise import baby_steps
from splitfed.encryption.parameters import CkksParameters

ENCRYPTION, DECRYPTION, SAVING, LOADING = "encryption", "decryption", "saving", "loading"
NUMBER_PRODUCT, PACKED_PRODUCT = "product with a number", "product with packed numbers"
PACKED_WEIGHTS, CIPHERTEXT_PRODUCT = "packing of weights", "product of ciphertexts"
RESCALING, ROTATION = "rescaling", "rotation"


class CiphertextOperation(NamedTuple):
    """Operation of a `kind` on one ciphertext that has `level` multiplications left before it."""

    kind: str
    level: int


@dataclass(frozen=True)
class CiphertextShape:
    """Shape and level of an encrypted (`rows`, `features`) tensor, without its ciphertexts.

    `scale`: equal for two tensors of one level whose numbers are encoded at the same scale.
    """

    layout: str
    rows: int
    features: int
    level: int
    width: int = 0
    scale: tuple[object, ...] = ()

    def count(self, parameters: CkksParameters) -> int:
        """Return the number of ciphertexts of the tensor."""
        return ciphertext_count(parameters, self.layout, (self.rows, self.features), self.width)


class CiphertextCounter:
    """Counter of the ciphertext operations of both parties in a step; `operations`: operation -> how often it occurs.

    It implements `Arithmetic`, so that a server's program runs on it.
    """

    def __init__(self, parameters: CkksParameters) -> None:
        self.parameters = parameters
        self.operations: Counter[CiphertextOperation] = Counter()

    def send_fresh(self, x: CiphertextShape) -> int:
        """Count encryption, serialisation and parsing of `x`; return the bytes of its message, within 1 %."""
        self._add(ENCRYPTION, x.level, x.count(self.parameters))
        return self._send(x)

    def send_back(self, x: CiphertextShape) -> int:
        """Count serialisation, parsing and decryption of `x`; return the bytes of its message, within 1 %."""
        self._add(DECRYPTION, x.level, x.count(self.parameters))
        return self._send(x)

    def linear(self, x: CiphertextShape, weight: Tensor, bias: Tensor | None = None) -> CiphertextShape:
        """Return the shape of the product with the plaintext `weight`, (results, features); count its operations."""
        if x.layout == ROWS:
            return self._linear_rows(x, weight)
        # Weights that would be encoded as zero are left out.
        self._add(NUMBER_PRODUCT, x.level, int((weight.abs() * 2.0**self.parameters.scale_bits >= 1).sum()))
        self._add(RESCALING, x.level, len(weight))
        return replace(x, features=len(weight), level=x.level - 1)

    def square(self, x: CiphertextShape) -> CiphertextShape:
        """Return the shape of the square of `x`, and count its operations."""
        self._add(CIPHERTEXT_PRODUCT, x.level, x.count(self.parameters))
        return replace(x, level=x.level - 1, scale=("square", x.scale, x.level))

    def multiply(self, x: CiphertextShape, y: CiphertextShape) -> CiphertextShape:
        """Return the shape of the product of two tensors of the same shape, and count its operations."""
        x, y = self._align(x, y)
        self._add(CIPHERTEXT_PRODUCT, x.level, x.count(self.parameters))
        return replace(x, level=x.level - 1, scale=("product", x.scale, y.scale, x.level))

    def add(self, x: CiphertextShape, y: CiphertextShape) -> CiphertextShape:
        """Return the shape of the sum of two tensors of the same shape, at the lower of their levels."""
        return self._align(x, y)[0]

    def concatenate(self, x: CiphertextShape, y: CiphertextShape) -> CiphertextShape:
        """Return the shape of the joined features of `x` and `y`, at the lower of their levels."""
        return replace(self._align(x, y)[0], features=x.features + y.features)

    def take_features(self, x: CiphertextShape, first: int, end: int) -> CiphertextShape:
        """Return the shape of the features of `x` from `first` up to, not including, `end`."""
        return replace(x, features=end - first)

    def _linear_rows(self, x: CiphertextShape, weight: Tensor) -> CiphertextShape:
        results = next_power_of_two(len(weight))
        steps = baby_steps(results)
        padded = torch.zeros(results, x.width, dtype=torch.float64)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        place, number = torch.arange(x.width), torch.arange(results)[:, None]
        largest = padded[place % results, (place + number) % x.width].abs().amax(1)
        diagonals = int((largest * 2.0**self.parameters.scale_bits >= 1).sum())
        # Rotations: baby steps of the input, giant steps of the sums, and those that add halves of the rows.
        rotations = min(steps, results) - 1 + -(-results // steps) - 1 + int(math.log2(x.width // results))
        count = x.count(self.parameters)
        self._add(PACKED_WEIGHTS, x.level, diagonals)
        self._add(PACKED_PRODUCT, x.level, diagonals * count)
        self._add(ROTATION, x.level, rotations * count)
        self._add(RESCALING, x.level, count)
        return replace(x, layout=ROW_RESULTS, features=len(weight), level=x.level - 1)

    def _align(self, x: CiphertextShape, y: CiphertextShape) -> tuple[CiphertextShape, CiphertextShape]:
        """Return `x` and `y` at one level and one scale, as `splitfed.encryption.arithmetic` aligns them."""
        if x.level != y.level:
            low = x if x.level < y.level else y
            return self._lower(x, low.level, low.scale), self._lower(y, low.level, low.scale)
        if x.scale == y.scale:
            return x, y
        return self._lower(x, x.level - 1, ()), self._lower(y, x.level - 1, ())

    def _lower(self, x: CiphertextShape, level: int, scale: tuple[object, ...]) -> CiphertextShape:
        if x.level > level:
            # A product with the number 1, one level above the target level.
            for kind in (NUMBER_PRODUCT, RESCALING):
                self._add(kind, level + 1, x.count(self.parameters))
        return replace(x, level=level, scale=scale)

    def _send(self, x: CiphertextShape) -> int:
        for kind in (SAVING, LOADING):
            self._add(kind, x.level, x.count(self.parameters))
        width = x.width or None
        return message_bytes(self.parameters, x.layout, (x.rows, x.features), level=x.level, width=width)

    def _add(self, kind: str, level: int, times: int) -> None:
        self.operations[CiphertextOperation(kind, level)] += times
