"""ResNet-18 with a stem for small images: two blocks in each of four stages.

Paper: He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, table 1.

Deviates: the stem is one 3x3 convolution of stride 1 without max pooling, as is usual for 32x32 images; the
7x7 stem of the paper would leave 1x1 maps of them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

from torch import nn

from splitfed.core.random import initialization
from splitfed.models.residual import Block, stem
from splitfed.models.shapes import image_shape


class ResNet18(nn.Sequential):
    """Stem, four stages of two blocks, average pooling, one linear layer; ReLUs work in place."""

    cuts: ClassVar[tuple[str, ...]] = (
        *("conv1", "bn1", "relu1"),
        *("stage1.block1", "stage1", "stage2.block1", "stage2"),
        *("stage3.block1", "stage3", "stage4.block1", "stage4", "pool"),
    )


def resnet18(shape: tuple[int, ...], outputs: int, *, seed: int | None = 0) -> ResNet18:
    """Return ResNet-18 for images (channels, height, width) of 8x8 or more.

    Weights depend on `seed` only, without a change of torch's global generator; None draws them from that generator.
    """
    channels, _, _ = image_shape("resnet18", shape, outputs, smallest=8)
    with initialization(seed):
        return ResNet18(
            OrderedDict(
                **stem(channels, 64),
                stage1=_stage(64, 64, 1),
                stage2=_stage(64, 128, 2),
                stage3=_stage(128, 256, 2),
                stage4=_stage(256, 512, 2),
                pool=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
                fc=nn.Linear(512, outputs),
            )
        )


def _stage(inputs: int, width: int, stride: int) -> nn.Sequential:
    return nn.Sequential(OrderedDict(block1=Block(inputs, width, stride), block2=Block(width, width)))
