"""Models and small helpers that several tests share."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitfed.attacks.base import Attack
from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.optimizers import Optim
from splitfed.core.random import derive, generator, stream
from splitfed.core.state_encoding import decode, encode
from splitfed.core.tasks import classification
from splitfed.core.topology import Topology
from splitfed.data.dataset import Dataset
from splitfed.engines.local import LocalEngine
from splitfed.threats.attack_requests import AttackRequest
from splitfed.threats.evaluator import Evaluator
from tests.pages import contributing


class SmallUNet(nn.Module):
    """A U-Net with two skips that ends in class scores."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.pool1 = nn.MaxPool2d(2)
        self.down2 = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.pool2 = nn.MaxPool2d(2)
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True))
        self.up2 = nn.ConvTranspose2d(8, 8, 2, 2)
        self.join2 = nn.Sequential(nn.Conv2d(16, 4, 3, padding=1), nn.ReLU(inplace=True))
        self.up1 = nn.ConvTranspose2d(4, 4, 2, 2)
        self.join1 = nn.Conv2d(8, 2, 3, padding=1)
        self.flat = nn.Flatten()
        self.head = nn.Linear(2 * 8 * 8, 10)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(self.pool1(a))
        m = self.middle(self.pool2(b))
        u = self.join2(torch.cat([self.up2(m), b], 1))
        return self.head(self.flat(self.join1(torch.cat([self.up1(u), a], 1))))


class InPlaceAfterCut(nn.Module):
    """The module after `conv` overwrites its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(6 * 16, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.pool(self.relu(self.conv(x))).flatten(1)
        return self.fc2(torch.relu(self.fc1(h)))


class Dropped(nn.Module):
    """Dropout on both sides of a cut after `relu1`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 32)
        self.drop1 = nn.Dropout(0.3)
        self.relu1 = nn.ReLU()
        self.fc2 = nn.Linear(32, 16)
        self.drop2 = nn.Dropout(0.5)
        self.fc3 = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu1(self.drop1(self.fc1(x.flatten(1))))
        return self.fc3(self.drop2(torch.relu(self.fc2(h))))


