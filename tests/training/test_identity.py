"""What a resumed run compares of a user's code and values: files as they are, else the code of what is given."""

from __future__ import annotations

import functools
import hashlib
import importlib
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import splitfed
from splitfed.core.errors import InvalidInput
from splitfed.core.tasks import Task
from splitfed.core.topology import Head, Segment, Topology
from splitfed.topologies import vanilla
from splitfed.training.identity import differences, digest_given
from tests.examples import toy_data

LOSS = '''
import torch
from torch import nn

FACTOR = 2.0
TABLE = {"unused": 1}


def helper(x):
    """Twice."""
    return helper(None) if x is None else x * FACTOR


def loss(output, y, scale=1.0):
    """Say something."""
    # A comment.
    if scale > 0:
        return nn.functional.cross_entropy(helper(output), y) * scale
    return output.sum()


def plot(x):
    return x


class Net(nn.Module):
    """A model."""

    number = 1

    def __init__(self, slope=1.0):
        super().__init__()
        self.fc = nn.Linear(64, 10)
        self.slope = slope

    def forward(self, x):
        return self.outer(x)

    def outer(self, x):
        assert isinstance(self, Net)
        return self.fc(x.flatten(1)) * self.slope

    @property
    def more(self):
        return self.number + 1
'''

# What is replaced, by what, and what then differs: of a module that is imported, and of a script or a notebook.
CHANGES: dict[str, tuple[str, str, str | None]] = {
    "constant": ("scale > 0", "scale > 1", "the code of __main__.loss"),
    "operation": ("y) * scale", "y) + scale", "the code of __main__.loss"),
    "default": ("scale=1.0", "scale=2.0", "the loss"),
    "a function that is called": ("x * FACTOR", "x / FACTOR", "the code of __main__.helper"),
    "a method that forward reaches": ("* self.slope", "/ self.slope", "the code of __main__.Net.outer"),
    "a value of the class": ("number = 1", "number = 2", "the code of __main__.Net"),
    "a property": ("self.number + 1", "self.number + 2", "the code of __main__.Net.more"),
    "an attribute": ("slope=1.0", "slope=0.5", "the model"),
    "comment": ("# A comment.", "# Another comment.", "the code of __main__.loss"),
    "a value of the module's": ("FACTOR = 2.0", "FACTOR = 3.0", None),
    "moved": ("FACTOR = 2.0", "\n\n\nFACTOR = 2.0", None),
    "a function that is not called": ("def plot(x):\n    return x", "def plot(x):\n    return -x", None),
}


def strange(folder: Path, text: str, name: str = "strange") -> ModuleType:
    """Import `text` as another process would."""
    (folder / f"{name}.py").write_text(text)
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    # Both texts may be of one size and of one second.
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
        sys.dont_write_bytecode = before


def cell(text: str, *, kept: bool) -> ModuleType:
    """Run `text` as a cell of a notebook, or where its source is not `kept`, as what is typed into a shell."""
    module = ModuleType("__main__")
    # As IPython does.
    linecache.cache["<cell>"] = (len(text), None, text.splitlines(keepends=True) if kept else [], "<cell>")
    exec(compile(text, "<cell>", "exec"), vars(module))
    return module


def printed(module: ModuleType) -> dict[str, str]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return digest_given({"loss": module.loss, "model": module.Net()})


@pytest.mark.parametrize("change", list(CHANGES))
def test_every_change_of_a_file_is_told(tmp_path: Path, change: str) -> None:
    old, new, _ = CHANGES[change]
    assert old in LOSS
    first = printed(strange(tmp_path, LOSS))
    assert differences(first, printed(strange(tmp_path, LOSS))) == []
    assert differences(first, printed(strange(tmp_path, LOSS.replace(old, new))))[0] == "the source of strange"
    assert not any(place.startswith("the code of") for place in first)
    assert first["the source of strange"] == hashlib.sha256(LOSS.encode()).hexdigest()


