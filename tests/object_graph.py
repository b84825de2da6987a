"""Walk the object graph from a party: which tensors, arrays, modules and data sets can be reached from it.

Containers, closures, defaults, bound methods, partials and weak references are followed.
"""

from __future__ import annotations

import array
import gc
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset

from splitfed.core.rows import SelectedRows, TensorRows
from splitfed.data.dataset import Dataset, Federation

# Code, classes and imported modules are the program, not what somebody holds.
_PROGRAM = (types.ModuleType, type, types.CodeType)


def reachable(start: object) -> Iterator[object]:
    """Yield every object reachable from `start`, gradients, graphs and closures included, each once."""
    seen: dict[int, object] = {}
    waiting = [start]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, _PROGRAM):
            continue
        seen[id(thing)] = thing  # held, so that no address is used twice
        yield thing
        if isinstance(thing, types.FrameType):
            continue  # It would lead to whoever called.
        waiting += _referents(thing)


def holdings(start: object) -> set[tuple[str, int]]:
    """Return what counts as somebody's own: tensor memory, modules, data sets and running code, by address.

    A tensor on the meta device is a shape, and has no memory. Of rows that are read by index, somebody holds those
    whose numbers they have, wherever the rows lie.
    """
    held = set()
    for thing in reachable(start):
        if isinstance(thing, (TensorRows, SelectedRows)):
            place = thing.tensor.data_ptr() if isinstance(thing, TensorRows) else id(thing.source)
            numbers = range(len(thing)) if thing.index is None else thing.index.tolist()
            held |= {("row", place * 2**20 + number) for number in numbers}
            continue
        if isinstance(thing, Tensor) and thing.numel() and not thing.is_meta:
            held.add(("memory", thing.untyped_storage().data_ptr()))
        elif isinstance(thing, np.ndarray) and thing.size and not thing.dtype.hasobject:
            held.add(("memory", _whole(thing).__array_interface__["data"][0]))
        elif isinstance(thing, (bytearray, array.array)) and len(thing):
            held.add(("memory", np.frombuffer(thing, dtype=np.uint8).__array_interface__["data"][0]))
        elif isinstance(thing, nn.Module):
            held.add(("module", id(thing)))
        elif isinstance(thing, (Dataset, Federation, TorchDataset)):
            held.add(("data", id(thing)))
        elif isinstance(thing, types.FrameType):
            held.add(("frame", id(thing)))
    return held


def leaves(start: object) -> set[int]:
    """Return the addresses of tensors with numbers that `start` holds or that its graphs accumulate gradients in."""
    return {id(thing) for thing in reachable(start) if isinstance(thing, Tensor) and not thing.is_meta}


def _referents(thing: object) -> list[object]:
    if isinstance(thing, (TensorRows, SelectedRows)):
        # Nor all the rows that some are taken of.
        return [thing.index]
    if isinstance(thing, types.FunctionType):
        # Not its globals: those are the program.
        return [*(thing.__closure__ or ()), thing.__defaults__, thing.__kwdefaults__, thing.__dict__]
    if isinstance(thing, types.BuiltinFunctionType):
        # Of a bound method: what it is bound to.
        return [thing.__self__]
    if isinstance(thing, weakref.ref):
        return [thing()]
    if isinstance(thing, weakref.ProxyTypes):
        return [_behind(thing)]
    if isinstance(thing, np.ndarray):
        # Its garbage collection does not tell of them.
        return [thing.base, *(thing.ravel().tolist() if thing.dtype.hasobject else ())]
    if isinstance(thing, memoryview):
        return [thing.obj]
    if isinstance(thing, types.CellType):
        try:
            return [thing.cell_contents]
        except ValueError:
            return []
    if isinstance(thing, Tensor):
        inner = thing.grad if thing.is_leaf else None
        return [inner, thing.grad_fn, thing._base, *gc.get_referents(thing)]
    if hasattr(thing, "next_functions"):
        return [*(node for node, _ in thing.next_functions), getattr(thing, "variable", None)]
    return gc.get_referents(thing)


def _behind(proxy: Any) -> object:
    try:
        return proxy.__repr__.__self__
    except ReferenceError:
        return None


def _whole(part: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array whose memory `part` is a part of."""
    while isinstance(part.base, np.ndarray):
        part = part.base
    return part
