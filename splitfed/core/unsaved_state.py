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
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.object_kinds import TENSOR, kind_of
from splitfed.core.plain_values import Identity, Key, dense_parts
from splitfed.core.reachable import Change, Location, Opaque, Record, Records, reach
from splitfed.core.reachable_names import name_changes
from splitfed.core.state_encoding import can_be_encoded

Path = tuple[tuple[str, Any], ...]
_MAKERS: dict[str, Any] = {t.__name__: t for t in (list, tuple, dict, set, frozenset, OrderedDict, deque)}
_WHOLE = ("tensor", "array", "generator")
_UNSAVED = "_non_persistent_buffers_set"
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
    _Loading(fresh, saved).run()


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
    saved = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
    saved |= {id(weight) for weight in module.parameters()}
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
                told = f"{type(one.value)}" if isinstance(one, Opaque) else repr(one)
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
        made.update(repr(sorted(record.data[_UNSAVED])).encode())
    else:
        made.update(repr(record.data).encode())
    return made


def _encode(record: Record, paths: Mapping[Location, Path], path: Path) -> list[Any]:
    value = record.value
    entries = []
    for key, one in record.contents.items():
        if key not in _lasting(record):
            entries.append([key.role, key.name, "kept", None])
        elif isinstance(one, Location):
            entries.append([key.role, key.name, "place", paths[one]])
        elif can_be_encoded(one):
            entries.append([key.role, key.name, "value", one])
        else:
            entries.append([key.role, key.name, "kept", None])
    if isinstance(value, Tensor):
        return [path, "tensor", entries, value.detach().clone()]
    if isinstance(value, (np.ndarray, bytearray)):
        return [path, "array", [], value.copy()]
    if record.kind.name == "generator":
        return [path, "generator", [], record.data]
    tag = type(value).__name__ if type(value) in _MAKERS.values() else record.kind.name
    limit = value.maxlen if isinstance(value, deque) else None
    data = sorted(record.data[_UNSAVED]) if record.kind.name == "module" else record.data
    return [path, tag, entries, {"limit": limit, "data": data}]


class _Loading:
    """Objects by their place: those that the fresh module has, filled anew, and those that it lacks."""

    def __init__(self, fresh: Records, saved: Sequence[Any]) -> None:
        self._paths = _paths(fresh)
        self._fresh = {self._paths[place]: record for place, record in fresh.items()}
        self._saved = {tuple((role, name) for role, name in path): rest for path, *rest in saved}
        self._objects: dict[Path, Any] = {}
        self._replaced: set[Path] = set()

    def run(self) -> None:
        for path in self._saved:
            self._object(path)
        for path, (tag, entries, stored) in self._saved.items():
            if tag == "tensor":
                TENSOR.put_back(self._objects[path], {Key(e[0], e[1]): self._entry(path, e) for e in entries}, None)
            elif tag not in _WHOLE:
                self._fill(path, self._objects[path], entries, stored)
        for path, record in self._fresh.items():
            places = {k: self._paths[one] for k, one in record.contents.items() if isinstance(one, Location)}
            if path not in self._saved and self._replaced & set(places.values()):
                held = {k: self._object(places[k]) if k in places else _bare(one) for k, one in record.contents.items()}
                record.kind.put_back(record.value, held, record.data)

    def _object(self, path: Path) -> Any:
        if path in self._objects:
            return self._objects[path]
        record = self._fresh.get(path)
        now = None if record is None else record.value
        if path not in self._saved:
            if record is None:
                place = ".".join(str(name) for _, name in path)
                raise InvalidInput(f"the checkpoint needs {place!r}, which the model lacks: it is of another model")
            return now
        tag, entries, stored = self._saved[path]
        made = now
        if tag == "tensor":
            if isinstance(now, Tensor) and now.shape == stored.shape and now.dtype == stored.dtype:
                with torch.no_grad():
                    now.copy_(stored)
            else:
                made = stored.clone().to(now.device) if isinstance(now, Tensor) else stored.clone()
        elif tag == "array":
            made = stored.copy()
        elif tag == "generator":
            assert record is not None
            record.kind.put_back(now, {}, stored)
        elif tag in ("tuple", "frozenset"):
            made = _MAKERS[tag](self._entry(path, entry) for entry in entries)
        elif tag in _MAKERS and type(now) is not _MAKERS[tag]:
            made = deque(maxlen=stored["limit"]) if tag == "deque" else _MAKERS[tag]()
        if made is not now:
            self._replaced.add(path)
        self._objects[path] = made
        return made

    def _entry(self, path: Path, entry: Sequence[Any]) -> Any:
        role, name, how, what = entry
        if how == "value":
            return what
        if how == "place":
            return self._object(tuple((r, n) for r, n in what))
        kept = self._fresh[path].contents.get(Key(role, name)) if path in self._fresh else None
        return self._object(self._paths[kept]) if isinstance(kept, Location) else _bare(kept)

    def _fill(self, path: Path, value: Any, entries: Sequence[Any], stored: Mapping[str, Any]) -> None:
        held = {Key(entry[0], entry[1]): self._entry(path, entry) for entry in entries}
        data = stored["data"]
        if path in self._fresh and self._fresh[path].kind.name == "module":
            data = {**self._fresh[path].data, **({} if data is None else {_UNSAVED: set(data)})}
        kind = (
            self._fresh[path].kind if path in self._fresh and self._objects[path] is self._fresh[path].value else None
        )
        if kind is None:
            kind = kind_of(type(value))
        if kind is not None and value is not None:
            kind.put_back(value, held, data)


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, Opaque) else value
