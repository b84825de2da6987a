"""Ways of writing a model by hand in which a cut could go wrong unseen; for `tests/core/test_fresh_models.py`."""

from __future__ import annotations

import functools
import itertools
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Layers(nn.Module):
    """Three layers, for the models below."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(width, 8), nn.Linear(8, 8), nn.Linear(8, 4)


class PositionTable(nn.Module):
    """Sine tables by length and width in a dictionary on the module, made when first asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[tuple[int, int], Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        key = (x.size(1), x.size(2))
        if key not in self.tables:
            angle = torch.arange(key[0])[:, None] / 10 ** (torch.arange(key[1]) / key[1])
            self.tables[key] = torch.where(torch.arange(key[1]) % 2 == 0, angle.sin(), angle.cos())
        return x + self.tables[key]


class SharedTable(Layers):
    """One table of positions is used in front of two layers, so that two parties read its cache."""

    def __init__(self) -> None:
        super().__init__(4)
        self.position = PositionTable()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(self.position(x)))
        return self.c(torch.relu(self.b(self.position(h))).mean(1))


class StatesByRows(Layers):
    """First states in a dictionary by the number of rows: the last batch makes another one."""

    def __init__(self) -> None:
        super().__init__(4)
        self.cell, self.states = nn.GRUCell(8, 8), {}

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        if len(x) not in self.states:
            self.states[len(x)] = torch.full((len(x), 8), 0.1)
        h = self.states[len(x)]
        for step in x.unbind(1):
            h = self.cell(self.b(step), h)
        return self.c(h)


class LazyMask(Layers):
    """A causal mask in a property that keeps it under a private name; the first call finds None."""

    def __init__(self) -> None:
        super().__init__(4)
        self._mask: Tensor | None = None

    def mask(self, length: int) -> Tensor:
        if self._mask is None or self._mask.shape[0] < length:
            self._mask = torch.ones(length, length).tril().bool()
        return self._mask[:length, :length]

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        scores = (self.b(h) @ h.transpose(1, 2)).masked_fill(~self.mask(h.size(1)), float("-inf"))
        return self.c((scores.softmax(-1) @ h).mean(1))


@functools.lru_cache(maxsize=8)
def smoothing(width: int) -> Tensor:
    """A matrix that spreads every number over its neighbours."""
    near = (torch.arange(width)[:, None] - torch.arange(width)).abs()
    return torch.exp(-near.float()) / 2


class CachedFunction(Layers):
    """A table from a cached function of the module's file, on both sides."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(torch.relu(self.a(x)) @ smoothing(8)) @ smoothing(8))


@dataclass
class Schedule:
    """A temperature that falls with every call."""

    start: float = 4.0
    fall: float = 0.7
    seen: list[int] = field(default_factory=list)

    def temperature(self, rows: int) -> float:
        self.seen.append(rows)
        return max(self.start * self.fall ** len(self.seen), 0.5)


class Annealed(Layers):
    """Softmax gates whose temperature a schedule object counts down."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        return self.c(h * torch.softmax(self.b(h) / self.schedule.temperature(len(h)), 1))


class ReplicaEpochs(Layers):
    """Branches are taken in turn, by an endless iterator of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.d, self.turn = nn.Linear(8, 8), itertools.cycle("bbd")

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(getattr(self, next(self.turn))(torch.relu(self.a(x)))))


def falling(start: float) -> Iterator[float]:
    """Yield factors that fall."""
    while True:
        yield start
        start *= 0.5


class Generated(Layers):
    """A generator, which nobody can copy, says how strong the skip is."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = falling(1.0)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        return self.c(torch.relu(self.b(h)) + next(self.factors) * h)


class Locked(Layers):
    """A lock, which nobody can copy, around a look at a table of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.scales = threading.Lock(), {"inner": 0.5}

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        with self.lock:
            scale = self.scales["inner"]
        return self.c(torch.relu(self.b(h)) * scale)


class Window(Layers):
    """Centers on the mean of the last three batches of training, which a deque holds at the server."""

    def __init__(self) -> None:
        super().__init__()
        self.means: deque[Tensor] = deque([torch.zeros(8)], maxlen=3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(torch.relu(self.a(x)))
        if self.training:
            self.means.append(h.detach().mean(0))
        return self.c(torch.relu(h - torch.stack(list(self.means)).mean(0)))


SEEN: dict[str, Any] = {"steps": 0}


def warmed() -> float:
    """How much of the skip counts: more with every call, by a counter in a global of the file."""
    SEEN["steps"] += 1
    return min(SEEN["steps"] / 10, 1.0)


def gated_skip(h: Tensor, skip: Tensor) -> Tensor:
    """Add the skip by a helper of a helper."""
    return h + warmed() * skip


class WarmUp(Layers):
    """Only a helper's helper knows the global."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        return self.c(gated_skip(torch.relu(self.b(h)), h))


