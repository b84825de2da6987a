"""Courses: their numbers by hand, alpha that follows the epochs on every kind of edge, resuming, studies, refusals."""

from __future__ import annotations

import copy
import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import splitfed
from splitfed.core.annealing import Annealing, Constant, Cosine, Linear, Steps
from splitfed.core.defense_context import Context
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Stamp
from splitfed.core.optimizers import Optim
from splitfed.core.per_client_defenses import check_clients
from splitfed.core.random import stream
from splitfed.core.tasks import classification
from splitfed.defenses import DistanceCorrelation, MaxNorm, Mid
from splitfed.models.mlp import mlp
from splitfed.stats.dependence import distance_correlation
from splitfed.study.config.toml import dumps
from splitfed.study.report.summary import short_names
from splitfed.topologies import multi_hop, u_shaped, vanilla, vertical
from splitfed.topologies.fusion import Fusion
from splitfed.training.run import Run
from tests.examples import Whole, assert_same, engine_of, images, placed, toy_data
from tests.study.examples import checked, small

BY_HAND: dict[str, tuple[Annealing, list[float]]] = {
    "constant": (Constant(0.3), [0.3] * 7),
    "linear": (Linear(0.0, 0.8, epochs=4), [0.0, 0.2, 0.4, 0.6, 0.8, 0.8, 0.8]),
    "falling": (Linear(0.8, 0.0, epochs=4), [0.8, 0.6, 0.4, 0.2, 0.0, 0.0, 0.0]),
    # (1 - cos(pi / 4)) / 2 is (2 - sqrt(2)) / 4.
    "cosine": (
        Cosine(0.0, 1.0, epochs=4),
        [0.0, (2 - math.sqrt(2)) / 4, 0.5, (2 + math.sqrt(2)) / 4, 1.0, 1.0, 1.0],
    ),
    "steps": (Steps(((0, 0.1), (2, 0.5), (5, 0.3))), [0.1, 0.1, 0.5, 0.5, 0.5, 0.3, 0.3]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    course, numbers = BY_HAND[name]
    assert [course.at(epoch) for epoch in range(7)] == pytest.approx(numbers)
    assert course.at(2**62) == numbers[-1], "no rounding where it stops"


def test_rounding_leaves_no_course_outside_its_ends() -> None:
    for start, end in ((0.1, 1.0), (0.7, 1.0), (1.0, 0.3)):
        for epochs in (3, 7, 49, 1000):
            found = [kind(start, end, epochs).at(e) for kind in (Linear, Cosine) for e in range(epochs + 1)]
            assert min(start, end) <= min(found)
            assert max(found) <= max(start, end)


class Pair(nn.Module):
    """Two parties' bottoms side by side, and a top, on rows cut in half."""

    def __init__(self) -> None:
        super().__init__()
        bottoms = {"left": nn.Linear(32, 8), "right": nn.Linear(32, 8)}
        self.whole = Whole(bottoms, Fusion("concat"), top=nn.Linear(16, 10))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        found: Tensor = self.whole({"left": flat[:, :32], "right": flat[:, 32:]})
        return found


def chain() -> nn.Module:
    return mlp((1, 8, 8), 10, (16, 12, 8)).double()


def _bottom(model: nn.Module, x: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(x, torch.relu(model.fc1(x.flatten(1))))]


def _halves(model: nn.Module, x: Tensor) -> list[tuple[Tensor, Tensor]]:
    parts = zip(x.flatten(1).split(32, 1), model.whole.bottoms.values(), strict=True)
    return [(part, bottom(part)) for part, bottom in parts]


def _vertical(model: nn.Module) -> splitfed.Topology:
    whole = model.whole
    return vertical(dict(whole.bottoms.items()), whole.get_submodule("top"), labels="server", fusion="concat")


# What builds the model and cuts it, and what is released of which raw input, edge by edge.
PLACES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], splitfed.Topology], Callable[..., Any]]] = {
    "vanilla": (chain, lambda m: vanilla(m, "relu1"), _bottom),
    "u_shaped": (chain, lambda m: u_shaped(m, ("relu1", "relu3")), _bottom),
    "multi_hop": (chain, lambda m: multi_hop(m, ("relu1", "relu2", "relu3"), labels="client"), _bottom),
    "vertical": (lambda: Pair().double(), _vertical, _halves),
}


