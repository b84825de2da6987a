"""Makes a model by name or by import path, with parameters that depend on the seed only."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import reduce
from typing import Any

from torch import nn

from splitfed import registry
from splitfed.errors import InvalidInput, unknown
from splitfed.seeding import initialization


def build(name: str, shape: tuple[int, ...], outputs: int, seed: int, **params: Any) -> nn.Module:
    """Return the model `name`, initialised from `seed`; torch's global generator is left as it was.

    `name` is registered (`splitfed list models`) or "package.module:factory", a function or class that is
    called with `params` and, where its signature has them, with `shape` (of one row), `outputs` and `seed`. Importing
    runs that module's code: it is as trusted as the program. Raises `InvalidInput` for a name that leads
    nowhere, for parameters that do not fit, and for a factory that returns no `nn.Module`.
    """
    factory = _import(name) if ":" in name else registry.load("models", name)
    given = _arguments(name, factory, {"shape": shape, "outputs": outputs, "seed": seed}, params)
    with initialization(seed):
        model = factory(**given)
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model {name!r} returned a {type(model).__name__}; expected an nn.Module")
    return model


def _import(path: str) -> Callable[..., Any]:
    module, _, attribute = path.partition(":")
    try:
        found = reduce(getattr, attribute.split("."), importlib.import_module(module))
    except (ImportError, ValueError) as error:
        raise InvalidInput(f"model {path!r}: cannot import {module!r} ({error})") from None
    except AttributeError:
        raise InvalidInput(f"model {path!r}: {module!r} has no {attribute!r}") from None
    if not callable(found):
        raise InvalidInput(f"model {path!r} is a {type(found).__name__}; expected a function or a class")
    return found


def _arguments(
    name: str, factory: Callable[..., Any], offered: dict[str, Any], params: dict[str, Any]
) -> dict[str, Any]:
    """Return `params` and those of `offered` that the factory takes; refuse what does not fit or lacks."""
    try:
        accepted = inspect.signature(factory).parameters.values()
    except ValueError:  # some built-in callables have no signature to read
        return params
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted)
    names = [p.name for p in accepted if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for key in params:
        if key not in names and not takes_any:
            raise unknown(f"parameter of model {name!r}:", key, [n for n in names if n not in offered])
    given = {key: value for key, value in offered.items() if key in names} | params
    missing = [p.name for p in accepted if p.default is p.empty and p.name in names and p.name not in given]
    if missing:
        raise InvalidInput(f"model {name!r} needs {', '.join(missing)}; give it among the model's parameters")
    return given
