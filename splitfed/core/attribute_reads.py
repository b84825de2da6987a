"""Which attributes of a model's submodules are read while it runs, and when: what a party needs of the user's objects.

A copy of the model is given classes that note every lookup and every change; they are subclasses of the user's own, so
that everything else stays as it was. Reads of whole tables (`vars(module)`) count as reads of every attribute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from splitfed.core.grouping import group_pairs

ALL = "__dict__"
"""Stands for every attribute of a module."""
# What looks attributes up in a module's table on its own behalf: torch's machinery, and this package.
_MACHINERY = ("torch.nn.modules.module", "torch.nn.utils.", "splitfed.core.")
_NOTING: ContextVar[tuple[AttributeReads, ...]] = ContextVar("noting", default=())


@dataclass
class Reads:
    """Reads of attributes, each a path of a submodule and a name.

    `between`: read -> the numbers of operations that had run when it was read outside of any; `within`: read -> the
    numbers of the operations within which it was; `written`: as `within`, for attributes that are set, with no
    numbers where that is outside of operations alone. `unseen`: submodules whose reads cannot be seen.
    """

    between: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    within: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    written: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()

    def names(self, between: Callable[[int], bool], within: Callable[[int], bool]) -> dict[str, set[str]]:
        """Return path -> attributes that are read where so many operations have run, or within such an operation."""
        found = [read for read, numbers in self.between.items() if any(map(between, numbers))]
        found += [read for read, numbers in self.within.items() if any(map(within, numbers))]
        return {path: set(names) for path, names in group_pairs(found).items()}

    def leaves_behind(self, operation: int) -> bool:
        """Return whether an attribute that `operation` sets is read outside of it."""
        for read, numbers in self.written.items():
            if operation in numbers:
                others = self.within.get(read, set()) - {operation}
                if max(self.between.get(read, ()), default=0) > operation or any(other > operation for other in others):
                    return True
        return False


class AttributeReads:
    """Notes in `reads` what is looked up in the submodules of `model`, a copy of the user's, within `noting`.

    `place`: says the number of the operation at work, or of those that have run, and whether one is at work.
    """

    def __init__(self, model: nn.Module, place: Callable[[], tuple[int, bool]]) -> None:
        self._place = place
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._model = model
        self.reads = Reads(unseen=_let_note(model))

    def note(self, module: nn.Module, name: str) -> None:
        """Note that `name` is looked up in `module`."""
        path = self._paths.get(id(module))
        if path is None:
            return
        number, within = self._place()
        read = (path, name)
        if within:
            self.reads.within.setdefault(read, set()).add(number)
        else:
            self.reads.between.setdefault(read, set()).add(number)

    def note_write(self, module: nn.Module, name: str) -> None:
        """Note that `name` is set in `module`."""
        number, within = self._place()
        if (path := self._paths.get(id(module))) is not None:
            self.reads.written.setdefault((path, name), set()).update((number,) if within else ())


@contextmanager
def noting(*reads: AttributeReads) -> Iterator[None]:
    """Let what is looked up within be noted by `reads` alone, by nobody where there are none."""
    token = _NOTING.set(reads)
    try:
        yield
    finally:
        _NOTING.reset(token)


def _note(module: nn.Module, name: str) -> None:
    noted_by = _NOTING.get()
    if noted_by and not (name == ALL and sys._getframe(2).f_globals.get("__name__", "").startswith(_MACHINERY)):
        for one in noted_by:
            one.note(module, name)


def _let_note(model: nn.Module) -> tuple[str, ...]:
    """Give all submodules of `model` classes that note lookups; return the paths of those that take none."""
    unseen: list[str] = []
    classes: dict[type, type] = {}
    for path, module in model.named_modules():
        compiled = isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod")
        try:
            if compiled or any(path.startswith(f"{other}.") for other in unseen):
                raise TypeError("what is compiled is left alone")
            kind = type(module)
            if kind not in classes:
                classes[kind] = _noting_class(kind)
            object.__setattr__(module, "__class__", classes[kind])
        except TypeError:
            unseen.append(path)
    return tuple(unseen)


def _noting_class(kind: Any) -> Any:
    def __getattribute__(module: Any, name: str) -> Any:
        _note(module, name)
        return kind.__getattribute__(module, name)

    def __setattr__(module: Any, name: str, value: Any) -> None:
        for one in _NOTING.get():
            one.note_write(module, name)
        kind.__setattr__(module, name, value)

    space = {"__getattribute__": __getattribute__, "__setattr__": __setattr__}
    return type(kind)(
        kind.__name__, (kind,), {**space, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    )
