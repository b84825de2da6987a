"""The simulated clock beside federated methods: planned is counted, further steps take longer, exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import splitfed as sf
from splitfed.core.random import stream
from splitfed.costs.speeds import Machine, Speeds
from splitfed.federated import FedProto
from splitfed.models.mlp import mlp
from splitfed.planning.plan import cost
from splitfed.planning.validation import prepare
from splitfed.registry import TABLES, load
from splitfed.schedules.base import Training
from splitfed.topologies import local, vanilla
from tests.thinning import thin

SPEEDS = Speeds(Machine(1e7, 1e5, 2e5, 0.01), {"fed_server": Machine(1e9, 1e6, 1e6, 0.01)}, stragglers={"client1": 2.0})


def data() -> Any:
    return sf.data.digits().clients(3, auxiliary=4, victims=4, public=0.1)


def shaped(shape: str = "local") -> sf.Topology:
    with stream(0):
        model = mlp((1, 8, 8), 10, (12,), seed=None)
    return local(model, ("relu1",)) if shape == "local" else vanilla(model, "relu1")


def go(method: Any, schedule: Any = "independent", rounds: int = 2, **changes: Any) -> sf.Run:
    arguments: dict[str, Any] = {
        "schedule": schedule,
        "method": method,
        "rounds": rounds,
        "evaluation": sf.Evaluation(every=rounds, speeds=SPEEDS),
        **changes,
    }
    return sf.train(shaped(), data(), **arguments)


def seconds(run: sf.Run) -> float:
    return float(run.history[-1]["simulated_seconds"])


@pytest.mark.parametrize("name", thin(TABLES["methods"], 2))
def test_planned_seconds_are_those_of_the_run(name: str) -> None:
    method = load("methods", name)()
    planned = prepare(
        shaped(), data(), schedule="independent", defenses=(), optimizer=None, training=Training(64), method=method
    )
    expected = cost(planned, 2, SPEEDS).seconds
    assert expected is not None
    if method.traits(planned.topology).at_most is None:
        assert seconds(go(method)) == pytest.approx(expected, rel=1e-12)
    else:
        assert seconds(go(method)) <= expected


def test_by_hand_one_client() -> None:
    """Weights down, ten steps, weights up: each time a latency, and as long as the slower end takes."""
    machines = Speeds(Machine(1e7, 1e5, 2e5, 0.01))
    rows = sf.data.digits().rows(range(640 + 8)).clients(1, auxiliary=4, victims=4, validation=0.0, test=0.0)
    parameters = 4 * (64 * 12 + 12 + 12 * 10 + 10)
    alone, fed = (
        sf.train(
            shaped(), rows, schedule="independent", method=method, rounds=1, evaluation=sf.Evaluation(speeds=machines)
        )
        for method in (None, "fedavg")
    )
    assert fed.bytes == 2 * parameters
    assert seconds(fed) - seconds(alone) == pytest.approx(2 * (parameters / 1e5 + 0.01))


def test_averaging_takes_as_long_as_the_schedule_that_averages() -> None:
    fed, split = go("fedavg"), go(None, "splitfed_v1")
    assert fed.bytes == split.bytes
    assert seconds(fed) == pytest.approx(seconds(split))


def test_steps_of_the_methods_own_take_time() -> None:
    """Clients that take two passes in place of one train about twice as long."""
    plain, further = go(FedProto(), rounds=2), go(FedProto(further=3), rounds=2)
    steps = [run.engine.run_parties.participation[0].steps for run in (plain, further)]
    assert steps[1] == 1.5 * steps[0]
    assert seconds(further) > 1.3 * seconds(plain)


def test_a_split_lane_and_a_server_that_sends_for_its_clients() -> None:
    plan = sf.schedules.Sequential(hand_over="none")
    for method in ("fedproto", "fedmd"):
        made = load("methods", method)()
        ready = prepare(
            shaped("vanilla"), data(), schedule=plan, defenses=(), optimizer=None, training=Training(64), method=made
        )
        run = sf.train(
            shaped("vanilla"), data(), schedule=plan, method=made, rounds=2, evaluation=sf.Evaluation(speeds=SPEEDS)
        )
        assert seconds(run) == pytest.approx(cost(ready, 2, SPEEDS).seconds, rel=1e-12)


def test_the_clock_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def stop(done: int, rounds: int, metrics: Any) -> None:
        if done == 2:
            raise KeyboardInterrupt

    whole = go("scaffold", rounds=4)
    with pytest.raises(KeyboardInterrupt):
        go("scaffold", rounds=4, logging=sf.Logging(folder=tmp_path / "run", progress=stop))
    again = go("scaffold", rounds=4, logging=sf.Logging(folder=tmp_path / "run", resume=True))
    assert seconds(again) == seconds(whole)
