"""State as JSON and dense tensors, and back: what a checkpoint can hold, to the bit, and nothing that could run code.

`encode` turns nested plain values into JSON, in which every tensor is a number that stands for one of a list. What it
does not know is refused with its place; `decode` makes nothing but the types that are listed here.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.grouping import overlapping
from splitfed.core.payload import Layout, layout_of, memory_span
from splitfed.core.plain_values import members_of

TAG = "$"
DEPTH = 100
_Ways = dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]]
_PLAIN = (bool, int, str, type(None))
_LARGEST_INT = 4096
"""Bits of the largest whole number that is written as one; some readers of JSON take no larger one."""
_NAMED: dict[str, Any] = {
    str(value): value
    for value in vars(torch).values()
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format))
}
_TEXTS: _Ways = {
    int: (hex, lambda text: int(text, 16)),
    float: (str, float),
    torch.device: (str, torch.device),
    **dict.fromkeys((torch.dtype, torch.layout, torch.memory_format), (str, _NAMED.__getitem__)),
    type(Ellipsis): (str, lambda _: Ellipsis),
}
"""Type -> how a value of it is written as a text, and read."""


def _bounds(value: Any) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step


_LISTS: _Ways = {
    list: (list, list),
    deque: (list, deque),
    tuple: (list, tuple),
    torch.Size: (list, torch.Size),
    set: (members_of, set),
    frozenset: (members_of, frozenset),
    range: (_bounds, lambda parts: range(*parts)),
    slice: (_bounds, lambda parts: slice(*parts)),
    complex: (lambda value: (value.real, value.imag), lambda parts: complex(*parts)),
}
"""Type -> how a value of it is taken apart into a list, and made of one."""
_READ = {kind.__name__: read for kind, (_, read) in (*_TEXTS.items(), *_LISTS.items())}
_TABLES: dict[str, Callable[..., Any]] = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}
# Those that every version of safetensors writes; others go as bytes.
_STORED = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
)


def encode(state: object, where: str) -> tuple[Any, list[Tensor]]:
    """Return `state` as JSON values, and the tensors in it: dense, contiguous and on the CPU, each with its own memory.

    Raises `InvalidInput`, with its place in `where`, for a value that a checkpoint cannot hold.
    """
    encoding = _Encoding()
    tree = encoding.value(state, where, 0)
    return tree, encoding.stored()


def check_state(state: object, where: str) -> None:
    """Refuse, by `InvalidInput` with its place in `where`, a value in `state` that a checkpoint cannot hold."""
    _Encoding().value(state, where, 0)


def can_be_encoded(value: object) -> bool:
    """Return whether a checkpoint can hold `value`."""
    try:
        check_state(value, "")
    except InvalidInput:
        return False
    return True


def decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that `encode` wrote as `tree`; `tensors`: by their numbers, as texts.

    Raises `ValueError` for what `encode` does not write.
    """
    try:
        return _Decoding(tensors).value(tree)
    except (KeyError, TypeError, IndexError, AttributeError, RuntimeError, OverflowError, RecursionError) as error:
        raise ValueError(f"it holds no state: {type(error).__name__}") from error


def lay_out(array: Any, strides: Sequence[int]) -> Any:
    """Return a copy of `array` with these strides, in bytes, and zeros in the gaps."""
    reaches = [(size - 1) * stride for size, stride in zip(array.shape, strides, strict=True)]
    memory = np.zeros(array.itemsize + sum(map(abs, reaches)), np.uint8)
    start = -sum(min(reach, 0) for reach in reaches)
    placed: Any = np.ndarray(array.shape, array.dtype, memory.data, start, strides) if array.size else array.copy()
    placed[...] = array
    return placed


