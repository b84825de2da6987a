"""The stem, the residual block and the four stages of ResNets.

Paper: He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, figure 2 and table 1.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from splitfed.core.errors import check_names
from splitfed.core.random import initialization
from splitfed.models.shapes import image_shape

STEMS = {"small": 8, "large": 32}
"""Stem -> smallest height and width of an image."""


class ResNet(nn.Sequential):
    """Stem, four stages of blocks, average pooling, one linear layer; ReLUs work in place.

    `cuts`: names of the layers behind which it can be cut.
    """

    def __init__(self, layers: OrderedDict[str, nn.Module]) -> None:
        super().__init__(layers)
        blocks = [name for name, module in self.named_modules() if isinstance(module, Block)]
        last = {stage: f"{stage}.{[*layers[stage]._modules][-1]}" for stage in layers if stage.startswith("stage")}
        ends = {block: stage for stage, block in last.items()}
        before = [name for name in layers if name not in (*last, "pool", "flatten", "fc")]
        self.cuts = (*before, *(ends.get(block, block) for block in blocks), "pool")


def resnet(
    name: str, shape: tuple[int, ...], outputs: int, blocks: Sequence[int], kind: str, seed: int | None
) -> ResNet:
    """Return the ResNet `name` with so many `blocks` in its four stages, for images (channels, height, width).

    `kind`: of the stem, "small" for images of 8x8 or more, or "large" for those of 32x32 or more, the paper's. Weights
    depend on `seed` only, without a change of torch's global generator; None draws them from that generator.
    """
    check_names(f"stem of {name}", STEMS, kind)
    channels, _, _ = image_shape(name, shape, outputs, smallest=STEMS[kind])
    widths = (64, 128, 256, 512)
    with initialization(seed):
        layers = OrderedDict(large_stem(channels, 64) if kind == "large" else stem(channels, 64))
        for i, (inputs, width, count) in enumerate(zip((64, *widths), widths, blocks, strict=False), start=1):
            named = {"block1": Block(inputs, width, 1 if i == 1 else 2)}
            named |= {f"block{n}": Block(width, width) for n in range(2, count + 1)}
            layers[f"stage{i}"] = nn.Sequential(OrderedDict(named))
        layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(512, outputs)}
        return ResNet(layers)


def large_stem(channels: int, width: int) -> dict[str, nn.Module]:
    """Return the paper's layers before the first block: (batch, channels, h, w) to (batch, width, h / 4, w / 4)."""
    return {
        "conv1": nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False),
        "bn1": nn.BatchNorm2d(width),
        "relu1": nn.ReLU(inplace=True),
        "pool1": nn.MaxPool2d(3, stride=2, padding=1),
    }


def stem(channels: int, width: int) -> dict[str, nn.Module]:
    """Return the layers before the first block, by name: (batch, channels, h, w) to (batch, width, h, w)."""
    return {
        "conv1": nn.Conv2d(channels, width, 3, padding=1, bias=False),
        "bn1": nn.BatchNorm2d(width),
        "relu1": nn.ReLU(inplace=True),
    }


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut: (batch, inputs, h, w) to (batch, width, h/stride, w/stride)."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != width:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.relu2 = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(F(x) + shortcut(x))."""
        out = self.relu1(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out)) + self.shortcut(x)
        result: Tensor = self.relu2(out)
        return result
