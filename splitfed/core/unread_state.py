"""Objects that a model's code can reach and change, but that cannot be read, compared or put back.

A change in one is not seen if it shows only after the batches in which a cut model is compared, and all copies of the
model would go on from where the user's own object was left. So whatever is not known to be unchanging is refused by its
name, before the model runs: an object of a compiled class, a generator at work, and an iterator for which no equal one
can be put in its stead. What an installed package's own modules hold is left to them, as is what no code names.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType

from torch import nn

from splitfed.core.code_kinds import installed
from splitfed.core.errors import InvalidInput
from splitfed.core.object_kinds import GeneratorKind, IteratorKind, TupleKind
from splitfed.core.reachable import Location, Records, bare_globals, is_named, names_asked
from splitfed.core.reachable_names import describe_place
from splitfed.core.unchanging import Opaque, is_unchanging

_BY_ANY_NAME = frozenset(("getattr", "vars", "__dict__"))


def refuse_unread(records: Records) -> None:
    """Refuse, by `InvalidInput`, the first object among `records` that could be neither copied nor turned back."""
    bare = bare_globals(records)
    for place, record in records.items():
        if isinstance(record.kind, GeneratorKind) and is_named(place, bare):
            raise InvalidInput(
                f"{describe_place(place, records)} is a generator at work, which can be neither copied for the "
                "parties nor turned back: keep what it yields in a buffer, and how far it has come in another, which "
                "forward changes in place"
            )
    mentioned = names_asked(records)
    for place, name in _unread(records):
        if is_named(place, bare) and _is_users(place, records, mentioned):
            raise InvalidInput(
                f"{describe_place(place, records)} is or leads to an object of {name}, whose state can be neither "
                "compared nor turned back: keep numbers, lists or tensors on the module, or what changes in a buffer, "
                "which forward changes in place"
            )


def _unread(records: Records) -> Iterator[tuple[Location, str]]:
    """Yield the places of all objects that cannot be read or turned back, and the names of their types."""
    for place, record in records.items():
        # An equal one can stand in its stead but in what cannot be changed.
        if isinstance(record.kind, IteratorKind) and place.parent is not None and place.key is not None:
            holder = records[place.parent].kind
            if place.key.role in ("part", "default") or isinstance(holder, TupleKind):
                yield place, type(record.value).__name__
        for key, one in record.contents.items():
            if isinstance(one, Opaque) and not is_unchanging(one.value):
                yield place.child(key), type(one.value).__name__


def _is_users(place: Location, records: Records, mentioned: set[str]) -> bool:
    """Return whether code of the user's, and not an installed module of torch or another package, holds `place`."""
    while place.parent is not None and place.key is not None and (holder := records.get(place.parent)) is not None:
        key, value, place = place.key, holder.value, place.parent
        if isinstance(value, FunctionType):
            return not installed(value.__globals__.get("__name__", ""))
        if key.role == "global":
            return True
        if isinstance(value, type) or not installed(type(value).__module__):
            return key.role != "attribute" or key.name in mentioned or not _BY_ANY_NAME.isdisjoint(mentioned)
        if isinstance(value, nn.Module):
            return False
    return True
