"""A run looked at in stages: the run that trains at a stretch, and where it was cut it goes on in the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.papers.stages import stages
from splitfed.attacks.training_time.fsha import Fsha
from splitfed.training.run import Run
from tests.attacks.training_time_examples import attack_state, go, ramps
from tests.examples import assert_same

PLAN = Fsha(width=8)


def start(rounds: int = 1) -> Run:
    return go(PLAN, rounds=rounds, data=ramps(1, 64))


def steps(run: Run) -> dict[str, float]:
    return {"steps": attack_state(run).steps}


def test_stages_are_one_training(tmp_path: Path) -> None:
    """A round has two steps; it is looked at after the first, after every second, and in the end."""
    run, seen = stages(start, 5, 2, steps, tmp_path)
    assert [(one["round"], one["steps"]) for one in seen] == [(1, 2), (2, 4), (4, 8), (5, 10)]
    whole = start(5)
    assert_same(run.engine.state(), whole.engine.state())
    assert_same(attack_state(run).state(), attack_state(whole).state())


def test_what_was_cut_short_goes_on(tmp_path: Path) -> None:
    def cut(run: Run) -> dict[str, float]:
        if attack_state(run).steps == 8:
            raise KeyboardInterrupt
        return steps(run)

    with pytest.raises(KeyboardInterrupt):
        stages(start, 5, 2, cut, tmp_path / "cut")
    looked: list[int] = []

    def again(run: Run) -> dict[str, float]:
        looked.append(attack_state(run).steps)
        return steps(run)

    run, seen = stages(start, 5, 2, again, tmp_path / "cut")
    whole, expected = stages(start, 5, 2, steps, tmp_path / "whole")
    assert (seen, looked) == (expected, [8, 10])
    assert_same(run.engine.state(), whole.engine.state())
