"""AlexNet in one column: five convolutions and three linear layers, with a stem for small or for large images.

Paper: Krizhevsky, Sutskever, Hinton, "ImageNet classification with deep convolutional neural networks", NeurIPS 2012;
in one column, without normalisation of responses, as in Krizhevsky, "One weird trick for parallelizing convolutional
neural networks", 2014.

Deviates: the stem for small images, which is the default, is a 3x3 convolution of stride 1, and pooling is over 2x2
places that do not overlap and keeps the odd last row and column of a map, so that images of 8x8 have a map left.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import nn

from splitfed.core.errors import check_count, check_names, check_number
from splitfed.core.random import initialization
from splitfed.models.shapes import image_shape

WIDTHS = (64, 192, 384, 256, 256)
STEMS = {"small": 8, "large": 63}
"""Stem -> smallest height and width of an image."""


class AlexNet(nn.Sequential):
    """Five convolutions (conv, relu), pooled three times, and three linear layers; ReLUs work in place.

    `cuts`: names of the layers behind which it can be cut.
    """

    def __init__(self, layers: OrderedDict[str, nn.Module]) -> None:
        super().__init__(layers)
        self.cuts = tuple(name for name in layers if not name.startswith(("flatten", "dropout", "fc3")))


def alexnet(
    shape: tuple[int, ...],
    outputs: int,
    *,
    stem: str = "small",
    hidden: int = 4096,
    dropout: float = 0.5,
    seed: int | None = 0,
) -> AlexNet:
    """Return AlexNet for images (channels, height, width) of 8x8 or more, with the stem "large" of 63x63 or more.

    `hidden`: width of the first two linear layers; `dropout`: before each of them, in [0, 1). Weights depend on `seed`
    only, without a change of torch's global generator; None draws them from that generator.
    """
    check_names("stem of alexnet", STEMS, stem)
    check_count("hidden", hidden, low=1)
    check_number("dropout", dropout, low=0.0, high=1.0, open_high=True)
    channels, height, width = image_shape("alexnet", shape, outputs, smallest=STEMS[stem])
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    with initialization(seed):
        for i, units in enumerate(WIDTHS, start=1):
            if i > 1:
                kernel, stride = (5, 1) if i == 2 else (3, 1)
            else:
                kernel, stride = (11, 4) if stem == "large" else (3, 1)
            padding = 2 if kernel == 11 else kernel // 2
            layers[f"conv{i}"] = nn.Conv2d(channels, units, kernel, stride, padding)
            layers[f"relu{i}"] = nn.ReLU(inplace=True)
            channels = units
            height, width = ((side + 2 * padding - kernel) // stride + 1 for side in (height, width))
            if i in (1, 2, 5):
                number = {1: 1, 2: 2, 5: 3}[i]
                layers[f"pool{number}"] = nn.MaxPool2d(3, 2) if stem == "large" else nn.MaxPool2d(2, ceil_mode=True)
                sides = (height, width)
                height, width = ((n - 1) // 2 if stem == "large" else math.ceil(n / 2) for n in sides)
        layers["flatten"] = nn.Flatten()
        layers["dropout1"] = nn.Dropout(dropout)
        layers["fc1"] = nn.Linear(channels * height * width, hidden)
        layers["relu6"] = nn.ReLU(inplace=True)
        layers["dropout2"] = nn.Dropout(dropout)
        layers["fc2"] = nn.Linear(hidden, hidden)
        layers["relu7"] = nn.ReLU(inplace=True)
        layers["fc3"] = nn.Linear(hidden, outputs)
        return AlexNet(layers)
