"""FedAvg CNN: two wide 5x5 convolutions with max pooling, and a hidden layer of 512.

Paper: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
section 3. The paper states 1,663,370 parameters for MNIST, which determines the padding (2) that it does not state.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

from torch import nn

from splitfed.core.random import initialization
from splitfed.models.shapes import image_shape


class FedAvgCnn(nn.Sequential):
    """The CNN of the FedAvg paper, every step a submodule."""

    cuts: ClassVar[tuple[str, ...]] = ("conv1", "relu1", "pool1", "conv2", "relu2", "pool2", "fc1", "relu3")


def fedavg_cnn(shape: tuple[int, ...], outputs: int, *, seed: int | None = 0) -> FedAvgCnn:
    """Return the FedAvg CNN for images (channels, height, width) of 4x4 or more.

    Weights depend on `seed` only, without a change of torch's global generator; None draws them from that generator.
    """
    channels, height, width = image_shape("fedavg_cnn", shape, outputs, smallest=4)
    with initialization(seed):
        return FedAvgCnn(
            OrderedDict(
                conv1=nn.Conv2d(channels, 32, 5, padding=2),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(32, 64, 5, padding=2),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                fc1=nn.Linear(64 * (height // 4) * (width // 4), 512),
                relu3=nn.ReLU(),
                fc2=nn.Linear(512, outputs),
            )
        )
