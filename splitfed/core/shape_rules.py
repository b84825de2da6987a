"""Shapes that common functions of torch return, by rules of a line each.

On the meta device torch finds most shapes by running a function as a chain of simpler ones, in Python: a layer norm
takes a millisecond there, an LSTM twenty, a hundred times what its numbers take. Where no rule fits (broadcasting,
layouts, autocast, what would be an error), torch is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_PLAIN = (Tensor, nn.Parameter)
_NUMBERS = (int, float)


def result_by_rule(func: Any, args: Any, kwargs: Mapping[str, Any], given: Sequence[Tensor]) -> Any:
    """Return what `func` makes of its arguments on the meta device; NotImplemented where no rule tells.

    `given`: the tensors among the arguments, (any shape), some without numbers.
    """
    rule = _RULES.get(func)
    if rule is None or not given[0].is_floating_point() or kwargs.get("out") is not None:
        return NotImplemented
    first = given[0].dtype
    for one in given:
        if type(one) not in _PLAIN or one.layout is not torch.strided or one.dtype not in (first, torch.bool):
            return NotImplemented
    if torch._C._are_functorch_transforms_active() or any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        return NotImplemented
    return rule(partial(_make, given), *args, **kwargs)


class _FromShapes(torch.autograd.Function):
    """A tensor of a shape that depends on others, so that autograd knows where it comes from."""

    @staticmethod
    def forward(ctx: Any, shape: Sequence[int], *given: Tensor) -> Tensor:
        """Return a tensor of `shape`, of the type of the first of `given`."""
        ctx.save_for_backward(*given)
        return torch.empty(shape, dtype=given[0].dtype, device="meta")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return gradients of the right shapes."""
        given = ctx.saved_tensors
        return None, *(_make((gradient, *given), *one.shape) if one.requires_grad else None for one in given)


def _make(given: Sequence[Tensor], *shape: int) -> Tensor:
    """Return a tensor of `shape` without numbers, made of `given`."""
    if torch.is_grad_enabled() and any(one.requires_grad for one in given):
        made: Tensor = _FromShapes.apply(shape, *given)  # type: ignore[no-untyped-call]
        return made
    return torch.empty(shape, dtype=given[0].dtype, device="meta")


Make = Callable[..., Tensor]


def _alike(place: int | None, _: Make, x: Tensor, *more: Any, **named: Any) -> Any:
    """Tell of a function of every number; `place`: that of the argument `inplace` behind the first."""
    if not x.is_meta or any(isinstance(one, (Tensor, torch.dtype)) for one in (*more, *named.values())):
        return NotImplemented
    inplace = named.get("inplace") or (place is not None and len(more) > place and more[place])
    return x if inplace else x.clone()


