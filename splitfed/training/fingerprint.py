"""A fingerprint of what a user gives to a run: the values inside it, and the code of functions and classes of theirs.

Code of installed packages counts by its name alone; their versions stand in environment.json. What cannot be looked
into counts by its type.
"""

from __future__ import annotations

import dis
import enum
import hashlib
import itertools
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from splitfed.core.plain_values import dense_parts
from splitfed.training import code_digest

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_OURS = {"splitfed", "torch", "numpy"}
_DEPTH = 100
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")
# What every module has for its own ends.
_MACHINERY = {*vars(nn.Module()), "_is_full_backward_hook"}


def fingerprint(things: Mapping[str, object], weightless: Iterable[str] = ()) -> dict[str, str]:
    """Return a digest of the values in each of `things`, and one of every function of the user's that is in them.

    `things`: place -> value, as in `{"task of 'logits'": task}`. `weightless`: places of modules whose state is
    described elsewhere. The keys of what is returned are fit for a message.
    """
    digests: dict[str, str] = {}
    bare = set(weightless)
    for place, thing in things.items():
        walk = _Walk(digests, weights=place not in bare)
        walk.value(thing)
        digests[f"the {place}"] = walk.digest()
    return digests


def differences(there: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Return what two fingerprints do not agree on, code before values."""
    keys = [key for key in dict.fromkeys([*wanted, *there]) if not _same(there.get(key), wanted.get(key))]
    return sorted(keys, key=lambda key: not key.startswith(_CODE))


_CODE = "the code of "


def _same(there: str | None, wanted: str | None) -> bool:
    return there == wanted or (there is not None and wanted is not None and code_digest.same_code(there, wanted))


class _Walk:
    """Goes through a value in an order that is the same in another process."""

    def __init__(self, code: dict[str, str], weights: bool) -> None:
        self._code = code
        self._weights = weights
        self._hash = hashlib.sha256()
        # Functions and classes that were met, kept alive so that no two have the same id.
        self._seen: dict[int, object] = {}
        # What the value at hand is inside of.
        self._open: set[int] = set()

    def digest(self) -> str:
        return f"values:{self._hash.hexdigest()[:16]}"

    def value(self, value: object) -> None:
        """Take up `value` and all that is in it."""
        if isinstance(value, _PLAIN):
            self._hash_words(type(value).__name__, repr(value))
            return
        self._hash_words(_name(type(value)))
        if id(value) in self._open or len(self._open) > _DEPTH:
            return
        if isinstance(value, (FunctionType, type)):
            self._hash_words(_name(value))
            if id(value) in self._seen:
                return
            self._seen[id(value)] = value
        self._open.add(id(value))
        self._hash_content(value)
        self._open.remove(id(value))

    def _hash_words(self, *words: str) -> None:
        for word in words:
            self._hash.update(f"{len(word)}:{word}".encode("utf-8", "surrogatepass"))

    def _hash_content(self, value: Any) -> None:
        match value:
            case Tensor():
                self._tensor(value)
            case np.ndarray() | np.generic():
                array = np.asarray(value)
                self._hash_words(str(array.dtype), str(array.shape))
                self._hash.update(repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes())
            case torch.dtype() | torch.device() | enum.Enum() | range() | slice():
                self._hash_words(repr(value))
            case Mapping():
                self._hash_each(part for pair in value.items() for part in pair)
            case Set():
                self._hash_words(*sorted(map(self._digest_element, value)))
            case re.Pattern():
                self._hash_each((value.pattern, value.flags))
            case list() | tuple() | deque():
                self._hash_each(value)
            case partial():
                self._hash_each((value.func, value.args, value.keywords))
            case MethodType():
                self._hash_each((value.__self__, value.__func__))
            case FunctionType():
                self._function(value)
            case ModuleType():
                self._hash_words(value.__name__)
            case type():
                self._class(value)
            case nn.Module():
                self._module(value)
            case _ if hasattr(value, "__wrapped__"):
                self.value(value.__wrapped__)
            case _ if callable(value) and hasattr(value, "__qualname__"):
                self._hash_words(_name(value))
            case _:
                self._instance(value)

    def _hash_each(self, values: Iterable[object]) -> None:
        for value in values:
            self.value(value)

    def _hash_named(self, values: Iterable[tuple[str, object]]) -> None:
        for name, value in values:
            self._hash_words(name)
            self.value(value)

    def _digest_element(self, value: object) -> str:
        """Return a digest of one element of a set, which has no order: what was met before counts, no other element."""
        walk = _Walk(self._code, self._weights)
        walk._seen, walk._open = dict(self._seen), set(self._open)
        walk.value(value)
        return walk.digest()

    def _tensor(self, tensor: Tensor) -> None:
        self._hash_words(str(tensor.dtype), str(tuple(tensor.shape)))
        for one in () if tensor.is_meta or tensor.is_quantized else dense_parts(tensor):
            if one.layout is torch.strided:
                self._hash.update(one.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())

    def _instance(self, value: object) -> None:
        kind = type(value)
        if not _installed(kind.__module__):
            self._class(kind)
        own = dict(_slot_attributes(value)) | getattr(value, "__dict__", {})
        if is_dataclass(value):
            own |= {field.name: getattr(value, field.name, None) for field in fields(value)}
        names = [name for name in sorted(own) if not (name.startswith("_") and _installed(kind.__module__))]
        self._hash_named((name, own[name]) for name in names)
        if not names and kind.__repr__ is not object.__repr__:
            text = repr(value)
            # An address in memory is another one in every process.
            self._hash_words("" if _ADDRESS.search(text) else text)

    def _module(self, module: nn.Module) -> None:
        for name, part in module.named_modules():
            self._hash_words(name, _name(type(part)))
            if isinstance(part, fx.GraphModule):
                self._graph(part)
                continue
            user = not _installed(type(part).__module__)
            if user:
                self._class(type(part))
            self._hash_named(
                (key, found)
                for key, found in sorted(vars(part).items())
                if key not in _MACHINERY and (user or not key.startswith("_")) and not isinstance(found, nn.Module)
            )
            self._hash_each([*part._forward_hooks.values(), *part._forward_pre_hooks.values()])
        state = module.state_dict()
        named = dict([*module.named_parameters(), *module.named_buffers()])
        for name in sorted(named):
            if self._weights or name not in state:
                self._hash_words(name)
                self._tensor(named[name])

    def _graph(self, module: fx.GraphModule) -> None:
        """Take up a traced module: its operations as written by torch, and functions of the user's among them."""
        self._hash_words(module.code)
        for node in module.graph.nodes:
            match node.op:
                case "call_function":
                    self.value(node.target)
                case "get_attr":
                    owner, _, name = str(node.target).rpartition(".")
                    found = getattr(module.get_submodule(owner), name, None)
                    # Weights and buffers are described with the state.
                    if isinstance(found, Tensor) and name not in {**module._parameters, **module._buffers}:
                        self._tensor(found)

    def _function(self, function: FunctionType) -> None:
        written = _rebound_names(function.__code__)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self._hash_each((function.__defaults__, function.__kwdefaults__))
        self._hash_named((name, _content(cell)) for name, cell in cells if name not in written)
        if _installed(function.__module__):
            return
        self._list_code(function)
        self._hash_named(_globals(function))

    def _list_code(self, function: FunctionType) -> None:
        """List the code of a function of the user's."""
        found = code_digest.digest(function.__code__)
        name = f"{_CODE}{_name(function)}"
        keys = itertools.chain([name], (f"{name} ({number})" for number in itertools.count(2)))
        self._code[next(key for key in keys if self._code.get(key, found) == found)] = found

    def _class(self, kind: type) -> None:
        """Take up a class of the user's; of a module the methods that can have a part in its forward."""
        for base in kind.__mro__:
            if _installed(base.__module__):
                self._hash_words(_name(base))
                continue
            members = dict(vars(base))
            wanted = _forward(kind) if issubclass(kind, nn.Module) else set(members)
            for name in sorted(n for n in wanted & members.keys() - _UNTOLD if not n.startswith("__dataclass")):
                for part in _unwrap_member(members[name]):
                    if not isinstance(part, FunctionType):
                        self._hash_words(name)
                        self.value(part)
                    elif part.__code__.co_filename != "<string>" or not is_dataclass(base):
                        self.value(part)


_UNTOLD = {
    *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__annotate__"),
    *("__abstractmethods__", "_abc_impl", "__firstlineno__", "__static_attributes__", "__match_args__", "__slots__"),
    *("__parameters__", "__orig_bases__", "__annotations_cache__", "__annotate_func__", "__annotate_cache__"),
}


def _forward(kind: type) -> set[str]:
    """Return the members of a module's class that its forward can reach, by name, and what it overrides of torch's."""
    members = {name: member for base in reversed(kind.__mro__) for name, member in vars(base).items()}
    own = {n for b in kind.__mro__ if not _installed(b.__module__) for n in vars(b)}
    # What __init__ does is seen by what it leaves behind.
    found = {name for name in own if hasattr(nn.Module, name)} - {"__init__"}
    left = list(found)
    while left:
        for part in _unwrap_member(members[left.pop()]):
            if isinstance(part, FunctionType):
                names = {name for code in code_digest.nested_code(part.__code__) for name in code.co_names}
                left += (names & own) - found
                found |= names & own
    return found


def _unwrap_member(member: Any) -> list[Any]:
    """Return the functions behind a property or a method of the class, else the member itself."""
    match member:
        case staticmethod() | classmethod():
            return [member.__func__]
        case property():
            return [part for part in (member.fget, member.fset, member.fdel) if part is not None]
    return [] if type(member).__name__ in ("member_descriptor", "getset_descriptor") else [member]


def _rebound_names(code: CodeType) -> set[str]:
    """Return the names outside of a function that it binds itself: they say how often it was called."""
    return {
        str(one.argval)
        for part in code_digest.nested_code(code)
        for one in dis.get_instructions(part)
        if one.opname in ("STORE_GLOBAL", "STORE_DEREF")
    }


def _globals(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield what a function reads of its module, and of what is in there, by name."""
    written = _rebound_names(function.__code__)
    globals_read: dict[str, object] = {}
    for code in code_digest.nested_code(function.__code__):
        steps = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "EXTENDED_ARG")]
        for place, one in enumerate(steps):
            name = str(one.argval)
            if one.opname not in ("LOAD_GLOBAL", "LOAD_NAME") or name not in function.__globals__ or name in written:
                continue
            value = function.__globals__[name]
            for after in steps[place + 1 :]:
                # Of a module or of a namespace only what is read counts: others of its values may be for other ends.
                inside = vars(value) if hasattr(value, "__dict__") and not isinstance(value, type) else {}
                if after.opname not in ("LOAD_ATTR", "LOAD_METHOD") or after.argval not in inside:
                    break
                name, value = f"{name}.{after.argval}", inside[after.argval]
            globals_read[name] = value
    yield from sorted(globals_read.items(), key=lambda pair: pair[0])


def _slot_attributes(value: object) -> Iterator[tuple[str, object]]:
    """Yield the attributes that the classes of `value` keep in slots, where they are set."""
    for base in type(value).__mro__:
        for name, member in vars(base).items() if "__slots__" in vars(base) else ():
            if isinstance(member, MemberDescriptorType):
                with suppress(AttributeError):
                    yield name, member.__get__(value)


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _name(thing: Any) -> str:
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", type(thing).__qualname__)
    return f"{module}.{name}"


@lru_cache(maxsize=4096)
def _installed(module: str | None) -> bool:
    """Return whether a module belongs to Python or to an installed package, not to the user."""
    top = (module or "builtins").partition(".")[0]
    if top in _OURS or (top in sys.stdlib_module_names and top != "__main__"):
        return True
    found = sys.modules.get(top)
    where = getattr(found, "__file__", None) or next(iter(getattr(found, "__path__", ())), None)
    return where is not None and bool({"site-packages", "dist-packages"} & set(Path(where).parts))
