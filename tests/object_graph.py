"""Walk the object graph from a party: which tensors, modules and data sets can be reached from it."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator

from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset

from splitfed.core.rows import SelectedRows, TensorRows
from splitfed.data.dataset import Dataset
from splitfed.data.federation import Federation

# Code, classes and imported modules are the program, not what somebody holds.
_PROGRAM = (types.ModuleType, type, types.CodeType, types.BuiltinFunctionType)


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
