"""Construction of a model by name or by import path, with weights that depend on the seed only."""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from splitfed.core.errors import InvalidInput, describe_error, unknown
from splitfed.core.random import initialization
from splitfed.models.import_paths import NameResolver

LARGE = 256
"""A model whose arguments are all smaller than this is assumed to fit into memory."""
MOST_MODULES = 100_000
"""Largest number of modules; each takes some kilobytes beside its weights, and time to construct."""


class _TooManyModules(InvalidInput):
    """Raised if a model has more than `MOST_MODULES` modules."""


def build(name: str, shape: tuple[int, ...], outputs: int, seed: int, **params: Any) -> nn.Module:
    """Return the model `name`, initialised from `seed`; torch's global generator is not changed.

    `name` is registered (`splitfed list models`) or is the import path of a subclass of `torch.nn.Module`,
    "package.module:Name", which is called with `params` and, if its signature has them, with `shape` (of one row),
    `outputs` and `seed`. Importing runs that module's code: it is as trusted as the program. Raises `InvalidInput` for
    an unknown name, for a path to anything else, and for parameters that do not match. A function of your own needs no
    name: call it.
    """
    return make(name, NameResolver().load("models", name), shape, outputs, seed, params)


def make(
    name: str, factory: Callable[..., Any], shape: tuple[Any, ...], outputs: int, seed: int, params: Mapping[str, Any]
) -> nn.Module:
    """Return the model that `factory`, called `name` in messages, makes of its arguments; as `build`."""
    arguments = _arguments(name, factory, {"shape": shape, "outputs": outputs, "seed": seed}, params)
    if ":" not in name and _largest(arguments) >= LARGE:
        _check_memory(name, factory, arguments)
    with initialization(seed):
        model = factory(**arguments)
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model {name!r} returned a {type(model).__name__}; expected an nn.Module")
    return model


def _largest(value: Any) -> int:
    """Return the largest whole number in `value`, at any depth; 0 if there is none."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return max(map(_largest, value), default=0)
    return value if isinstance(value, int) else 0


def _check_memory(name: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise `InvalidInput` for a model of too many modules, or with weights larger than the machine's memory.

    Either would end the process. Warns of a model that cannot be measured.
    """
    try:
        with torch.device("meta"), _counted_modules():
            model = factory(**arguments)
        needed = sum(weight.nbytes for weight in model.parameters())
    except _TooManyModules:
        raise InvalidInput(f"model {name!r} has more than {MOST_MODULES} modules (layers and their parts)") from None
    except InvalidInput:
        # Bad arguments raise the same error when the model is made.
        return
    except Exception as error:  # noqa: BLE001  of tensors without numbers a plug-in's factory may raise anything
        line = f"model {name!r} is not compared with this machine's memory: its size is not known beforehand"
        warnings.warn(f"{line} ({describe_error(error)})", UserWarning, stacklevel=3)
        return
    if needed > (there := _memory()):
        raise InvalidInput(
            f"model {name!r} has weights of {needed / 1e9:.3g} GB; this machine has {there / 1e9:.3g} GB of memory"
        )


@contextmanager
def _counted_modules() -> Iterator[None]:
    """Raise `_TooManyModules` within the block once more than `MOST_MODULES` modules were added to others."""
    count = itertools.count(1)

    def stop(*_: object) -> None:
        if next(count) > MOST_MODULES:
            raise _TooManyModules

    handle = register_module_module_registration_hook(stop)
    try:
        yield
    finally:
        handle.remove()


def _memory() -> int:
    """Return the bytes of this machine's memory; if unknown, a number above every model's size."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return sys.maxsize


def _arguments(
    name: str, factory: Callable[..., Any], offered: dict[str, Any], params: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `params` and those of `offered` that the factory takes; raise `InvalidInput` for unknown or missing."""
    try:
        accepted = inspect.signature(factory).parameters.values()
    except (ValueError, TypeError):
        raise InvalidInput(f"model {name!r} has no signature that its parameters can be checked against") from None
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted)
    names = [p.name for p in accepted if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for key in params:
        if key not in names and not takes_any:
            raise unknown(f"parameter of model {name!r}:", key, [n for n in names if n not in offered])
    arguments = {key: value for key, value in offered.items() if key in names} | dict(params)
    missing = [p.name for p in accepted if p.default is p.empty and p.name in names and p.name not in arguments]
    if missing:
        raise InvalidInput(f"model {name!r} needs {', '.join(missing)}; give it among the model's parameters")
    return arguments
