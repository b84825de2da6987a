"""Mistakes of a first day that passed in silence: each is put right, said in a line, or refused with a way out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.core.defense import GradientDefense, LabelDefense, ReleaseDefense
from splitfed.core.defense_context import Context
from splitfed.core.tasks import Task
from splitfed.data.from_python import pixel_range
from splitfed.topologies import vanilla, vertical
from tests.examples import refusal


def small(count: int = 24) -> sf.Dataset:
    generator = torch.Generator().manual_seed(0)
    return sf.data.from_arrays(torch.rand(count, 3, generator=generator), torch.arange(count) % 2)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def clients(data: sf.Dataset) -> sf.Federation:
    return data.clients(1, auxiliary=4, victims=4, seed=0)


@dataclass(frozen=True)
class Halved(ReleaseDefense):
    """Returns half of every row."""

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        return z[:, : z.shape[1] // 2]


@dataclass(frozen=True)
class Listed(ReleaseDefense):
    """Returns no tensor."""

    def release(self, name: str, z: Tensor, context: Context) -> Any:
        return z.tolist()


@dataclass(frozen=True)
class Summed(GradientDefense):
    """Returns one gradient for all rows."""

    def gradient(self, name: str, g: Tensor, context: Context) -> Tensor:
        return g.sum(0, keepdim=True)


@dataclass(frozen=True)
class Fewer(LabelDefense):
    """Returns one label too few."""

    def heads(self, topology: sf.Topology) -> tuple[str, ...]:
        return tuple(head.value for head in topology.heads)

    def targets(self, y: Tensor, task: Task, generator: torch.Generator) -> Tensor:
        return y[1:]


@pytest.mark.parametrize(
    ("defense", "said"),
    [
        (Halved(), "Halved.release returned shape (11, 2) for (11, 4); expected the same"),
        (Listed(), "Listed.release returned a list; expected a tensor"),
        (Summed(), "Summed.gradient returned shape (1, 4) for (11, 4); expected the same"),
        (Fewer(), "Fewer.targets returned shape (10,) for (11,); expected as many rows"),
    ],
)
def test_a_defense_that_returns_another_shape_is_named(defense: sf.Defense, said: str) -> None:
    data = clients(small())
    assert len(data.clients[0].train) == 11
    assert refusal(sf.train, vanilla(mlp(), "1"), data, defenses=defense, rounds=1) == said


def test_classes_and_data_sets_in_place_of_objects_and_rows() -> None:
    data = clients(small())
    run = sf.train(vanilla(mlp(), "1"), data, rounds=1)
    text = refusal(run.attack, sf.attacks.Rmle)
    assert text == "attacks=Rmle is a class; expected an instance, Rmle()"
    assert refusal(run.attack, ["norm", sf.attacks.Rmle]) == text
    assert "attacks=3 is not allowed" in refusal(run.attack, 3)
    assert "example is a Dataset" in refusal(vanilla, mlp(), "1", example=small())
    assert "example is a Dataset" in refusal(vanilla, mlp(), "auto", example=small())
    assert "progress=True is not allowed" in refusal(sf.Logging, progress=True)
    assert refusal(sf.train, vanilla(mlp(), "1"), data, defenses=sf.defenses.Noise).startswith("defenses=")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda x: x, (0.0, 1.0)),
        (lambda x: 2 * x - 1, (-1.0, 1.0)),
        (lambda x: (x * 255).round(), (0.0, 255.0)),
        (lambda x: (x * 255).to(torch.uint8), (0.0, 255.0)),
        (lambda x: 5 * x - 2.1, (-3.0, 3.0)),
        (lambda x: x.double().numpy(), (0.0, 1.0)),
        (lambda x: x[:, 0], None),
        (lambda x: x.flatten(1), None),
    ],
)
def test_own_images_have_a_range(make: Callable[[Tensor], Any], expected: tuple[float, float] | None) -> None:
    x = torch.rand(24, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    assert sf.data.from_arrays(make(x), np.arange(24) % 2).value_range == expected
    assert sf.data.from_arrays(x, np.arange(24) % 2, value_range=(-1, 2)).value_range == (-1, 2)
    assert pixel_range(torch.full((2, 1, 2, 2), torch.nan)) is None


def test_own_images_are_attacked_and_unscaled_ones_refused_at_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 2))
    images, labels = torch.rand(24, 1, 4, 4), torch.arange(24) % 2
    data = sf.data.from_arrays(images, labels)
    run = sf.train(vanilla(model, "1"), clients(data), rounds=1)
    (result,) = run.attack(sf.attacks.Rmle(iterations=2), floors=False)
    assert {"psnr", "ssim", "mse"} <= set(result.scores["attack"])
    bare = sf.Dataset("mine", images, labels, data.task)
    run = sf.train(vanilla(model, "1"), clients(bare), rounds=1)
    text = refusal(run.attack, sf.attacks.Rmle(iterations=10**9))
    assert text.startswith("mine holds images without a value range")
    assert "from_arrays(..., value_range=(0, 1))" in text


def test_labels_that_are_likely_meant_otherwise_are_said_in_a_line() -> None:
    x = torch.rand(6, 3)
    with pytest.warns(UserWarning, match="whole numbers of a real type, which means regression; set task=") as said:
        assert sf.data.from_arrays(x, torch.tensor([0.0, 1, 2, 0, 1, 2])).task.name == "regression"
    with pytest.warns(UserWarning, match="labels are 1 to 10, which makes 11 classes, of which 1 are empty") as more:
        assert sf.data.from_arrays(x, torch.tensor([1, 2, 3, 4, 9, 10])).task.outputs == 11
    assert all(len(str(one.message).splitlines()) == 1 for one in (*said, *more))
    # Asked for, or not to be mistaken: nothing is said.
    sf.data.from_arrays(x, torch.tensor([0.0, 1, 2, 0, 1, 2]), task="regression")
    sf.data.from_arrays(x, torch.tensor([0.0, 1.5, 2, 0, 1, 2]))
    sf.data.from_arrays(x, torch.tensor([1, 2, 3, 4, 9, 10]), task=sf.classification(11))
    sf.data.from_arrays(x, torch.tensor([0, 2, 3, 4, 9, 10]))


def tables() -> dict[str, sf.data.Table]:
    x = torch.rand(24, 2, generator=torch.Generator().manual_seed(0))
    keys = list(range(24))
    return {"registry": sf.data.Table(keys, x, torch.arange(24) % 2), "lab": sf.data.Table(keys, x + 1)}


def test_labels_are_where_they_were_aligned() -> None:
    data = sf.data.align(tables(), labels="registry").dataset
    bottoms = {"registry": nn.Linear(2, 2), "lab": nn.Linear(2, 2)}
    text = refusal(sf.train, vertical(bottoms, nn.Linear(4, 2), labels="server"), clients(data), rounds=1)
    assert "at 'server'" in text
    assert "held by 'registry'" in text
    run = sf.train(vertical(bottoms, nn.Linear(4, 2), labels="registry"), clients(data), rounds=1)
    assert data.rows([0, 1]).label_holder == "registry"
    # One party that has all of it is no other party.
    whole = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    sf.train(vanilla(whole, "0"), clients(data), rounds=1)
    # A role that one party plays stands for it.
    assert run.observe("lab").messages == run.observe("lab0").messages == ()


def test_a_path_is_no_table() -> None:
    text = refusal(sf.data.align, {**tables(), "lab": "lab.csv"}, labels="registry")
    assert text == "tables['lab']='lab.csv' is not allowed; expected splitfed.data.Table(keys, x, y)"


def test_a_role_that_several_parties_play_is_asked_for_by_name() -> None:
    run = sf.train(vanilla(mlp(), "1"), small().clients(2, auxiliary=4, victims=4, seed=0), rounds=1)
    text = refusal(run.observe, "client")
    assert text == "2 parties play the role 'client': name one, such as 'client0'"


TOPOLOGY = vanilla(mlp(), "0")
TABLES = {"a": sf.data.Table([1], torch.rand(1, 3), torch.tensor([1.0])), "b": sf.data.Table([1], torch.rand(1, 3))}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: sf.Recording(None), "recording parties=None is not allowed; expected a list of names"),
        (
            lambda: sf.Recording("server"),
            "parties='server' is not allowed; expected a list of text",
        ),
        (lambda: sf.Logging("a\0b"), r"folder='a\x00b' is not allowed; expected a path of names of at most 255 bytes"),
        (lambda: sf.Logging("x" * 256), "is not allowed; expected a path of names of at most 255 bytes each"),
        (lambda: sf.Logging(progress=object), "progress=<class 'object'> is not allowed; expected a function of round"),
        (lambda: sf.Logging(link=TOPOLOGY), "unknown link Topology(vanilla: input_1 of client client: bottom: in"),
        (lambda: sf.Optim(scheduler=TOPOLOGY), "Topology(vanilla: input_1 of client client: bottom: in"),
        (lambda: sf.attacks.ModelInversion(optimizer=TOPOLOGY), "Topology(vanilla: input_1 of client client: bottom"),
        (lambda: sf.cut(mlp(), ["0"], torch.rand(4, 3), chain=["x"]), "expected the party of each of 2 pieces"),
        (lambda: sf.cut_places(mlp(), torch.rand(4, 3), progress=object), "progress=<class 'object'> is not allowed"),
        (lambda: sf.data.from_torch([(1.0, 0), (2.0, 1)], collate=object), "collate=<class 'object'> is not allowed"),
        (lambda: sf.data.align(TABLES, "a", intersect=lambda *_: None), "what intersect returns=None is not allowed"),
        (lambda: sf.data.csv("x" * 256, "y"), "expected a path of names of at most 255 bytes"),
        (lambda: sf.data.beats(noise=10**30), "expected a number below 2**63"),
        (lambda: sf.models.mlp((3,), 2**64), "a whole number of at least 1 and at most"),
        (lambda: sf.compare(None), "folder=None is not allowed; expected a path of names"),
        (lambda: sf.LocalUpdate(local_epochs=10**30), "a whole number of at least 1 and at most"),
    ],
)
def test_values_of_wrong_kinds_are_refused_before_anything_runs(make: Callable[[], object], said: str) -> None:
    assert said in refusal(make)
