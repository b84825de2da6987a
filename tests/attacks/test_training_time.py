"""What lives inside training: who sees what, what it may change, what it leaves behind, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import splitfed
from splitfed.attacks.base import Needs
from splitfed.attacks.networks.frozen_copy import FrozenCopy
from splitfed.attacks.reconstruction.rmle import Rmle
from splitfed.attacks.training_time.fsha import Fsha
from splitfed.attacks.training_time.insider_labels import InsiderLabels
from splitfed.attacks.training_time.pcat import Pcat
from splitfed.attacks.training_time.sdar import Sdar
from splitfed.attacks.training_time.training_attack import Seen, TrainingAttack, TrainingAttackState
from splitfed.core.errors import InvalidInput
from splitfed.core.optimizers import Optim
from splitfed.core.random import stream
from splitfed.data.dataset import Dataset
from splitfed.defenses import Noise
from splitfed.models.mlp import mlp
from splitfed.registry import TABLES, load
from splitfed.threats.floors import FLOORS
from splitfed.topologies import u_shaped, vanilla
from splitfed.training.run import Run
from tests.attacks.training_time_examples import ALL, Loud, Passive, Spy, attack_state, go, ramps, small
from tests.examples import assert_same


def weights(run: Run) -> dict[str, Any]:
    return {name: party.state.state_dict()["segments"] for name, party in run.engine.parties.items()}


def test_it_sees_every_training_step_once_and_its_own_segments() -> None:
    run = go(Spy(), rounds=2)
    spy = attack_state(run)
    assert isinstance(spy, Passive)
    assert [len(seen.z) for seen, _ in spy.seen] == [32] * 16
    assert {tuple(seen.z.shape[1:]) for seen, _ in spy.seen} == {(2,)}
    assert all(set(modules) == {"top"} for _, modules in spy.seen)
    labels = torch.cat([seen.y for seen, _ in spy.seen if seen.y is not None])
    assert torch.equal(labels.bincount(), 2 * run.data.clients[0].train.y.bincount())


def test_no_label_arrives_in_a_u() -> None:
    spy = attack_state(go(Spy(), "u_shaped"))
    assert isinstance(spy, Passive)
    assert {seen.y for seen, _ in spy.seen} == {None}


def test_every_registered_training_attack_is_among_those_tried_here() -> None:
    registered = {kind for kind in map(partial(load, "attacks"), TABLES["attacks"]) if issubclass(kind, TrainingAttack)}
    assert registered == {type(attack) for attack in ALL.values()}, "ALL in tests/attacks/training_time_examples.py"


PASSIVE = [(name, "vanilla") for name, attack in ALL.items() if not attack.active]


@pytest.mark.parametrize(
    ("name", "shape"), [*PASSIVE, *((name, "u_shaped") for name in ("sdar", "sdar, client's layout", "pcat"))]
)
def test_a_passive_training_attack_changes_no_bit_of_the_training(name: str, shape: str) -> None:
    assert_same(weights(go(ALL[name], shape)), weights(go(None, shape)))


def test_an_active_one_replaces_what_the_client_gets() -> None:
    """SGD at rate one without momentum: the last layer's bias moves by minus the gradient's sum over the rows."""
    one = go(Spy(loud=True), batch_size=256, optimizer=Optim("SGD", {"lr": 1.0}))
    moved = one.engine.party(0, "client").state.modules["bottom"].state_dict()
    before = small().first.state_dict()
    name = next(n for n in moved if n.endswith("2.bias"))
    assert torch.allclose(moved[name] - before["2.bias"], torch.full((2,), -256.0))


@pytest.mark.parametrize("schedule", ["sequential", "splitfed_v1", "splitfed_v2", "sglr"])
def test_every_client_of_every_schedule_passes_it(schedule: str) -> None:
    spy = attack_state(go(Spy(loud=True), data=ramps(2, 64), schedule=schedule))
    assert isinstance(spy, Passive)
    assert sum(len(seen.z) for seen, _ in spy.seen) == 128


class Silent(Loud):
    """Active, and sends nothing."""

    def learn(self, seen: Seen, modules: Mapping[str, nn.Module], random: torch.Generator) -> Tensor | None:
        return None


def test_an_active_one_that_returns_no_gradient_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spy, "enter", lambda self, site: Silent(self, site))
    with pytest.raises(InvalidInput, match=r"Silent\.learn returned None, but it is active; expected the gradient"):
        go(Spy(loud=True))


@pytest.mark.parametrize(
    ("hook", "text"),
    [("build", r"build\(\)"), ("learn", r"learn\(seen, modules, random\)"), ("predict", r"predict\(view, target\)")],
)
def test_a_hook_that_is_not_written_is_named(hook: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Passive, hook, getattr(TrainingAttackState, hook))
    with pytest.raises(NotImplementedError, match=f"Passive does not define {text}"):
        go(Spy()).attack(Spy())
    with pytest.raises(NotImplementedError, match=r"TrainingAttack does not define enter\(site\)"):
        go(TrainingAttack())


class Stop(Exception):
    """Stands for a crash."""


@pytest.mark.parametrize("name", ALL)
def test_a_resumed_run_ends_in_the_same_bits(name: str, tmp_path: Path) -> None:
    def progress(done: int, rounds: int, metrics: Mapping[str, Any]) -> None:
        if done == 1:
            raise Stop

    changes: dict[str, Any] = {"rounds": 2, "data": ramps(1, 64), "defenses": [Noise(scale=0.1)]}
    whole = go(ALL[name], **changes)
    with pytest.raises(Stop):
        go(ALL[name], logging=splitfed.Logging(folder=tmp_path / "run", progress=progress), **changes)
    again = go(ALL[name], logging=splitfed.Logging(folder=tmp_path / "run", resume=True), **changes)
    assert_same(weights(again), weights(whole))
    assert_same(attack_state(again).state(), attack_state(whole).state())
    assert [h["training_attacks"] for h in again.history] == [h["training_attacks"] for h in whole.history]
    with pytest.raises(InvalidInput, match="holds another run: its training_attacks"):
        go(None, logging=splitfed.Logging(folder=tmp_path / "run", resume=True), **changes)


@pytest.mark.parametrize("name", ALL)
def test_the_guess_is_graded_and_knows_no_truth(name: str) -> None:
    run = go(ALL[name])
    (result,) = run.attack(ALL[name])
    assert result.prediction.shape == (64, 16)
    assert {"attack", "mean_image", "random_pairing", *FLOORS} <= set(result.scores)
    v = run.data.victims
    other = Dataset("other", v.x, 1 - v.y, v.task, v.value_range)
    assert torch.equal(run.attack(ALL[name], victims=other)[0].prediction, result.prediction)


def test_the_replica_is_frozen_and_in_evaluation_mode() -> None:
    run = go(None)
    segments = run.engine.topology.segments_of("server")
    replica = FrozenCopy(segments, segments[0].inputs[0], segments[-1].outputs[-1])
    live = run.engine.parties["server"].state.modules
    replica.follow(live)
    z = torch.randn(5, 2, requires_grad=True)
    replica(z).sum().backward()
    assert z.grad is not None
    assert float(z.grad.abs().sum()) > 0
    assert all(p.grad is None for m in live.values() for p in m.parameters())
    assert torch.equal(replica(z), live["top"](z))


@dataclass(frozen=True)
class Asker(Spy):
    """Wants of the training what can be had after it only."""

    learns_from: ClassVar[frozenset[Needs]] = frozenset({Needs.AUXILIARY, Needs.QUERIES, Needs.RELEASES})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such party": (
        {"adversaries": splitfed.Adversaries(training_attacks={"serfer": Fsha()})},
        "unknown party for a training attack 'serfer'; did you mean 'server'",
    ),
    "at a client": ({"adversaries": splitfed.Adversaries(training_attacks={"client0": Fsha()})}, "'client0' is none"),
    "no gradient": ({"plan": Fsha(), "schedule": "local_loss"}, "none goes back here"),
    "no auxiliary rows": ({"plan": Fsha(), "data": "bare"}, "Fsha needs auxiliary data; this run does not grant that"),
    "what is never granted": (
        {"plan": Asker()},
        "Asker needs releases, queries; inside training an attack is",
    ),
    "no auxiliary labels": (
        {"plan": Sdar(), "data": "bare"},
        "Sdar needs auxiliary data, labels of the auxiliary data",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_training(case: str) -> None:
    changes, text = dict(REFUSED[case][0]), REFUSED[case][1]
    if changes.get("data") == "bare":
        data = ramps()
        changes["data"] = replace(data, auxiliary=data.clients[0].test)
    if "adversaries" in changes:
        with pytest.raises(InvalidInput) as caught:
            splitfed.train(vanilla(small(), "first"), ramps(), rounds=1, **changes)
    else:
        with pytest.raises(InvalidInput) as caught:
            go(changes.pop("plan"), **changes)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ALL)
def test_several_values_at_one_party_are_refused(name: str) -> None:
    twice = u_shaped(small(), ("first.0", "first.1", "first.2", "second"))
    with pytest.raises(
        InvalidInput, match=r"needs a party that receives one value with data; 'server' receives '\w+', '\w+'$"
    ):
        splitfed.train(
            twice, ramps(), rounds=1, adversaries=splitfed.Adversaries(training_attacks={"server": ALL[name]})
        )


def test_a_training_attack_that_was_not_there_cannot_answer() -> None:
    with pytest.raises(InvalidInput, match=r"Fsha needs a training attack"):
        go(None).attack(Fsha())
    with pytest.raises(
        InvalidInput, match=r"here Spy was at 'server': train with Adversaries\(\{'server': Fsha\(\)\}\)"
    ):
        go(Spy()).attack(Fsha())
    with pytest.raises(InvalidInput, match="Fsha learns no labels"):
        go(ALL["fsha"], "u_shaped").attack(InsiderLabels())
    go(Spy()).attack(Rmle(iterations=1))


@pytest.mark.parametrize("plan", [Sdar.with_budget("quick"), Pcat.with_budget("quick", inverse_steps=2)])
def test_a_relay_that_sees_labels_learns_scores_of_its_own(plan: TrainingAttack) -> None:
    """Its segments make no scores: what they make is put into a head, and not into the loss as if it were scores."""
    with stream(0):
        topology = splitfed.topologies.multi_hop(mlp((1, 8, 8), 10, (16, 12), seed=None), ("relu1", "relu2"))
    data = splitfed.data.digits().clients(1, auxiliary=200, victims=16)
    run = splitfed.train(topology, data, rounds=1, adversaries=splitfed.Adversaries(training_attacks={"hop1": plan}))
    found = run.engine.training_attacks["hop1"]
    assert isinstance(found, TrainingAttackState)
    assert found.site.labels is not None
    assert not found.site.makes_scores
    assert "head" in found.nets
    (rows,) = run.attack(plan, adversary="hop1")
    assert rows.prediction.shape == (16, 1, 8, 8)


@pytest.mark.parametrize("kind", [TrainingAttack, TrainingAttackState])
def test_a_contract_has_at_most_twelve_methods_and_properties(kind: type) -> None:
    held = {name: inspect.getattr_static(kind, name) for name in dir(kind) if not name.startswith("_")}
    asked = [n for n, v in held.items() if inspect.isfunction(v) or isinstance(v, (property, classmethod))]
    assert len(asked) <= 12, asked


class _Beside(nn.Module):
    """Returns features, and constants beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.first(x)), torch.full((len(x), 4), 0.5)


