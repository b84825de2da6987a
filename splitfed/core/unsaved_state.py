"""State of a module that its state dict lacks: buffers that are not saved, and attributes that training changes.

What a party's segment holds besides its weights is compared with what it held at first, and what is another is kept as
plain values and tensors, by the place where it is. Tensors, numbers, texts, arrays, generators of random numbers, and
lists, deques, tuples, dicts and sets of these; objects of other classes where the module had them before. Attributes
that a class of modules names in `transient` are left out: every call makes them anew before anybody reads them.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.object_kinds import UNSAVED, kind_of
from splitfed.core.plain_values import Identity, Key, dense_parts
from splitfed.core.reachable import Change, Location, Opaque, Record, Records, bare, put_back, reach
from splitfed.core.reachable_names import name_changes
from splitfed.core.state_encoding import can_be_encoded

Path = tuple[tuple[str, Any], ...]
_MAKERS: dict[str, Any] = {t.__name__: t for t in (list, tuple, dict, set, frozenset, OrderedDict, deque)}
_WHOLE = ("array", "generator")
_UNFILLED = ("tuple", "frozenset")
_FIRST: weakref.WeakKeyDictionary[nn.Module, dict[Path, str]] = weakref.WeakKeyDictionary()
_UNKEPT = (
    "keep what changes in buffers, or in attributes that are tensors, numbers, arrays, or lists, tuples, dicts and "
    "sets of these"
)


def first_state(module: nn.Module) -> dict[Path, str]:
    """Return digests, by place, of all that `module` holds outside of its state dict; of each module found once."""
    if (found := _FIRST.get(module)) is None:
        found = _FIRST[module] = state_digests(module)
    return found


def state_digests(module: nn.Module) -> dict[Path, str]:
    """Return what `first_state` does, of the module as it is now."""
    records = reach(module, Location(), code=False)
    return _digests(module, records, _paths(records))


def unsaved_state(module: nn.Module, first: Mapping[Path, str]) -> list[Any]:
    """Return what `module` holds outside of its state dict that is not as `first` says, as tensors and plain values.

    Raises `InvalidInput` for what no checkpoint holds: a function, an iterator, an object or weight that is new.
    """
    records = reach(module, Location(), code=False)
    paths = _paths(records)
    digests = _digests(module, records, paths)
    changed = {place for place, path in paths.items() if path in digests and digests[path] != first.get(path)}
    for place in reversed(records):
        # A tuple is made anew with what has changed in it.
        if isinstance(records[place].value, tuple) and changed & {
            one for one in records[place].contents.values() if isinstance(one, Location)
        }:
            changed.add(place)
    for place in [one for one in records if one in changed]:
        if (key := _unkept_entry(records[place], paths[place], digests, first)) is not None:
            (name,) = name_changes([Change(place, key or None, False)], records)
            raise InvalidInput(f"the {name} is not as it was before training, and no checkpoint can hold it: {_UNKEPT}")
    return [_encode(record, paths, paths[place]) for place, record in records.items() if place in changed]


def _unkept_entry(
    record: Record, path: Path, digests: Mapping[Path, str], first: Mapping[Path, str]
) -> Key | tuple[()] | None:
    """Return the entry of a changed record that no checkpoint holds, () for the record itself, None where it can."""
    known = first.get(path, "").partition(" ")[0] == digests[path].partition(" ")[0]
    if (record.kind.name in ("object", "module") and not known) or record.kind.name in ("iterator", "function"):
        return ()
    for key, one in _lasting(record).items():
        entry = (*path, (key.role, key.name))
        lasting = isinstance(one, Location) or digests.get(entry) == first.get(entry)
        if not lasting or not can_be_encoded(key.name):
            return key
    return () if _cannot_hold(record, ()) else None


def load_unsaved_state(module: nn.Module, saved: Sequence[Any]) -> None:
    """Go back to what `unsaved_state` returned."""
    if not saved:
        return
    fresh = reach(module, Location(), code=False)
    # What stays itself may hold what is made anew.
    records = {place: replace(record, mark=None) for place, record in fresh.items()}
    places = {path: place for place, path in _paths(fresh).items()}
    for path, tag, _, stored in saved:
        place = places.setdefault(path, Location())
        records[place] = _made(tag, stored, fresh.get(place), path)
    for path, _, entries, _ in saved:
        place = places[path]
        kept = fresh[place].contents if place in fresh else {}
        for role, name, how, what in entries:
            key, held = Key(role, name), what
            if how == "kept":
                held = kept.get(key)
            elif how == "place" and (held := places.get(what)) is None:
                raise _lacking(what)
            records[place].contents[key] = held
    # Those are made of what they hold.
    unmade = {places[path] for path, tag, _, _ in saved if tag in _UNFILLED}

    def object_of(one: Any) -> Any:
        if isinstance(one, Location) and one in unmade:
            unmade.discard(one)
            record = records[one]
            made = type(record.value)
            record.value = made(map(object_of, record.contents.values()) if record.data is None else record.data)
        return bare(one, records)

    for place in tuple(unmade):
        object_of(place)
    put_back(records)


def _made(tag: str, stored: Any, fresh: Record | None, path: Path) -> Record:
    """Return the object that a saved one becomes, still without contents: what is there if it can be filled, or new."""
    value = made = None if fresh is None else fresh.value
    data = None if tag == "tensor" else stored if tag in _WHOLE else stored["data"]
    if tag == "tensor" and isinstance(value, Tensor) and value.shape == stored.shape and value.dtype == stored.dtype:
        with torch.no_grad():
            value.copy_(stored)
    elif tag == "tensor":
        made = stored.clone().to(value.device) if isinstance(value, Tensor) else stored.clone()
    elif tag == "array":
        made = stored.copy()
    elif tag == "deque" and type(value) is not deque:
        made = deque(maxlen=stored["limit"])
    elif tag in _MAKERS and type(value) is not _MAKERS[tag]:
        made = _MAKERS[tag]()
    elif fresh is None:
        raise _lacking(path)
    elif tag == "module":
        data = {**fresh.data, UNSAVED: set(stored["data"])}
    kind = fresh.kind if fresh is not None and made is value else kind_of(type(made))
    assert kind is not None
    return Record(made, kind, False, data=data)


def _lacking(path: Path) -> InvalidInput:
    place = ".".join(str(name) for _, name in path)
    return InvalidInput(f"the checkpoint needs {place!r}, which the model lacks: it is of another model")


def saved_tensors(module: nn.Module) -> set[int]:
    """Return the identities of all weights of `module`, and of all else that its state dict holds."""
    return {id(tensor) for tensor in (*module.state_dict(keep_vars=True).values(), *module.parameters())}


def cannot_be_kept(change: Change, after: Records) -> bool:
    """Return whether `change` leaves what a checkpoint cannot hold: shared state, an iterator, a new object."""
    if change.shared or any(isinstance(key.name, Identity) for key in change.place.path()):
        return True
    if _cannot_hold(after[change.place], ("iterator", "function")):
        return True
    pending = [] if change.key is None else [after[change.place].contents.get(change.key)]
    met: set[Location] = set()
    while pending:
        value = pending.pop()
        if not isinstance(value, Location):
            if not can_be_encoded(value):
                return True
            continue
        if value in met:
            continue
        met.add(value)
        if _cannot_hold(after[value], ("iterator", "function", "object", "module")):
            return True
        pending += after[value].contents.values()
    return False


def _cannot_hold(record: Record, kinds: Sequence[str]) -> bool:
    """Return whether a record is of one of these kinds, or has data or names of entries that no checkpoint holds."""
    if record.kind.name in kinds:
        return True
    if isinstance(record.value, Tensor):
        return not record.value.is_meta and not can_be_encoded(record.value)
    told = [key.name for key in record.contents]
    return not can_be_encoded(told if record.kind.name == "module" else [*told, record.data])


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
            made.update(repr((key, paths[one] if isinstance(one, Location) else one)).encode())
            if not isinstance(one, Location) and not can_be_encoded(one):
                told = f"{type(one.value)} {one!r}" if isinstance(one, Opaque) else repr(one)
                found[(*path, (key.role, key.name))] = told
        found[path] = f"{type(record.value).__qualname__} {made.hexdigest()}"
    return found


def _transient(record: Record) -> tuple[str, ...]:
    return getattr(type(record.value), "transient", ())


def _lasting(record: Record) -> dict[Key, Any]:
    """Return the contents of an object that its next call does not make anew."""
    names = _transient(record)
    return {key: one for key, one in record.contents.items() if not (key.role == "attribute" and key.name in names)}


def digest_value(record: Record, saved: bool = False) -> Any:
    """Return the hash of what an object is besides what it holds; of a `saved` tensor that of its shape alone."""
    value, made = record.value, hashlib.blake2b(digest_size=16)
    if isinstance(value, Tensor):
        made.update(f"{tuple(value.shape)} {value.dtype}".encode())
        if not (saved or value.is_meta):
            for one in dense_parts(value):
                made.update(one.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        made.update(f"{value.shape} {value.dtype}".encode() + value.tobytes())
    elif isinstance(record.data, Tensor):
        made.update(record.data.numpy().tobytes())
    elif record.kind.name == "module":
        made.update(repr(sorted(record.data[UNSAVED])).encode())
    else:
        made.update(repr(record.data).encode())
    return made


def _encode(record: Record, paths: Mapping[Location, Path], path: Path) -> list[Any]:
    """Return path, kind, entries and data of an object; what its next call makes anew is kept as it is found."""
    lasting = _lasting(record)

    def told(key: Key, one: Any) -> list[Any]:
        if key in lasting and isinstance(one, Location):
            return [*key, "place", paths[one]]
        return [*key, "value", one] if key in lasting and can_be_encoded(one) else [*key, "kept", None]

    value, entries = record.value, [told(key, one) for key, one in record.contents.items()]
    if isinstance(value, Tensor):
        return [path, "tensor", entries, value.detach().clone()]
    if isinstance(value, (np.ndarray, bytearray)):
        return [path, "array", [], value.copy()]
    if record.kind.name == "generator":
        return [path, "generator", [], record.data]
    tag = type(value).__name__ if type(value) in _MAKERS.values() else record.kind.name
    limit = value.maxlen if isinstance(value, deque) else None
    data = sorted(record.data[UNSAVED]) if record.kind.name == "module" else record.data
    return [path, tag, entries, {"limit": limit, "data": data}]