def _dropout(make: Make, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    # Where nothing is drawn, torch hands through what it was given.
    return _alike(None, make, x, inplace=inplace) if training and p > 0 and x.numel() else NotImplemented


def _contiguous(make: Make, x: Tensor, *more: Any, **named: Any) -> Any:
    """Tell of a function of whole rows, as a softmax."""
    return _alike(None, make, x, *more, **named) if x.is_contiguous() else NotImplemented


def _combined(make: Make, x: Any, y: Any, **named: Any) -> Any:
    """Tell of a sum, a product and the like."""
    tensors = [one for one in (x, y) if isinstance(one, Tensor)]
    whole = max(tensors, key=lambda one: (one.dim(), one.numel()))
    if any(isinstance(one, Tensor) for one in named.values()) or not whole.is_contiguous():
        return NotImplemented
    for one in (x, y):
        if isinstance(one, Tensor):
            fits = all(size in (1, full) for size, full in zip(one.shape[::-1], whole.shape[::-1], strict=False))
            in_order = one.is_contiguous() or (one.shape == whole.shape and whole is x and 1 not in whole.shape)
            if not fits or not in_order or one.dtype is torch.bool:
                return NotImplemented
        elif type(one) not in _NUMBERS:
            return NotImplemented
    return make(*whole.shape)


def _linear(make: Make, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    fits = x.dim() > 1 and weight.dim() == 2 and x.shape[-1] == weight.shape[1]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        return NotImplemented
    return make(*x.shape[:-1], weight.shape[0])


def _layer_norm(make: Make, x: Tensor, shape: Sequence[int], *more: Any, **named: Any) -> Any:
    given = [one for one in (*more, *named.values()) if isinstance(one, Tensor)]
    fits = all(tuple(one) == tuple(x.shape[-len(shape) :]) for one in (shape, *(one.shape for one in given)))
    return make(*x.shape) if fits and x.is_contiguous() else NotImplemented


def _batch_norm(
    make: Make,
    x: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    *more: Any,
    **named: Any,
) -> Any:
    given = [one for one in (mean, variance, weight, bias) if one is not None]
    fits = x.dim() > 1 and x.is_contiguous() and all(one.shape == x.shape[1:2] for one in given)
    # Of one number there is no spread, which torch says.
    return make(*x.shape) if fits and (not training or x.numel() > x.shape[1]) else NotImplemented


def _group_norm(make: Make, x: Tensor, groups: int, *more: Any, **named: Any) -> Any:
    given = [one for one in (*more, *named.values()) if isinstance(one, Tensor)]
    fits = x.dim() > 1 and x.is_contiguous() and all(one.shape == x.shape[1:2] for one in given)
    return make(*x.shape) if fits and x.shape[1] % groups == 0 and x.numel() > groups else NotImplemented


def _mean(make: Make, x: Tensor, dim: Any = None, keepdim: bool = False, **named: Any) -> Any:
    places = range(x.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    if named or not x.is_contiguous() or not all(-x.dim() <= place < x.dim() for place in places):
        return NotImplemented
    gone = {place % x.dim() for place in places}
    return make(*(1 if place in gone else size for place, size in enumerate(x.shape) if keepdim or place not in gone))


def _adaptive(count: int, make: Make, x: Tensor, output_size: Any) -> Any:
    sizes = (output_size,) * count if isinstance(output_size, int) else output_size
    if not x.is_contiguous() or x.dim() != count + 2 or None in sizes:
        return NotImplemented
    return make(*x.shape[:2], *sizes)


def _interpolate(make: Make, x: Tensor, size: Any = None, scale_factor: Any = None, *more: Any, **named: Any) -> Any:
    wanted, count = size if size is not None else scale_factor, x.dim() - 2
    wanted = tuple(wanted) if isinstance(wanted, (tuple, list)) else (wanted,) * count
    if not x.is_contiguous() or len(wanted) != count or (size is None) is (scale_factor is None):
        return NotImplemented
    if size is None:
        wanted = tuple(math.floor(float(one) * by) for one, by in zip(x.shape[2:], wanted, strict=True))
    return make(*x.shape[:2], *wanted)


def _cat(make: Make, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    first = tensors[0]
    dim = dim % first.dim() if first.dim() else 0
    rest = {(*one.shape[:dim], *one.shape[dim + 1 :], one.dim(), one.dtype) for one in tensors}
    if len(rest) > 1 or not all(one.is_contiguous() and one.dim() for one in tensors):
        return NotImplemented
    return make(*first.shape[:dim], sum(one.shape[dim] for one in tensors), *first.shape[dim + 1 :])


def _attention(
    make: Make, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *more: Any, **named: Any
) -> Any:
    mask = named.get("attn_mask", mask)
    full = (*query.shape[:-1], key.shape[-2])
    fits = query.shape[:-2] == key.shape[:-2] == value.shape[:-2] and key.shape[-2] == value.shape[-2]
    fits = fits and query.shape[-1] == key.shape[-1] and query.dim() > 2
    if mask is not None:
        causal = named.get("is_causal") or True in more
        sizes = zip(mask.shape[::-1], full[::-1], strict=False)
        fits = fits and not causal and 1 < mask.dim() <= len(full) and all(one in (1, size) for one, size in sizes)
    return make(*query.shape[:-1], value.shape[-1]) if fits else NotImplemented


def _heads(
    make: Make,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    width: int,
    heads: int,
    *more: Any,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    **named: Any,
) -> Any:
    """Tell of `multi_head_attention_forward` without further keys."""
    if query.dim() != 3 or key.dim() != 3 or key.shape[:2] != value.shape[:2] or query.shape[1] != key.shape[1]:
        return NotImplemented
    (targets, rows, _), sources = query.shape, len(key)
    extra = more[2:5] != (None, None, False) or named.get("static_k") is not None or named.get("static_v") is not None
    padded = key_padding_mask is not None and key_padding_mask.shape != (rows, sources)
    masked = attn_mask is not None and attn_mask.shape not in ((targets, sources), (rows * heads, targets, sources))
    if extra or padded or masked or named.get("is_causal") or query.shape[2] != width:
        return NotImplemented
    by_head = () if average_attn_weights else (heads,)
    return make(targets, rows, width), make(rows, *by_head, targets, sources) if need_weights else None


def _recurrent(
    make: Make,
    x: Tensor,
    states: Any,
    weights: Any,
    biases: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: Any = None,
) -> Any:
    """Tell of an LSTM or a GRU over rows of one length."""
    given = (states,) if isinstance(states, Tensor) else states
    # Packed sequences have other arguments in their places.
    if isinstance(weights, Tensor) or not isinstance(batch_first, bool) or x.dim() != 3:
        return NotImplemented
    rows, steps = x.shape[:2] if batch_first else x.shape[1::-1]
    if any(state.dim() != 3 or state.shape[1] != rows for state in given) or x.shape[2] != weights[0].shape[1]:
        return NotImplemented
    outputs = make(steps, rows, given[0].shape[2] * (1 + bidirectional))
    return outputs.transpose(0, 1) if batch_first else outputs, *(make(*state.shape) for state in given)


def _list_rules() -> Iterator[tuple[str, Callable[..., Any]]]:
    names = "gelu tanh sigmoid logsigmoid softplus tanhshrink softsign exp sqrt rsqrt abs neg cos sin erf clamp"
    yield from ((name, partial(_alike, None)) for name in names.split())
    yield from ((name, partial(_alike, 0)) for name in ("relu", "relu6", "silu", "mish", "selu", "hardswish"))
    yield from ((name, partial(_alike, 1)) for name in ("leaky_relu", "elu", "celu"))
    yield "hardtanh", partial(_alike, 2)
    yield from ((name, _contiguous) for name in ("softmax", "log_softmax", "normalize"))
    yield from ((name, _combined) for name in ("add", "sub", "mul", "div", "true_divide", "__rsub__"))
    yield from ((f"adaptive_avg_pool{count}d", partial(_adaptive, count)) for count in (1, 2, 3))
    others: dict[str, Callable[..., Any]] = {
        "linear": _linear,
        "dropout": _dropout,
        "layer_norm": _layer_norm,
        "batch_norm": _batch_norm,
        "group_norm": _group_norm,
        "mean": _mean,
        "interpolate": _interpolate,
        "cat": _cat,
        "scaled_dot_product_attention": _attention,
        "multi_head_attention_forward": _heads,
        "lstm": _recurrent,
        "gru": _recurrent,
    }
    yield from others.items()


# Of two functions of one name, that of `torch.nn.functional` has the arguments that are told here.
_ELSEWHERE = frozenset(("layer_norm", "batch_norm", "group_norm", "dropout"))
_RULES: dict[Any, Callable[..., Any]] = {
    getattr(owner, name): rule
    for name, rule in _list_rules()
    for owner in (torch, Tensor, functional)
    if hasattr(owner, name) and (owner is functional or name not in _ELSEWHERE)
}
