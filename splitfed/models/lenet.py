"""LeNet-5: two convolutions with pooling, and three fully connected layers.

Paper: LeCun, Bottou, Bengio and Haffner, "Gradient-Based Learning Applied to Document Recognition", Proceedings of the
IEEE, 1998.

Deviates: images are not enlarged to 32x32 but padded by 2 at the first convolution, which for 28x28 is the same; ReLU
in place of tanh, plain pooling without coefficients, a second convolution connected to all maps of the first, and a
linear last layer. Where the map is too small for the second convolution (digits of 8x8) it is padded by 2 as well.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

from torch import nn

from splitfed.core.errors import check_names
from splitfed.core.random import initialization
from splitfed.models.shapes import image_shape

POOLING: dict[str, type[nn.AvgPool2d] | type[nn.MaxPool2d]] = {"average": nn.AvgPool2d, "max": nn.MaxPool2d}


class LeNet(nn.Sequential):
    """LeNet-5, every step a submodule."""

    cuts: ClassVar[tuple[str, ...]] = (
        *("conv1", "relu1", "pool1", "conv2", "relu2", "pool2"),
        *("fc1", "relu3", "fc2", "relu4"),
    )


def lenet(shape: tuple[int, ...], outputs: int, pool: str = "average", *, seed: int | None = 0) -> LeNet:
    """Return LeNet-5 for images (channels, height, width) of 4x4 or more; `pool` is "average" or "max".

    Weights depend on `seed` only, without a change of torch's global generator; None draws them from that generator.
    """
    channels, height, width = image_shape("lenet", shape, outputs, smallest=4)
    check_names("pool", POOLING, pool)
    padding = 0 if min(height // 2, width // 2) >= 6 else 2
    rows, columns = ((side // 2 + 2 * padding - 4) // 2 for side in (height, width))
    with initialization(seed):
        return LeNet(
            OrderedDict(
                conv1=nn.Conv2d(channels, 6, 5, padding=2),
                relu1=nn.ReLU(),
                pool1=POOLING[pool](2),
                conv2=nn.Conv2d(6, 16, 5, padding=padding),
                relu2=nn.ReLU(),
                pool2=POOLING[pool](2),
                flatten=nn.Flatten(),
                fc1=nn.Linear(16 * rows * columns, 120),
                relu3=nn.ReLU(),
                fc2=nn.Linear(120, 84),
                relu4=nn.ReLU(),
                fc3=nn.Linear(84, outputs),
            )
        )
