"""Ways in which people write `forward`, each as a small model; for `tests/core/test_cut_idioms.py`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx._symbolic_trace import is_fx_tracing

Forward = Callable[[Any, Tensor], Any]
COUNTS = {"calls": 0}
SYSTEM = random.SystemRandom()


class Net(nn.Module):
    """Layers of 8 numbers with a `forward` that is given; `extra` is added to it under its names."""

    flag = 0

    def __init__(self, forward: Forward, **extra: Any) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        for name, value in extra.items():
            setattr(self, name, value)
        self._run = forward

    def forward(self, x: Tensor) -> Any:
        return self._run(self, x)


class Counting(Net):
    """Branches on how often it was called."""

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        h = torch.relu(self.a(x))
        return self.c(self.b(h) if self.steps < 1000 else h)


class CountingInClass(Net):
    def forward(self, x: Tensor) -> Tensor:
        type(self).flag += 1
        return self.c(self.b(torch.relu(self.a(x))))


class CountingInGlobal(Net):
    def forward(self, x: Tensor) -> Tensor:
        COUNTS["calls"] += 1
        return self.c(self.b(torch.relu(self.a(x))))


class OwnTrain(Net):
    """Keeps a norm frozen by an overridden `train`."""

    def train(self, mode: bool = True) -> OwnTrain:
        super().train(mode)
        self.norm.eval()
        return self


class OwnState(Net):
    """Saves something that is neither weight nor buffer."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 1}


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class DoubleLayer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Double.apply(x)


class Largest(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.c = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(x.unsqueeze(1).expand(-1, 3, -1))
        return self.c(h[:, -1])


class Tokens(nn.Module):
    """A small transformer with a class token and learnt positions."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.place = nn.Parameter(0.1 * torch.randn(1, 5, 8))
        self.attention = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.reshape(-1, 4, 2))
        h = torch.cat([self.token.expand(h.shape[0], -1, -1), h], 1) + self.place
        g, _ = self.attention(h, h, h)
        return self.head(self.norm(h + g)[:, 0])


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.b, self.c = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(self.embed(x).mean(1))))


class Dense(nn.Module):
    """Every block reads all that came before, as in DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([nn.Linear(8 * (i + 1), 8) for i in range(4)])
        self.c = nn.Linear(40, 4)

    def forward(self, x: Tensor) -> Tensor:
        found = [torch.tanh(self.first(x))]
        for block in self.blocks:
            found.append(torch.tanh(block(torch.cat(found, 1))))
        return self.c(torch.cat(found, 1))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm, self.act, self.pool = nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)
        self.c = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.flatten(self.pool(self.act(self.norm(self.conv(x.reshape(-1, 1, 2, 4))))), 1))


def ends(m: Any, x: Tensor, change: Callable[[Any, Tensor], Tensor] = lambda m, h: h) -> Tensor:
    """Layer a, `change`, layers b and c."""
    return m.c(torch.relu(m.b(change(m, torch.relu(m.a(x))))))


def between(change: Callable[[Any, Tensor], Tensor]) -> Forward:
    """Return a forward with `change` between the layers a and b."""
    return lambda m, x: ends(m, x, change)


def without_gradients(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = torch.relu(m.a(x))
    return m.c(torch.relu(m.b(h)))


def frozen_unless_traced(m: Any, x: Tensor) -> Tensor:
    """Another model where torch.fx traces it, which nobody can see but who compares."""
    h = torch.relu(m.a(x))
    return m.c(torch.relu(m.b(h if is_fx_tracing() else h.detach())))


def masked_classes(m: Any, x: Tensor, run: Forward = ends) -> Tensor:
    """Four classes, and a fifth that is out of the question."""
    return nn.functional.pad(run(m, x), (0, 1)).masked_fill(m.out, float("-inf"))


def gradients_by_the_mode(m: Any, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(m.training):
        return ends(m, x)


def inference(m: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        h = torch.relu(m.a(x))
    return m.c(m.b(h.clone()))


def autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = m.b(torch.relu(m.a(x)))
    return m.c(h.float())


def running_mean(m: Any, x: Tensor) -> Tensor:
    h = torch.relu(m.a(x))
    m.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
    return m.c(m.b(h - m.mean))


def running_mean_in_training(m: Any, x: Tensor) -> Tensor:
    h = torch.relu(m.a(x))
    if m.training:
        m.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
    return m.c(m.b(h - m.mean))


def counting_buffer(m: Any, x: Tensor) -> Tensor:
    m.n.add_(1)
    return ends(m, x)


def replaced_buffer(m: Any, x: Tensor) -> Tensor:
    m.n = m.n + 1
    return ends(m, x)


def written_under_another_name(view: Callable[[Tensor], Tensor]) -> Forward:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.relu(m.a(x))
        g = m.b(view(h).mul_(2.0).reshape(-1, 8))
        return m.c(g + h)

    return forward


def python_random(m: Any, x: Tensor) -> Tensor:
    h = torch.relu(m.a(x))
    return m.c(m.b(h) if random.random() < 2 else h)


def numpy_random(m: Any, x: Tensor) -> Tensor:
    return ends(m, x, lambda m, h: h * float(np.random.rand()))  # noqa: NPY002


def stochastic_depth(m: Any, x: Tensor) -> Tensor:
    h = torch.relu(m.a(x))
    keep = torch.bernoulli(torch.full((h.shape[0], 1), 0.8)) if m.training else 1.0
    return m.c(h + keep * m.b(h))


def remembering(m: Any, x: Tensor) -> Tensor:
    m.last = torch.relu(m.a(x))
    return m.c(m.b(m.last))


def recurrent_state(m: Any, x: Tensor) -> Tensor:
    h = torch.relu(m.a(x)) + m.last
    m.last = h.detach().mean(0)
    return m.c(m.b(h))


def logging_shapes(m: Any, x: Tensor) -> Tensor:
    h = torch.relu(m.a(x))
    m.shapes.append(len(m.shapes))
    return m.c(m.b(h))


def skip_with_stop(m: Any, x: Tensor) -> Tensor:
    h = torch.relu(m.a(x))
    return m.c(m.b(h.detach()))


def swapped(m: Any, x: Tensor) -> Tensor:
    return ends(m, x, lambda m, h: torch.where(torch.rand_like(h) < 0.5, h, h.flip(0)))


_LEAKS: list[Any] = []


def leak(weight: Tensor, factor: float) -> None:
    """Scale the gradient of `weight` where it is added up, which no attribute shows and no copy has."""
    node = weight.view_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_prehook(lambda gradients: (gradients[0] * factor,))
    _LEAKS.append((node, weight))


def leaking(parameter: str, factor: float) -> Callable[[Net], Net]:
    def put(model: Net) -> Net:
        leak(model.get_parameter(parameter), factor)
        return model

    return put