@pytest.mark.parametrize("kept", [True, False], ids=["source", "instructions"])
@pytest.mark.parametrize("change", list(CHANGES))
def test_what_has_no_file_is_told_by_its_own_code(change: str, kept: bool) -> None:
    old, new, place = CHANGES[change]
    first = printed(cell(LOSS, kept=kept))
    assert differences(first, printed(cell(LOSS, kept=kept))) == []
    found = differences(first, printed(cell(LOSS.replace(old, new), kept=kept)))
    if place is None or (change == "comment" and not kept):
        assert found == []
    else:
        assert place in found


def digest_of(text: str) -> str:
    """Return the digest of a function that has no file."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "<nowhere>", "exec"), space)
    return digest_given({"f": space["f"]})["the code of __main__.f"]


def test_code_without_a_file_is_told_by_its_instructions() -> None:
    plain = digest_of("def f(x):\n    return [y + 1 for y in x if y in {'a', 'b', 'c'}]")
    assert plain == digest_of('\n\ndef f(x):\n    return [\n y + 1 for y in x if y in {"a", "b", "c"}]')
    assert plain != digest_of("def f(x):\n    return [y + 2 for y in x if y in {'a', 'b', 'c'}]")
    assert plain != digest_of("def f(x):\n    return [y + 1 for y in x if y in {'a', 'b', 'd'}]")


def test_a_file_that_was_edited_after_its_import_is_not_taken_for_what_runs(tmp_path: Path) -> None:
    module = strange(tmp_path, LOSS)
    before = digest_given({"loss": module.loss})
    assert "the source of strange" in before
    (tmp_path / "strange.py").write_text(LOSS.replace("scale > 0", "scale > 1"))
    after = digest_given({"loss": module.loss})
    place = "the code of strange.loss"
    assert place in differences(before, after)
    assert place in differences(
        after, digest_given({"loss": strange(tmp_path, Path(module.__file__).read_text()).loss})
    )


def test_two_functions_of_one_name_in_one_file_are_told_apart(tmp_path: Path) -> None:
    first, second = (digest_given({"loss": one}) for one in (lambda x: x * 2.0, lambda x: x * 3.0))
    assert differences(first, second) == []  # on one line
    third = digest_given({"loss": lambda x: x * 3.0})
    assert differences(first, third) == ["the loss"]


IMPORTS = {
    "a module": "import other",
    "a function": "from other import helper",
    "a value": "from other import FACTOR",
    "all": "try:\n    from .nothing import x\nexcept ImportError:\n    from other import *",
}


@pytest.mark.parametrize("line", IMPORTS.values(), ids=IMPORTS)
def test_files_that_a_file_imports_are_told(tmp_path: Path, line: str) -> None:
    found = []
    for text in (LOSS, LOSS, LOSS.replace("FACTOR = 2.0", "FACTOR = 3.0")):
        strange(tmp_path, text, "other")
        found.append(printed(strange(tmp_path, f"{line}\n{LOSS}")))
    assert differences(found[0], found[1]) == []
    assert differences(found[0], found[2]) == ["the source of other"]


def test_files_of_a_package_are_told(tmp_path: Path) -> None:
    for home in (tmp_path / "parcel", tmp_path / "parcel" / "inner"):
        home.mkdir()
        (home / "__init__.py").write_text("")
    (tmp_path / "parcel" / "numbers.py").write_text("FACTOR = 2.0\n")
    (tmp_path / "parcel" / "inner" / "deep.py").write_text("from .. import numbers\n")
    (tmp_path / "parcel" / "losses.py").write_text(f"from .inner import deep\n{LOSS}")
    sys.path.insert(0, str(tmp_path))
    try:
        found = printed(importlib.import_module("parcel.losses"))
    finally:
        sys.path.remove(str(tmp_path))
    told = {"parcel", "parcel.losses", "parcel.inner", "parcel.inner.deep", "parcel.numbers"}
    assert {place for place in found if "source" in place} == {f"the source of {module}" for module in told}


def weighted(weights: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, y: functional.cross_entropy(output, y, weight=torch.as_tensor(weights))


def measured(weights: Any, output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output, y, weight=torch.as_tensor(weights))


class Penalty:
    def __init__(self, weights: list[float]) -> None:
        self.weights = weights

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(output, y, weight=torch.tensor(self.weights))


ONES = [1.0] * 10
MORE = [5.0, *[1.0] * 9]
LOSSES: dict[str, Callable[[list[float]], Any]] = {
    "partial of an array": lambda w: functools.partial(measured, np.array(w, dtype=np.float32)),
    "partial": lambda w: functools.partial(functional.cross_entropy, weight=torch.tensor(w)),
    "module": lambda w: nn.CrossEntropyLoss(weight=torch.tensor(w)),
    "module's attribute": lambda w: nn.CrossEntropyLoss(label_smoothing=w[0] / 10),
    "callable": Penalty,
    "method": lambda w: Penalty(w).__call__,
}


def train(folder: Path, loss: Any, resume: bool = False, model: nn.Module | None = None, **more: Any) -> Any:
    data = toy_data(60).clients(2, auxiliary=10, victims=10)
    task = Task("weighted", loss, lambda o, y: float((o.argmax(1) == y).double().mean()), "accuracy", 10)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10)) if model is None else model
    topology = vanilla(whole, "1")
    head = topology.heads[0]
    topology = Topology(
        topology.name, topology.segments, topology.inputs, (Head(head.value, head.role, head.labels, task=task),)
    )
    return splitfed.train(
        topology, data, rounds=1, batch_size=20, logging=splitfed.Logging(folder=folder, resume=resume), **more
    )


SLOTTED = """
import decimal, fractions, pathlib, re, threading
from collections import deque

