"""A decoder from releases to rows, shared by the attacks that train an inverse.

It is the sum of the best linear inverse, by least squares (`splitfed.attacks.networks.least_squares`), and a network
that learns the residual in units of its deviation. So training starts from the linear attack, and the decoder is as
exact as that one where no residual is left. Without that start, training would have to find the inverse of an
ill-conditioned convolution step by step.

Spatial releases pass convolutions: one bridges the difference to a size from which doubling leads to the image's. Flat
ones are first mapped to a small image. A value computed from one part of an image is decoded to that part, at its
place. Rows that are no images get a multilayer perceptron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.attacks.networks.image_parts import Rectangle, bridge, doublings
from splitfed.attacks.networks.least_squares import linear_inverse
from splitfed.core.rows import flat_rows

Passes = Sequence[Mapping[str, Tensor]]


class Decoder(nn.Module):
    """Maps releases {value: (n, *shape)} to rows (n, *target), inside `value_range` if given.

    `shapes`: shape of each value, without the batch; `width`: channels, half as many at the size of the image (or a
    sixteenth of the hidden units of the perceptron). `start`: the mean row, (*target), which is the output before
    `fit`. `parts`: value -> the rectangles of the image that it shows, by default the whole image.
    """

    base: Tensor
    unit: Tensor

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        target: tuple[int, ...],
        value_range: tuple[float, float] | None,
        width: int = 32,
        start: Tensor | None = None,
        parts: Mapping[str, Sequence[Rectangle]] | None = None,
    ) -> None:
        super().__init__()
        # One number a row is a channel of one.
        shapes = {name: shape or (1,) for name, shape in shapes.items()}
        self._names, self._target, self._range = tuple(shapes), target, value_range
        low, high = value_range or (-1.0, 1.0)
        mean = torch.full(target, (low + high) / 2) if start is None else start.detach().clone().float()
        self.register_buffer("base", mean)
        self.register_buffer("unit", torch.tensor((high - low) / 2))
        self.scales = nn.ModuleList(_Standard(shape[0]) for shape in shapes.values())
        self.net: nn.Module
        if len(target) == 3:
            whole = (Rectangle(0, 0, target[1], target[2]),)
            self._shown = [(name, box) for name in shapes for box in (parts or {}).get(name, whole)]
            self.net = _Images([(shapes[name], box) for name, box in self._shown], target, width)
        else:
            self._shown = list[tuple[str, Rectangle]]()
            self.net = _perceptron(sum(map(prod, shapes.values())), target, 16 * width)
        self.linear = nn.ModuleDict()  # by the number of what is shown; "all" where the data are no images

    @torch.no_grad()
    def fit(self, passes: Passes, x: Tensor) -> None:
        """Compute scales and the linear inverse from `passes` of releases of the rows x (n, *target)."""
        for name, scale in zip(self._names, self.scales, strict=True):
            assert isinstance(scale, _Standard)
            scale.fit(_with_channels(torch.cat([releases[name] for releases in passes])))
        scaled = [self._scale(releases) for releases in passes]
        left = x - self.base
        if self._shown:
            covered = torch.zeros(self._target[1:], dtype=torch.bool)
            for number, (name, box) in enumerate(self._shown):
                mine, base = box.cut(left), box.cut(self.base)
                inverse = linear_inverse(
                    [z[name] for z in scaled], mine + (0 if bool(box.cut(covered).any()) else base)
                )
                if inverse is not None:
                    if not bool(box.cut(covered).any()):
                        mine += base
                        base.zero_()
                    box.cut(covered).fill_(True)
                    mine -= inverse(scaled[0][name])
                    self.linear[str(number)] = inverse
        else:
            flat = [_flatten(z) for z in scaled]
            if (inverse := linear_inverse(flat, x)) is not None:
                self.base.zero_()
                self.linear["all"] = inverse
                left = x - inverse(flat[0])
        self.unit.copy_(left.square().mean().sqrt().clamp_min(1e-6 * self.unit))

    def forward(self, releases: Mapping[str, Tensor]) -> Tensor:
        """Return rows (n, *target).

        Beyond the value range the result is its bound, with the gradient of the unclamped number.
        """
        scaled = self._scale(releases)
        if not self._shown:
            flat = _flatten(scaled)
            x: Tensor = self.base + self.unit * self.net(flat)
            x = x + self.linear["all"](flat) if "all" in self.linear else x
        else:
            x = self.base + self.unit * self.net([scaled[name] for name, _ in self._shown])
            for number, (name, box) in enumerate(self._shown):
                if str(number) in self.linear:
                    x = x + functional.pad(self.linear[str(number)](scaled[name]), box.margins(*self._target[1:]))
        return x if self._range is None else x + (x.clamp(*self._range) - x).detach()

    def _scale(self, releases: Mapping[str, Tensor]) -> dict[str, Tensor]:
        pairs = zip(self._names, self.scales, strict=True)
        return {name: scale(_with_channels(releases[name])) for name, scale in pairs}


def _with_channels(z: Tensor) -> Tensor:
    return z if z.dim() > 1 else z.unsqueeze(1)


class _Standard(nn.Module):
    """Subtracts the mean of every channel and divides by its deviation, as computed in `fit`."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("deviation", torch.ones(channels))

    def fit(self, z: Tensor) -> None:
        """Compute mean and deviation from z (n, channels, ...); a constant channel keeps its scale."""
        flat = z.flatten(2).double() if z.dim() > 2 else z.double().unsqueeze(2)
        deviation = flat.std((0, 2), correction=0)
        self.mean.copy_(flat.mean((0, 2)))
        self.deviation.copy_(torch.where(deviation > 0, deviation, 1.0))

    def forward(self, z: Tensor) -> Tensor:
        """Return a tensor of the shape of z."""
        shape = (1, -1, *[1] * (z.dim() - 2))
        return (z - self.mean.view(shape)) / self.deviation.view(shape)


