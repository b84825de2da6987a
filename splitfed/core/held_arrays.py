"""Arrays that a module holds beside its weights and buffers, wherever its objects lead: what else its party could read.

Followed are attributes, containers, user objects, closures, defaults, bound methods, partials, weak references, hooks,
and class attributes and globals that the user's own code names. Not followed is what belongs to installed packages.
"""

from __future__ import annotations

import array
import copy
import gc
import io
import logging
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn

from splitfed.core.code_kinds import FUNCTION, is_installed, names_in
from splitfed.core.errors import InvalidInput
from splitfed.core.object_kinds import HOOKS, OWN
from splitfed.core.payload import storage_of
from splitfed.core.plain_values import dense_parts

OTHERS = "_belongs_to_others"
"""Name of an attribute of a module that stands for one of another party, none of whose code is run."""
STAND_INS = "_stand_ins"
"""Name of the attribute of a module that holds what stands for attributes that others read; see `stand_ins`."""
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState)
_PROGRAM = (types.ModuleType, type, types.CodeType, types.FrameType, logging.Logger, *_GENERATORS)
_NUMBER = (bool, int, float, np.generic)
_VALUES = (nn.Module, Tensor, np.ndarray, list, tuple, set, dict, deque, array.array, bytearray)
# Every copy makes them anew; lines of the code that was written.
_PASSING = {"_flat_weight_refs": nn.RNNBase, "_lineno_map": fx.GraphModule}
_LEAVES = frozenset((bool, int, float, str, type(None)))
_CONTAINERS = frozenset((dict, list, tuple, set))
# Numbers of a Python container that are named: below are sizes of kernels and the like.
_FEW = 8
# Up to so many numbers a sparse tensor is read with its zeros, which rows of the data have too.
_DENSE = 2**22


@dataclass(frozen=True)
class HeldArray:
    """An array that is held: how a user would name it, its shape, and its numbers."""

    name: str
    shape: tuple[int, ...]
    numbers: np.ndarray[Any, Any] = field(repr=False, compare=False)
    named: bool = field(default=True, repr=False, compare=False)


class _Met(NamedTuple):
    """Something that a module leads to. `shared`: a copy of the module would lead to the same object."""

    label: str
    thing: object
    shared: bool


def is_elsewhere(module: nn.Module) -> bool:
    """Return whether `module`, of a segment cut by replay, only stands for a submodule that another party holds."""
    table = vars(module)
    return OTHERS in table or any(isinstance(value, Tensor) and value.is_meta for value in table.values())


def stand_ins_of(module: nn.Module) -> dict[str, Any]:
    """Return the stand-ins of `module`, attribute -> stand-in."""
    found = vars(module).get(STAND_INS)
    return {} if found is None else dict(found.values)


def held_arrays(module: nn.Module) -> Iterator[HeldArray]:
    """Yield the arrays that `module` leads to and that are none of its weights and buffers, each once."""
    blank = {_label(path, name) for path, inner in module.named_modules() for name in stand_ins_of(inner)}
    for label, thing, _ in _walk(module):
        found = ((x, named) for x, named in numbers_in(thing) if not (label in blank and _is_blank(x)))
        yield from (HeldArray(label, numbers.shape, numbers, named) for numbers, named in found)
    for name in getattr(module, "trace_constants", ()):
        label = f"{name!r} of the model"
        yield from (HeldArray(label, found.shape, found) for found, _ in numbers_in(module.get_buffer(name)))


def check_references(module: nn.Module, model: str) -> None:
    """Refuse attributes and hooks of `module` that lead to modules or tensors that copies of it would share.

    `model`: the class that it is a copy of. Through closures, defaults and weak references, copies would go on using
    the original's, which belong to no party.
    """
    found = [(label, thing) for label, thing, shared in _walk(module, arrays=False) if shared]
    # A module says more than what it keeps.
    for label, thing in sorted(found, key=lambda one: not isinstance(one[1], nn.Module)):
        if isinstance(thing, nn.Module) or (isinstance(thing, Tensor) and not thing.is_meta):
            what = f"a {type(thing).__name__}" if isinstance(thing, nn.Module) else f"a tensor {tuple(thing.shape)}"
            raise InvalidInput(
                f"{label.replace('the model', model)} is a function or a reference that leads to {what}: "
                "copies of it would use the weights of the model itself; make it a method, or hand that over as an "
                "argument"
            )