@pytest.mark.parametrize(("epoch", "alpha"), [(0, 0.2), (3, 0.5), (9, 0.6)])
@pytest.mark.parametrize("place", PLACES)
def test_both_weights_of_the_loss_follow_the_epoch(place: str, epoch: int, alpha: float) -> None:
    """(1 - alpha) CE + alpha DCOR(x, z), averaged over edges, with the alpha of the epoch: from .2 by a tenth to .6."""
    make, cut, released = PLACES[place]
    with stream(1):
        model = make()
    uncut, (x, y) = copy.deepcopy(model), images(12)
    topology = cut(model).with_task(classification(10))
    parts = {"left": x.double().flatten(1)[:, :32], "right": x.double().flatten(1)[:, 32:]}
    given = parts if place == "vertical" else {next(iter(topology.inputs)): x.double()}
    (head,) = topology.heads
    defenses = [DistanceCorrelation(alpha=Linear(0.2, 0.6, epochs=4))]
    engine = placed(topology, given, {head.value: y}, optim=Optim("SGD", {"lr": 1.0}), defenses=defenses)
    before = {n: t.clone() for n, t in topology.state_dict(engine.modules(0)).items()}
    engine.train(0, epoch, [torch.arange(12)])
    pairs = released(uncut, x.double())
    penalty = sum(distance_correlation(raw.flatten(1), z) for raw, z in pairs) / len(pairs)
    ((1 - alpha) * functional.cross_entropy(uncut(x.double()), y) + alpha * penalty).backward()
    expected = {n.removeprefix("whole."): p.grad for n, p in uncut.named_parameters()}
    after = topology.state_dict(engine.modules(0))
    assert set(after) == set(expected)
    for name, gradient in expected.items():
        assert torch.allclose(before[name] - after[name], gradient, rtol=0, atol=1e-12), name
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-3


def trained(alpha: float | Annealing, shape: str = "u_shaped", **options: Any) -> Run:
    with stream(0):
        model = mlp((1, 8, 8), 10, (16, 12, 8), seed=None)
    topology = u_shaped(model, ("relu1", "relu3")) if shape == "u_shaped" else multi_hop(model, ("relu1", "relu2"))
    given = {
        "rounds": 3,
        "batch_size": 20,
        "local": splitfed.LocalUpdate(local_epochs=2),
        "schedule": "splitfed_v1",
        **options,
    }
    data = toy_data(60).clients(2, auxiliary=4, victims=6)
    return splitfed.train(topology, data, defenses=[DistanceCorrelation(alpha=alpha)], **given)


@pytest.mark.parametrize("shape", ["u_shaped", "multi_hop"])
def test_a_constant_course_is_its_number_to_the_bit(shape: str) -> None:
    """So are a step at epoch 0 and a way of no length; another number for the last epoch alone is not."""
    states = [
        trained(alpha, shape, rounds=2).engine.state()["parties"]
        for alpha in (0.3, Constant(0.3), Steps(((0, 0.3), (4, 0.9))), Linear(0.3, 0.3, 5), Steps(((0, 0.3), (3, 0.9))))
    ]
    for other in states[1:4]:
        assert_same(states[0], other)
    with pytest.raises(AssertionError):
        assert_same(states[0], states[4])


class Stop(Exception):
    """Stands for a crash."""


@pytest.mark.parametrize("shape", ["u_shaped", "multi_hop"])
def test_stopped_in_the_middle_and_resumed(shape: str, tmp_path: Path) -> None:
    """Two epochs a round: round 1 goes on with epochs 2 and 3 of six."""
    course = Cosine(0.1, 0.9, epochs=5)

    def stop_second(done: int, rounds: int, metrics: Any) -> None:
        if done == 1:
            raise Stop

    with pytest.raises(Stop):
        trained(course, shape, logging=splitfed.Logging(folder=tmp_path / "run", progress=stop_second))
    resumed = trained(course, shape, logging=splitfed.Logging(folder=tmp_path / "run", resume=True))
    assert_same(resumed.engine.state()["parties"], trained(course, shape).engine.state()["parties"])
    with pytest.raises(InvalidInput, match="defenses"):
        trained(Cosine(0.1, 0.9, epochs=6), shape, logging=splitfed.Logging(folder=tmp_path / "run", resume=True))