class _Encoding:
    """The tensors met so far, and how each is told; one that is met again is the same one when it is read."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._told: dict[int, dict[str, Any]] = {}

    def value(self, value: Any, where: str, depth: int) -> Any:
        kind = type(value)
        small = kind is not int or value.bit_length() <= _LARGEST_INT
        if (kind in _PLAIN and small) or (kind is float and math.isfinite(value)):
            return value
        if kind in _TEXTS:
            return {TAG: kind.__name__, "value": _TEXTS[kind][0](value)}
        if depth > DEPTH:
            raise InvalidInput(f"{where} is nested more than {DEPTH} deep, which a checkpoint cannot hold")
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if isinstance(value, (np.ndarray, np.generic)):
            return self._array(value, where)
        if kind in (bytes, bytearray):
            return {TAG: kind.__name__, "value": self._bytes(value)}
        if kind in _TABLES.values():
            return self._table(value, where, depth)
        if kind in _LISTS:
            parts = [self.value(one, f"{where}[{i}]", depth + 1) for i, one in enumerate(_LISTS[kind][0](value))]
            limit = {"limit": value.maxlen} if kind is deque else {}
            return parts if kind is list else {TAG: kind.__name__, "value": parts, **limit}
        raise InvalidInput(
            f"{where} is of type {kind.__qualname__}, which a checkpoint cannot hold; keep numbers, texts, tensors, "
            "and lists and dicts of these"
        )

    def _table(self, table: dict[Any, Any], where: str, depth: int) -> Any:
        held = {key: self.value(one, f"{where}[{key!r}]", depth + 1) for key, one in table.items()}
        # Of what a module's state dict says about its versions.
        extra = vars(table) if type(table) is OrderedDict else {}
        if type(table) is dict and all(type(key) is str for key in table) and TAG not in table:
            return held
        entries = [[self.value(key, f"a key of {where}", depth + 1), one] for key, one in held.items()]
        more = {"extra": self.value(dict(extra), f"an attribute of {where}", depth + 1)} if extra else {}
        return {TAG: type(table).__name__, "value": entries, **more}

    def _tensor(self, tensor: Tensor, where: str) -> dict[str, Any]:
        if (
            type(tensor) not in (Tensor, nn.Parameter, nn.Buffer)
            or tensor.layout is not torch.strided
            or tensor.is_meta
        ):
            raise InvalidInput(
                f"{where} is a {tensor.layout} {type(tensor).__name__} on {tensor.device}, which a checkpoint cannot "
                "hold; keep a dense tensor"
            )
        if tensor.is_quantized:
            raise InvalidInput(f"{where} is a quantized tensor, which a checkpoint cannot hold; keep its int_repr()")
        if id(tensor) not in self._told:
            found: dict[str, Any] = {TAG: "tensor", "value": len(self._tensors)}
            self._told[id(tensor)] = found
            self._tensors.append(tensor)
            plain = list(range(tensor.dim()))
            if (layout := layout_of(tensor)) is not None:
                found |= {"strides": list(layout.strides), "lead": layout.lead}
            elif (order := _order(tensor)) != plain:
                found["order"] = order
            if layout is not None or tensor.dtype not in _STORED:
                found["shape"] = [tensor.shape[i] for i in found.get("order", plain)]
            if tensor.dtype not in _STORED:
                found["dtype"] = str(tensor.dtype)
            if tensor.device.type != "cpu":
                found["device"] = str(tensor.device)
            if type(tensor) is nn.Parameter:
                found["parameter"] = tensor.requires_grad
            elif tensor.is_leaf and tensor.requires_grad:
                found["learns"] = True
        return self._told[id(tensor)]

    def _array(self, value: Any, where: str) -> dict[str, Any]:
        array, scalar = np.asarray(value), isinstance(value, np.generic)
        dtype = array.dtype
        if dtype.hasobject or dtype.names is not None or type(array[()] if scalar else array) is not type(value):
            what = "an array" if type(value) is np.ndarray else f"of type {type(value).__qualname__},"
            raise InvalidInput(f"{where} is {what} of {dtype}, which a checkpoint cannot hold; keep numbers")
        told: dict[str, Any] = {"dtype": dtype.str, "shape": list(array.shape), "scalar": scalar}
        if not array.flags.c_contiguous:
            told["strides"] = list(array.strides)
        return {TAG: "array", "value": self._bytes(array.tobytes()), **told}

    def _bytes(self, raw: bytes | bytearray) -> int:
        taken = bytearray(raw)
        self._tensors.append(torch.frombuffer(taken, dtype=torch.uint8) if taken else torch.empty(0, dtype=torch.uint8))
        return len(self._tensors) - 1

    def stored(self) -> list[Tensor]:
        """Return what is written; of tensors that overlap in memory, all that they span, by the first of them."""
        told = {found["value"]: found for found in self._told.values()}
        spans = [(*span, number) for number in told if (span := memory_span(self._tensors[number])) is not None]
        for group in overlapping(spans):
            tensors = [self._tensors[number] for number in group]
            if len({(one.dtype, one.device, one.is_conj(), one.is_neg()) for one in tensors}) > 1:
                continue
            start = min(one.storage_offset() for one in tensors)
            ends = [one.storage_offset() + Layout(one.stride(), 0).reach(one.shape) for one in tensors]
            memory = tensors[0].detach().as_strided((max(ends) - start,), (1,), start)
            for number, one in zip(group, tensors, strict=True):
                place = {"of": group[0], "at": one.storage_offset() - start, "lead": Layout.of(memory).lead}
                told[number].pop("order", None)
                told[number] |= {"shape": list(one.shape), "strides": list(one.stride()), **place}
                self._tensors[number] = torch.empty(0)
            self._tensors[group[0]] = memory
        storages: set[int] = set()
        return [_dense(one, told.get(n, {}).get("order"), storages) for n, one in enumerate(self._tensors)]


def _dense(tensor: Tensor, order: list[int] | None, storages: set[int]) -> Tensor:
    """Return the numbers of `tensor`, its dimensions in `order`, in a storage that is not among `storages`."""
    held = tensor.detach().resolve_conj().resolve_neg()
    found = (held if order is None else held.permute(order)).to("cpu").contiguous()
    if tensor.dtype not in _STORED:
        found = found.reshape(-1).view(torch.uint8)
    start = found.untyped_storage().data_ptr()
    if start in storages:
        return found.clone()
    storages.add(start)
    return found


def _order(tensor: Tensor) -> list[int]:
    """Return the dimensions of `tensor` from the outermost in memory to the innermost, where it is dense."""
    plain = list(range(tensor.dim()))
    if tensor.is_contiguous():
        return plain
    strides = torch.empty_like(tensor, device="meta").stride()  # those that a copy has
    return sorted(plain, key=lambda i: -strides[i])


class _Decoding:
    """Makes a state of JSON values; every tensor is made once."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._made: dict[int, Tensor] = {}
        self._memory: dict[int, Tensor] = {}

    def value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.value(one) for one in tree]
        if not isinstance(tree, dict):
            return tree
        if TAG not in tree:
            return {key: self.value(one) for key, one in tree.items()}
        tag = tree[TAG]
        if tag == "tensor":
            return self._tensor(tree)
        if tag == "array":
            return self._array(tree)
        if tag in ("bytes", "bytearray"):
            return (bytes if tag == "bytes" else bytearray)(self._bytes(tree))
        if tag in _TABLES:
            table = _TABLES[tag]({self.value(key): self.value(one) for key, one in tree["value"]})
            if "extra" in tree:
                vars(table).update(self.value(tree["extra"]))
            return table
        made = _READ[tag](self.value(tree["value"]))
        return deque(made, tree["limit"]) if tag == "deque" else made

    def _tensor(self, tree: Mapping[str, Any]) -> Tensor:
        number = tree["value"]
        if number not in self._made:
            found = self._numbers(tree)
            if "parameter" in tree:
                found = nn.Parameter(found, tree["parameter"])
            self._made[number] = found.requires_grad_() if "learns" in tree else found
        return self._made[number]

    def _numbers(self, tree: Mapping[str, Any]) -> Tensor:
        number = tree.get("of", tree["value"])
        found = self._tensors[str(number)].to(torch.device(tree.get("device", "cpu")))
        if "dtype" in tree:
            found = found.view(_NAMED[tree["dtype"]])
        if "of" in tree:
            if number not in self._memory:
                self._memory[number] = Layout((1,), tree["lead"]).lay_out(found)
            return self._memory[number].as_strided(tree["shape"], tree["strides"], tree["lead"] + tree["at"])
        if "shape" in tree:
            found = found.reshape(tree["shape"])
        if "strides" in tree:
            return Layout(tuple(tree["strides"]), tree["lead"]).lay_out(found)
        if "order" in tree:
            found = found.permute(sorted(range(len(tree["order"])), key=tree["order"].__getitem__))
        return found

    def _array(self, tree: Mapping[str, Any]) -> Any:
        found = np.frombuffer(self._bytes(tree), np.dtype(tree["dtype"])).reshape(tree["shape"]).copy()
        if "strides" in tree:
            return lay_out(found, tree["strides"])
        return found[()] if tree["scalar"] else found

    def _bytes(self, tree: Mapping[str, Any]) -> bytes:
        raw: bytes = self._tensors[str(tree["value"])].view(torch.uint8).numpy().tobytes()
        return raw
