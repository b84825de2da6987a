"""Models that keep Python state in every place where people keep it; for `tests/core/test_cut_idioms_state.py`.

Each counts its calls and takes another way from the thousandth on, which no comparison of a few batches reaches.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import io
import itertools
import os
import queue
import re
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

LATE = 1000
VARIABLE = "SPLITFED_TEST_STEPS"


class Counting(nn.Module):
    """Three layers, of which the second is left out once `late` says so; `untraceable` has it replayed."""

    def __init__(self, untraceable: bool = False, **extra: Any) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.untraceable = untraceable
        for name, value in extra.items():
            setattr(self, name, value)

    def late(self) -> bool:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        if self.untraceable:
            h = h if self.training else h * 1.0
        h = h if self.late() else self.b(h)
        return self.c(h)


@dataclass
class Settings:
    step: int = 0


class Slots:
    """An object without a table of attributes."""

    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step = 0


class InObject(Counting):
    """`cfg` is any object with a `step`."""

    cfg: Any

    def late(self) -> bool:
        self.cfg.step += 1
        return self.cfg.step > LATE


class InIterator(Counting):
    numbers: Iterator[int]

    def late(self) -> bool:
        return next(self.numbers) > LATE


class InEnvironment(Counting):
    def late(self) -> bool:
        os.environ[VARIABLE] = str(int(os.environ.get(VARIABLE, "0")) + 1)
        return int(os.environ[VARIABLE]) > LATE


PROGRESS = SimpleNamespace(step=0)
STEPS = 0


class InGlobalObject(Counting):
    def late(self) -> bool:
        PROGRESS.step += 1
        return PROGRESS.step > LATE


OF_THREAD = threading.local()
OF_THREAD.step = 0


class InThread(Counting):
    def late(self) -> bool:
        OF_THREAD.step += 1
        return OF_THREAD.step > LATE  # type: ignore[no-any-return]


def count_globally() -> bool:
    global STEPS
    STEPS += 1
    return STEPS > LATE


class InGlobalOfHelper(Counting):
    """A method calls a function that alone names the global."""

    def late(self) -> bool:
        return self.ask()

    def ask(self) -> bool:
        return count_globally()


class InContainer(Counting):
    memory: dict[str, list[int]]

    def late(self) -> bool:
        self.memory["steps"][0] += 1
        return self.memory["steps"][0] > LATE


class InClassObject(Counting):
    progress: ClassVar[SimpleNamespace] = SimpleNamespace(step=0)

    def late(self) -> bool:
        self.progress.step += 1
        return self.progress.step > LATE


class InDefault(Counting):
    def late(self, seen: list[int] = [0]) -> bool:  # noqa: B006
        seen[0] += 1
        return seen[0] > LATE


def counter() -> Callable[[], bool]:
    steps = 0

    def count() -> bool:
        nonlocal steps
        steps += 1
        return steps > LATE

    return count


class InClosure(Counting):
    count: Callable[[], bool]

    def late(self) -> bool:
        return self.count()


def add_one(steps: list[int]) -> bool:
    steps[0] += 1
    return steps[0] > LATE


class InArray(Counting):
    steps: Any

    def late(self) -> bool:
        self.steps[0] += 1
        return bool(self.steps[0] > LATE)


class BehindWeakReference(Counting):
    ref: Any

    def late(self) -> bool:
        found = self.ref()
        found.step += 1
        return bool(found.step > LATE)


IN_CONTEXT = contextvars.ContextVar("steps", default=0)


class InContext(Counting):
    def late(self) -> bool:
        IN_CONTEXT.set(IN_CONTEXT.get() + 1)
        return IN_CONTEXT.get() > LATE


class InWhatIsUnread(Counting):
    """`tool` is an object of which Python shows no state, and `use` changes it and returns how often that was."""

    tool: Any
    use: Callable[[Any], int]

    def late(self) -> bool:
        return self.use(self.tool) > LATE


class OwnQueue(queue.SimpleQueue[int]):
    """Has attributes beside what it holds unread."""


def put(tool: Any) -> int:
    tool.put(1)
    return tool.qsize()  # type: ignore[no-any-return]


def add(tool: Any) -> int:
    tool.value += 1
    return tool.value  # type: ignore[no-any-return]


def insert(tool: sqlite3.Connection) -> int:
    return int(tool.execute("insert into steps values (1)").lastrowid or 0)


def stepped(tool: Any) -> int:
    return int(next(tool))


def called(tool: Any) -> int:
    return int(tool())


def table() -> sqlite3.Connection:
    made = sqlite3.connect(":memory:", isolation_level=None)
    made.execute("create table steps (one integer)")
    return made


UNREAD: dict[str, tuple[Callable[[], Any], Callable[[Any], int], Callable[[Any], int], str]] = {
    "queue": (queue.SimpleQueue, put, lambda tool: tool.qsize(), "an object of SimpleQueue"),
    "own_queue": (OwnQueue, put, lambda tool: tool.qsize(), "an object of OwnQueue"),
    "number_of_c": (lambda: ctypes.c_long(0), add, lambda tool: tool.value, "an object of c_long"),
    "flat_iterator": (lambda: np.arange(2000).flat, stepped, lambda tool: tool.index, "an object of flatiter"),
    "bytes": (io.BytesIO, lambda tool: tool.write(b"x") and tool.tell(), lambda tool: tool.tell(), "object of BytesIO"),
    "database": (table, insert, lambda tool: tool.total_changes, "an object of Connection"),
    "scanner": (
        lambda: re.compile("a").scanner("a" * 2000),  # type: ignore[attr-defined]
        lambda tool: tool.search().end(),
        lambda tool: tool.search().start(),
        "an object of SRE_Scanner",
    ),
    "next_of_a_counter": (lambda: itertools.count().__next__, called, called, "an object of count"),
    "next_of_a_generator": (lambda: (n for n in range(2000)).__next__, called, called, "a generator at work"),
    "partial_of_a_counter": (lambda: functools.partial(next, itertools.count()), called, called, "an object of count"),
    "counter_in_a_counter": (lambda: zip(itertools.count()), lambda t: next(t)[0], lambda t: next(t)[0], "of count"),
    "second_of_two": (lambda: itertools.tee(range(2000))[1], stepped, stepped, "an object of _tee_dataobject"),
    "loader": (
        lambda: iter(torch.utils.data.DataLoader(range(2000))),  # type: ignore[arg-type]
        stepped,
        stepped,
        "a generator at work",
    ),
}
"""What makes it, what changes and asks it, what tells how far it has come (0 at first), and what it is refused as."""
WATCHED = Settings()
MODELS: dict[str, tuple[Callable[[bool], Counting], str]] = {
    "object": (
        lambda replayed: InObject(replayed, cfg=SimpleNamespace(step=0)),
        "attribute 'step' of 'cfg' (0 -> 5)",
    ),
    "dataclass": (lambda replayed: InObject(replayed, cfg=Settings()), "attribute 'step' of 'cfg' (0 -> 5)"),
    "slots": (lambda replayed: InObject(replayed, cfg=Slots()), "attribute 'step' of 'cfg' (0 -> 5)"),
    "itertools_count": (
        lambda replayed: InIterator(replayed, numbers=itertools.count()),
        "attribute 'numbers' of the model (count(0) -> count(5))",
    ),
    "iterator_of_a_list": (
        lambda replayed: InIterator(replayed, numbers=iter(list(range(2000)))),
        "attribute 'numbers' of the model (iterator, 2000 left -> iterator, 1995 left)",
    ),
    "environment": (InEnvironment, f"environment variable '{VARIABLE}'"),
    "global_object": (InGlobalObject, "attribute 'step' of global 'PROGRESS' (0 -> "),
    "thread": (InThread, "attribute 'step' of global 'OF_THREAD' (0 -> "),
    "global_of_a_helper": (InGlobalOfHelper, "global 'STEPS' (0 -> "),
    "container": (
        lambda replayed: InContainer(replayed, memory={"steps": [0]}),
        "attribute 'memory' of the model ({'steps': [0]} -> {'steps': [5]})",
    ),
    "object_of_the_class": (InClassObject, "attribute 'step' of 'InClassObject.progress' (0 -> "),
    "default_argument": (InDefault, "default of the argument 'seen' of function 'late' ([0] -> "),
    "closure": (lambda replayed: InClosure(replayed, count=counter()), "variable 'steps' of function 'count' (0 -> "),
    "partial": (
        lambda replayed: InClosure(replayed, count=functools.partial(add_one, [0])),
        "attribute 'count' of the model",
    ),
    "array": (lambda replayed: InArray(replayed, steps=np.zeros(1)), "attribute 'steps' of the model ([0.0] -> [5.0])"),
    "context": (InContext, "global 'IN_CONTEXT' ("),
    "weak_reference": (
        lambda replayed: BehindWeakReference(replayed, ref=weakref.ref(WATCHED)),
        "attribute 'step' of",
    ),
    "proxy": (lambda replayed: InObject(replayed, cfg=weakref.proxy(WATCHED)), "attribute 'step' of 'cfg' (0 -> 5)"),
}


def told(model: Counting) -> list[Any]:
    """Return all the state that these models keep, as plain values."""
    cfg, count = getattr(model, "cfg", None), getattr(model, "count", None)
    numbers = getattr(model, "numbers", None)
    return [
        getattr(cfg, "step", None),
        repr(numbers) if isinstance(numbers, itertools.count) else getattr(numbers, "__length_hint__", int)(),
        os.environ.get(VARIABLE),
        PROGRESS.step,
        OF_THREAD.step,
        STEPS,
        repr(getattr(model, "memory", None)),
        InClassObject.progress.step,
        repr(InDefault.late.__defaults__),
        count.__closure__[0].cell_contents if getattr(count, "__closure__", None) else None,  # type: ignore[index, union-attr]
        repr(getattr(count, "args", None)),
        repr(getattr(model, "steps", None)),
        WATCHED.step,
        IN_CONTEXT.get(),
    ]


class Table(nn.Module):
    """Layers with a table of positions that is made when it is first needed, and held as `keep` says."""

    def __init__(self, keep: str, untraceable: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.keep, self.untraceable = keep, untraceable
        self.table: Tensor | None = None
        self.length = 0
        self.tables: dict[int, Tensor] = {}

    def positions(self, length: int) -> Tensor:
        if self.keep == "dict":
            if length not in self.tables:
                self.tables[length] = torch.sin(torch.outer(torch.arange(length) / 3, torch.arange(8) + 1.0))
            return self.tables[length]
        if self.table is None or (self.keep == "length" and self.length != length):
            self.table = torch.sin(torch.outer(torch.arange(length) / 3, torch.arange(8) + 1.0))
            self.length = length
        return self.table

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x.reshape(-1, 4, 2))
        if self.untraceable:
            h = h if self.training else h * 1.0
        h = torch.relu(self.b(h + self.positions(4))) + self.positions(4)
        return self.c(h.mean(1))
