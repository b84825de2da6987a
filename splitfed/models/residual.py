"""The stem and the residual block of both ResNets.

Paper: He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, figure 2.
"""

from __future__ import annotations

from torch import Tensor, nn


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
