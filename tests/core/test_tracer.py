"""What a graph does not hold is refused by a trace, though no number of the example shows it; a replay follows it."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.topologies import vanilla
from tests.thinning import thin


class Model(nn.Module):
    """Two layers; between them `between`, if there is one."""

    between: Callable[..., Tensor] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(12, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        return self.c(h if self.between is None else self.between(h))  # type: ignore[no-any-return]


class Through(torch.autograd.Function):
    """Values up to 3, with a gradient as if there were no bound."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-3, 3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def bounded_without_gradient(h: Tensor) -> Tensor:
    return Through.apply(h)


def scale_without_gradient(h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = h.norm(dim=1, keepdim=True).clamp(min=6.0)
    return h / scale


def scale_in_inference_mode(h: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = h.detach().norm(dim=1, keepdim=True).clamp(min=6.0)
    return h / scale.clone()


@torch.no_grad()
def _scale(h: Tensor) -> Tensor:
    return h.norm(dim=1, keepdim=True).clamp(min=6.0)


def scale_of_a_function(h: Tensor) -> Tensor:
    return h / _scale(h)


def scale_between_switches(h: Tensor) -> Tensor:
    was = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    scale = h.norm(dim=1, keepdim=True).clamp(min=6.0)
    torch.set_grad_enabled(was)
    return h / scale


def under_autocast(h: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (h @ torch.eye(16)).float() if h.dtype == torch.float32 else h


def half_of_large_by_class(h: Tensor) -> Tensor:
    if isinstance(h, Tensor) and h.max() > 5:
        return h * 0.5
    return h


def half_of_large_by_function(h: Tensor) -> Tensor:
    return h * 0.5 if torch.is_tensor(h) and h.max() > 5 else h


def half_of_large_by_type(h: Tensor) -> Tensor:
    return h * 0.5 if type(h) is Tensor and h.max() > 5 else h


def half_of_large_caught(h: Tensor) -> Tensor:
    try:
        large = bool(h.max() > 5)
    except Exception:  # noqa: BLE001
        large = False
    return h * 0.5 if large else h


def half_of_large_by_number(h: Tensor) -> Tensor:
    try:
        large = float(h.max()) > 5
    except TypeError:
        large = False
    return h * 0.5 if large else h


class OfWeights(Model):
    """Halves where a weight behind the cut has grown, which `parameters()` or the like tells."""

    def __init__(self) -> None:
        super().__init__()
        self.read = next(iter(READS))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        large = READS[self.read](self.c) > 1.0
        return self.c(h * 0.5 if large else h)


READS: dict[str, Callable[[Any], Any]] = {
    "parameters": lambda module: max(float(one.abs().max()) for one in module.parameters()),
    "named": lambda module: dict(module.named_parameters())["weight"].max().item(),
    "table": lambda module: float(module._parameters["weight"].max()),
    "state": lambda module: module.state_dict()["weight"].abs().max(),
    "data": lambda module: float(next(module.parameters()).data.max()),
}


@pytest.mark.parametrize("read", READS)
def test_a_number_of_a_weight_steers_a_replay_and_no_trace(read: str) -> None:
    model = made(None, OfWeights)
    model.read = read  # type: ignore[assignment]
    with pytest.raises(InvalidInput, match=r"is made of a weight or buffer that is read by parameters\(\)"):
        sf.cut(model, ["a"])
    pieces = sf.cut(model, ["a"], example=small())
    for factor in (1.0, 30.0):
        with torch.no_grad():
            weights = [dict(module.named_parameters())["c.weight"] for module in (model, pieces[1].module)]
            for weight in weights:
                weight.mul_(factor)
        want, got = outcome(model, [model], small()), outcome(through(pieces), [p.module for p in pieces], small())
        assert all(torch.equal(one, other) for one, other in zip(want, got, strict=True))


class OfAType(Model):
    """Asks weights for what everybody knows."""

    def forward(self, x: Tensor) -> Tensor:
        first = next(self.parameters())
        return self.c(torch.relu(self.a(x.to(first.dtype, copy=first.dim() > 2))))  # type: ignore[no-any-return]


def test_types_and_shapes_of_weights_are_traced() -> None:
    check(made(None, OfAType), None)


def twice_where_long(h: Tensor) -> Tensor:
    try:
        rows = len(h)
    except (RuntimeError, TypeError):
        rows = 1000
    return h * 2 if rows < 1000 else h


def half_of_16(h: Tensor) -> Tensor:
    return h * {16: 0.5}.get(h.shape[0], 1.0)


def half_of_numbers_in_a_set(h: Tensor) -> Tensor:
    return h * (0.5 if h.size(0) in {15, 16} else 1.0)


def half_of_a_default_table(h: Tensor) -> Tensor:
    return h * collections.defaultdict(lambda: 1.0, {256: 0.5})[h.numel()]


def half_of_a_shape(h: Tensor) -> Tensor:
    return h * {torch.Size((16, 16)): 0.5}.get(h.shape, 1.0)


def half_of_a_name(h: Tensor) -> Tensor:
    return h * getattr(SCALES, f"of_{h.shape[0]}", 1.0)


def half_of_a_text(h: Tensor) -> Tensor:
    return h * (0.5 if str(h.shape[0]).endswith("6") else 1.0)


def half_of_parameters(h: Tensor) -> Tensor:
    name = repr(h.shape[0])
    return h * PARAMETERS[name if name in PARAMETERS else "1"]


def half_of_a_cache(h: Tensor) -> Tensor:
    return h * _scale_of(h.shape[0])


@functools.cache
def _scale_of(rows: int) -> float:
    return {16: 0.5}.get(rows, 1.0)


def half_of_a_case(h: Tensor) -> Tensor:
    match h.shape:
        case (16, _):
            scale = 0.5
        case _:
            scale = 1.0
    return h * scale


SCALES = SimpleNamespace(of_16=0.5)
PARAMETERS = {"16": torch.tensor(0.5), "1": torch.tensor(1.0)}
BY_ROWS = (
    half_of_16,
    half_of_numbers_in_a_set,
    half_of_a_default_table,
    half_of_a_shape,
    half_of_a_name,
    half_of_a_text,
    half_of_parameters,
    half_of_a_cache,
    half_of_a_case,
)
LOST = (
    *BY_ROWS,
    bounded_without_gradient,
    scale_without_gradient,
    scale_in_inference_mode,
    scale_of_a_function,
    scale_between_switches,
    under_autocast,
    half_of_large_by_class,
    half_of_large_by_function,
    half_of_large_by_type,
    half_of_large_caught,
    half_of_large_by_number,
    twice_where_long,
)


def made(between: Callable[..., Tensor] | None, kind: type[Model] = Model) -> Model:
    """Return a model that runs `between`, as code of a class of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if between is None:
            return kind()
        return type(f"{kind.__name__}Of", (kind,), {"between": staticmethod(between)})()  # type: ignore[no-any-return]


def outcome(call: Callable[[Tensor], Tensor], modules: list[nn.Module], x: Tensor) -> list[Tensor]:
    """Return the result for `x` and the gradients of all weights."""
    for module in modules:
        module.zero_grad()
    result = call(x)
    functional.cross_entropy(result, torch.arange(len(x)) % 3).backward()
    found = {n: p.grad for module in modules for n, p in module.named_parameters() if p.grad is not None}
    return [result.detach(), *(found[name].clone() for name in sorted(found))]


def through(pieces: Any) -> Callable[[Tensor], Tensor]:
    """Return the composition of two pieces."""

    def call(x: Tensor) -> Tensor:
        sent = pieces[0].module(x)
        received = pieces[1].module(*(sent if isinstance(sent, tuple) else (sent,)))
        return received[0] if isinstance(received, tuple) else received  # type: ignore[no-any-return]

    return call


def small(rows: int = 16) -> Tensor:
    return torch.randn(rows, 12, generator=torch.Generator().manual_seed(0))


def check(model: nn.Module, example: Tensor | None, count: int = 16) -> None:
    """Check that the cut is exact on `count` rows that are larger than those of the example."""
    rows = small(count) * 20
    pieces = sf.cut(model, ["a"], example=example)
    want, got = outcome(model, [model], rows), outcome(through(pieces), [p.module for p in pieces], rows)
    assert len(want) == len(got) == 5
    for one, other in zip(want, got, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("between", LOST, ids=lambda one: one.__name__)
def test_a_trace_refuses_what_it_would_lose(between: Callable[..., Tensor]) -> None:
    with pytest.raises(InvalidInput, match="cannot be traced") as caught:
        sf.cut(made(between), ["a"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("between", thin(LOST, 2), ids=lambda one: one.__name__)
def test_a_replay_of_it_is_exact_for_rows_that_the_example_does_not_foretell(between: Callable[..., Tensor]) -> None:
    check(made(between), small())


@pytest.mark.parametrize("between", BY_ROWS, ids=lambda one: one.__name__)
def test_a_replay_goes_by_the_number_of_rows(between: Callable[..., Tensor]) -> None:
    for count in (20, 16, 3):
        check(made(between), small(20), count)


@pytest.mark.parametrize("between", [None, torch.relu, lambda h: h * h.shape[0]], ids=["none", "relu", "shape"])
def test_what_a_graph_holds_is_traced(between: Callable[..., Tensor] | None) -> None:
    check(made(between), None)


class Hooked(Model):
    """A hook of the whole model bounds its result."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, given, returned: returned.clamp(-3, 3))


class Called(Model):
    """A call of its own bounds its result."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x).clamp(-3, 3)  # type: ignore[no-any-return]


class Replaced(Model):
    """Another function stands as its `forward`."""

    def __init__(self) -> None:
        super().__init__()
        before = self.forward
        self.forward = functools.wraps(before)(lambda x: before(x).clamp(-3, 3))  # type: ignore[method-assign]


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("kind", [Hooked, Called, Replaced])
def test_what_stands_around_the_forward_of_a_model_is_refused(kind: type[Model], example: bool) -> None:
    with pytest.raises(InvalidInput, match=f"{kind.__name__} itself has (hooks|a __call__|another function)") as caught:
        sf.cut(made(None, kind), ["a"], example=small() if example else None)
    assert "\n" not in str(caught.value)


class Autocast(Model):
    """Its whole `forward` runs under one object of autocast, which can be entered once at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(16, 16)

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x))))).float()  # type: ignore[no-any-return]


def test_a_cut_leaves_the_modes_of_the_process_as_they_were() -> None:
    assert not torch.is_autocast_enabled("cpu")
    model = made(None, Autocast)
    topology = vanilla(model, "a", task=sf.classification(3), example=small())
    assert not torch.is_autocast_enabled("cpu")
    rows = small() * 20
    sent = topology.segments[0].module(rows)
    assert sent.dtype == torch.bfloat16
    result = topology.segments[1].module(sent)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(result, model(rows))
