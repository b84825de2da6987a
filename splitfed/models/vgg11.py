"""VGG-11 with BatchNorm for small images: eight 3x3 convolutions and one linear layer.

Paper: Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", ICLR
2015, table 1, column A.

Deviates: BatchNorm after each convolution, and one linear layer in place of three (4096, 4096, outputs), as
is usual for 32x32 images; a pooling step keeps the odd last row and column of a map, so that 28x28 and even
8x8 images end as 1x1 maps too.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import ClassVar

from torch import nn

from splitfed.core.random import initialization
from splitfed.models.shapes import image_shape

# Channels of the convolutions between one pooling step and the next.
STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))


class Vgg11(nn.Sequential):
    """Eight convolutions (conv, bn, relu), pooled five times; ReLUs work in place."""

    cuts: ClassVar[tuple[str, ...]] = (
        *("conv1", "bn1", "relu1", "pool1", "conv2", "bn2", "relu2", "pool2"),
        *("conv3", "bn3", "relu3", "conv4", "bn4", "relu4", "pool3"),
        *("conv5", "bn5", "relu5", "conv6", "bn6", "relu6", "pool4"),
        *("conv7", "bn7", "relu7", "conv8", "bn8", "relu8", "pool5"),
    )


def vgg11(shape: tuple[int, ...], outputs: int, *, seed: int | None = 0) -> Vgg11:
    """Return VGG-11 for images (channels, height, width) of 8x8 or more.

    Weights depend on `seed` only, without a change of torch's global generator; None draws them from that generator.
    """
    channels, height, width = image_shape("vgg11", shape, outputs, smallest=8)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    i = 0
    with initialization(seed):
        for stage, widths in enumerate(STAGES, start=1):
            for units in widths:
                i += 1
                layers[f"conv{i}"] = nn.Conv2d(channels, units, 3, padding=1)
                layers[f"bn{i}"] = nn.BatchNorm2d(units)
                layers[f"relu{i}"] = nn.ReLU(inplace=True)
                channels = units
            layers[f"pool{stage}"] = nn.MaxPool2d(2, ceil_mode=True)
        layers["flatten"] = nn.Flatten()
        layers["fc"] = nn.Linear(channels * math.ceil(height / 32) * math.ceil(width / 32), outputs)
        return Vgg11(layers)
