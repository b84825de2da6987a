"""The names of cuts ("block1" is after a submodule, "before:block1" before it, "core#2" after its second call), and the
ways of values along a chain of parties that know their neighbours only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import nn

from splitfed.core.errors import InvalidInput, check_names

_BEFORE = "before:"


class Cut(NamedTuple):
    """A place in a model: before or after a call of the submodule `target`.

    `call`: which one, from 1; None is the first one for a place before it, and the last one for a place after it.
    `name`: as the user wrote it.
    """

    name: str
    target: str
    before: bool = False
    call: int | None = None

    def select(self, model: str, starts: Sequence[int], ends: Sequence[int]) -> int:
        """Return where in `model` the place is, given where each call of the submodule starts and where it ends.

        Raises `InvalidInput` for a submodule that is not called, or not as often as the name says.
        """
        calls = starts if self.before else ends
        if not calls:
            side = "before" if self.before else "after"
            raise InvalidInput(f"submodule {self.target!r} is never called by {model}; nothing to cut {side}")
        if self.call is not None and self.call > len(calls):
            raise InvalidInput(
                f"cut {self.name!r}: {self.target!r} is called {len(calls)} times; expected #1 to #{len(calls)}"
            )
        if self.call is None:
            return calls[0 if self.before else -1]
        return calls[self.call - 1]


def read_cuts(model: nn.Module, names: Sequence[str]) -> tuple[Cut, ...]:
    """Return the places in `model` that `names` say. Raises `InvalidInput` for a submodule that is not there."""
    # One submodule under two names is known by the first.
    first = {id(module): name for name, module in model.named_modules()}
    modules = {name: first[id(module)] for name, module in model.named_modules(remove_duplicate=False) if name}
    cuts = []
    for name in names:
        target, mark, call = name.removeprefix(_BEFORE).partition("#")
        check_names(f"submodule of {type(model).__name__}", modules, target)
        if mark and not (call.isdecimal() and int(call) >= 1):
            raise InvalidInput(f"cut {name!r} is not allowed; expected the number of a call, such as '{target}#2'")
        cuts.append(Cut(name, modules[target], name.startswith(_BEFORE), int(call) if mark else None))
    return tuple(cuts)


def check_places(cuts: Sequence[Cut], places: Sequence[int]) -> None:
    """Refuse cuts at `places` that are not in the order they run, or of which two are the same place."""
    for i in range(1, len(cuts)):
        if places[i] < places[i - 1]:
            raise InvalidInput(
                f"cut {cuts[i].name!r} runs before {cuts[i - 1].name!r}; name the cuts in the order they run"
            )
    if len(set(places)) < len(places):
        named = ", ".join(repr(cut.name) for cut in cuts)
        raise InvalidInput(f"cuts {named} leave an empty segment: two are the same place")


def relays(chain: Sequence[str], source: int, target: int) -> tuple[int, ...]:
    """Return the pieces that hand on what piece `target` reads of piece `source`, in the order they run.

    `chain`: the party of each piece, each of which sends to the next and the one before alone; empty where everybody
    sends to everybody. None are needed within a party and between neighbours.
    """
    neighbours = {frozenset(pair) for pair in pairwise(chain)}
    if not chain or chain[source] == chain[target] or frozenset((chain[source], chain[target])) in neighbours:
        return ()
    return tuple(range(source + 1, target))
