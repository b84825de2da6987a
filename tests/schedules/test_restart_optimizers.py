"""Optimizers restarted every round or not: one setting of the run, the same for all methods, right in every one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from splitfed.attacks.gradients.gradient_matching import newest_step
from splitfed.core.errors import InvalidInput
from splitfed.core.local_update import LocalUpdate
from splitfed.core.messages import Recording
from splitfed.core.optimizers import Optim
from splitfed.engines.base import FED
from splitfed.federated import FedAvg, FedNova, FedProto, FedProx
from splitfed.federated.scaffold import Steer
from splitfed.planning.validation import prepare
from splitfed.registry import TABLES, load
from splitfed.schedules import Independent
from splitfed.schedules.base import Training
from splitfed.threats.recorded_training import recorded_view
from splitfed.topologies import vanilla
from splitfed.training.run import Run
from splitfed.training.settings import Logging
from tests.examples import assert_same
from tests.federated.examples import (
    CLIENTS,
    RATE,
    START,
    arguments,
    check_resumed,
    common,
    go,
    hand,
    model,
    own,
    pictures,
)
from tests.rounding import single

MOMENTUM = Optim("SGD", {"lr": RATE, "momentum": 0.9})


def alone(rounds: int, restart: bool, rows: int, label: float) -> float:
    """One weight at one client: every step of momentum .9 on (w - label)^2, from where the round before ended."""
    w, held = START, 0.0
    for _ in range(rounds):
        held = 0.0 if restart else held
        for _ in range(rows):
            held = 0.9 * held + 2 * (w - label)
            w -= RATE * held
    return w


def averaged(rounds: int, restart: bool) -> float:
    """The same with FedAvg: everybody starts each round at the mean, with the momentum that it has."""
    mean, held = START, [0.0] * len(CLIENTS)
    for _ in range(rounds):
        ends = []
        for replica, (rows, label) in enumerate(CLIENTS):
            w = mean
            held[replica] = 0.0 if restart else held[replica]
            for _ in range(rows):
                held[replica] = 0.9 * held[replica] + 2 * (w - label)
                w -= RATE * held[replica]
            ends.append(w)
        mean = 0.75 * ends[0] + 0.25 * ends[1]
    return mean


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("method", [None, "standalone"])
def test_clients_that_train_alone_by_hand(method: str | None, restart: bool) -> None:
    run = hand(method, rounds=3, optimizer=MOMENTUM, local=LocalUpdate(restart_optimizers=restart))
    assert [own(run, replica) for replica in range(2)] == single([alone(3, restart, *client) for client in CLIENTS])
    assert run.training.restart_optimizers == restart


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("method", [FedAvg(), FedProx(mu=0.0)])
def test_averaged_clients_by_hand(method: Any, restart: bool) -> None:
    assert common(hand(method, 3, optimizer=MOMENTUM, local=LocalUpdate(restart_optimizers=restart))) == single(
        averaged(3, restart)
    )


def test_it_is_the_same_for_every_method_unless_one_is_told_otherwise() -> None:
    def restarts(method: Any, training: Training) -> bool:
        given = arguments(data=pictures(), optimizer=Optim())
        more = {"defenses": (), "training": training, "method": method}
        return prepare(**given, **more).training.restart_optimizers

    # Those that need public rows are refused here before it comes to that.
    methods = [name for name in TABLES["methods"] if name not in ("mafml", "fedmd", "aggregation")]
    for name in methods:
        kind = load("methods", name)
        assert restarts(kind(restart=False), Training(7, restart_optimizers=True)) is False, name
    assert all(load("methods", name)().restart is None for name in TABLES["methods"])
    assert restarts("fednova", Training(7, restart_optimizers=True)) is True
    assert restarts("scaffold", Training(7)) is False


def test_a_methods_own_word_trains_as_the_runs() -> None:
    one, other = hand(FedAvg(restart=True), 3, optimizer=MOMENTUM), hand("fedavg", 3, optimizer=MOMENTUM)
    assert common(one) == single(averaged(3, True))
    assert common(other) == single(averaged(3, False))
    assert (one.training.restart_optimizers, other.training.restart_optimizers) == (True, False)


def test_every_party_of_a_split_lane_is_restarted() -> None:
    def momenta(run: Run) -> list[bool]:
        return [
            bool(party.state.momentum()) for party in run.engine.run_parties.members().values() if party.state.modules
        ]

    run = go(None, 1, topology=vanilla(model(), "relu"), schedule="splitfed_v1", optimizer=MOMENTUM)
    assert any(momenta(run))
    run.engine.restart_optimizers()
    assert not any(momenta(run))


def reach(options: dict[str, Any], steps: Sequence[int]) -> list[float]:
    """How far torch's SGD carries a constant gradient of one in each round of so many steps, times the rate."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0, **options)
    found, before = [], 0.0
    for count in steps:
        for _ in range(count):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        found.append(before - float(weight.detach()))
        before = float(weight.detach())
    return found


