"""Whole runs with DP-SGD: epsilon against Opacus' own accountant, every schedule, plan equal to count, resumed runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import splitfed
from splitfed.core.defense import Defense
from splitfed.core.optimizers import Optim
from splitfed.core.privacy_events import Event, Gaussian, Neighbours, Protects
from splitfed.data.batch_order import poisson_batches
from splitfed.data.dataset import Federation
from splitfed.defenses import DpSgd
from splitfed.engines.local import LocalEngine
from splitfed.planning.calibration import calibrate_defenses
from splitfed.planning.counting import CountingTrainer
from splitfed.planning.plan import cost
from splitfed.planning.simulation import simulate_rounds
from splitfed.planning.validation import prepare
from splitfed.poisoning.base import Poisoning
from splitfed.privacy.accountants import compose
from splitfed.schedules.base import Training
from splitfed.schedules.independent import Independent
from splitfed.schedules.sequential import Sequential
from splitfed.topologies import heterogeneous, local, vanilla, vertical
from splitfed.training.run import Run
from tests.examples import InPlaceAfterCut, assert_same, toy_data
from tests.federated.examples import EXAMPLE_PASSES, shared_probes
from tests.thinning import thin
from tests.training.test_resume import Stop, stop_after


def model() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return InPlaceAfterCut()


@cache
def split() -> splitfed.Topology:
    return vanilla(model(), "pool")


@cache
def two_clients() -> Federation:
    return toy_data(100).clients(2, auxiliary=10, victims=10)


def go(*defenses: Defense, **changes: Any) -> Run:
    options: dict[str, Any] = {"rounds": 2, "batch_size": 8, "optimizer": Optim("Adam", {"lr": 1e-2})}
    given = {"data": two_clients(), **options, **changes}
    with shared_probes():
        return splitfed.train(split(), given.pop("data"), defenses=defenses, **given)


def step_counts(run: Run, client: int) -> tuple[int, int]:
    counts = run.engine.run_parties.participation[client]
    return counts.steps, counts.most


def uses_of(run: Run, client: int = 0) -> tuple[Event, int]:
    found = run.engine.defenses[0].weight_uses(client, *step_counts(run, client))
    assert found is not None
    return found


def test_poisson_batches_are_what_they_say() -> None:
    """Each of 40 rows with chance 8 / 40 at each of 5 steps, all independent: 4000 steps, 4 standard errors."""
    found = [rows for epoch in range(800) for rows in poisson_batches(40, 8, 0, epoch, 0)]
    assert len(found) == 4000
    sizes = torch.tensor([len(rows) for rows in found]).double()
    counts = torch.bincount(torch.cat(found), minlength=40).double()
    deviation = math.sqrt(40 * 0.2 * 0.8)
    assert float(sizes.mean()) == pytest.approx(8, abs=4 * deviation / math.sqrt(4000))
    assert float(sizes.var()) == pytest.approx(deviation**2, rel=4 * math.sqrt(2 / 4000))
    assert float((counts - 800).abs().max()) < 4.5 * math.sqrt(4000 * 0.2 * 0.8)
    assert all(len(rows.unique()) == len(rows) for rows in found)
    same = list(poisson_batches(40, 8, 0, 3, 0))
    assert all(torch.equal(one, two) for one, two in zip(same, poisson_batches(40, 8, 0, 3, 0), strict=True))
    assert [len(rows) for rows in poisson_batches(5, 8, 0, 0)] == [5], "a batch as large as the data has every row"
    assert any(len(rows) == 0 for epoch in range(20) for rows in poisson_batches(40, 1, 0, epoch))


def test_who_takes_part_is_drawn_from_a_whole_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two purposes get the same number as seed, as two of 32 bits may, their batches differ all the same."""
    monkeypatch.setattr("splitfed.core.random.derive", lambda *words: 7)
    one, two = (torch.cat(list(poisson_batches(40, 8, 0, epoch, 0))) for epoch in (0, 1))
    assert one.tolist() != two.tolist()


