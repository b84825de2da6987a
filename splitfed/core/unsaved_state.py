"""State of a module that its state dict lacks: buffers that are not saved, and attributes that training changes.

What a party's segment holds besides its weights is compared with what it held at first, and what is another is kept as
plain values and tensors, by the place where it is. Tensors, numbers, texts, arrays, and lists, deques, tuples, dicts
and sets of these; objects of other classes, generators of random numbers among them, where the module had them before.
Attributes that a class of modules names in `transient` are left out: every call makes them anew before anybody reads
them.

One rule says what a checkpoint can hold: what comes back as it is, in class, order, layout and shared memory, when it
is written, read and put into a copy of the module as it was at first. `check_comes_back` tries that before training, on
a segment made by hand whose Python values change, and whenever a checkpoint is made.
"""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.grouping import overlapping
from splitfed.core.object_kinds import UNSAVED, kind_of
from splitfed.core.payload import memory_span, not_dense, storage_of
from splitfed.core.plain_values import Identity, Key, base_of, dense_parts, members_of
from splitfed.core.reachable import Change, Location, Record, Records, bare, put_back, reach
from splitfed.core.reachable_names import describe_place, name_changes
from splitfed.core.state_encoding import can_be_encoded, decode, encode, lay_out
from splitfed.core.unchanging import Opaque

Path = tuple[tuple[str, Any], ...]
_MAKERS: dict[str, type] = {t.__name__: t for t in (list, tuple, dict, set, frozenset, OrderedDict, deque)}
_NUMBERS = {t.__name__: t for t in (Tensor, np.ndarray, bytearray)}
_THERE = "there"
"""What is saved of an object whose class is not among those: it goes into the one that a new model has in its place."""
_FIRST: weakref.WeakKeyDictionary[nn.Module, dict[Path, str]] = weakref.WeakKeyDictionary()
UNKEPT = (
    "keep what changes in buffers, or in attributes that are tensors, numbers, arrays of numbers with memory of their "
    "own, or lists, tuples and dicts of these (sets of numbers or texts alone)"
)