class Plain:
    pass

class Slotted:
    __slots__ = ("_hidden", "scale", "unset")

    def __init__(self, scale):
        self.scale, self._hidden = scale, [scale]

    def __call__(self, output, y):
        return output.sum() * self.scale

class Loss:
    def __init__(self, held):
        self.held = held

    def __call__(self, output, y):
        return output.sum()

    def other(self):
        return 2

def one(x): return x + 1
def two(x): return x + 2
"""
HELD = {
    "decimal": "decimal.Decimal({})",
    "fraction": "fractions.Fraction({}, 7)",
    "path": "pathlib.PurePosixPath('{}')",
    "pattern": "re.compile('{}')",
    "a long pattern": "re.compile('x' * 300 + '{}')",
    "flags": "re.compile('x', {} * re.MULTILINE)",
    "bytearray": "bytearray({})",
    "slots": "Slotted({})",
    "a set of slots": "{{Slotted({}), Slotted(9)}}",
    "a set of functions": "frozenset([one, [one, one, two][{}]])",
    "a set of tuples": "{{(1, {}), (2, decimal.Decimal(4))}}",
    "deque": "deque([Plain(), {}])",
}


def held(folder: Path, expression: str) -> dict[str, str]:
    module = strange(folder, SLOTTED)
    return digest_given({"loss": module.Loss(eval(expression, vars(module)))})


@pytest.mark.parametrize("kind", HELD)
def test_values_without_attributes_of_their_own_are_told_apart(tmp_path: Path, kind: str) -> None:
    found = [held(tmp_path, HELD[kind].format(number)) for number in (1, 1, 2)]
    assert differences(found[0], found[1]) == []
    assert "the loss" in differences(found[0], found[2])


SAME_EVERYWHERE = ("{one, two, Slotted}", "threading.Lock()", "Plain()", "object()", "{'a', 'b', 'c', 1, None}")


@pytest.mark.parametrize("expression", SAME_EVERYWHERE)
def test_no_address_and_no_order_of_a_set_is_told(tmp_path: Path, expression: str) -> None:
    """Of objects that are alike, and lie elsewhere."""
    first = held(tmp_path, expression)
    kept = strange(tmp_path, SLOTTED)
    assert differences(first, held(tmp_path, expression)) == []
    assert kept is not sys.modules["strange"]


@pytest.mark.parametrize("kind", list(LOSSES))
def test_other_class_weights_are_another_run(tmp_path: Path, kind: str) -> None:
    make = LOSSES[kind]
    train(tmp_path / "run", make(ONES))
    train(tmp_path / "run", make(ONES), resume=True)
    with pytest.raises(InvalidInput, match=r"holds another run: the task of head '.*' changed since it began; go back"):
        train(tmp_path / "run", make(MORE), resume=True)


def test_another_closure_is_not_noticed(tmp_path: Path) -> None:
    """As the documentation says: only the code of a function is looked at."""
    train(tmp_path / "run", weighted(ONES))
    train(tmp_path / "run", weighted(MORE), resume=True)


def byhand(module: ModuleType) -> Topology:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        bottom, top = module.Net(), nn.Linear(10, 10)
    segments = (Segment("bottom", "client", bottom, ("x",), ("z",)), Segment("top", "server", top, ("z",), ("out",)))
    return Topology("hand-made", segments, {"x": "client"}, (Head("out", "server", "client"),))


def test_another_forward_is_another_run(tmp_path: Path) -> None:
    data = toy_data(60).clients(2, auxiliary=10, victims=10)
    arguments: dict[str, Any] = {"rounds": 1, "batch_size": 20, "logging": splitfed.Logging(folder=tmp_path / "run")}
    splitfed.train(byhand(strange(tmp_path, LOSS)), data, **arguments)
    again = {**arguments, "logging": splitfed.Logging(folder=tmp_path / "run", resume=True)}
    splitfed.train(byhand(strange(tmp_path, LOSS)), data, **again)
    with pytest.raises(InvalidInput, match=r"another run: the source of strange changed since it began; go back"):
        splitfed.train(byhand(strange(tmp_path, LOSS.replace("* self.slope", "- self.slope"))), data, **again)
    other = strange(tmp_path, LOSS)
    other.Net.__init__.__defaults__ = (0.5,)
    with pytest.raises(InvalidInput, match=r"another run: the module of segment 'bottom' changed since it began"):
        splitfed.train(byhand(other), data, **again)


class Scaled(nn.Module):
    """Has the same modules and weights whatever its `forward` does with them."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(64, 8), nn.Linear(8, 10), act

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x.flatten(1))))


