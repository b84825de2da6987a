"""The identity of a run, as digests: of its weights, its data, and of what a user gives to it.

Weights and data count by names, shapes, types and numbers; of rows that are not in memory, `SAMPLED` of them. Any other
value counts by its class and by what it is made of: an object by its attributes, a module by its submodules and their
attributes, a traced one by its operations. Code of the user's counts as `user_code` says: by its files. A value in the
closure of a function is not looked at: an edit of it is not noticed.
"""

from __future__ import annotations

import copyreg
import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn

from splitfed.core import digests
from splitfed.core.code_kinds import installed
from splitfed.core.plain_values import dense_parts
from splitfed.core.rows import RowSource, blocks, in_memory
from splitfed.data.dataset import Dataset
from splitfed.training.user_code import PLAIN, UserCode, name_of

SAMPLED = 64
"""How many rows of a part stand for all of it in a run's description, where they are not in memory."""

_DEPTH = 200
# What every module has for its own ends.
_MACHINERY = {*vars(nn.Module()), "_is_full_backward_hook"}


def data_digest(data: Dataset) -> str:
    """Return the hash of all rows, labels, groups and domains of a data set, before it is split; see `digest`."""
    held: dict[str, Tensor | RowSource | None] = {"x": data.source, "y": data.y}
    held |= {"domains": data.domains, "groups": data.groups}
    held |= {f"target {name}": found.y for name, found in data.targets.items()}
    return digest({name: one for name, one in held.items() if one is not None})


def digest(tensors: Mapping[str, object]) -> str:
    """Return a hash of names, shapes and values; of rows that are not in memory, of `SAMPLED` of them."""
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        if not isinstance(tensor, (Tensor, RowSource)):
            # What a module has of its own in its state dict (`get_extra_state`).
            found.update(f"{name} {tensor!r}".encode())
            continue
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else (len(tensor), *tensor.shape)
        found.update(f"{name} {shape} {tensor.dtype}".encode())
        if not isinstance(tensor, Tensor) and not in_memory(tensor):
            found.update(b"sampled")
            tensor = tensor.take(torch.linspace(0, len(tensor) - 1, min(SAMPLED, len(tensor))).long())
        for few in (tensor.detach().reshape(1, *tensor.shape),) if isinstance(tensor, Tensor) else blocks(tensor):
            found.update(few.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def digest_given(things: Mapping[str, object]) -> dict[str, str]:
    """Return a digest of each file or function of the user's that has a part in `things`, and of each of them.

    `things`: place -> value, as in `{"task of 'logits'": task}`. The keys of what is returned are fit for a message.
    """
    values = _Values()
    found = {f"the {place}": values.digest(thing) for place, thing in things.items()}
    return values.code.digests() | found


def differences(there: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Return what two results of `digest_given` do not agree on, code before values."""
    return [key for key in {**wanted, **there} if there.get(key) != wanted.get(key)]


class _Values:
    """Digests of values, the same in every process; collects the `code` of the classes and functions in them."""

    def __init__(self) -> None:
        self.code = UserCode()
        # What the value at hand is inside of.
        self._open: list[int] = []

    def digest(self, value: Any) -> str:
        """Return a digest of the class of `value` and of all that is in it."""
        if isinstance(value, PLAIN):
            return f"{type(value).__name__} {value!r}"
        value = inspect.unwrap(value) if callable(value) else value
        lines = self.code.take(value if isinstance(value, (type, FunctionType)) else type(value))
        found = [name_of(type(value)), *map(str, lines)]
        if id(value) not in self._open and len(self._open) < _DEPTH:
            self._open.append(id(value))
            parts = [self.digest(part) for part in _parts(value)]
            found += sorted(parts) if isinstance(value, Set) else parts
            self._open.pop()
        return digests.of(json.dumps(found).encode())


def _parts(value: Any) -> Iterable[object]:
    """Return what `value` is made of: what is known of its class, else what a copy of it would be made of."""
    match value:
        case Tensor():
            dense = () if value.is_meta or value.is_quantized else dense_parts(value)
            strided = {str(i): one for i, one in enumerate(dense) if one.layout is torch.strided}
            return str(value.dtype), tuple(value.shape), digest(strided)
        case Mapping():
            return value.items()
        case list() | tuple() | Set():
            return value
        case FunctionType():
            return name_of(value), value.__defaults__, value.__kwdefaults__
        case type() | ModuleType():
            return (name_of(value),)
        case nn.Module():
            return _parts_of_module(value)
        case _ if is_dataclass(value):
            return [(one.name, getattr(value, one.name, None)) for one in fields(value)]
    reduce: Any = copyreg.dispatch_table.get(type(value))
    try:
        told = value.__reduce_ex__(4) if reduce is None else reduce(value)
    except Exception as error:  # noqa: BLE001  of a user's own class, which may refuse to be copied by any error
        return (type(error).__name__,)
    return (told,) if isinstance(told, str) else [list(one) if isinstance(one, Iterator) else one for one in told]


def _parts_of_module(module: nn.Module) -> Iterator[object]:
    """Yield a module's submodules with their weights, hooks and attributes; of a traced one its operations too."""
    for name, part in module.named_modules():
        hidden = "_" if installed(type(part).__module__) else ()
        held = {key: one for key, one in vars(part).items() if key not in _MACHINERY and key[0] not in hidden}
        yield name, type(part), {key: one for key, one in held.items() if not isinstance(one, nn.Module)}
        yield part._parameters, part._buffers
        yield [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
        if isinstance(part, fx.GraphModule):
            yield part.code, [node.target for node in part.graph.nodes if node.op == "call_function"]