def test_the_joint_event_with_poisson_sampling() -> None:
    """Two parties of multiplier 1.2 are one of 1.2 / √2; with a joint norm 1.2. 36 rows in steps of 8: q = 2 / 9."""
    run = go(DpSgd(noise_multiplier=1.2), local=splitfed.LocalUpdate(sampling="poisson"))
    rows = len(run.data.clients[0].train)
    steps = 2 * math.ceil(rows / 8)
    event = Event(
        Gaussian(1.2 / math.sqrt(2)), Protects.WEIGHTS, neighbours=Neighbours.ADD_REMOVE, sampling_rate=8 / rows
    )
    assert uses_of(run) == (event, steps)
    joint, _ = uses_of(go(DpSgd(noise_multiplier=1.2, clip="joint"), local=splitfed.LocalUpdate(sampling="poisson")))
    assert joint.mechanism == Gaussian(1.2)


def test_shuffled_an_epoch_is_one_use_of_twice_the_sensitivity() -> None:
    run = go(DpSgd(noise_multiplier=1.2), local=splitfed.LocalUpdate(local_epochs=2))
    event = Event(Gaussian(1.2 / math.sqrt(2) / 2), Protects.WEIGHTS, neighbours=Neighbours.REPLACE)
    assert uses_of(run) == (event, 4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accountant", ["rdp", pytest.param("prv", marks=pytest.mark.exhaustive)])
def test_epsilon_is_that_of_opacus(accountant: str) -> None:
    """The target is met, not by much, when Opacus counts the steps that were taken with the multiplier found."""
    from opacus.accountants import create_accountant

    run = go(
        DpSgd(epsilon=3.0, delta=1e-3, clip="joint", accountant=accountant),
        local=splitfed.LocalUpdate(sampling="poisson"),
    )
    event, steps = uses_of(run)
    assert isinstance(event.mechanism, Gaussian)
    theirs = create_accountant(accountant)
    theirs.history = [(event.mechanism.noise_multiplier, event.sampling_rate, steps)]
    assert 2.97 < theirs.get_epsilon(delta=1e-3) <= 3.0 * 1.001


@pytest.mark.parametrize("sampling", thin(["shuffle", "poisson"], 2))
def test_a_target_holds_for_clients_of_different_make(sampling: str) -> None:
    """One with a frozen bottom has a single guarded party, one that learns has two, and needs more noise."""
    bottoms = [torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8)) for _ in range(2)]
    bottoms[1].requires_grad_(False)
    top = torch.nn.Linear(8, 10)
    makes = heterogeneous([vertical({"client": bottom}, top, labels="client") for bottom in bottoms])
    for topologies in (makes, makes[::-1]):
        run = splitfed.train(
            topologies,
            two_clients(),
            schedule=Sequential(hand_over="none"),
            defenses=DpSgd(epsilon=2.0, delta=1e-3),
            rounds=1,
            batch_size=8,
            local=splitfed.LocalUpdate(sampling=sampling),
        )
        spent = [compose([uses_of(run, client)], 1e-3).epsilon for client in range(2)]
        assert max(spent) == pytest.approx(2.0, rel=2e-3)
        assert min(spent) < 1.7


def test_without_every_weight_guarded_nothing_is_promised() -> None:
    run = go(DpSgd(noise_multiplier=1.2, roles=("server",)))
    (settled_one,) = run.engine.defenses
    assert settled_one.event() is None
    assert settled_one.weight_uses(0, 5, 1) is None
    assert settled_one.guarantee == (
        "no formal guarantee: the weights of role 'client' learn from the same rows unguarded"
    )
    assert DpSgd(noise_multiplier=0.0).weight_uses(0, 5, 1) is None


def test_with_a_client_that_stands_inside_the_steps_nothing_is_promised() -> None:
    """It may give one row the gradient of another; one that bends uploads only processes what is private already."""

    @dataclass(frozen=True, kw_only=True)
    class Inside(Poisoning):
        def enter(self, engine: LocalEngine, data: Federation) -> None:
            return None

    run = go(DpSgd(noise_multiplier=1.2), adversaries=splitfed.Adversaries(poisoning=Inside()))
    assert not run.ledger.totals
    assert run.engine.defenses[0].guarantee == "no formal guarantee: 'Inside' does not follow the protocol"
    assert go(DpSgd(noise_multiplier=1.2), adversaries=splitfed.Adversaries(poisoning=Poisoning())).ledger.totals


