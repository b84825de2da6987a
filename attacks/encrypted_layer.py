"""What a server knows of a layer of its own that computes on ciphertexts: how it learns, and what CKKS adds to it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from splitfed.encryption.noise import TAIL, scalar_noise, vector_noise
from splitfed.encryption.parameters import CkksParameters


@dataclass(frozen=True)
class EncryptedLayer:
    """One linear layer of a server that reads ciphertexts and whose gradients arrive in plain.

    `protocol`: which of `splitfed.core.encryption_settings.PROTOCOLS`. `segment`: that has the layer; `value`: what it
    reads; `result`: what it returns, whose gradient arrives. `rate`: of its SGD. `mask`: what is added to its weights
    before the key holder sees them. `bound`: the declared largest magnitude of what it reads. `parameters`: of CKKS.
    """

    protocol: str
    segment: str
    value: str
    result: str
    rate: float
    mask: float
    bound: float
    parameters: CkksParameters

    def weight_error(self, gradient: Tensor) -> float:
        """Return the largest error of a weight after a step that was computed on ciphertexts and decrypted.

        `gradient`: of the results, (rows, results). At 16 standard deviations of the noise of fresh encryptions, times
        the Euclidean norm of what they are multiplied by, of the encoding of that, of one rescaling and of a sum.
        """
        parameters = self.parameters
        rows, scale = len(gradient), 2.0**parameters.scale_bits
        factors = self.rate * float(gradient.double().square().sum(0).max().sqrt())
        return TAIL * math.hypot(
            factors * parameters.noise,
            scalar_noise(rows, self.bound, scale),
            parameters.noise,
            vector_noise(parameters.degree, 1, 1.0, scale),
        )