def test_a_rehearsed_step_is_one_of_the_newest_epoch() -> None:
    """Alpha is 1 from epoch 2 on, so that no gradient of the task comes back any more."""
    for rounds, zero in ((1, False), (2, True)):
        run = trained(Steps(((0, 0.5), (2, 1.0))), "multi_hop", rounds=rounds)
        seen = run.observe("hop1", phase=splitfed.attacks.base.Phase.STEP).select(kind="gradient")
        assert all(bool(t.any()) != zero for t in seen.tensors().values())


def test_mid_takes_a_course_too() -> None:
    """Its penalty of epoch 2 is half of that of epoch 4."""
    with stream(0):
        topology = vanilla(mlp((1, 8, 8), 10, (6,), seed=None), "relu1")
    engine = engine_of(topology, *images(8))
    mid = Mid(weight=Linear(0.0, 0.1, epochs=4))
    fitted = mid.fit(engine.topology, engine.facts, 0).segment("bottom").module
    z = fitted(images(8)[0])
    here = [Context("client", "bottom->top", Stamp("train", 0, epoch, 0), 0, 0, module=fitted) for epoch in (0, 2, 4)]
    found = [float(mid.penalty(z, context).detach()) for context in here]
    assert found[0] == 0.0 < found[1]
    assert found[2] == pytest.approx(2 * found[1])


LINEAR: dict[str, Any] = {"name": "linear", "start": 0.0, "end": 0.5, "epochs": 4}
STEPS: dict[str, Any] = {"name": "steps", "steps": [[0, 0.1], [5, 0.5]]}


def test_a_study_writes_courses_as_tables_and_a_list_of_them_is_a_grid() -> None:
    grid = checked(small(defense=[{"name": "distance_correlation", "alpha": [0.3, LINEAR, STEPS]}]))
    assert [cell.defense.label for cell in grid.cells] == [
        "distance_correlation(alpha=0.3)",
        "distance_correlation(alpha=linear 0 to 0.5 by epoch 4)",
        "distance_correlation(alpha=steps 0.1 then 0.5 from 5)",
    ]
    assert list(short_names([cell.defense.label for cell in grid.cells]).values())[1:] == [
        "distance_correlation(alpha=linear 0 to 0.5 by epoch 4)",
        "distance_correlation(alpha=steps 0.1 then 0.5 from 5)",
    ]
    assert [cell.defense.strength and cell.defense.strength.value for cell in grid.cells] == [0.3, 0.5, 0.5]
    assert [cell.config["defense"][0]["alpha"] for cell in grid.cells] == [0.3, LINEAR, STEPS]
    assert [splitfed.study.config.build.defenses(cell)[0] for cell in grid.cells] == [
        DistanceCorrelation(alpha=alpha) for alpha in (0.3, Linear(0.0, 0.5, 4), Steps(((0, 0.1), (5, 0.5))))
    ]
    again = checked(tomllib.loads(dumps(grid.resolved)))
    assert again.resolved == grid.resolved
    assert len({cell.id for cell in grid.cells}) == 3