class _Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(4, 2)

    def forward(self, h: Tensor, places: Tensor) -> Any:
        return self.second(h + places)


def beside() -> splitfed.Topology:
    """Return a topology in which constants cross beside features, as a mask would."""
    with stream(3):
        segments = (
            splitfed.Segment("bottom", "client", _Beside(), ("x",), ("h", "places")),
            splitfed.Segment("top", "server", _Added(), ("h", "places"), ("y",)),
        )
    heads = (splitfed.Head("y", "server", "client"),)
    return splitfed.Topology(name="by hand", inputs={"x": "client"}, segments=segments, heads=heads)


def test_a_value_without_data_does_not_stand_in_the_way_of_an_attack() -> None:
    attacks = splitfed.Adversaries(training_attacks={"server": Fsha(width=8)})
    run = splitfed.train(beside(), ramps(), rounds=1, batch_size=32, adversaries=attacks)
    assert attack_state(run).site.value == "h"
    spied = splitfed.Adversaries(training_attacks={"server": Spy()})
    spy = attack_state(splitfed.train(beside(), ramps(), rounds=1, batch_size=32, adversaries=spied))
    assert isinstance(spy, Passive)
    # Of features the numbers differ, of constants they would not.
    assert all(seen.z.unique().numel() > 4 for seen, _ in spy.seen)


@pytest.mark.parametrize("name", [name for name in ALL if name != "fsha"])
def test_an_attack_that_runs_the_segments_on_its_own_rows_says_what_it_lacks(name: str) -> None:
    attacks = splitfed.Adversaries(training_attacks={"server": ALL[name]})
    with pytest.raises(InvalidInput, match=r"segment 'top' on rows of its own has no 'places' for them.*fsha"):
        splitfed.train(beside(), ramps(), rounds=1, batch_size=32, adversaries=attacks)