@pytest.mark.parametrize("sampling", ["shuffle", "poisson"])
@pytest.mark.parametrize(
    "schedule", thin(["sequential", "alternate", "splitfed_v1", "splitfed_v2", "splitfed_v3", "local_loss"], 2)
)
def test_planned_equals_counted(schedule: str, sampling: str) -> None:
    """Bytes of every flow, norms included, and what each client took part in; every weight ends up elsewhere."""
    data, defense = two_clients(), DpSgd(noise_multiplier=1.0, clip="joint")
    run = go(defense, data=data, schedule=schedule, local=splitfed.LocalUpdate(sampling=sampling), batch_size=2)
    ready = calibrate_defenses(
        prepare(
            split(),
            data,
            schedule=schedule,
            defenses=defense,
            optimizer=None,
            training=Training(2, sampling=sampling),
            example_passes=EXAMPLE_PASSES,
        ),
        2,
    )
    counted = {flow: entry for flow, entry in run.engine.traffic.flows.items() if flow.phase == "train"}
    assert dict(cost(ready, 2).flows) == counted
    assert counted[next(f for f in counted if f.kind == "norm")][1] > 0
    (mine,) = ready.defenses
    assert isinstance(mine, DpSgd)
    assert mine._terms is not None
    for client in range(2):
        assert (mine._terms.steps[client], mine._terms.epochs[client]) == step_counts(run, client)


@pytest.mark.parametrize(
    "schedule", [Independent(steps=7), Independent(steps=2), Independent(steps=2, clients_per_round=1)]
)
def test_rounds_counted_in_steps_cost_a_row_every_batch_that_it_is_in(schedule: Independent) -> None:
    """Three batches hold all rows: seven steps of a round see a row three times, two may see it twice."""
    data, rounds, training = two_clients(), 3, Training(16)
    arguments: dict[str, Any] = {"schedule": schedule, "defenses": DpSgd(noise_multiplier=1.0), "method": None}
    run = splitfed.train(local(model()), data, rounds=rounds, batch_size=16, **arguments)
    ready = prepare(local(model()), data, optimizer=None, training=training, **arguments)
    dry = CountingTrainer(ready)
    for _ in simulate_rounds(dry, ready, rounds):
        pass
    for client, rows in enumerate(len(held.train) for held in data.clients):
        seen = torch.zeros(rows, dtype=torch.int64)
        for number in range(rounds):
            for turn in schedule.turns(dry, training, number):
                for batch in schedule._batches(training, rows, number, client) if turn.client == client else ():
                    seen[batch] += 1
        assert uses_of(run, client)[1] == dry.step_counts(client)[1] == int(seen.max())
    assert schedule.steps == 2 or uses_of(run)[1] > rounds


@pytest.mark.parametrize("sampling", ["shuffle", "poisson"])
def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path, sampling: str) -> None:
    def once(name: str, **kept: Any) -> Run:
        defense = DpSgd(noise_multiplier=0.5, clip="joint")
        logging = splitfed.Logging(folder=tmp_path / name, **kept)
        return go(defense, logging=logging, local=splitfed.LocalUpdate(sampling=sampling), batch_size=2, rounds=3)

    def outcome(run: Run) -> dict[str, Any]:
        history = [{k: v for k, v in entry.items() if k != "seconds"} for entry in run.history]
        return {"state": run.state(), "history": history}

    whole = once("whole")
    with pytest.raises(Stop):
        once("parts", progress=stop_after(1))
    assert_same(outcome(once("parts", resume=True)), outcome(whole))


def test_it_learns() -> None:
    """Clipping and little noise leave the toy task learnable; as much noise as a small epsilon takes does not."""
    data = toy_data(400).clients(1, auxiliary=10, victims=10)
    options: dict[str, Any] = {"data": data, "rounds": 6, "batch_size": 16, "schedule": "joint"}
    little = go(DpSgd(noise_multiplier=0.1, clip="joint"), **options)
    much = go(DpSgd(noise_multiplier=50.0, clip="joint"), **options)
    assert little.accuracy > 0.5
    assert much.accuracy < little.accuracy - 0.2