def images(rows: int, side: int = 8, seed: int = 0, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Return random images (rows, 1, side, side) in [0, 1] and random labels."""
    drawn = generator(seed, "images")
    x = torch.rand(rows, 1, side, side, generator=drawn)
    return x, torch.randint(0, classes, (rows,), generator=drawn)


def engine_of(
    topology: Topology, x: Tensor, y: Tensor, replicas: int = 1, optim: Optim | None = None, **options: object
) -> LocalEngine:
    """Place `topology` on local parties; replica i owns its share of the rows as the part "train"."""
    ready = topology.with_task(classification(10))
    name = next(iter(ready.inputs))
    return placed(ready, {name: x}, {h.value: y for h in ready.heads}, replicas, optim, **options)


def placed(
    topology: Topology,
    inputs: Mapping[str, Tensor],
    labels: Mapping[str, Tensor],
    replicas: int = 1,
    optim: Optim | None = None,
    **options: object,
) -> LocalEngine:
    """Place `topology`, whose heads have tasks; `inputs` by value and `labels` by head are shared out as "train"."""
    facts = pass_example(topology, {name: x[:4] for name, x in inputs.items()})
    optims = dict.fromkeys(topology.roles, optim or Optim("SGD", {"lr": 0.05, "momentum": 0.9}))
    engine = LocalEngine(topology, facts, replicas, optims=optims, **options)  # type: ignore[arg-type]
    for replica in range(replicas):
        # Clones, so that no two parties share memory before they start.
        mine, known = ({n: t.chunk(replicas)[replica].clone() for n, t in given.items()} for given in (inputs, labels))
        engine.own(replica, "train", mine, known)
    return engine


class Whole(nn.Module):
    """A vertical model in one module: `bottoms`, `fusion` and what follows, under the names the builders give them."""

    def __init__(self, bottoms: Mapping[str, nn.Module], fusion: nn.Module, **rest: nn.Module) -> None:
        super().__init__()
        self.bottoms = nn.ModuleDict(bottoms)
        self.fusion = fusion
        self.after = tuple(rest)
        for name, module in rest.items():
            self.add_module(name, module)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        value: Tensor = self.fusion(*(module(inputs[role]) for role, module in self.bottoms.items()))
        for name in self.after:
            value = self.get_submodule(name)(value)
        return value


class ManyTops(nn.Module):
    """A multi-task model in one module: `bottoms` side by side, and every one of the `tops` on all of them."""

    def __init__(self, bottoms: Mapping[str, nn.Module], tops: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.bottoms = nn.ModuleDict(bottoms)
        self.tops = nn.ModuleDict(tops)

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parts = [module(inputs[role]) for role, module in self.bottoms.items()]
        return {f"out_{server}": top(torch.cat(parts, 1)) for server, top in self.tops.items()}


def block(inputs: int, outputs: int, seed: int = 0) -> nn.Module:
    """Return a layer with batch norm and a ReLU in place, started from `seed`."""
    with stream(derive(seed, "block", inputs, outputs)):
        return nn.Sequential(nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU(inplace=True))


def columns(
    widths: Mapping[str, int], rows: int = 100, seed: int = 0, classes: int = 10
) -> tuple[dict[str, Tensor], Tensor]:
    """Return every role's random columns (rows, width), and random labels."""
    x = {role: torch.randn(rows, wide, generator=generator(seed, "columns", role)) for role, wide in widths.items()}
    return x, torch.randint(0, classes, (rows,), generator=generator(seed, "labels"))


class Scale(nn.Module):
    """One weight that multiplies its input; starts at `weight`."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def toy_data(rows: int = 120, seed: int = 0) -> Dataset:
    """Return `rows` images (1, 8, 8) with labels that a small model can learn: which tenth is brightest."""
    x, y = images(rows, seed=seed)
    lit = x.flatten(1)
    for row, label in enumerate(y.tolist()):
        lit[row, 6 * label : 6 * label + 6] = 1.0
    return Dataset("toy", lit.view_as(x), y, classification(10), (0.0, 1.0))


def assert_refuses(act: Callable[[], object], text: str) -> None:
    """Refused as the user's to fix, with `text` in the line that says so."""
    with pytest.raises(InvalidInput, match=re.escape(text)):
        act()


def import_from_contributing(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import an example of the pages on contributing as the module `name`, which is how its docstring begins."""
    (code,) = re.findall(
        rf'^```python\n("""{name.replace("_", " ").capitalize()}:.*?)^```', contributing(), re.DOTALL | re.MULTILINE
    )
    (folder / f"{name}.py").write_text(code, "utf-8")
    monkeypatch.syspath_prepend(folder)
    return importlib.import_module(name)


def refusal(call: Callable[..., object], *given: object, **options: object) -> str:
    """Return the one line in which `call` refuses what it is given."""
    with pytest.raises(InvalidInput) as refused:
        call(*given, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def read_back(state: object) -> Any:
    """Return `state` as a checkpoint gives it back: through JSON and tensors."""
    tree, tensors = encode(state, "state")
    return decode(json.loads(json.dumps(tree, allow_nan=False)), {str(i): t for i, t in enumerate(tensors)})


def assert_same(one: object, two: object, path: str = "") -> None:
    """Compare nested states: tensors bit by bit, everything else with `==`; the first difference is named."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        assert one.dtype == two.dtype, path
        assert torch.equal(one, two), path
    elif isinstance(one, Mapping) and isinstance(two, Mapping):
        assert one.keys() == two.keys(), path
        for key in one:
            assert_same(one[key], two[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        assert len(one) == len(two), path
        for index, (left, right) in enumerate(zip(one, two, strict=True)):
            assert_same(left, right, f"{path}/{index}")
    else:
        assert one == two, path


def asked(evaluator: Evaluator, attack: Attack, adversary: str, name: str = "it", **options: Any) -> AttackRequest:
    """Return the request that `adversary` runs `attack`, whose random numbers go by `name`."""
    (request,) = evaluator.requests([(name, attack)], adversary, **options)
    return request