OPTIONS = [
    {"momentum": 0.9},
    {"momentum": 0.5, "nesterov": True},
    {"momentum": 0.8, "dampening": 0.4},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_fednova_counts_what_a_living_momentum_holds(options: dict[str, Any]) -> None:
    """At a tiny rate gradients hardly change: 2 and 10. What is divided by must be what carried them."""
    tiny, rounds = 1e-5, 3
    run = hand(FedNova(), rounds, optimizer=Optim("SGD", {"lr": tiny, **options}))
    a = [reach(options, [rows] * rounds) for rows, _ in CLIENTS]
    moved = sum((0.75 * a[0][k] + 0.25 * a[1][k]) * (0.75 * 2 + 0.25 * 10) for k in range(rounds))
    assert (START - common(run)) / tiny == pytest.approx(moved, rel=2e-2)
    # From an empty momentum the later rounds would be counted like the first.
    assert a[0][2] > 1.1 * a[0][0]


def test_fednova_with_equal_steps_is_fedavg_with_a_living_momentum_too() -> None:
    equal = ((2, 1.0), (2, -3.0))
    for restart in (False, True):
        one, other = (
            hand(method, 4, clients=equal, optimizer=MOMENTUM, local=LocalUpdate(restart_optimizers=restart))
            for method in (FedNova(), FedAvg())
        )
        assert common(one) == single(common(other))


def test_fednova_knows_the_momentum_of_a_client_that_left_and_of_a_resumed_run(tmp_path: Path) -> None:
    some = {
        "schedule": Independent(clients_per_round=2, drop_out=0.4),
        "optimizer": MOMENTUM,
        "local": LocalUpdate(local_epochs=2),
    }
    run = go(FedNova(), 4, **some)
    assert any(entry["dropped"] for entry in run.history)
    check_resumed(run, FedNova(), tmp_path / "run", **some)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_scaffolds_variate_is_a_gradient_with_a_living_momentum_too(options: dict[str, Any]) -> None:
    """At a tiny rate the variates settle in the first round; what momentum brings along must not change them."""
    run = hand("scaffold", 4, optimizer=Optim("SGD", {"lr": 1e-4, **options}))
    found = []
    for replica in range(2):
        objective = run.engine.party(replica, "client").state.objective
        assert isinstance(objective, Steer)
        found.append(float(objective.own["model/weight"]))
    assert found == pytest.approx([2.0, 10.0], rel=2e-2)
    assert float(run.method_state["variate"]["model/weight"]) == pytest.approx(0.75 * 2 + 0.25 * 10, rel=2e-2)


def test_scaffolds_variate_is_the_weighted_mean_of_the_raw_gradients() -> None:
    """Two rounds of momentum .9 by hand, at a rate at which gradients change."""
    run, x, held, c, ci = hand("scaffold", 2, optimizer=MOMENTUM), START, [0.0, 0.0], 0.0, [0.0, 0.0]
    for _ in range(2):
        ends, before = [], list(ci)
        for replica, (rows, label) in enumerate(CLIENTS):
            w, gradients = x, []
            for _ in range(rows):
                gradients.append(2 * (w - label))
                held[replica] = 0.9 * held[replica] + gradients[-1] + c - before[replica]
                w -= RATE * held[replica]
            # The k-th of K gradients is taken 1 + .9 + ... + .9^(K - k) times.
            weights = [sum(0.9**i for i in range(rows - k)) for k in range(rows)]
            ci[replica] = sum(a * g for a, g in zip(weights, gradients, strict=True)) / sum(weights)
            ends.append(w)
        c += 0.75 * (ci[0] - before[0]) + 0.25 * (ci[1] - before[1])
        x = 0.75 * ends[0] + 0.25 * ends[1]
    assert common(run) == pytest.approx(x, rel=1e-4)
    objectives = [run.engine.party(replica, "client").state.objective for replica in range(2)]
    assert [float(t.own["model/weight"]) for t in objectives] == pytest.approx(ci, rel=1e-4)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["scaffold", "fednova"])
