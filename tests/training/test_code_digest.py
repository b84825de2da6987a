"""What a resumed run compares of a user's code and values: layout does not count, every other change does."""

from __future__ import annotations

import functools
import importlib
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
from splitfed.training import code_digest
from splitfed.training.fingerprint import differences, fingerprint
from tests.examples import toy_data

LOSS = '''
import torch
from torch import nn

FACTOR = 2.0
TABLE = {"unused": 1}


def helper(x):
    """Twice."""
    return x * FACTOR


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

    def __init__(self, slope=1.0):
        super().__init__()
        self.fc = nn.Linear(64, 10)
        self.slope = slope

    def forward(self, x):
        return self.outer(x)

    def outer(self, x):
        return self.fc(x.flatten(1)) * self.slope

    def draw(self):
        return "picture"
'''

# What is replaced, by what, and what of the code then differs.
SAME = {
    "comment": ("# A comment.", "# Another comment,\n    # of two lines."),
    "layout": ("return nn.functional.cross_entropy(helper(output), y) * scale", "return (\n            nn.functional.cross_entropy(\n                helper(output), y)\n            * scale)"),  # noqa: E501
    "docstring": ('"""Say something."""', '"""Say something else."""'),
    "no docstring": ('    """Say something."""\n', ""),
    "annotation": ("def loss(output, y, scale=1.0):", "def loss(output, y: torch.Tensor, scale: float = 1.0):"),
    "moved": ("FACTOR = 2.0", "\n\n\nFACTOR = 2.0"),
    "a value that is not read": ('"unused": 1', '"unused": 2'),
    "a function that is not called": ("def plot(x):\n    return x", "def plot(x):\n    return -x"),
    "a method that forward does not reach": ('return "picture"', 'return "drawing"'),
}  # fmt: skip
OTHER = {
    "constant": ("scale > 0", "scale > 1", "the code of strange.loss"),
    "operation": ("y) * scale", "y) + scale", "the code of strange.loss"),
    "default": ("scale=1.0", "scale=2.0", "the loss"),
    "a function that is called": ("x * FACTOR", "x / FACTOR", "the code of strange.helper"),
    "a value that is read": ("FACTOR = 2.0", "FACTOR = 3.0", "the loss"),
    "a method that forward reaches": ("* self.slope", "/ self.slope", "the code of strange.Net.outer"),
    "an attribute": ("slope=1.0", "slope=0.5", "the model"),
}


def strange(folder: Path, text: str) -> ModuleType:
    """Import `text` as another process would."""
    (folder / "strange.py").write_text(text)
    sys.modules.pop("strange", None)
    importlib.invalidate_caches()
    # Both texts may be of one size and of one second.
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("strange")
    finally:
        sys.path.remove(str(folder))
        sys.dont_write_bytecode = before


def printed(folder: Path, text: str) -> dict[str, str]:
    module = strange(folder, text)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return fingerprint({"loss": module.loss, "model": module.Net()}, ["model"])


@pytest.mark.parametrize("change", list(SAME))
def test_what_changes_nothing_of_a_run_is_not_told_apart(tmp_path: Path, change: str) -> None:
    old, new = SAME[change]
    assert old in LOSS
    assert differences(printed(tmp_path, LOSS), printed(tmp_path, LOSS.replace(old, new))) == []


@pytest.mark.parametrize("change", list(OTHER))
def test_what_changes_a_run_is_told_by_its_place(tmp_path: Path, change: str) -> None:
    old, new, place = OTHER[change]
    assert old in LOSS
    assert place in differences(printed(tmp_path, LOSS), printed(tmp_path, LOSS.replace(old, new)))


def digest_of(text: str, name: str = "f") -> str:
    """Return the digest of a function that has no file."""
    space: dict[str, Any] = {}
    exec(compile(text, "<nowhere>", "exec"), space)
    return code_digest.digest(space[name].__code__)


def test_code_without_a_file_is_told_by_its_bytecode() -> None:
    plain = digest_of("def f(x):\n    return [y + 1 for y in x if y in {'a', 'b', 'c'}]")
    assert "source:" not in plain
    assert code_digest.same_code(
        plain, digest_of('\n\ndef f(x):\n    "Doc."\n    return [\n y + 1 for y in x if y in {"a", "b", "c"}]')
    )
    assert not code_digest.same_code(
        plain, digest_of("def f(x):\n    return [y + 2 for y in x if y in {'a', 'b', 'c'}]")
    )
    assert not code_digest.same_code(
        plain, digest_of("def f(x):\n    return [y + 1 for y in x if y in {'a', 'b', 'd'}]")
    )


def test_another_python_is_compared_by_the_source() -> None:
    assert code_digest.same_code("source:1 python3.11:2", "source:1 python3.12:3")
    assert not code_digest.same_code("source:1 python3.11:2", "source:9 python3.12:2")
    # Without a source nothing can be said across versions, and what cannot be compared is not the same.
    assert not code_digest.same_code("python3.11:2", "python3.12:2")
    assert code_digest.same_code("source:1 python3.11:2", "python3.11:2")


def test_a_file_that_was_edited_after_its_import_is_not_taken_for_what_runs(tmp_path: Path) -> None:
    module = strange(tmp_path, LOSS)
    before = code_digest.digest(module.loss.__code__)
    assert before.startswith("source:")
    (tmp_path / "strange.py").write_text(LOSS.replace("scale > 0", "scale > 1"))
    assert code_digest.digest(module.loss.__code__) == before.partition(" ")[2]


def weighted(weights: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, y: functional.cross_entropy(output, y, weight=torch.as_tensor(weights))


class Penalty:
    def __init__(self, weights: list[float]) -> None:
        self.weights = weights

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(output, y, weight=torch.tensor(self.weights))


ONES = [1.0] * 10
MORE = [5.0, *[1.0] * 9]
LOSSES: dict[str, Callable[[list[float]], Any]] = {
    "closure": weighted,
    "closure over an array": lambda w: weighted(np.array(w, dtype=np.float32)),
    "closure over a tensor": lambda w: weighted(torch.tensor(w)),
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
    return fingerprint({"loss": module.Loss(eval(expression, vars(module)))})


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
    splitfed.train(byhand(strange(tmp_path, LOSS.replace("# A comment.", "# Another."))), data, **again)
    with pytest.raises(InvalidInput, match=r"another run: the code of strange.Net.outer changed since it began"):
        splitfed.train(byhand(strange(tmp_path, LOSS.replace("* self.slope", "- self.slope"))), data, **again)
    with pytest.raises(InvalidInput, match=r"another run: the module of segment 'bottom' changed since it began"):
        splitfed.train(byhand(strange(tmp_path, LOSS.replace("slope=1.0", "slope=0.5"))), data, **again)


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
    train(tmp_path / "run", ones, True, defenses=strange(tmp_path, DEFENSE.replace("+ 1.0", "+   1.0")).Mine())
    with pytest.raises(InvalidInput, match=r"another run: the code of strange.Mine.release changed since it began"):
        train(tmp_path / "run", ones, True, defenses=strange(tmp_path, DEFENSE.replace("+ 1.0", "- 1.0")).Mine())
