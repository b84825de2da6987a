"""How the `forward` of a user's model takes its rows: by names, by places, or as one table or tuple of them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_PLACED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class ModelCall:
    """A call of a model with rows by name.

    `placed`: arguments that go by their places, in order; `batch`: the argument that takes all rows at once, as a
    table, or as a tuple where their names are "0", "1" and so on; `unread`: arguments without a default and without
    rows, which are None. All others go by their names.
    """

    placed: tuple[str, ...] = ()
    batch: str | None = None
    unread: tuple[str, ...] = ()

    def __call__(self, model: Any, values: Mapping[str, Any]) -> Any:
        """Return what `model`, or a method of it, returns for `values`."""
        if self.batch is not None:
            whole = dict(values) if not all(map(str.isdecimal, values)) else _in_order(values)
            return model(**{self.batch: whole}, **dict.fromkeys(self.unread))
        named = {name: value for name, value in values.items() if name not in self.placed}
        return model(*(values[name] for name in self.placed), **named, **dict.fromkeys(self.unread))


def _in_order(values: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(values[name] for name in sorted(values, key=int))


def call_of(model: nn.Module, names: Sequence[str]) -> ModelCall:
    """Return how `model` takes rows of `names`."""
    parameters = inspect.signature(model.forward).parameters.values()
    required = [p.name for p in parameters if p.kind in (*_PLACED, *_NAMED) and p.default is inspect.Parameter.empty]
    unread = tuple(name for name in required if name not in names)
    others = [name for name in names if not any(p.name == name and p.kind in _NAMED for p in parameters)]
    if not others:
        return ModelCall(unread=unread)
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        first = [p.name for p in parameters if p.kind in _PLACED and p.name in names]
        return ModelCall((*first, *(name for name in others if name not in first)), None, unread)
    if any(p.kind is inspect.Parameter.POSITIONAL_ONLY for p in parameters):
        return ModelCall(tuple(p.name for p in parameters if p.kind in _PLACED and p.name in names), None, unread)
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters) or unread:
        batches = unread or [p.name for p in parameters if p.kind in _NAMED][:1]
        if len(others) == len(names) and len(batches) == 1:
            return ModelCall(batch=batches[0])
    return ModelCall(unread=unread)


def takes_by_name(model: nn.Module, names: Collection[str]) -> bool:
    """Return whether each of `names` is an argument of its own of `model`, which a trace can follow."""
    parameters = inspect.signature(model.forward).parameters
    return all(name in parameters and parameters[name].kind in _NAMED for name in names)


@contextmanager
def trying(gradients: bool) -> Iterator[None]:
    """Let a pass within be one that is only tried: no warnings are shown, and no random number of torch is used up.

    `gradients`: whether it runs with gradients.
    """
    with warnings.catch_warnings(action="ignore"), torch.set_grad_enabled(gradients), torch.random.fork_rng(devices=[]):
        yield


def set_mode(module: nn.Module, training: bool) -> None:
    """Put `module` into training or evaluation as its user does: a class may have an `eval` of its own."""
    if training:
        module.train()
    else:
        module.eval()
