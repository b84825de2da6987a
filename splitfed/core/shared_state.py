"""State that all copies of a segment share, and that no checkpoint of a party holds: attributes of classes, globals.

Numbers of a class (`type(self).count += 1`), globals, closures, default arguments and what hangs on these are found in
the code of the segments, and looked at whenever a checkpoint is written. Of globals those count that the code reads or
writes by their bare names, of attributes those whose names it mentions. What is filled once where nothing stood, an
entry of a table or a name that was None, is a cache: it is filled again after the checkpoint is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from splitfed.core.code_kinds import is_data
from splitfed.core.errors import InvalidInput
from splitfed.core.plain_values import Key
from splitfed.core.reachable import Change, Location, Records, bare_globals, is_named, names_asked, reach
from splitfed.core.reachable_names import name_changes
from splitfed.core.unsaved_state import digest_value

_NOTHING = repr(None)
Entry = tuple[tuple[Key, ...], Key | None]
"""An entry of the object at a path; None: the object itself."""


class SharedState:
    """What the code of `modules` shares with all of their copies, as it is when this is made."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list({id(module): module for module in modules}.values())
        self._known = [_entries(reach(module, Location())) for module in self._modules]

    def check(self) -> None:
        """Refuse, by `InvalidInput`, what is not as it was when this was made, or last checked, and is no cache."""
        for number, module in enumerate(self._modules):
            records = reach(module, Location())
            known, now = self._known[number], _entries(records)
            for entry, told in now.items():
                before = known.get(entry, _NOTHING if (entry[0], None) in known else told)
                if told != before and before != _NOTHING:
                    raise self._refusal(entry, records)
            if (gone := next((e for e in known.keys() - now.keys() if (e[0], None) in now), None)) is not None:
                raise self._refusal(gone, records)
            self._known[number] = now

    def _refusal(self, entry: Entry, records: Records) -> InvalidInput:
        place = next(place for place in records if place.path() == entry[0])
        (name,) = name_changes([Change(place, entry[1], True)], records)
        return InvalidInput(
            f"the {name} is not as it was before training, and no checkpoint holds it, as all copies of the model "
            "share it: keep what changes in buffers, or in attributes of the module itself (self.count in place of "
            "type(self).count)"
        )


def _entries(records: Records) -> dict[Entry, str]:
    """Return a text for every shared entry that the code can read, by which it is told from another."""
    bare = bare_globals(records)
    mentioned = names_asked(records)
    found: dict[Entry, str] = {}
    for place, record in records.items():
        path = place.path()
        if not record.shared or not is_named(place, bare):
            continue
        kind, value = record.kind.name, record.value
        names = kind in ("class", "globals", "environment")
        found[path, None] = "" if names else f"{type(value).__qualname__} {digest_value(record).hexdigest()}"
        for key, one in record.contents.items():
            if kind == "class" and not is_data(key.name, value.__dict__[key.name]):
                continue
            if kind == "globals" and (path[0].name, key.name) not in bare:
                continue
            if key.role in ("attribute", "environment variable") and key.name not in mentioned:
                continue
            found[path, key] = f"at {one.path()}" if isinstance(one, Location) else repr(one)
    return found