@pytest.mark.parametrize(
    ("act", "other"),
    [
        (torch.relu, torch.tanh),
        (lambda x: x * 2.0, lambda x: x * 3.0),
        (lambda x: x * torch.tensor([2.0]), lambda x: x * torch.tensor([3.0])),
    ],
    ids=["function", "number", "constant tensor"],
)
def test_another_forward_of_a_model_that_is_cut_is_another_run(tmp_path: Path, act: Any, other: Any) -> None:
    def run(act: Any, resume: bool) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Scaled(act)
        data = toy_data(60).clients(2, auxiliary=10, victims=10)
        splitfed.train(
            vanilla(model, "fc1"),
            data,
            rounds=1,
            batch_size=20,
            logging=splitfed.Logging(folder=tmp_path / "run", resume=resume),
        )

    run(act, False)
    run(act, True)
    with pytest.raises(InvalidInput, match=r"holds another run: the module of segment '.*' changed since it began"):
        run(other, True)


DEFENSE = """
from dataclasses import dataclass

from splitfed.core.defense import ReleaseDefense


@dataclass(frozen=True)
class Mine(ReleaseDefense):
    factor: float = 1.0

    def release(self, value, z, context):
        return z * self.factor + 1.0
"""


def test_another_defense_of_the_same_name_is_another_run(tmp_path: Path) -> None:
    ones = functional.cross_entropy
    train(tmp_path / "run", ones, defenses=strange(tmp_path, DEFENSE).Mine())
    train(tmp_path / "run", ones, True, defenses=strange(tmp_path, DEFENSE).Mine())
    with pytest.raises(InvalidInput, match=r"another run: the source of strange changed since it began"):
        train(tmp_path / "run", ones, True, defenses=strange(tmp_path, DEFENSE.replace("+ 1.0", "- 1.0")).Mine())
