"""A loss and a metric of one's own, tried on a few rows before anything is trained.

The tasks that come with splitfed are known to hold what is asked here, and are not tried.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, describe_error
from splitfed.core.random import generator
from splitfed.core.tasks import Task

TRIED = 64
"""Rows on which a loss and a metric are tried."""

_KNOWN = ("splitfed.core.tasks", "torch.nn.functional")


def has_own_loss(task: Task) -> bool:
    """Return whether the loss of `task` is not one of those that come with splitfed."""
    return _is_own(task.loss)


def describe_function(given: Callable[..., Any]) -> str:
    """Return what a function is called, for a message."""
    inner = given.func if isinstance(given, partial) else given
    return str(getattr(inner, "__name__", type(inner).__name__))


def check_own_parts(task: Task, shape: tuple[int, ...], y: Tensor) -> None:
    """Refuse a loss or metric of one's own that cannot be taken of outputs (rows, *shape) and the labels `y`.

    The outputs are random numbers; no more than `TRIED` rows are taken. Raises `InvalidInput` for a loss that is no
    single number, that does not depend on the outputs, or that raises anything; and for a metric that is no number, or
    raises anything.
    """
    y = y[:TRIED]
    output = torch.randn(len(y), *shape, generator=generator(0, "task check"))
    if has_own_loss(task):
        what = f"loss {describe_function(task.loss)} of {task.name}"
        leaf = output.clone().requires_grad_()
        value = _call(what, task.loss, leaf, y)
        if not isinstance(value, Tensor) or value.numel() != 1:
            given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise InvalidInput(f"{what} returned {given}; expected a tensor with a single number, the mean of the rows")
        if not value.requires_grad:
            raise InvalidInput(
                f"{what} does not depend on the outputs: it has no gradient; leave out detach and argmax"
            )
    if _is_own(task.metric):
        what = f"metric {describe_function(task.metric)} of {task.name}"
        found = _call(what, task.metric, output, y)
        if not isinstance(found, Real) and not (isinstance(found, Tensor) and found.numel() == 1):
            raise InvalidInput(f"{what} returned a {type(found).__name__}; expected a number")


def check_class_probabilities(task: Task, who: str) -> None:
    """Refuse a loss of one's own that takes no probabilities of classes in place of labels, as `who` gives it."""
    if not has_own_loss(task):
        return
    single = task.name == "binary" or task.outputs is None
    shape = (2,) if single else (2, task.outputs or 1)
    probabilities = torch.full(shape, 0.5 if single else 1 / shape[-1])
    what = f"loss {describe_function(task.loss)} of {task.name}"
    try:
        value = task.loss(torch.zeros(2, task.outputs or 1), probabilities)
    except Exception as error:  # the user's own loss may raise anything
        raise InvalidInput(
            f"{who} has probabilities of classes in place of labels, which {what} cannot take: {describe_error(error)}"
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise InvalidInput(f"{who} has probabilities of classes in place of labels, which {what} cannot take")


def _is_own(function: Callable[..., Any]) -> bool:
    inner = function.func if isinstance(function, partial) else function
    return getattr(inner, "__module__", None) not in _KNOWN


def _call(what: str, function: Callable[[Tensor, Tensor], Any], output: Tensor, y: Tensor) -> Any:
    try:
        return function(output, y)
    except InvalidInput:
        raise
    except Exception as error:  # the user's own loss or metric may raise anything
        shapes = f"outputs {tuple(output.shape)} and labels {tuple(y.shape)}"
        raise InvalidInput(f"{what} cannot be taken of {shapes}: {describe_error(error)}") from error