IN_A_STUDY: dict[str, tuple[Any, str]] = {
    "unknown": (
        {**LINEAR, "name": "liner"},
        "unknown course for distance_correlation alpha 'liner'; did you mean 'lin",
    ),
    "no name": (
        {"start": 0.1},
        "distance_correlation alpha={'start': 0.1} is not allowed; expected a course with its n",
    ),
    "key": ({**LINEAR, "ende": 1.0}, "unknown key of a linear course for distance_correlation alpha 'ende'; did you m"),
    "missing": (
        {"name": "cosine", "start": 0.1},
        "distance_correlation alpha is a cosine course without end; expected",
    ),
    "above": ({**LINEAR, "end": 1.5}, "distance_correlation alpha end=1.5 is not allowed; expected a number in [0, 1]"),
    "later": (
        {"name": "steps", "steps": [[0, 0.1], [3, 2.0]]},
        "distance_correlation alpha from epoch 3=2.0 is not al",
    ),
    "text": (
        "0.5",
        "'0.5' is not allowed; expected a number or a course such as {name = \"linear\", start = 0.0, end =",
    ),
    "bare list": ([[0, 0.1], [5, 0.5]], "[[0, 0.1], [5, 0.5]] is not allowed; expected a number or a course such as"),
}


@pytest.mark.parametrize("case", IN_A_STUDY)
def test_a_study_refuses_in_one_line_with_its_place(case: str) -> None:
    alpha, text = IN_A_STUDY[case]
    with pytest.raises(InvalidInput) as error:
        checked(small(defense=[{"name": "none"}, {"name": "distance_correlation", "alpha": alpha}]))
    assert str(error.value).startswith(f"study.toml: defense[1].alpha: {text}")
    assert "\n" not in str(error.value)


def test_twice_the_same_setting_is_refused() -> None:
    constant = {"name": "constant", "value": 0.3}
    with pytest.raises(
        InvalidInput, match=re.escape("distance_correlation(alpha=0.3) is there 2 times; expected once")
    ):
        checked(small(defense=[{"name": "distance_correlation", "alpha": [0.3, constant]}]))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "constant": (lambda: Constant("0.1"), "constant value='0.1' is not allowed; expected a number in (-inf, inf)"),
    "start": (lambda: Linear(True, 0.5, 3), "linear start=True is not allowed"),
    "end": (lambda: Cosine(0.1, math.inf, 3), "cosine end=inf is not allowed"),
    "no epoch": (lambda: Linear(0.1, 0.5, 0), "linear epochs=0 is not allowed; expected a whole number of at least 1"),
    "half": (lambda: Cosine(0.1, 0.5, 2.5), "cosine epochs=2.5 is not allowed"),
    "no pairs": (lambda: Steps(()), "steps=() is not allowed; expected pairs of epoch and number, such as"),
    "numbers": (lambda: Steps((0.1, 0.5)), "steps=(0.1, 0.5) is not allowed; expected pairs"),
    "late": (
        lambda: Steps(((1, 0.1),)),
        "steps from epochs [1] are not allowed; expected 0 first, then each above the",
    ),
    "back": (lambda: Steps(((0, 0.1), (4, 0.2), (4, 0.3))), "steps from epochs [0, 4, 4] are not allowed"),
    "epoch": (lambda: Steps(((0.0, 0.1),)), "steps epoch=0.0 is not allowed; expected a whole number"),
    "number": (lambda: Steps(((0, "x"),)), "steps number from epoch 0='x' is not allowed"),
    "list": (
        lambda: DistanceCorrelation(alpha=[0.1, 0.2]),
        "distance_correlation alpha=[0.1, 0.2] is not allowed; exp",
    ),
    "below": (lambda: DistanceCorrelation(alpha=Linear(-0.1, 0.5, 3)), "distance_correlation alpha start=-0.1 is not"),
    "mid": (lambda: Mid(weight=Linear(0.1, -0.5, 3)), "mid weight end=-0.5 is not allowed; expected a number in [0,"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    make, text = REFUSED[case]
    with pytest.raises(InvalidInput, match=re.escape(text)):
        make()


def test_a_course_that_ever_weighs_the_servers_loss_is_for_all_clients() -> None:
    topology = vanilla(mlp((1, 8, 8), 10, (6,)), "relu1")
    check_clients([DistanceCorrelation(alpha=Linear(0.0, 0.0, 3), clients=(0,)), MaxNorm()], topology, 2)
    with pytest.raises(InvalidInput, match="DistanceCorrelation for some clients alone is not allowed: it weighs"):
        check_clients([DistanceCorrelation(alpha=Linear(0.0, 0.1, 3), clients=(0,))], topology, 2)
