"""Copies of modules as `copy.deepcopy` makes them, in a fraction of the time, and of what it refuses to copy.

Most entries of a module are plain values and empty tables of hooks, and to copy one of these by the general way takes
as long as to copy a weight. A model is copied a dozen times before it is trained.

Tensors that a module keeps as plain attributes and that were computed from its weights, such as a pruned weight,
`copy.deepcopy` refuses, for their copies would be no results of the copied weights. Whoever computes them anew at every
call (`nn.utils.prune` and `nn.utils.weight_norm` do) never reads what is kept; whoever does not fails in the uncut
model, too, at its second backward pass.

A hook that is a function with a module or an attribute of it in its closure or defaults is made anew, on their copies:
it would go on using the original's otherwise.

What `torch.compile` has wrapped is run by copies as it is written.
"""

from __future__ import annotations

import copy
import copyreg
import types
from collections import OrderedDict
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from splitfed.core.plain_values import dense_parts

T = TypeVar("T")
_COMPILED = "_compiled_call_impl"
"""The one entry that `nn.Module` leaves out of its copies."""
_TABLES = frozenset((dict, OrderedDict, set))
_ATOMS = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype))


def copy_computed(module: nn.Module, *, numbers: bool = True) -> dict[int, Any]:
    """Return a memo for `copy.deepcopy` with a copy of each computed tensor in `module`, without its graph.

    `numbers`: False leaves their shapes alone, on the meta device.
    """
    return {
        id(value): value.detach().clone() if numbers else value.detach().to("meta")
        for inner in module.modules()
        for value in vars(inner).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }


def deep_copy(value: T, modules: Collection[nn.Module], memo: dict[int, Any]) -> T:
    """Return `copy.deepcopy(value, memo)`, of a `value` that leads to `modules`."""
    made: list[tuple[nn.Module, nn.Module]] = []
    for module in modules:
        for inner in module.modules():
            if id(inner) not in memo and _copied_by_entries(type(inner)):  # type: ignore[arg-type]
                memo[id(inner)] = object.__new__(type(inner))
                made.append((inner, memo[id(inner)]))
    # Children before those that hold them.
    for inner, empty in reversed(made):
        entries = {name: entry for name, entry in vars(inner).items() if name != _COMPILED}
        for name, entry in entries.items():
            if (kind := type(entry)) in _TABLES and not entry:
                entries[name] = memo.setdefault(id(entry), kind())
            elif kind not in _ATOMS:
                entries[name] = _copy_entry(entry, memo)
        empty.__setstate__(entries)
    copied = _copy_entry(value, memo)
    # `nn.Parameter` leaves out of its copies what somebody hung on it.
    inner_modules = [inner for module in modules for inner in module.modules()]
    tables = [table for inner in inner_modules for table in (inner._parameters, vars(inner))]
    for weight in [one for table in tables for one in table.values() if isinstance(one, nn.Parameter) and vars(one)]:
        if (other := memo.get(id(weight), weight)) is not weight and not vars(other):
            vars(other).update({name: _copy_entry(one, memo) for name, one in vars(weight).items()})
    for _, copied_module in made:
        for name, table in vars(copied_module).items():
            if name.endswith("_hooks") and table:
                table.update((key, _on_copies(one, memo)) for key, one in table.items() if callable(one))
    return copied  # type: ignore[no-any-return]


def _copy_entry(entry: Any, memo: dict[int, Any]) -> Any:
    kind = type(entry)
    if kind in _ATOMS:
        return entry
    if (known := memo.get(id(entry))) is not None:
        return known
    if kind in _TABLES and not entry:
        return memo.setdefault(id(entry), kind())
    if kind is dict:
        memo[id(entry)] = made = {}
        for key, one in entry.items():
            made[key if type(key) in _ATOMS else copy.deepcopy(key, memo)] = _copy_entry(one, memo)
        return made
    if kind is Tensor and len(dense_parts(entry)) > 1:
        # Of which torch copies some forms alone.
        memo[id(entry)] = copied = entry.detach().clone()
        vars(copied).update((name, _copy_entry(one, memo)) for name, one in vars(entry).items())
        return copied
    return copy.deepcopy(entry, memo)


def _on_copies(hook: Any, memo: Mapping[int, Any]) -> Any:
    """Return `hook`, where it is a function that leads to what was copied, with the copies in its place."""
    if not isinstance(hook, types.FunctionType):
        return hook

    def of_cell(cell: types.CellType) -> types.CellType:
        try:
            held = cell.cell_contents
        except ValueError:
            return cell
        return types.CellType(memo[id(held)]) if id(held) in memo else cell

    cells = tuple(map(of_cell, hook.__closure__ or ()))
    defaults = tuple(memo.get(id(one), one) for one in hook.__defaults__ or ())
    named = {name: memo.get(id(one), one) for name, one in (hook.__kwdefaults__ or {}).items()}
    before = (*(hook.__closure__ or ()), *(hook.__defaults__ or ()), *(hook.__kwdefaults__ or {}).values())
    if all(one is other for one, other in zip(before, (*cells, *defaults, *named.values()), strict=True)):
        return hook
    closure = cells if hook.__closure__ else None
    made = types.FunctionType(hook.__code__, hook.__globals__, hook.__name__, defaults, closure)
    made.__kwdefaults__, made.__dict__ = named, dict(vars(hook))
    return made


@cache
def _copied_by_entries(kind: type) -> bool:
    """Return whether a deep copy of a module of class `kind` is an empty one that is given copies of its entries."""
    ways = {"__reduce_ex__": object, "__reduce__": object, "__new__": object, "__getstate__": nn.Module}
    own = any(getattr(kind, name, None) is not getattr(base, name, None) for name, base in ways.items())
    slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    return not (own or slots or hasattr(kind, "__deepcopy__") or kind in copyreg.dispatch_table)


class UncompiledModule(nn.Module):
    """Stands for a submodule that `torch.compile` has wrapped, and runs it as it is written, under the same names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module that was compiled."""
        return self._orig_mod(*args, **kwargs)


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` has wrapped `module`; to ask its class would load the compiler."""
    return type(module).__name__ == "OptimizedModule" and type(module).__module__.startswith("torch._dynamo")


def open_compiled(model: nn.Module) -> None:
    """Let `model`, a copy, run what is compiled in it as it is written; compiled code would hold another's weights."""
    for module in list(model.modules()):
        for name, inner in list(module._modules.items()):
            if inner is not None and is_compiled(inner):
                module._modules[name] = UncompiledModule(inner.get_submodule("_orig_mod"))
