"""What a server knows of a layer of its own that computes on ciphertexts: how it learns, and what CKKS adds to it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class EncryptedLayer:
    """One linear layer of a server that reads ciphertexts and whose gradients arrive in plain.

    `segment`: that has the layer; `value`: what it reads; `result`: what it returns, whose gradient arrives. `weight`:
    under which name the gradient of its weights arrives beside that. `masked`: the kind of messages in which, instead,
    its weights after a step arrive under that name, each plus `mask`; None where the gradient arrives. `rate`: of its
    SGD. `bound`: the declared largest magnitude of what it reads.
    Errors at their largest: `fresh`, of a number of what it reads; `encoding`, of the product of that and a number of
    the server; `rounding`, of a sum of such products.
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
        """Return the largest error of a weight after a step of the server on ciphertexts, once it is decrypted.

        `gradient`: of the results, (rows, results). Errors are independent, so that their squares add up.
        """
        norm = float(gradient.double().square().sum(0).max().sqrt())
        return math.hypot(self.rate * norm * self.fresh, math.sqrt(len(gradient)) * self.encoding, self.rounding)