def test_a_resumed_run_ends_in_the_same_bits(name: str, tmp_path: Path) -> None:
    given = {"optimizer": MOMENTUM, "local": LocalUpdate(restart_optimizers=True)}
    check_resumed(go(name, 3, **given), load("methods", name)(), tmp_path / "run", **given)


def test_a_run_is_resumed_with_its_own_setting_alone(tmp_path: Path) -> None:
    go("fedavg", 1, logging=Logging(folder=tmp_path), local=LocalUpdate(restart_optimizers=True))
    with pytest.raises(InvalidInput, match=r"holds another run: its training\.restart_optimizers is True, not False"):
        go("fedavg", 1, logging=Logging(folder=tmp_path, resume=True))


def test_without_momentum_it_changes_nothing() -> None:
    one, other = (go(FedProto(), 2, local=LocalUpdate(restart_optimizers=restart)) for restart in (False, True))
    assert_same(one.engine.modules(0)["body"].state_dict(), other.engine.modules(0)["body"].state_dict())


@pytest.mark.parametrize("restart", [False, True])
def test_a_fed_server_reads_the_gradient_off_an_update(restart: bool) -> None:
    """The step of the third round with the momentum of the two before, or without it."""
    run = hand(
        "fedavg",
        3,
        clients=((1, 1.0), (1, -3.0)),
        optimizer=MOMENTUM,
        local=LocalUpdate(restart_optimizers=restart),
        logging=Logging(record=Recording((FED,))),
    )
    for replica, label in enumerate((1.0, -3.0)):
        local = run.evaluator.grants.local(FED, replica)
        assert local is not None
        step = newest_step(recorded_view(run.engine, FED, replica), local)
        before = float(step.before["model/weight"])
        assert float(step.gradient["model/weight"]) == pytest.approx(2 * (before - label), rel=1e-4)


def test_copies_that_an_attack_trains_are_restarted_as_the_run_is() -> None:
    def copied(restart: bool, momentum: float) -> torch.Tensor:
        optimizer = Optim("SGD", {"lr": 0.1, "momentum": momentum})
        run = go(None, 1, optimizer=optimizer, local=LocalUpdate(restart_optimizers=restart))
        rows = run.data.clients[0].train
        return run.evaluator.grants.imitate(0)(rows.x, rows.y, 3, None, 5).predict(rows.x)

    assert torch.equal(copied(False, 0.0), copied(True, 0.0))
    assert not torch.allclose(copied(False, 0.9), copied(True, 0.9))


@pytest.mark.parametrize("value", [1, "yes", None])
def test_what_is_no_switch_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInput, match=r"restart_optimizers=.* is not allowed; expected True or False"):
        go("fedavg", local=LocalUpdate(restart_optimizers=value))


def test_a_methods_own_word_must_be_one() -> None:
    with pytest.raises(InvalidInput, match="FedAvg restart='often' is not allowed; expected True, False, or None"):
        go(FedAvg(restart="often"))  # type: ignore[arg-type]