class _Images(nn.Module):
    """One trunk for every pair of a value and a rectangle; overlapping outputs are added."""

    def __init__(self, shown: Sequence[tuple[tuple[int, ...], Rectangle]], target: tuple[int, ...], width: int) -> None:
        super().__init__()
        self._size = target[1:]
        self._boxes = [box for _, box in shown]
        half = max(width // 2, 4)
        self.trunks = nn.ModuleList(_trunk(shape, box, width, half) for shape, box in shown)
        # Where there are several, they are joined by one layer more, which sees across their borders.
        joined = [nn.Conv2d(half, half, 3, padding=1), nn.ReLU()] if len(shown) > 1 else []
        last = nn.Conv2d(half, target[0], 3, padding=1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)  # type: ignore[arg-type]
        self.tail = nn.Sequential(*joined, last)

    def forward(self, values: Sequence[Tensor]) -> Tensor:
        maps = [
            functional.pad(_centre(trunk(z), box), box.margins(*self._size))
            for trunk, box, z in zip(self.trunks, self._boxes, values, strict=True)
        ]
        found: Tensor = self.tail(torch.stack(maps).sum(0) if len(maps) > 1 else maps[0])
        return found


def _trunk(shape: tuple[int, ...], box: Rectangle, width: int, half: int) -> nn.Sequential:
    """Return a network from (n, *shape) to (n, half, height, width) of the rectangle, or slightly larger."""
    goal, layers = (box.height, box.width), list[nn.Module]()
    if len(shape) == 3 and min(shape[1:]) > 1:
        channels, side = shape[0], (shape[1], shape[2])
    else:
        channels, side = width, (max(-(-goal[0] // 4), 2), max(-(-goal[1] // 4), 2))
        layers += [nn.Flatten(), nn.Linear(prod(shape), width * prod(side)), nn.Unflatten(1, (width, *side)), nn.ReLU()]
    while any(size >= 2 * wanted for size, wanted in zip(side, goal, strict=True)):
        stride = [2 if size >= 2 * wanted else 1 for size, wanted in zip(side, goal, strict=True)]
        layers += [nn.Conv2d(channels, width, (2 + stride[0], 2 + stride[1]), (stride[0], stride[1]), 1), nn.ReLU()]
        channels, side = width, (side[0] // stride[0], side[1] // stride[1])
    (high, rows), (wide, columns) = (doublings(*pair) for pair in zip(side, goal, strict=True))
    layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
    channels = width if high or wide else half
    layers += [bridge(width, channels, side, (rows, columns)), nn.ReLU()]
    for number in range(max(high, wide)):
        if number < min(high, wide):
            # Sub-pixel convolution: the work is done before the size doubles, at half the cost of doing it after.
            layers += [nn.Conv2d(channels, 4 * half, 3, padding=1), nn.PixelShuffle(2), nn.ReLU()]
        else:
            steps = (2, 1) if number < high else (1, 2)
            layers += [nn.ConvTranspose2d(channels, half, (2 + steps[0], 2 + steps[1]), steps, 1), nn.ReLU()]
        channels = half
    return nn.Sequential(*layers)


def _centre(x: Tensor, box: Rectangle) -> Tensor:
    top, left = (x.shape[2] - box.height) // 2, (x.shape[3] - box.width) // 2
    return x[..., top : top + box.height, left : left + box.width]


def _perceptron(inputs: int, target: tuple[int, ...], hidden: int) -> nn.Sequential:
    last = nn.Linear(hidden, prod(target))
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), last, nn.Unflatten(1, target)
    )


def _flatten(values: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([flat_rows(z) for z in values.values()], 1)
