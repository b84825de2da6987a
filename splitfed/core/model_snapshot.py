"""Snapshot of a user's model: all that tracing or running it can change, kept, compared and put back.

Weights, buffers, gradients, modes and registered submodules; plain Python attributes of every module, of its class
and of the globals that its `forward` names; the generators of torch, NumPy and Python.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_OWN = frozenset(vars(nn.Module()))
_DEPTH = 4


@dataclass(frozen=True)
class _Attribute:
    """One plain attribute: how users would name it, where it is kept, and what it was."""

    label: str
    holder: Any
    name: str
    value: Any
    content: Any
    refill: Callable[[], None]


class ModelSnapshot:
    """What `model` and the random generators of the process are at the moment this is made."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = list(model.named_modules(remove_duplicate=True))
        self._tables = [
            (m, {table: dict(vars(m)[table]) for table in ("_parameters", "_buffers", "_modules")}, m.training)
            for _, m in self._modules
        ]
        self._plain = [(m, {k: v for k, v in vars(m).items() if k not in _OWN}) for _, m in self._modules]
        tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
        for _, plain in self._plain:
            # A replayed segment has shapes of what others hold.
            tensors.update({id(v): v for v in plain.values() if isinstance(v, Tensor) and not v.is_meta})
        self._tensors = [(t, t.detach().clone(), t.requires_grad, t.grad) for t in tensors.values()]
        self._attributes = _attributes(self._modules)
        self._generators = generator_states()

    def changes(self) -> list[str]:
        """Return the plain attributes that are no longer what they were, as `'steps' of 'block' (0 -> 1)`.

        Values that are tensors do not count: whether they matter shows in what the model computes.
        """
        now = {(id(a.holder), a.name): a for a in _attributes(self._modules)}
        descriptions = []
        for before in self._attributes:
            after = now.pop((id(before.holder), before.name), None)
            if after is None:
                descriptions.append(f"{before.label} (removed)")
            elif after.content not in (before.content, _OPAQUE):
                descriptions.append(f"{before.label} ({_short(before.content)} -> {_short(after.content)})")
        return descriptions + [f"{a.label} (new)" for a in now.values() if a.content != _OPAQUE]

    def drop_gradients(self) -> None:
        """Let no weight have a gradient, so that what is left of earlier training is neither added to nor changed."""
        for tensor, *_ in self._tensors:
            if tensor.is_leaf:
                tensor.grad = None

    def restore(self) -> None:
        """Put everything back."""
        for module, tables, training in self._tables:
            for table, entries in tables.items():
                current = vars(module)[table]
                if list(current) != list(entries) or any(current[n] is not entry for n, entry in entries.items()):
                    current.clear()
                    current.update(entries)
            module.training = training
        with torch.no_grad():
            for tensor, value, requires_grad, gradient in self._tensors:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
                if tensor.is_leaf:
                    tensor.requires_grad_(requires_grad)
                    tensor.grad = gradient
        for attribute in self._attributes:
            attribute.refill()
            if isinstance(attribute.holder, dict):
                attribute.holder[attribute.name] = attribute.value
            elif isinstance(attribute.holder, type):
                setattr(attribute.holder, attribute.name, attribute.value)
        for module, plain in self._plain:
            for name in [k for k in vars(module) if k not in _OWN and k not in plain]:
                del vars(module)[name]
            vars(module).update(plain)
        set_generators(self._generators)


def generator_states() -> tuple[Any, ...]:
    """Return the states of the default generators of torch on the CPU, of Python and of NumPy."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002


def set_generators(states: tuple[Any, ...]) -> None:
    """Go back to what `generator_states` returned."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])  # noqa: NPY002


