"""Shapes told by rule are those that torch finds, with the same layout and the same errors left to torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from splitfed.core.nested_tensors import tensors_of
from splitfed.core.shape_rules import result_by_rule

X, IMAGE, NARROW = (4, 6, 8), (4, 6, 10, 10), (4, 8)


class _ByRule(TorchFunctionMode):
    """Answers what it can by rule, and counts that."""

    def __init__(self) -> None:
        super().__init__()
        self.told = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tensors_of((args, kwargs or {}))
        if any(one.is_meta for one in given):
            found = result_by_rule(func, args, kwargs or {}, given)
            if found is not NotImplemented:
                self.told += 1
                return found
        return func(*args, **(kwargs or {}))


def module(made: nn.Module) -> Callable[..., Any]:
    return made.to("meta")


CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "linear": (module(nn.Linear(8, 5)), (X,)),
    "linear without bias": (module(nn.Linear(8, 5, bias=False)), (NARROW,)),
    "relu": (functional.relu, (X,)),
    "relu of a transposed": (lambda x: torch.relu(x.transpose(0, 1)), (X,)),
    "relu in place": (lambda x: functional.relu(x * 1.0, inplace=True), (X,)),
    "gelu": (functional.gelu, (X,)),
    "leaky_relu in place": (lambda x: functional.leaky_relu(x * 1.0, 0.1, True), (X,)),
    "elu": (functional.elu, (X,)),
    "hardtanh": (functional.hardtanh, (X,)),
    "clamp": (lambda x: x.clamp(min=0), (X,)),
    "dropout": (functional.dropout, (X,)),
    "softmax": (lambda x: x.softmax(-1), (X,)),
    "log_softmax": (lambda x: functional.log_softmax(x, 1), (X,)),
    "normalize": (functional.normalize, (X,)),
    "add": (lambda x, y: x + y, (X, X)),
    "add a row": (lambda x, y: x + y, (X, (8,))),
    "add to a row": (lambda x, y: x - y, ((1, 6, 8), X)),
    "add a transposed": (lambda x, y: x + y.transpose(0, 1), (X, (6, 4, 8))),
    "multiply": (lambda x: 2.0 * x, (X,)),
    "subtract from": (lambda x: 1 - x, (X,)),
    "divide": (lambda x: x / 3, (X,)),
    "layer_norm": (module(nn.LayerNorm(8)), (X,)),
    "layer_norm of two": (module(nn.LayerNorm((6, 8))), (X,)),
    "batch_norm": (module(nn.BatchNorm2d(6)), (IMAGE,)),
    "batch_norm in evaluation": (module(nn.BatchNorm1d(8).eval()), (NARROW,)),
    "group_norm": (module(nn.GroupNorm(2, 6)), (IMAGE,)),
    "mean": (lambda x: x.mean(1), (X,)),
    "mean of several": (lambda x: x.mean((-1, -2), keepdim=True), (IMAGE,)),
    "mean of all": (lambda x: x.mean(), (X,)),
    "adaptive_avg_pool2d": (lambda x: functional.adaptive_avg_pool2d(x, (1, 1)), (IMAGE,)),
    "adaptive_avg_pool1d": (lambda x: functional.adaptive_avg_pool1d(x, 3), (X,)),
    "interpolate by a factor": (lambda x: functional.interpolate(x, scale_factor=1.5, mode="bilinear"), (IMAGE,)),
    "interpolate to a size": (lambda x: functional.interpolate(x, size=(7, 9)), (IMAGE,)),
    "cat": (lambda x, y: torch.cat([x, y], -2), (X, (4, 2, 8))),
    "attention": (functional.scaled_dot_product_attention, (X, (4, 5, 8), (4, 5, 3))),
    "attention of transposed heads": (
        lambda x: functional.scaled_dot_product_attention(*[x.view(4, 6, 2, 4).transpose(1, 2)] * 3, is_causal=True),
        (X,),
    ),
    "attention with a mask": (functional.scaled_dot_product_attention, (X, X, X, (6, 6))),
    "heads": (lambda x: module(nn.MultiheadAttention(8, 2, batch_first=True))(x, x, x), (X,)),
    "heads without weights": (lambda x: module(nn.MultiheadAttention(8, 2))(x, x, x, need_weights=False), (X,)),
    "weights of heads": (
        lambda x: module(nn.MultiheadAttention(8, 2))(x, x, x, average_attn_weights=False),
        (X,),
    ),
    "lstm": (module(nn.LSTM(8, 5, 2, batch_first=True, bidirectional=True)), (X,)),
    "lstm of steps first": (module(nn.LSTM(8, 5, proj_size=3)), (X,)),
    "gru": (module(nn.GRU(8, 5, batch_first=True)), (X,)),
    "encoder layer": (module(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)), (X,)),
    "encoder layer of steps first": (module(nn.TransformerEncoderLayer(8, 2, 16, norm_first=True)), (X,)),
}


def meta(shape: tuple[int, ...], gradient: bool = True) -> Tensor:
    return torch.empty(shape, device="meta", requires_grad=gradient)


def looks(value: Any, given: Sequence[Tensor] = ()) -> list[tuple[Any, ...]]:
    """What tells a result from another: its layout, and which of `given` it is, if any."""
    return [
        (one.shape, one.stride(), one.dtype, one.device.type, one.requires_grad, [one is x for x in given])
        for one in tensors_of(value)
    ]


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_result_by_rule_looks_as_torch_finds_it(name: str, gradient: bool) -> None:
    run, shapes = CASES[name]
    given = [meta(shape, gradient) for shape in shapes]
    with _ByRule() as mode:
        found = run(*given)
    assert mode.told
    assert looks(found, given) == looks(run(*given), given)


def test_gradients_of_gradients_find_their_way_through_results_by_rule() -> None:
    x, weight = meta(NARROW), meta((5, 8))
    with _ByRule() as mode:
        result = functional.linear(x, weight)
    assert mode.told == 1
    (slope,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), weight)
    assert slope.shape == x.shape
    assert second.shape == weight.shape


@pytest.mark.parametrize(
    "run",
    [
        lambda: functional.linear(meta(X), meta((5, 7))),
        lambda: functional.layer_norm(meta(X), (7,)),
        lambda: functional.batch_norm(meta((1, 8)), None, None, training=True),
        lambda: functional.batch_norm(meta(X), meta((7,)), meta((7,))),
        lambda: functional.group_norm(meta((1, 4, 1)), 4),
        lambda: meta(X) + meta((7,)),
        lambda: torch.cat([meta(X), meta(NARROW)]),
        lambda: meta(X).mean(3),
        lambda: functional.scaled_dot_product_attention(meta(X), meta(X), meta(X), meta((5, 5))),
        lambda: nn.LSTM(7, 5, device="meta")(meta(X)),
        lambda: nn.MultiheadAttention(8, 2, device="meta")(*[meta(X)] * 3, attn_mask=meta((5, 5))),
        lambda: functional.interpolate(meta(IMAGE), size=(3, 3), scale_factor=2),
    ],
)
def test_what_does_not_fit_is_left_to_torch(run: Callable[[], object]) -> None:
    with _ByRule(), pytest.raises((RuntimeError, ValueError, IndexError, AssertionError)):
        run()


@pytest.mark.parametrize(
    "run",
    [
        lambda: meta(X) * torch.empty(X, dtype=torch.float64, device="meta"),
        lambda: meta(X).softmax(-1, dtype=torch.float64),
        lambda: torch.vmap(functional.relu)(meta(X)),
        lambda: meta(X).transpose(0, 1) + meta((6, 4, 8)),
        lambda: functional.scaled_dot_product_attention(meta((1, *X)), meta((3, *X)), meta((3, *X))),
        lambda: functional.layer_norm(meta((6, 4, 8)).transpose(0, 1), (8,)),
        lambda: torch.empty(X, dtype=torch.long, device="meta") / 2,
    ],
)
def test_what_has_another_type_or_layout_is_as_torch_finds_it(run: Callable[[], object]) -> None:
    with _ByRule() as mode:
        found = run()
    assert not mode.told
    assert looks(found) == looks(run())


@pytest.mark.parametrize("layer", [nn.Dropout(0.3).eval(), nn.Dropout(0.0)])
def test_dropout_that_draws_nothing_hands_through_what_it_is_given(layer: nn.Module) -> None:
    x = meta(X)
    with _ByRule():
        assert layer(x) is x
