"""What a server knows of its own layer that computes on ciphertexts: the update rule, and the error bounds of CKKS."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class EncryptedLayer:
    """A linear layer of a server that reads ciphertexts and receives its gradients in plain.

    `segment`: name of the segment with the layer; `value`: what it reads; `result`: what it returns, whose gradient
    arrives. `weight`: name under which the gradient of its weights arrives with that gradient. `masked`: kind of the
    messages in which its weights after a step arrive under that name instead, each plus `mask`; None if the gradient
    arrives. `rate`: learning rate of its SGD. `bound`: declared largest magnitude of its inputs. Largest absolute
    errors: `fresh`, of an encrypted input; `encoding`, of the product of an input and a plain number; `rounding`, of a
    sum of such products.
    """

    segment: str
    value: str
    result: str
    weight: str
    masked: str | None
    mask: float
    rate: float
    bound: float
    fresh: float
    encoding: float
    rounding: float

    def weight_error(self, gradient: Tensor) -> float:
        """Return the error of a decrypted weight after one encrypted step of the server.

        `gradient`: of the results, (rows, results). The largest errors are combined as independent ones, by the root of
        the sum of their squares.
        """
        norm = float(gradient.double().square().sum(0).max().sqrt())
        return math.hypot(self.rate * norm * self.fresh, math.sqrt(len(gradient)) * self.encoding, self.rounding)
