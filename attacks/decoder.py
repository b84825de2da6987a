"""A decoder from what was released to what went in: used by every attack that learns an inverse.

Spatial releases go through convolutions and are doubled in size until they reach the image's; flat ones are first
mapped to a small image. Data that are no images get a multilayer perceptron. Several values that arrive together
are decoded together.

It starts out at the mean row, where that is given: from the middle of the range, a decoder of mostly dark images is
first driven to black, where its units die, and it stays there whatever the release says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional


class Decoder(nn.Module):
    """Maps releases {value: (n, *shape)} to rows (n, *target), inside `value_range` where there is one.

    `shapes`: per value, without the batch; `width`: channels, halved wherever the size doubles (or a sixteenth of
    the hidden units of the perceptron). `start`: the mean row, (*target), around which it answers before training.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        target: tuple[int, ...],
        value_range: tuple[float, float] | None,
        width: int = 32,
        start: Tensor | None = None,
    ) -> None:
        super().__init__()
        self._names = tuple(shapes)
        self._target = target
        self._range = value_range
        self.norms = nn.ModuleList(nn.BatchNorm1d(shape[0], affine=False) for shape in shapes.values())
        if len(target) == 3:
            self.net: nn.Sequential = _image_decoder(list(shapes.values()), target, width)
        else:
            hidden = 16 * width
            self.net = nn.Sequential(
                _Flat(), nn.Linear(sum(map(prod, shapes.values())), hidden), nn.ReLU(),
                nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, prod(target)),
            )  # fmt: skip
        if start is not None:
            self._begin(start)

    @torch.no_grad()
    def _begin(self, start: Tensor) -> None:
        last = self.net[-1]
        assert isinstance(last, nn.Linear | nn.Conv2d)
        assert last.bias is not None
        mean = start.flatten(1).mean(1) if isinstance(last, nn.Conv2d) else start.flatten()
        if self._range is not None:
            low, high = self._range
            mean = torch.logit((mean - low) / (high - low), eps=0.01)
        last.bias.copy_(mean)

    def forward(self, releases: Mapping[str, Tensor]) -> Tensor:
        """Return (n, *target)."""
        values = [
            norm(releases[name].flatten(2) if releases[name].dim() > 2 else releases[name]).view_as(releases[name])
            for name, norm in zip(self._names, self.norms, strict=True)
        ]
        x: Tensor = self.net(values).reshape(-1, *self._target)
        if self._range is None:
            return x
        low, high = self._range
        return low + (high - low) * torch.sigmoid(x)


class _Flat(nn.Module):
    def forward(self, values: Sequence[Tensor]) -> Tensor:
        return torch.cat([v.flatten(1) for v in values], 1)


class _Join(nn.Module):
    """Bring every value to the size of the largest one and put them side by side as channels."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], side: tuple[int, int], channels: int) -> None:
        super().__init__()
        self._side = side
        self.lift = nn.ModuleList(
            nn.Identity() if len(s) == 3 else nn.Linear(prod(s), channels * side[0] * side[1]) for s in shapes
        )
        self.channels = sum(s[0] if len(s) == 3 else channels for s in shapes)

    def forward(self, values: Sequence[Tensor]) -> Tensor:
        maps = []
        for value, lift in zip(values, self.lift, strict=True):
            spatial = value.dim() == 4
            maps.append(value if spatial else lift(value.flatten(1)).view(len(value), -1, *self._side))
        maps = [m if m.shape[2:] == self._side else functional.interpolate(m, self._side) for m in maps]
        return torch.cat(maps, 1)


def _image_decoder(shapes: list[tuple[int, ...]], target: tuple[int, ...], width: int) -> nn.Sequential:
    channels, height, breadth = target
    spatial = [s[1:] for s in shapes if len(s) == 3]
    side = max(spatial) if spatial else (max(height // 4, 1), max(breadth // 4, 1))
    join = _Join(shapes, (side[0], side[1]), width)
    layers: list[nn.Module] = [join, nn.Conv2d(join.channels, width, 3, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    while side[0] * 2 <= height and side[1] * 2 <= breadth:
        # Sub-pixel convolution: the work is done before the size doubles, at half the cost of doing it after.
        half = max(width // 2, 4)
        layers += [nn.Conv2d(width, 4 * half, 3, padding=1), nn.PixelShuffle(2), nn.ReLU()]
        width, side = half, (side[0] * 2, side[1] * 2)
    if side != (height, breadth):
        layers.append(nn.Upsample((height, breadth), mode="bilinear", align_corners=False))
    layers.append(nn.Conv2d(width, channels, 3, padding=1))
    return nn.Sequential(*layers)
