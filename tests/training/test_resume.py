"""A run that was stopped and resumed ends in the same bits as one that was not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import LocalLink, Message, Recording
from splitfed.core.optimizers import Optim
from splitfed.defenses import DistanceCorrelation, Noise
from splitfed.topologies import u_shaped, vanilla
from splitfed.training.run import Run
from tests.examples import assert_same, toy_data
from tests.thinning import thin

ROUNDS = 4


class Eventful(nn.Module):
    """Everything that has a state or draws numbers: batch norm and dropout on both sides of the cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm1, self.drop1 = nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.fc2, self.norm2, self.drop2 = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.fc3 = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.drop1(self.norm1(self.fc1(x.flatten(1)))))
        return self.fc3(torch.relu(self.drop2(self.norm2(self.fc2(h)))))


class Stop(Exception):
    """Stands for a crash."""


def stop_after(number: int | None) -> Any:
    def progress(done: int, rounds: int, metrics: Mapping[str, Any]) -> None:
        if done == number:
            raise Stop

    return progress


RECORDED = Recording(("server", "client1"), every=2, budget=2000)


def go(
    folder: Path | None,
    shape: str = "vanilla",
    stop: int | None = None,
    resume: bool = False,
    record: Recording | None = RECORDED,
    **changes: Any,
) -> Run:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Eventful()
    topology = vanilla(model, "drop1") if shape == "vanilla" else u_shaped(model, ("drop1", "drop2"))
    data = changes.pop("data", toy_data(100).clients(3, auxiliary=10, victims=10))
    arguments: dict[str, Any] = {
        "defenses": [Noise(scale=0.1), DistanceCorrelation(alpha=0.2)],
        "optimizer": Optim("Adam", {"lr": 1e-2}, "StepLR", {"step_size": 1, "gamma": 0.7}),
        "rounds": ROUNDS,
        "batch_size": 10,
        "logging": splitfed.Logging(folder, resume, record, progress=stop_after(stop)),
    }
    return splitfed.train(topology, data, **{**arguments, **changes})


def outcome(run: Run) -> dict[str, Any]:
    """All that must be equal, without the clock and without how views are spread over files."""
    state = run.state()
    state["run"].pop("recorders")
    views = {
        party: [(m.sender, m.kind, m.edge, dict(m.tensors), tuple(m.stamp)) for m in run.engine.view(party).messages]
        for party in ("server", "client1")
    }
    history = [{k: v for k, v in entry.items() if k != "seconds"} for entry in run.history]
    return {"state": state, "views": views, "history": history}


SHAPES = ("vanilla", "u_shaped")


@pytest.fixture(scope="module")
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    torch.set_num_threads(1)
    found = outcome(go(tmp_path_factory.mktemp("whole") / "run", request.param))
    assert len(found["views"]["server"]) > 20
    assert len(found["history"]) == ROUNDS
    return request.param, found


@pytest.mark.parametrize(
    ("whole", "stop"), thin([(shape, stop) for shape in SHAPES for stop in range(1, ROUNDS + 1)], 3), indirect=["whole"]
)
def test_stopped_after_a_round(whole: tuple[str, dict[str, Any]], tmp_path: Path, stop: int) -> None:
    shape, expected = whole
    with pytest.raises(Stop):
        go(tmp_path / "run", shape, stop)
    resumed = go(tmp_path / "run", shape, resume=True)
    assert_same(outcome(resumed), expected)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [entry["round"] for entry in lines] == list(range(ROUNDS))


