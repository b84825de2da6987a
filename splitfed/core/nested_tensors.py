"""Tensors in nested lists, tuples, tables and plain objects: found in their order, and replaced there.

What a submodule is given and returns is seldom a bare tensor: a tuple of states, a table, a dataclass of outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

_LEAVES = frozenset((bool, int, float, complex, str, type(None), torch.dtype, torch.device, slice))


def is_number(value: Any) -> bool:
    """Return whether `value` is a plain number or truth value, or nested lists of such, as `tolist` returns."""
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return len(value) > 0 and all(is_number(one) for one in value)
    return isinstance(value, (bool, int, float, complex)) and not isinstance(value, Tensor)


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and tables, in their order, those of plain objects included."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    """Add the tensors in `value` to `found`."""
    kind = type(value)
    if kind in (tuple, list, dict):
        # As `_pytree` walks them, which takes ten times as long; this runs at every operation of a pass.
        for one in value.values() if kind is dict else value:
            _collect(one, found)
        return
    for leaf in (value,) if kind in _LEAVES or isinstance(value, Tensor) else _pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):
            _collect(list(leaf.values()), found)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (type, nn.Module)) and not callable(leaf):
            found += [v for v in vars(leaf).values() if isinstance(v, Tensor)]


def is_plain(value: Any) -> bool:
    """Return whether `tensors_of` finds all tensors in `value`: objects in it hold tensors, numbers and texts."""
    simple = (Tensor, bool, int, float, complex, str, type(None), torch.dtype, torch.device)
    for leaf in _pytree.tree_leaves(value):
        if isinstance(leaf, Mapping):
            inner = list(leaf.values())
        elif isinstance(leaf, simple):
            continue
        else:
            inner = list(vars(leaf).values()) if hasattr(leaf, "__dict__") else [leaf]
        if not all(isinstance(one, simple) for one in inner):
            return False
    return True


def replace_tensors(value: Any, received: Mapping[int, Tensor], copies: bool = False) -> Any:
    """Return `value` with the tensors of these numbers, among those that `tensors_of` finds, replaced.

    `copies`: tables and objects of classes of their own are copied first; otherwise they are changed themselves.
    """
    if isinstance(value, Tensor):
        return received.get(0, value)
    number = -1

    def changed(leaf: Any) -> Any:
        nonlocal number
        if isinstance(leaf, Tensor):
            number += 1
            return received.get(number, leaf)
        if isinstance(leaf, Mapping):
            leaf = copy.copy(leaf) if copies else leaf
            for key, one in leaf.items():
                leaf[key] = changed(one)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (type, nn.Module)) and not callable(leaf):
            leaf = copy.copy(leaf) if copies else leaf
            for key, one in vars(leaf).items():
                if isinstance(one, Tensor):
                    # A frozen dataclass lets nobody else.
                    object.__setattr__(leaf, key, changed(one))
        return leaf

    return _pytree.tree_map(changed, value)


def autograd_nodes(tensors: Iterable[Tensor]) -> set[Any]:
    """Return all nodes of the graphs by which `tensors` were computed."""
    pending, visited = [tensor.grad_fn for tensor in tensors], set[Any]()
    while pending:
        node = pending.pop()
        if node is not None and node not in visited:
            visited.add(node)
            pending += [before for before, _ in node.next_functions]
    return visited


def autograd_leaves(*values: Tensor) -> set[int]:
    """Return the ids of all leaves that autograd would send a gradient of `values` to."""
    leaves = (getattr(node, "variable", None) for node in autograd_nodes(values))
    return {id(leaf) for leaf in leaves if leaf is not None}