class Foreign(NamedTuple):
    """What a module leads to though it is another's: by which of its attributes, to which weight, or to a copy."""

    label: str
    name: str
    copied: bool

    @property
    def described(self) -> str:
        """Which weight or buffer it is, and whether a copy."""
        return f"{'a copy of ' if self.copied else ''}{self.name}"

    @property
    def advice(self) -> str:
        """What to do about it."""
        if self.copied:
            return "register it as a frozen submodule (a teacher) or as a buffer: whoever reads it there holds it"
        return "let what it leads to hold no weight of a submodule"


def find_foreign(module: nn.Module, others: Iterable[tuple[str, Tensor]]) -> Foreign | None:
    """Return by what `module` leads to memory of `others`, weights and buffers by name, and to which; else None.

    To a copy too, which has the same numbers, not all one. What is a weight or buffer of `module` counts for none.
    """
    met = [(label, thing) for label, thing, _ in _walk(module, arrays=False) if isinstance(thing, Tensor)]
    named = dict(others if met else ())
    places = {place: name for name, tensor in named.items() if (place := storage_of(tensor))}
    for label, thing in met:
        if (name := places.get(storage_of(thing)) or _same_numbers(thing, named)) is not None:
            return Foreign(label, name, storage_of(thing) not in places)
    return None


def state_of(module: nn.Module) -> tuple[tuple[str, Tensor], ...]:
    """Return the weights and buffers of `module` by name, each once."""
    return (*module.named_parameters(), *module.named_buffers())


def _same_numbers(tensor: Tensor, others: Mapping[str, Tensor]) -> str | None:
    """Return which of `others` has the numbers of `tensor`; None where they say nothing, or there is none."""
    if not storage_of(tensor) or bool((tensor == tensor.flatten()[0]).all()):
        return None
    alike = ((name, one) for name, one in others.items() if one.shape == tensor.shape and storage_of(one))
    return next((name for name, one in alike if one.dtype == tensor.dtype and torch.equal(one, tensor)), None)


def leave_out_unread(piece: nn.Module) -> None:
    """Take from `piece` what its submodules carry beside numbers, texts and weights, and their code does not name.

    Of a piece that holds arrays; the user's own submodules are left as they are: a leaner one takes the place of each
    that carries such a thing. Hooks, and methods that were put in place of the class's, may read anything: a submodule
    with such keeps all.
    """
    made: dict[int, nn.Module] = {}
    if any(_spare(inner) for inner in piece.modules() if inner is not piece) and any(held_arrays(piece)):
        for name, inner in list(piece._modules.items()):
            piece._modules[name] = None if inner is None else _leaner(inner, made)