class NotKept(InvalidInput):
    """State of a module, `name`, that no checkpoint can hold."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"the {name} is not as it was before training, and no checkpoint can hold it: {UNKEPT}")


def first_state(module: nn.Module) -> dict[Path, str]:
    """Return digests, by place, of all that `module` holds outside of its state dict; of each module found once."""
    if (found := _FIRST.get(module)) is None:
        found = _FIRST[module] = state_digests(module)
    return found


def module_of(first: Mapping[Path, str]) -> nn.Module:
    """Return the module of which `first_state` returned `first`; its topology holds it."""
    return next(module for module, found in _FIRST.items() if found is first)


def state_digests(module: nn.Module) -> dict[Path, str]:
    """Return what `first_state` does, of the module as it is now."""
    records = reach(module, Location(), code=False)
    return _digests(module, records, _paths(records))


def things_digest(thing: object, weights: Iterable[nn.Parameter] = ()) -> dict[Path, str]:
    """Return digests, by place, of all that something which is no segment holds, such as a loss or an optimizer.

    `weights`: those of segments, whose values are left out.
    """
    holder = nn.Module()
    for number, weight in enumerate(weights):
        holder.register_parameter(str(number), weight)
    # In a list: of what is registered values are left out.
    vars(holder)["things"] = [thing]
    return state_digests(holder)


def unsaved_state(module: nn.Module, first: Mapping[Path, str]) -> list[Any]:
    """Return what `module` holds outside of its state dict that is not as `first` says, as tensors and plain values.

    Raises `NotKept` for what no checkpoint holds: a function, an iterator, a weight that is new, and an object of
    another class than those of numbers and containers where `first` has none of that class.
    """
    records = reach(module, Location(), code=False)
    paths = _paths(records)
    digests = _digests(module, records, paths)
    changed = {place for place, path in paths.items() if path in digests and digests[path] != first.get(path)}
    for group in overlapping(_spans(records)):
        changed |= set(group) if changed & set(group) else set()
    saved = saved_tensors(module)
    for place, record in records.items():
        # Weights lose their gradients after a step; what other tensors gather is read by the next one, or by nobody.
        value = record.value
        if isinstance(value, Tensor) and id(value) not in saved and value.is_leaf and value.grad is not None:
            raise NotKept(f"gradient (.grad) of the {describe_place(place, records)}")
    for place in reversed(records):
        # A tuple is made anew with what has changed in it.
        if isinstance(records[place].value, tuple) and changed & {
            one for one in records[place].contents.values() if isinstance(one, Location)
        }:
            changed.add(place)
    for place in [one for one in records if one in changed]:
        if (key := _unkept_entry(records[place], paths[place], digests, first)) is not None:
            raise _not_kept(place, key or None, records)
    return _copied([_encode(place, records, paths) for place in records if place in changed])


def check_comes_back(module: nn.Module, saved: Mapping[str, Sequence[Any]], fresh: nn.Module) -> None:
    """Refuse, by `NotKept`, what a checkpoint of `saved`, by submodule of `module`, does not bring back as it is.

    Tried on `fresh`, a copy of the module as it was at first: order, layout and sharing of memory are compared, too.
    """
    records = reach(module, Location(), code=False)
    places = {path: place for place, path in _paths(records).items()}
    (path, *_), *_ = next(iter(saved.values()))
    name = next(iter(saved))
    # What one submodule holds of another is met there.
    first = places.get(((("submodule", name),) if name else ()) + tuple(path), next(iter(records)))
    try:
        tree, tensors = encode(saved, "the state")
        read = decode(tree, {str(number): tensor for number, tensor in enumerate(tensors)})
        for name, state in read.items():
            load_unsaved_state(fresh.get_submodule(name), state)
    except (InvalidInput, ValueError, TypeError, RuntimeError, AttributeError):
        raise _not_kept(first, None, records) from None
    wanted, found = _whole(module), _whole(fresh)
    for path in [*wanted, *found]:
        if wanted.get(path) != found.get(path):
            raise _not_kept(places.get(path, first), None, records)


def _whole(module: nn.Module) -> dict[Path, str]:
    """Return `state_digests` with what tells exact layout, and which objects share memory."""
    records = reach(module, Location(), code=False)
    paths = _paths(records)
    found = _digests(module, records, paths)
    for place, record in records.items():
        if (path := paths[place]) in found and isinstance(record.value, (Tensor, np.ndarray)):
            found[path] += f" {_strides(record.value)}"
    starts = {place: start for start, _, place in _spans(records)}
    for group in overlapping(_spans(records)):
        for place in group:
            if paths[place] in found:
                found[paths[place]] += f" {starts[place] - starts[group[0]]} from {paths[group[0]]}"
    return found


def _not_kept(place: Location, key: Key | None, records: Records) -> NotKept:
    (name,) = name_changes([Change(place, key, False)], records)
    return NotKept(name)


def _spans(records: Records) -> list[tuple[int, int, Location]]:
    """Return between which addresses the numbers of tensors and arrays lie."""
    found = []
    for place, record in records.items():
        value, span = record.value, None
        if isinstance(value, Tensor):
            span = memory_span(value)
        elif isinstance(value, np.ndarray) and value.size:
            reaches = [(size - 1) * stride for size, stride in zip(value.shape, value.strides, strict=True)]
            ends = [sum(one for one in reaches if (one > 0) is up) for up in (False, True)]
            span = value.ctypes.data + ends[0], value.ctypes.data + ends[1] + value.itemsize
        if span is not None:
            found.append((*span, place))
    return found


def _unkept_entry(
    record: Record, path: Path, digests: Mapping[Path, str], first: Mapping[Path, str]
) -> Key | tuple[()] | None:
    """Return the entry of a changed record that no checkpoint holds, () for the record itself, None where it can."""
    known = first.get(path, "").partition(" ")[0] == digests[path].partition(" ")[0]
    if (_tag(record.value) == _THERE and not known) or record.kind.name in ("iterator", "function"):
        return ()
    for key, one in _lasting(record).items():
        entry = (*path, (key.role, key.name))
        lasting = isinstance(one, Location) or digests.get(entry) == first.get(entry)
        if not lasting or not can_be_encoded(key.name):
            return key
    told = [key.name for key in record.contents], _own_data(record)
    return None if can_be_encoded(told) else ()


def load_unsaved_state(module: nn.Module, saved: Sequence[Any]) -> None:
    """Go back to what `unsaved_state` returned."""
    if not saved:
        return
    saved = _copied(saved)
    times = Counter(storage_of(data) for *_, data in saved if isinstance(data, Tensor))
    fresh = reach(module, Location(), code=False)
    # What stays itself may hold what is made anew.
    records = {place: replace(record, mark=None) for place, record in fresh.items()}
    places = {path: place for place, path in _paths(fresh).items()}
    unmade: set[Location] = set()
    for path, tag, limit, _, data in saved:
        place = places.setdefault(path, Location())
        alone = not isinstance(data, Tensor) or times[storage_of(data)] == 1
        records[place] = made = _made(tag, limit, data, fresh.get(place), path, alone)
        if isinstance(made.value, (tuple, frozenset)):
            unmade.add(place)
    for path, _, _, entries, _ in saved:
        place = places[path]
        kept = fresh[place].contents if place in fresh else {}
        for role, name, how, what in entries:
            key, held = Key(role, name), what
            if how == "kept":
                held = kept.get(key)
            elif how == "place" and (held := places.get(what)) is None:
                raise _lacking(what)
            elif how == "meta":
                held = Opaque(torch.empty(what[0], dtype=what[1], device="meta"))
            records[place].contents[key] = held

    # Those are made of what they hold.
    def object_of(one: Any) -> Any:
        if isinstance(one, Location) and one in unmade:
            unmade.discard(one)
            record = records[one]
            items = [object_of(held) for key, held in record.contents.items() if key.role == "item"]
            base = base_of(record.value, tuple, frozenset)
            record.value = base.__new__(type(record.value), items if record.data is None else record.data)
        return bare(one, records)

    for place in tuple(unmade):
        object_of(place)
    put_back(records)


def _copied(saved: Sequence[Any]) -> list[Any]:
    """Return a copy in which arrays lie as they do, and tensors that share memory go on sharing it."""
    arrays = [data for *_, data in saved if isinstance(data, np.ndarray)]
    return copy.deepcopy(list(saved), {id(one): lay_out(one, one.strides) for one in arrays})


def _made(tag: str, limit: int | None, data: Any, fresh: Record | None, path: Path, alone: bool) -> Record:
    """Return the object that a saved one becomes, still without contents: what is there if it can be filled, or new.

    `alone`: whether it shares its memory with no other.
    """
    value: Any = None if fresh is None else fresh.value
    made: Any = value
    if tag == _THERE:
        if fresh is None:
            raise _lacking(path)
        if isinstance(value, Tensor):
            if not (alone and _write(value, data)):
                value.data = data.to(value.device)
            data = None
        elif fresh.kind.name == "module":
            data = {**fresh.data, UNSAVED: set(data)}
        return Record(value, fresh.kind, False, data=data)
    if tag == Tensor.__name__:
        fits = alone and type(value) is Tensor and value.requires_grad == data.requires_grad
        if not (fits and _write(value, data)):
            made = data.to(value.device) if isinstance(value, Tensor) else data
        data = None
    elif tag in _NUMBERS:
        made = data
    elif type(value) is not _MAKERS[tag] or getattr(value, "maxlen", None) != limit:
        made = _MAKERS[tag]() if limit is None else deque(maxlen=limit)
    kind = kind_of(type(made))
    assert kind is not None
    return Record(made, kind, False, data=data)


def _write(tensor: Tensor, numbers: Tensor) -> bool:
    """Write `numbers` into a tensor of the same shape, type and layout; return whether it is one."""
    same = all(getattr(tensor, name) == getattr(numbers, name) for name in ("shape", "dtype"))
    if not same or tensor.stride() != numbers.stride():
        return False
    with torch.no_grad():
        tensor.copy_(numbers)
    return True


def _lacking(path: Path) -> InvalidInput:
    place = ".".join(str(name) for _, name in path)
    return InvalidInput(f"the checkpoint needs {place!r}, which the model lacks: it is of another model")


def saved_tensors(module: nn.Module) -> set[int]:
    """Return the identities of all weights of `module`, and of all else that its state dict holds."""
    return {id(tensor) for tensor in (*module.state_dict(keep_vars=True).values(), *module.parameters())}


def _paths(records: Records) -> dict[Location, Path]:
    """Return the keys that lead to every place, with the order in its table for one that is an object, or of a hook."""
    found: dict[Location, Path] = {}
    for place in records:
        if place.parent is None or place.key is None:
            found[place] = ()
            continue
        role, name = place.key
        # torch numbers all hooks of a process.
        hook = place.parent.key is not None and place.parent.key.role == "hooks"
        if hook or isinstance(name, Identity):
            name = f"<{'' if hook else repr(name)} {list(records[place.parent].contents).index(place.key)}>"
        found[place] = (*found[place.parent], (role, name))
    return found


def _digests(module: nn.Module, records: Records, paths: Mapping[Location, Path]) -> dict[Path, str]:
    """Return what tells every place's contents, its class first; also of each entry that no checkpoint can hold.

    Of what the state dict holds the shape alone is told.
    """
    saved = saved_tensors(module)
    passing = {(*paths[place], ("attribute", name)) for place, record in records.items() for name in _transient(record)}
    found: dict[Path, str] = {}
    for place, record in records.items():
        path = paths[place]
        if passing and any(path[: len(one)] == one for one in passing):
            continue
        if isinstance(record.value, Tensor) and record.value.is_meta:
            # Another party's.
            continue
        made = digest_value(record, id(record.value) in saved)
        for key, one in _lasting(record).items():
            name = Opaque(key.name.value) if isinstance(key.name, Identity) else ""
            made.update(repr((key, name, paths[one] if isinstance(one, Location) else one)).encode())
            if not isinstance(one, Location) and not can_be_encoded(one):
                told = f"{type(one.value)} {one!r}" if isinstance(one, Opaque) else repr(one)
                found[(*path, (key.role, key.name))] = told
        found[path] = f"{type(record.value).__module__}.{type(record.value).__qualname__} {made.hexdigest()}"
    return found


def _transient(record: Record) -> tuple[str, ...]:
    return getattr(type(record.value), "transient", ())


def _lasting(record: Record) -> dict[Key, Any]:
    """Return the contents of an object that its next call does not make anew."""
    names = _transient(record)
    return {key: one for key, one in record.contents.items() if not (key.role == "attribute" and key.name in names)}


def digest_value(record: Record, saved: bool = False) -> Any:
    """Return the hash of what an object is besides what it holds; of a `saved` tensor that of its form alone."""
    value, made = record.value, hashlib.blake2b(digest_size=16)
    if isinstance(value, Tensor):
        made.update(f"{tuple(value.shape)} {value.dtype} {_layout(value)}".encode())
        if not (saved or value.is_meta):
            made.update(f"{value.is_leaf and value.requires_grad}".encode())
            for one in dense_parts(value):
                plain = one.cpu().resolve_conj().resolve_neg()
                made.update(plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        made.update(f"{value.shape} {value.dtype} {_layout(value)}".encode() + np.ndarray.tobytes(value))
    elif isinstance(record.data, Tensor):
        made.update(record.data.numpy().tobytes())
    elif record.kind.name == "module":
        made.update(repr(sorted(record.data[UNSAVED])).encode())
    else:
        told = members_of(record.data) if isinstance(record.data, set) else record.data
        made.update(f"{told!r} {getattr(value, 'maxlen', None) if isinstance(value, deque) else None}".encode())
    return made


def _layout(value: Any) -> Any:
    """Return the strides of a copy of a tensor or an array, None where its numbers lie one behind the other."""
    if isinstance(value, np.ndarray):
        return None if value.flags.c_contiguous else np.empty_like(value, subok=False).strides
    if not_dense(value) is not None or value.is_contiguous():
        return None
    return torch.empty_like(value, device="meta").stride()


def _strides(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.strides
    return None if not_dense(value) is not None else (value.stride(), value.is_conj(), value.is_neg())


def _tag(value: Any) -> str:
    """Return the name of the class of `value` where one can be made anew, else that it has to be there."""
    name = type(value).__name__
    return name if type(value) in (*_MAKERS.values(), *_NUMBERS.values()) else _THERE


def _own_data(record: Record) -> Any:
    """Return what an object is besides what it holds, as a checkpoint holds it."""
    value = record.value
    if isinstance(value, Tensor):
        learns = value.is_leaf and value.requires_grad
        return None if value.is_meta else value.detach().requires_grad_(learns and type(value) is Tensor)
    if isinstance(value, (set, frozenset)) and record.data is not None:
        return members_of(value)
    if isinstance(value, np.ndarray):
        return value.view(np.ndarray)
    return sorted(record.data[UNSAVED]) if record.kind.name == "module" else record.data


def _encode(place: Location, records: Records, paths: Mapping[Location, Path]) -> list[Any]:
    """Return path, tag, limit, entries and data of an object; what its next call makes anew is kept as it is found."""
    record = records[place]
    lasting = _lasting(record)

    def told(key: Key, one: Any) -> list[Any]:
        if key in lasting and isinstance(one, Location):
            held = records[one].value
            if isinstance(held, Tensor) and held.is_meta:
                return [*key, "meta", [held.shape, held.dtype]]
            return [*key, "place", paths[one]]
        return [*key, "value", one] if key in lasting and can_be_encoded(one) else [*key, "kept", None]

    limit = record.value.maxlen if isinstance(record.value, deque) else None
    entries = [told(key, one) for key, one in record.contents.items()]
    return [paths[place], _tag(record.value), limit, entries, _own_data(record)]
