"""What a party's copy of a model keeps of the user's objects: no more than its pass reads.

Weights and buffers are dealt with elsewhere; here it is about plain attributes (arrays, lists, objects, functions) and
hooks. Of a submodule that the party runs, texts and numbers stay, and what the code of the model's classes names, for a
branch that was not taken when the model was cut may read it.
"""

from __future__ import annotations

import contextlib
import copy
import enum
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from splitfed.core.attribute_reads import ALL, AttributeReads, Reads, noting
from splitfed.core.forward_path import ForwardPath
from splitfed.core.held_arrays import OTHERS, names_in_code
from splitfed.core.model_call import set_mode
from splitfed.core.object_kinds import HOOKS, OWN

_SCALARS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, enum.Enum)
_SHORT = 8
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
    made: nn.Module, ways: Collection[ForwardPath], segment: int, machinery: Reads, cuts: Sequence[str]
) -> None:
    """Take from `made`, the party's copy of a model, what the pass of `segment` does not read.

    `machinery`: what is read besides; `cuts`: submodules that are cut at.
    """
    parts = _Parts(ways, segment, machinery)
    whole: list[str] = []
    # Where a copy and its original have tables in common, names still stand for one object.
    mentioned: set[str] | None = None
    for path, module in made.named_modules():
        inside = any(path.startswith(f"{other}.") for other in whole)
        if path and not inside and not any(cut.startswith(f"{path}.") for cut in cuts):
            whole.append(path)
            inside = True
        mine = parts.runs(path) or any(t is not None for t in (*module._parameters.values(), *module._buffers.values()))
        read = parts.read(path)
        table = vars(module)
        for name in HOOKS:
            if table.get(name) and not (mine or name in read or (not inside and "state_dict" in name)):
                table[name] = OrderedDict()
        for name, value in list(table.items()):
            if name in OWN or (isinstance(value, Tensor) and value.is_meta) or name == "_named_members":
                continue
            if name == "forward" and inside and not mine and not parts.shadows(path):
                del table[name]
                continue
            if name in read or ALL in read or name == "_load_from_state_dict":
                continue
            # What it is called by `repr`, and the code of another way, may read.
            if _is_plain(value):
                continue
            if mine and mentioned is None:
                kinds = {kind for one in made.modules() for kind in type(one).__mro__}
                mentioned = names_in_code(kinds - {nn.Module, object})
            if not (mine and mentioned is not None and name in mentioned):
                del table[name]
        if path and type(module).__setstate__ is not nn.Module.__setstate__:
            # What its class gives to every copy that lacks it, such as the activation of torch's encoder layers.
            with contextlib.suppress(*_FAILURES):
                table.update({name: value for name, value in vars(copy.copy(module)).items() if name not in table})
        if inside and not mine and not parts.shadows(path):
            table[OTHERS] = True
            table["extra_repr"] = _say_nothing
            if callable(getattr(module, "reset_parameters", None)):
                table["reset_parameters"] = _draw_nothing


class _Parts:
    """What the party of one segment reads and runs, in all ways."""

    def __init__(self, ways: Collection[ForwardPath], segment: int, machinery: Reads) -> None:
        self._read: dict[str, set[str]] = {}
        self._run: set[str] = set()
        self._shadowed: set[str] = set()
        for way in ways:
            first, last = way.bounds(segment)
            found = way.attributes.names(last, lambda n, way=way: way.runs(segment, n))  # type: ignore[misc]
            for path, names in (*found.items(), *machinery.names(0, bool).items()):
                self._read.setdefault(path, set()).update(names)
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
        """Return the attributes of a submodule that its pass reads."""
        return self._read.get(path, set())

    def runs(self, path: str) -> bool:
        """Return whether the party computes with the submodule."""
        return path in self._run

    def shadows(self, path: str) -> bool:
        """Return whether the party runs the code of another's submodule on shapes, or on constants."""
        return path in self._shadowed


def _is_plain(value: Any) -> bool:
    """Return whether `value` is a text, a number or a short tuple of these, such as the size of a kernel."""
    if isinstance(value, (tuple, torch.Size)):
        return len(value) < _SHORT and all(map(_is_plain, value))
    return isinstance(value, _SCALARS)


def _say_nothing() -> str:
    """Stand for `extra_repr` of what another party holds."""
    return "of another party"


def _draw_nothing() -> None:
    """Stand for `reset_parameters` of what another party holds."""
