"""A variational encoder of a value, number by number, as used by `mid` and `mid_labels`.

It computes a mean mu and a standard deviation s = softplus(h - 5), as in Alemi, Fischer, Dillon, Murphy, "Deep
variational information bottleneck", ICLR 2017, so that training starts with little noise. mu and h are one linear layer
each, a 1x1 convolution for images, of the value's own size.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.errors import InvalidInput
from splitfed.defenses.fitted_layers import Layer


class Variational(Layer):
    """Computes mean and standard deviation of (batch, channels, ...), returns the mean and stores both.

    `name`: of its defense, for error messages.
    """

    name = "mid"

    def __init__(self, value: str, shape: tuple[int, ...]) -> None:
        super().__init__(value)
        if len(shape) not in (1, 3):
            raise InvalidInput(
                f"{self.name} cannot guard {value!r} of shape {shape} a row: expected (features,) or (channels, "
                "height, width)"
            )
        size = shape[0]
        self.mean, self.spread = (
            nn.Linear(size, size) if len(shape) == 1 else nn.Conv2d(size, size, 1) for _ in range(2)
        )

    def forward(self, z: Tensor) -> Tensor:
        """Return the mean: same shape."""
        self.kept = (self.mean(z), functional.softplus(self.spread(z) - 5).clamp_min(1e-6))
        return self.kept[0]


def divergence(mean: Tensor, spread: Tensor) -> Tensor:
    """Return KL(N(mean, spread^2) || N(0, 1)) in nats, summed over a row's numbers, averaged over rows."""
    terms = mean.square() + spread.square() - 2 * spread.log() - 1
    return terms.flatten(1).sum(1).mean() / 2
