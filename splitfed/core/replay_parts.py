"""What a party's copy of a model keeps of the user's objects: no more than its own operations read.

Weights and buffers are dealt with elsewhere; here it is about plain attributes (arrays, lists, objects, functions) and
hooks. What the code of other segments reads while the party goes through it has a stand-in without numbers. Of a
submodule that the party runs, there stays what the code of the model's classes names and nobody reads, for a branch
that was not taken when the model was cut may read it. Single numbers and texts are settings, and stay everywhere.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from splitfed.core.attribute_reads import ALL, AttributeReads, Reads, noting
from splitfed.core.forward_path import ForwardPath
from splitfed.core.held_arrays import OTHERS, STAND_INS, names_in_code, stand_ins_of
from splitfed.core.model_call import set_mode
from splitfed.core.object_kinds import HOOKS, OWN
from splitfed.core.replay_passes import in_others_code
from splitfed.core.stand_ins import SCALARS, Blanking, StandIns

_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)


def machinery_reads(shapes: nn.Module) -> Reads:
    """Return what is read of `shapes`, a copy of a model, when its mode, place or state changes, or it is copied."""
    noted = AttributeReads(shapes, lambda: (0, False))
    with noting(noted):
        for act in (
            lambda: set_mode(shapes, not shapes.training),
            lambda: set_mode(shapes, not shapes.training),
            lambda: shapes.to(torch.device("meta")),
            lambda: shapes.load_state_dict(shapes.state_dict(), strict=False),
            lambda: shapes.zero_grad(),
            lambda: copy.deepcopy(shapes),
        ):
            # What fails here fails where it is asked for.
            with contextlib.suppress(*_FAILURES):
                act()
    return noted.reads


def leave_out(
    made: nn.Module,
    ways: Collection[ForwardPath],
    segment: int,
    machinery: Reads,
    cuts: Sequence[str],
    held: Mapping[str, bool] | None = None,
) -> frozenset[str]:
    """Take from `made`, the party's copy of a model, what the operations of `segment` do not read.

    `machinery`: what is read besides; `cuts`: submodules that are cut at; `held`: attributes that are left there though
    others alone are seen to read them: True: as they are, False: their settings. Returns the attributes that have a
    stand-in now, by their full names.
    """
    levels, parts = held or {}, _Parts(ways, segment, machinery)
    whole: list[str] = []
    # Where a copy and its original have tables in common, names still stand for one object.
    mentioned: set[str] | None = None
    withheld: set[str] = set()
    own = (x for one in made.modules() for x in (*one._parameters.values(), *one._buffers.values()))
    blanking = Blanking({id(x): x for x in own})
    for path, module in made.named_modules():
        inside = any(path.startswith(f"{other}.") for other in whole)
        if path and not inside and not any(cut.startswith(f"{path}.") for cut in cuts):
            whole.append(path)
            inside = True
        mine = parts.runs(path) or any(t is not None for t in (*module._parameters.values(), *module._buffers.values()))
        read, passed = parts.read(path), parts.passed(path)
        table = vars(module)
        stand_ins: dict[str, Any] = {}
        for name in HOOKS:
            if table.get(name) and not (mine or name in read | passed or (not inside and "state_dict" in name)):
                table[name] = OrderedDict()
        for name, value in list(table.items()):
            if isinstance(value, Tensor) and value.is_meta:
                # What somebody hung on another's weight is the other's.
                vars(value).update({key: blanking.of_attribute(one) for key, one in vars(value).items()})
                continue
            if name in OWN or name == "_named_members":
                continue
            if name == "forward" and inside and not mine and not parts.shadows(path):
                del table[name]
                continue
            if name in read or ALL in read or name == "_load_from_state_dict":
                continue
            # What it is called by `repr`, and the code of another way, may read.
            if isinstance(value, SCALARS):
                continue
            if name in passed or ALL in passed:
                full = f"{path}.{name}" if path else name
                stand_in = value if levels.get(full) else blanking.of_attribute(value, settings=full in levels)
                if stand_in is not value:
                    withheld.add(full)
                    del table[name]
                    # What others' code replaces, or finds in the table, is there for all that read the table.
                    (table if parts.is_written(path, name) or ALL in passed else stand_ins)[name] = stand_in
                continue
            if mine and mentioned is None:
                kinds = {kind for one in made.modules() for kind in type(one).__mro__}
                mentioned = names_in_code(kinds - {nn.Module, object})
            if not (mine and mentioned is not None and name in mentioned) or parts.is_seen(path, name):
                del table[name]
        if stand_ins:
            table[STAND_INS] = StandIns(stand_ins, blanking.kept_alive)
            if not isinstance(module, Withholding) and path:
                kind: Any = type(module)
                names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
                module.__class__ = type(kind)(kind.__name__, (Withholding, kind), names)
        if path and type(module).__setstate__ is not nn.Module.__setstate__:
            # What its class gives to every copy that lacks it, such as the activation of torch's encoder layers.
            with contextlib.suppress(*_FAILURES):
                table.update({name: value for name, value in vars(copy.copy(module)).items() if name not in table})
        if inside and not mine:
            table["extra_repr"] = _say_nothing
        if inside and not mine and not parts.shadows(path):
            table[OTHERS] = True
            if callable(getattr(module, "reset_parameters", None)):
                table["reset_parameters"] = _draw_nothing
    return frozenset(withheld)


class Withholding(nn.Module):
    """A module of a party of which others read attributes: their code gets stand-ins, and its own an error."""

    def __getattr__(self, name: str) -> Any:
        """Return the stand-in of what others read there; say of all else that it is the user's model that reads it."""
        stand_ins = stand_ins_of(self)
        if name in stand_ins and in_others_code():
            return stand_ins[name]
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            kind = next(one for one in type(self).__mro__[1:] if not issubclass(one, Withholding))
            raise AttributeError(
                f"forward of {kind.__name__}, or a hook of it, reads the attribute {name!r}, which this party does not "
                "hold, as nothing read it there when the model was cut: read it in every pass, or keep it in a buffer"
            ) from error