def seed_generators(seed: int) -> None:
    """Let the same generators start from `seed`, of which NumPy takes the last 32 bits."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


def same_generators(one: tuple[Any, ...], other: tuple[Any, ...]) -> str | None:
    """Return the package whose default generator differs between the two states, None where none does."""
    if not torch.equal(one[0], other[0]):
        return "torch"
    if one[1] != other[1]:
        return "random"
    left, right = one[2]["state"], other[2]["state"]
    if left.keys() != right.keys() or not all(np.array_equal(value, right[name]) for name, value in left.items()):
        return "numpy.random"
    return None if {**one[2], "state": None} == {**other[2], "state": None} else "numpy.random"


class _Opaque:
    """Stands for a value that is not compared: a tensor, or an object that is not plain data."""

    def __repr__(self) -> str:
        return "..."


_OPAQUE = _Opaque()


def _attributes(modules: list[tuple[str, nn.Module]]) -> list[_Attribute]:
    """Return the plain attributes of every module, of its class, and of the globals that its `forward` names."""
    attributes: dict[tuple[int, str], _Attribute] = {}

    def add(label: str, holder: Any, name: str, value: Any) -> None:
        attributes.setdefault(
            (id(holder), name), _Attribute(label, holder, name, value, _content(value), _refiller(value))
        )

    for path, module in modules:
        where = f"of {path!r}" if path else "of the model"
        for name, value in vars(module).items():
            if name not in _OWN:
                add(f"attribute {name!r} {where}", module, name, value)
        for kind in type(module).__mro__:
            if kind.__module__.startswith("torch.") or kind is object:
                continue
            for name, value in vars(kind).items():
                if not name.startswith("__") and _is_plain(value):
                    add(f"attribute {name!r} of class {kind.__name__}", kind, name, value)
            forward = vars(kind).get("forward")
            names = getattr(forward, "__globals__", {})
            for name in getattr(getattr(forward, "__code__", None), "co_names", ()):
                if _is_plain(value := names.get(name, _OPAQUE)):
                    add(f"global {name!r}", names, name, value)
    return list(attributes.values())


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex, str, bytes, list, dict, set, deque, np.ndarray, random.Random))


_CONTENTS: tuple[tuple[tuple[type, ...], Callable[[Any, int], Any]], ...] = (
    ((bool, int, float, complex, str, bytes, type(None)), lambda v, _: v if v == v else "nan"),
    ((list, tuple, deque), lambda v, depth: (type(v).__name__, [_content(item, depth - 1) for item in v])),
    ((set, frozenset), lambda v, _: (type(v).__name__, sorted(map(repr, v)))),
    ((Mapping,), lambda v, depth: ("mapping", {repr(k): _content(item, depth - 1) for k, item in v.items()})),
    ((np.ndarray,), lambda v, _: ("array", v.shape, v.tobytes())),
    ((np.random.Generator,), lambda v, _: ("generator", repr(v.bit_generator.state))),
    ((random.SystemRandom,), lambda _v, _depth: _OPAQUE),
    ((random.Random,), lambda v, _: ("generator", v.getstate())),
)


def _content(value: Any, depth: int = _DEPTH) -> Any:
    """Return what `value` holds, in a form that stays when it changes and that can be compared."""
    for kinds, content in _CONTENTS:
        if isinstance(value, kinds):
            return content(value, depth) if depth else _OPAQUE
    return _OPAQUE


def _refiller(value: Any, depth: int = _DEPTH) -> Callable[[], None]:
    """Return what puts the present contents of a container, an array or a generator back into it."""
    if isinstance(value, np.ndarray):
        return partial(np.copyto, value, value.copy())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if not isinstance(value, (list, deque, dict, set)) or not depth:
        return lambda: None
    # `dict(value)` asks a subclass for its values, which may make new ones.
    items = dict(value.items()) if isinstance(value, dict) else list(value)
    inner = [_refiller(item, depth - 1) for item in (items.values() if isinstance(items, dict) else items)]

    def refill() -> None:
        value.clear()
        if isinstance(value, (list, deque)):
            value.extend(items)
        else:
            value.update(items)
        for refill_item in inner:
            refill_item()

    return refill


def _short(content: Any) -> str:
    text = repr(content)
    return text if len(text) <= 40 else f"{text[:37]}..."
