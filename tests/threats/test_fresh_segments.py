"""Segments drawn anew hold what an adversary knows alone, so no defense is asked to judge them in the run's place."""

from __future__ import annotations

import pytest

import splitfed as sf
from splitfed.defenses import DpSgd
from splitfed.models import mlp
from splitfed.registry import load

DATA = sf.data.breast_cancer().clients(1, auxiliary=40, victims=16)


@pytest.fixture(scope="module")
def runs() -> dict[str, sf.Run]:
    """A U-shape whose server may draw the client's part anew, trained with private steps and without."""

    def train(*defenses: sf.Defense) -> sf.Run:
        model = mlp((30,), 1, hidden=(16, 8), seed=0)
        topology = sf.topologies.u_shaped(model, ("relu1", "relu2"))
        return sf.train(topology, DATA, rounds=1, batch_size=64, defenses=defenses)

    return {"none": train(), "dp_sgd": train(DpSgd(noise_multiplier=1.0, delta=1e-5))}


def test_private_steps_refuse_no_attack_that_draws_the_client_anew(runs: dict[str, sf.Run]) -> None:
    """The loss of the redrawn topology has no segment before it, which `dp_sgd` would take for the run's."""
    for run in runs.values():
        assert run.evaluator.refusal("unsplit", load("attacks", "unsplit").with_budget("quick")) is None


def test_private_steps_change_no_answer_to_what_applies(runs: dict[str, sf.Run]) -> None:
    plain, private = (run.applicable() for run in runs.values())
    assert {n for n, why in plain.items() if why is None} == {n for n, why in private.items() if why is None}
