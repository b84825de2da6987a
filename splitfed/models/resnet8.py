"""ResNet-8: the smallest residual network for small images, one block in each of three stages.

Paper: He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2, with n
= 1.

Deviates: where a stage changes the number of channels the shortcut is a 1x1 convolution with BatchNorm (the
paper's option B), not zero padding (option A).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

from torch import nn

from splitfed.core.random import initialization
from splitfed.models.residual import Block, stem
from splitfed.models.shapes import image_shape


class ResNet8(nn.Sequential):
    """Stem, three blocks, average pooling, one linear layer; ReLUs work in place."""

    cuts: ClassVar[tuple[str, ...]] = ("conv1", "bn1", "relu1", "stage1", "stage2", "stage3", "pool")


def resnet8(shape: tuple[int, ...], outputs: int, *, seed: int | None = 0) -> ResNet8:
    """Return ResNet-8 for images (channels, height, width) of 4x4 or more.

    Weights depend on `seed` only, without a change of torch's global generator; None draws them from that generator.
    """
    channels, _, _ = image_shape("resnet8", shape, outputs, smallest=4)
    with initialization(seed):
        return ResNet8(
            OrderedDict(
                **stem(channels, 16),
                stage1=Block(16, 16),
                stage2=Block(16, 32, stride=2),
                stage3=Block(32, 64, stride=2),
                pool=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
                fc=nn.Linear(64, outputs),
            )
        )