@pytest.mark.parametrize(
    ("whole", "count"), thin([(shape, count) for shape in SHAPES for count in (5, 40, 70)], 2), indirect=["whole"]
)
def test_stopped_within_a_round(
    whole: tuple[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Message number `count` never arrives: the first falls into round 0, before there is any checkpoint."""
    shape, expected = whole
    left, carried = [count], LocalLink.carry

    def crash(self: LocalLink, message: Message) -> Message:
        # The comparison before training has parties without numbers.
        left[0] -= message.sender[-1].isdigit() or message.receiver[-1].isdigit()
        if left[0] == 0:
            raise Stop
        return carried(self, message)

    with monkeypatch.context() as patched:
        patched.setattr(LocalLink, "carry", crash)
        with pytest.raises(Stop):
            go(tmp_path / "run", shape)
    assert_same(outcome(go(tmp_path / "run", shape, resume=True)), expected)


@pytest.mark.parametrize("whole", thin(SHAPES, 2), indirect=True)
def test_a_run_without_a_folder_is_the_same_run(whole: tuple[str, dict[str, Any]]) -> None:
    shape, expected = whole
    free = go(None, shape, record=Recording(("server", "client1"), every=2))
    assert_same(outcome(free), expected)


@pytest.mark.parametrize(
    ("whole", "damage"),
    thin([(shape, damage) for shape in SHAPES for damage in ("party", "half-written", "missing manifest")], 2),
    indirect=["whole"],
)
def test_a_damaged_newest_checkpoint(whole: tuple[str, dict[str, Any]], tmp_path: Path, damage: str) -> None:
    shape, expected = whole
    with pytest.raises(Stop):
        go(tmp_path / "run", shape, 3)
    newest = tmp_path / "run" / "checkpoints" / "000002"
    if damage == "party":
        newest.joinpath("party-server.safetensors").write_bytes(b"damaged")
    elif damage == "half-written":
        half = tmp_path / "run" / "checkpoints" / "000003"
        half.mkdir()
        half.joinpath(".party-server.safetensors.tmp").write_bytes(b"half")
    else:
        newest.joinpath("manifest.json").unlink()
    # What a crash leaves behind is no damage.
    said = pytest.warns(UserWarning, match="party-server.safetensors is damaged; the run goes on from .* round 1")
    with said if damage == "party" else nullcontext():
        resumed = go(tmp_path / "run", shape, resume=True)
    assert_same(outcome(resumed), expected)
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["000002", "000003"]
    assert not list((tmp_path / "run").rglob(".*"))


def test_a_finished_run_is_read_back_without_training(tmp_path: Path) -> None:
    first = go(tmp_path / "run", rounds=1)
    again = go(tmp_path / "run", stop=1, rounds=1, resume=True)
    assert again.accuracy == first.accuracy
    assert again.bytes == first.bytes
    assert_same(outcome(again), outcome(first))


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "rounds": ({"rounds": 5}, "its rounds is 2, not 5"),
    "seed": ({"seed": 1}, "its training.seed is 0, not 1"),
    "batch_size": ({"batch_size": 12}, "its training"),
    "defense": ({"defenses": [Noise(scale=0.2)]}, "its defenses"),
    "optimizer": ({"optimizer": Optim("Adam", {"lr": 2e-2})}, "its optimizers"),
    "clients": ({"data": toy_data(100).clients(2, auxiliary=10, victims=10)}, "its data"),
    "split": ({"data": toy_data(100).clients(3, auxiliary=10, victims=10, seed=1)}, "its data"),
    "data": ({"data": toy_data(100, seed=5).clients(3, auxiliary=10, victims=10)}, "its data"),
    "record": ({"record": Recording(("server",))}, "its record"),
    "shape": ({"shape": "u_shaped"}, "its topology is 'vanilla', not 'u_shaped'"),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_another_run_is_refused(tmp_path: Path, change: str) -> None:
    arguments, text = CHANGES[change]
    go(tmp_path / "run", rounds=2)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(InvalidInput, match="holds another run") as caught:
        go(tmp_path / "run", **{"rounds": 2, "resume": True, **arguments})
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_folders_that_are_not_ours_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    for resume in (False, True):
        with pytest.raises(InvalidInput, match="is not empty and holds no run; give a new or empty folder"):
            go(tmp_path / "mine", resume=resume)
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    with pytest.raises(InvalidInput, match="is a file; give a new or empty folder"):
        go(tmp_path / "mine" / "thesis.tex")


def test_a_folder_in_which_a_run_had_just_begun_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.json.tmp").write_text("half")
    assert len(go(tmp_path / "run", rounds=1, resume=True).history) == 1


def test_a_run_is_not_overwritten_without_resume(tmp_path: Path) -> None:
    go(tmp_path / "run", rounds=1)
    with pytest.raises(InvalidInput, match="holds a run already; resume it or give another folder"):
        go(tmp_path / "run", rounds=1)


def test_resuming_needs_a_folder() -> None:
    with pytest.raises(InvalidInput, match="resume"):
        go(None, record=None, resume=True)