def _leaner(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """Return `module`, or one on the same weights without what it need not carry; `made`: by what they stand for."""
    if id(module) in made or isinstance(module, torch.jit.ScriptModule):
        return made.get(id(module), module)
    made[id(module)] = module
    inner = {name: None if one is None else _leaner(one, made) for name, one in module._modules.items()}
    table = vars(module)
    if spare := _spare(module):
        named = names_in_code(set(type(module).__mro__) - {nn.Module, object})
        hooked = any(value for name, value in table.items() if name in HOOKS)
        patched = any(hasattr(type(module), name) for name in spare)
        spare = [] if hooked or patched else [name for name in spare if name not in named]
    if spare or any(inner[name] is not one for name, one in module._modules.items()):
        lean: nn.Module = object.__new__(type(module))
        kept = {name: value for name, value in table.items() if name not in spare}
        vars(lean).update((name, copy.copy(value) if name in OWN else value) for name, value in kept.items())
        vars(lean)["_modules"] = inner
        made[id(module)] = lean
    return made[id(module)]


def _spare(module: nn.Module) -> list[str]:
    """Return the names of attributes of `module` that are no settings."""
    return [name for name, value in vars(module).items() if name not in OWN and not _is_setting(value)]


def _is_setting(value: Any) -> bool:
    """Return whether `value` is a text, a number or a few of these, such as the size of a kernel."""
    if isinstance(value, (list, tuple)):
        return len(value) < _FEW and all(map(_is_setting, value))
    return isinstance(value, (*_NUMBER, str, type(None), torch.dtype, torch.device))


def _walk(module: nn.Module, arrays: bool = True) -> Iterator[_Met]:
    """Yield what the attributes of all submodules lead to, tensors and foreign modules included, each once.

    `arrays`: whether tuples of numbers are wanted as well.
    """
    is_leaf = _is_leaf if arrays else _is_plain
    modules = dict(module.named_modules())
    own = {id(x) for one in modules.values() for x in (one, *one._parameters.values(), *one._buffers.values())}
    seen: dict[int, object] = {}
    for path, inner in modules.items():
        for name, value, of_class in _attributes(inner):
            if is_leaf(value):
                continue
            label = _label(path, name)
            waiting = [_Met(label, value, False)]
            hooks = {id(one) for one in value.values()} if name in OWN and not of_class else set()
            while waiting:
                met = waiting.pop()
                thing = met.thing
                mine = id(thing) in own
                if id(thing) in seen or isinstance(thing, _PROGRAM) or (mine and not met.shared):
                    continue
                if type(thing).__module__ in ("splitfed.core.replay", "splitfed.core.segment_pass"):
                    continue  # The plan: names and shapes.
                seen[id(thing)] = thing
                yield met
                if not mine:
                    # A hook that is a function is made anew with its module, see `module_copies`.
                    anew = own if id(thing) in hooks else ()
                    waiting += [
                        _Met(label, one, met.shared or (shared and not of_class and id(one) not in anew))
                        for one, shared in followed(thing)
                        if not is_leaf(one)
                    ]


def _label(path: str, name: str) -> str:
    return f"{name!r} of {path!r}" if path else f"{name!r} of the model"


def _is_leaf(value: Any) -> bool:
    """Return whether `value` is plain, or an empty container."""
    return type(value) in _LEAVES or (type(value) in _CONTAINERS and not value)


def _is_plain(value: Any) -> bool:
    """Return whether `value` is plain, an empty container, or a tuple of plain values, such as the size of a kernel."""
    return _is_leaf(value) or (type(value) is tuple and all(type(one) in _LEAVES for one in value))


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any, bool]]:
    """Yield name and value of the attributes of `module` and of its classes, and whether it is one of a class."""
    for name, value in (vars(module) | stand_ins_of(module)).items():
        if name == STAND_INS:
            continue
        if name in OWN:
            wanted = value and name in HOOKS
        else:
            wanted = name not in _PASSING or not isinstance(module, _PASSING[name])
        if wanted:
            yield name, value, False
    for table in (module._parameters, module._buffers):
        for name, tensor in table.items():
            for key, value in ({} if tensor is None else vars(tensor)).items():
                yield f"{name}.{key}", value, False
    if OTHERS in vars(module):
        return
    for kind in type(module).__mro__:
        if not is_installed(kind):
            for name, value in vars(kind).items():
                if not name.startswith("__"):
                    yield name, value, True


def followed(thing: Any) -> Iterator[tuple[object, bool]]:
    """Yield what `thing` refers to, and whether a copy of it would refer to the same."""
    if isinstance(thing, (Tensor, nn.Module)):
        yield from ((one, False) for one in vars(thing).values())
    elif isinstance(thing, np.ndarray):
        yield from ((one, False) for one in (thing.flat if _is_of_objects(thing) else ()))
    elif isinstance(thing, types.FunctionType):
        yield from ((one, True) for one in FUNCTION.held(thing).values())
        if not is_installed(thing):
            named = (thing.__globals__.get(name) for name in names_in(thing.__code__, "LOAD_GLOBAL", "LOAD_NAME"))
            yield from ((one, False) for one in named if _may_hold(one))
    elif isinstance(thing, weakref.ref):
        yield thing(), True
    elif isinstance(thing, weakref.ProxyTypes):
        yield thing.__repr__.__self__, True
    elif isinstance(thing, types.BuiltinFunctionType):
        yield thing.__self__, True
    elif isinstance(thing, fx.Graph):
        # What nodes take from one another is no value.
        given = (one for node in thing.nodes for one in (node.args, dict(node.kwargs)))
        yield from ((one, False) for one in given if not all(isinstance(part, fx.Node) for part in one))
    elif not isinstance(thing, (fx.Node, *_NUMBER, str, bytes, type(None))):
        yield from ((one, False) for one in gc.get_referents(thing))


def _may_hold(value: Any) -> bool:
    """Return whether a global that the user's code names is a value of the user's, and no part of a program."""
    return isinstance(value, _VALUES) or (isinstance(value, types.FunctionType) and not is_installed(value))