class SmallBatches(Layers):
    """A last batch of few rows is not normalised, as it would be in `nn.BatchNorm1d`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(torch.relu(self.a(x)))
        if h.shape[0] > 4 or not self.training:
            h = self.norm(h)
        return self.c(torch.relu(h))


class HiddenUnits(Layers):
    """A part of what crosses is overwritten behind the cut by an index, another part by a mask."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h[:, :2] = 0.5
        h[h < -1] = -1
        return self.c(torch.relu(self.b(h)))


class Centroids(Layers):
    """A buffer that one side moves through `.data` and the other subtracts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        if self.training:
            self.center.data = 0.9 * self.center.data + 0.1 * h.detach().mean(0)
        return self.c(torch.relu(self.b(h)) - self.center)


class LateCentroids(Centroids):
    """The same, moved behind the second layer and subtracted in front of it: in the next pass, at another party."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.b(torch.relu(self.a(x)) - self.center))
        if self.training:
            self.center.data = 0.9 * self.center.data + 0.1 * h.detach().mean(0)
        return self.c(h)


class KeptCentroids(Centroids):
    """The same, read by the side that moves it alone."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.b(torch.relu(self.a(x))))
        if self.training:
            self.center.data = 0.9 * self.center.data + 0.1 * h.detach().mean(0)
        return self.c(h - self.center)


class MultiQuery(nn.Module):
    """One key and value for all heads, expanded before the queries are made."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v, self.q, self.o = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        k, v = (f(x).unsqueeze(1).expand(-1, 3, -1, -1) for f in (self.k, self.v))
        q = self.q(x).unflatten(-1, (3, 4)).transpose(1, 2)
        a = functional.scaled_dot_product_attention(q, k, v)
        return self.o(a.transpose(1, 2).flatten(2)).mean(1)


class OwnGenerator(Layers):
    """Noise from a `torch.Generator` of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        return self.c(torch.relu(self.b(h)) + 0.1 * torch.randn(h.shape, generator=self.noise))


class PaddingByHand(nn.Module):
    """Which steps are padding is seen from the rows themselves, and every layer behind is told."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.attention = nn.Linear(4, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.ff, self.out = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        padding = x.abs().sum(-1) == 0
        h = self.inp(x)
        h = h + self.attention(h, h, h, key_padding_mask=padding, need_weights=False)[0]
        h = torch.relu(self.ff(h)).masked_fill(padding.unsqueeze(-1), 0.0)
        return self.out(h.sum(1) / (~padding).sum(1, keepdim=True))


class Differences(Layers):
    """The first differences of the series go past the first layer: raw rows in disguise."""

    def __init__(self) -> None:
        super().__init__(4)
        self.d = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        change = x[:, 1:] - x[:, :-1]
        h = torch.relu(self.b(torch.relu(self.a(x))))
        return self.c(h.mean(1) + self.d(change).mean(1))


class Neighbours(Layers):
    """Answers are mixed with those of the nearest of some rows that the model keeps as a plain tensor."""

    def __init__(self, bank: Tensor) -> None:
        super().__init__()
        self.bank, self.answers = bank, torch.eye(4)[torch.arange(len(bank)) % 4]

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        near = torch.softmax(-torch.cdist(h, torch.relu(self.a(self.bank))), 1)
        return self.c(torch.relu(self.b(h))) + near @ self.answers


class TiedByList(nn.Module):
    """A decoder that holds its encoder in a list, so that torch does not see it, and multiplies by its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mid = nn.Linear(8, 6), nn.Linear(6, 6)
        self.friend, self.head = [self.encoder], nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.mid(torch.relu(self.encoder(x))))
        return self.head(torch.relu(h @ self.friend[0].weight))


class SortedByLength(nn.Module):
    """Rows are sorted by their lengths behind the first layer, and put back at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.gru, self.out = nn.Linear(4, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x.abs().sum(-1) > 0).sum(1)
        order = lengths.argsort(descending=True, stable=True)
        h = self.gru(torch.relu(self.inp(x[order])))[0]
        return self.out(h[order.argsort()].mean(1))


class Observed(Layers):
    """A hook in front of the last layer follows the range of what comes, and rounds to it with a straight way back."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(()))
        self.act = functools.partial(functional.leaky_relu, negative_slope=0.1)
        self.c.register_forward_pre_hook(self.observe)

    def observe(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (h,) = inputs
        if self.training:
            self.low.copy_(torch.minimum(self.low, h.detach().min()))
            self.high.copy_(torch.maximum(self.high, h.detach().max()))
        step = (self.high - self.low).clamp(min=1e-6) / 15
        return (h + (torch.round(h / step) * step - h).detach(),)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.c(self.act(self.b(self.act(self.a(x)))) * scale)
