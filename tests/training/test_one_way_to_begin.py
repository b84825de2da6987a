"""One way to begin a run: what is asked for becomes a plan, the plan an engine, and both a run that is whole then."""

from __future__ import annotations

import ast
import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import splitfed as sf
from splitfed.core.defense import Defense
from splitfed.core.errors import InvalidInput
from splitfed.data.dataset import Federation
from splitfed.models.mlp import mlp
from splitfed.planning.validation import Prepared, prepare
from splitfed.schedules.base import Training
from splitfed.topologies import vanilla
from splitfed.training.entry_point import engine_of
from splitfed.training.run import Run
from splitfed.training.run_plan import RunPlan
from tests.examples import assert_same, toy_data

ROOT = Path(sf.__file__).resolve().parent
MOST_FILES, MOST_RETURNS = 15, 15


def data() -> Federation:
    return toy_data(80).clients(2, auxiliary=16, victims=4)


def plan(rounds: int = 2, **more: Any) -> RunPlan:
    topology = vanilla(mlp((1, 8, 8), 10, hidden=[8], seed=0), "relu1")
    given: dict[str, Any] = {"schedule": "splitfed_v1", "defenses": [sf.defenses.Noise(scale=0.1)], "optimizer": None}
    return RunPlan(prepare(topology, data(), training=Training(20), **given), rounds, **more)


def test_a_run_is_whole_when_it_is_made() -> None:
    given = plan(3, evaluation=sf.Evaluation(delta=1e-3), logging=sf.Logging(callbacks=[sf.EarlyStopping()]))
    run = Run(given, engine_of(given))
    assert (run.plan, run.data, run.schedule, run.method) == (given, given.prepared.data, given.prepared.schedule, None)
    assert (run.history, run.stopped, len(run.callbacks)) == ([], None, 1)
    assert (run.evaluator.grants.rounds, run.evaluator.grants.training) == (3, given.prepared.training)
    assert run.ledger.delta == 1e-3
    assert "0 of 3" in str(run.summary())


def test_a_run_made_by_hand_trains_as_one_of_train() -> None:
    given = plan()
    run = Run(given, engine_of(given))
    run.continue_training()
    topology = vanilla(mlp((1, 8, 8), 10, hidden=[8], seed=0), "relu1")
    noise = sf.defenses.Noise(scale=0.1)
    other = sf.train(topology, data(), schedule="splitfed_v1", defenses=noise, rounds=2, batch_size=20)
    assert_same(run.state_dict(), other.state_dict())


def test_a_plan_refuses_when_it_is_made() -> None:
    with pytest.raises(InvalidInput, match="device='cuda:9' is not there"):
        plan(device="cuda:9")
    guard = sf.defenses.GaussianRelease(noise_multiplier=2.0)
    topology = vanilla(mlp((1, 8, 8), 10, hidden=[8], seed=0), "relu1")
    given: dict[str, Any] = {"schedule": "splitfed_v1", "optimizer": None, "training": Training(20)}
    ready = prepare(topology, data(), defenses=guard, **given)
    with pytest.raises(InvalidInput, match="across=True puts everybody's rows"):
        RunPlan(ready, 2, evaluation=sf.Evaluation(across_clients=True))


def test_no_field_of_a_run_is_set_from_outside() -> None:
    """Nowhere above the run is something assigned to `run.NAME`, or to a field of what the run holds."""
    found = []
    for path in sorted([*(ROOT / "training").rglob("*.py"), *(ROOT / "study").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) else ():
                for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                    text = ast.unparse(one) if isinstance(one, ast.Attribute) else ""
                    found += [f"{path}:{node.lineno}: {text}"] if text.startswith(("run.", "self._run.")) else []
    assert not found, "\n".join(found)


def project_file(path: str) -> str | None:
    real = Path(path).resolve()
    return str(real.relative_to(ROOT)) if real.is_relative_to(ROOT) else None


def test_defenses_come_to_a_party_by_few_files() -> None:
    """Followed are calls that are given the sequence of defenses, or the prepared run that holds it."""
    entered: list[str] = []

    def follows(value: object) -> bool:
        several = isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(d, Defense) for d in value)
        return several or isinstance(value, Prepared)

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        file = project_file(code.co_filename) if event == "call" else None
        if file is None:
            return
        if code.co_name == "make" and file == "engines/parties.py":
            sys.setprofile(None)
            return
        # Before its first statement a function's local variables are its arguments.
        given = [value for name, value in frame.f_locals.items() if name != "self"]
        if code.co_argcount + code.co_kwonlyargcount and any(map(follows, given)):
            entered.append(file)

    topology, rows = vanilla(mlp((1, 8, 8), 10, hidden=[8], seed=0), "relu1"), data()
    sys.setprofile(note)
    try:
        sf.train(topology, rows, schedule="splitfed_v1", defenses=[sf.defenses.Noise(scale=0.1)], rounds=1)
    finally:
        sys.setprofile(None)
    stops = entered[:1] + [after for before, after in pairwise(entered) if before != after]
    assert "engines/parties.py" in stops
    assert len(set(stops)) <= MOST_FILES, "\n".join(stops)
    assert len(stops) - len(set(stops)) <= MOST_RETURNS, "\n".join(stops)