class _Parts:
    """What the party of one segment reads and runs, and what others do, in all ways."""

    def __init__(self, ways: Collection[ForwardPath], segment: int, machinery: Reads) -> None:
        self._read: dict[str, set[str]] = {}
        self._passed: dict[str, set[str]] = {}
        self._seen: set[tuple[str, str]] = set()
        self._written: set[tuple[str, str]] = set()
        for path, names in machinery.names(_always, _always).items():
            self._read.setdefault(path, set()).update(names)
        self._run: set[str] = set()
        self._shadowed: set[str] = set()
        for way in ways:
            first, last = way.bounds(segment)
            own_reads, passed = way.attributes_read(segment)
            self._seen.update(way.attributes.between, way.attributes.within)
            self._written.update(way.attributes.written)
            for table, found in ((self._read, own_reads), (self._passed, passed)):
                for path, names in found.items():
                    table.setdefault(path, set()).update(names)
            own = [n for n in range(first, last) if n in way.wholes]
            shadowed = {n for n in way.wholes if n < first and n not in way.calls}
            self._shadowed |= {way.names[n] for n in shadowed}
            self._shadowed |= {path for (path, _), ns in way.attributes.within.items() if shadowed & ns}
            self._run |= {way.names[n] for n in own}
            self._run |= {path for (path, _), ns in way.attributes.within.items() if any(first <= n < last for n in ns)}
            self._run |= {
                path for path in way.attributes.unseen if any(f"{path}.".startswith(f"{way.names[n]}.") for n in own)
            }

    def read(self, path: str) -> set[str]:
        """Return the attributes of a submodule that its operations read."""
        return self._read.get(path, set())

    def passed(self, path: str) -> set[str]:
        """Return the attributes of a submodule that others' code reads while the party goes through it."""
        return self._passed.get(path, set())

    def is_seen(self, path: str, name: str) -> bool:
        """Return whether anybody is seen to read that attribute of a submodule."""
        return (path, name) in self._seen

    def is_written(self, path: str, name: str) -> bool:
        """Return whether anybody is seen to set that attribute of a submodule."""
        return (path, name) in self._written

    def runs(self, path: str) -> bool:
        """Return whether the party computes with the submodule."""
        return path in self._run

    def shadows(self, path: str) -> bool:
        """Return whether the party runs the code of another's submodule on shapes, or on constants."""
        return path in self._shadowed


def _always(number: int) -> bool:
    """Return that every place counts."""
    return True


def _say_nothing() -> str:
    """Stand for `extra_repr` of what another party holds."""
    return "of another party"


def _draw_nothing() -> None:
    """Stand for `reset_parameters` of what another party holds."""