def names_in_code(kinds: Collection[type]) -> set[str]:
    """Return the attributes, and texts that may name one, that the methods of classes read, but to make an object."""
    found: set[str] = set()
    # Since Python 3.13 a class lists what its methods assign.
    told = ("__init__", "__static_attributes__")
    waiting: list[Any] = [value for kind in kinds for name, value in vars(kind).items() if name not in told]
    while waiting:
        one = waiting.pop()
        if isinstance(one, (property, staticmethod, classmethod, types.FunctionType)):
            waiting += [getattr(one, name, None) for name in ("fget", "fset", "__wrapped__", "__code__")]
        elif isinstance(one, types.CodeType):
            found |= names_in(one, "LOAD_ATTR", "LOAD_METHOD")
            waiting += one.co_consts
        elif isinstance(one, str) and one.isidentifier():
            found.add(one)
        elif isinstance(one, tuple):
            waiting += one
    return found


def _is_of_objects(thing: Any) -> bool:
    return isinstance(thing, np.ndarray) and thing.dtype.hasobject


def numbers_in(thing: Any) -> Iterator[tuple[np.ndarray[Any, Any], bool]]:
    """Yield the numbers that `thing` itself holds, and whether it is an array that is worth a name.

    Complex numbers are pairs of real ones, side by side and all real parts first; records have their numbers one after
    another, and a storage its bytes.
    """
    if isinstance(thing, torch.UntypedStorage) and thing.device.type != "meta":
        thing = torch.empty(0, dtype=torch.uint8, device=thing.device).set_(thing).cpu().numpy().tobytes()
    elif isinstance(thing, io.BytesIO) and not thing.closed:
        thing = thing.getvalue()
    if isinstance(thing, Tensor):
        if thing.is_nested and not thing.is_meta:
            yield from (found for one in thing.unbind() for found in numbers_in(one))
        elif not thing.is_meta and len(parts := dense_parts(thing)) > 1:
            small = thing.numel() <= _DENSE
            yield from (found for one in ((thing.to_dense(),) if small else parts) for found in numbers_in(one))
        elif not thing.is_meta and thing.numel() > 0 and thing.layout == torch.strided:
            yield _as_array(thing), thing.numel() > 1
            if thing.is_complex() and thing.dim():
                yield _as_array(torch.cat([thing.real, thing.imag], -1)), False
    elif isinstance(thing, np.ndarray):
        if thing.dtype.kind in "biuf" and thing.size > 1:
            yield thing, True
        elif thing.dtype.kind == "c" and thing.size > 1:
            yield np.stack([thing.real, thing.imag], -1), True
            yield np.concatenate([thing.real, thing.imag], -1), False
        elif thing.dtype.names:
            fields = [thing[name] for name in thing.dtype.names if thing.dtype[name].base.kind in "biuf"]
            if fields and thing.size > 0:
                yield np.concatenate([one.reshape(thing.size, -1) for one in fields], 1), True
            yield from ((numbers, False) for name in thing.dtype.names for numbers, _ in numbers_in(thing[name]))
        elif _is_of_objects(thing) and thing.size > 1 and all(isinstance(one, _NUMBER) for one in thing.flat):
            yield thing.astype(np.float64), True
    elif isinstance(thing, array.array) and len(thing) > 1:
        yield np.array(thing), True
    elif isinstance(thing, (bytes, bytearray)) and len(thing) > 1:
        for kind in (np.uint8, np.float32, np.float64):
            if len(thing) % np.dtype(kind).itemsize == 0:
                yield np.frombuffer(thing, dtype=kind), kind is np.uint8 and len(thing) >= _FEW
    elif isinstance(thing, (list, tuple, set, frozenset, deque)):
        items = list(thing)
        if len(items) > 1 and all(isinstance(one, _NUMBER) for one in items):
            yield np.array(items), len(items) >= _FEW
    elif isinstance(thing, Mapping):
        items = [one for one in thing.values() if isinstance(one, _NUMBER)]
        if len(items) > 1:
            yield np.array(items), False
    elif hasattr(type(thing), "__array__"):
        numbers = np.asarray(thing)
        if numbers.dtype.kind in "biuf" and numbers.size > 1:
            yield numbers, True


def _is_blank(numbers: np.ndarray[Any, Any]) -> bool:
    """Return whether an array has no numbers but those that stand-ins have in their place."""
    least = np.iinfo(numbers.dtype).min if numbers.dtype.kind in "iu" else 0
    same = np.isnan(numbers) if numbers.dtype.kind in "fc" else numbers == least
    return bool(same.all() or (numbers == 0).all())


def _as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    if plain.is_quantized:
        plain = plain.dequantize()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    if plain.dtype not in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float64):
        plain = plain.float()
    return np.asarray(plain)
