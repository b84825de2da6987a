"""The audit: its interval, what it proves of mechanisms that keep their claim, and of a study's run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import splitfed as sf
from splitfed.cli import main
from splitfed.core.defense import Defense
from splitfed.core.errors import InvalidInput
from splitfed.core.optimizers import Optim
from splitfed.defenses import GaussianRelease, LaplaceRelease, Latent, Noise
from splitfed.privacy.audit import clopper_pearson, lower_bound
from splitfed.study.run.audit import audit, format_audit
from splitfed.topologies import vanilla
from tests.examples import InPlaceAfterCut


def test_the_interval_of_clopper_and_pearson() -> None:
    """No hit in n: the rate is below 1 - alpha^(1/n)."""
    assert clopper_pearson(0, 100, 0.025) == (0.0, pytest.approx(1 - 0.025**0.01))
    assert clopper_pearson(100, 100, 0.025) == (pytest.approx(0.025**0.01), 1.0)
    low, high = clopper_pearson(8, 10, 0.025)
    assert (low, high) == (pytest.approx(0.4439, abs=1e-4), pytest.approx(0.9748, abs=1e-4))


def coins(truth: float, n: int = 20000) -> dict[str, np.ndarray]:
    return {"coin": (np.random.default_rng(int(truth * 1000)).random(n) < truth).astype(float)}


def test_randomised_response_is_audited_to_its_epsilon() -> None:
    """Coins of e / (1 + e) and 1 / (1 + e): epsilon is one, and most of it is seen."""
    p = math.e / (1 + math.e)
    found = lower_bound(coins(p), coins(1 - p), 0.0)
    assert 0.9 < found.epsilon <= 1.0
    assert found.most > 7
    same = lower_bound(coins(p), coins(p - 0.0005), 0.0)
    assert same.epsilon < 0.05, "nothing to tell apart"


@pytest.mark.parametrize(("samples", "epsilon"), [(500, 4.91), (1000, 5.60), (10_000, 7.905)])
def test_the_most_that_counts_can_prove(samples: int, epsilon: float) -> None:
    """No error in so many samples of each input, at 95 %: half of the 5 % for each of the two rates."""
    first, second = ({"x": np.full(2 * samples, value)} for value in (1.0, 0.0))
    found = lower_bound(first, second, 1e-5)
    assert found.epsilon == pytest.approx(epsilon, abs=0.005)
    assert found.most == pytest.approx(found.epsilon)


def test_delta_is_allowed_for() -> None:
    """A mechanism that gives the input away once in ten times, and is perfect otherwise, has delta .1."""
    n = 20000
    leak = np.random.default_rng(0).random(n) < 0.1
    first, second = {"leak": np.where(leak, 1.0, 0.0)}, {"leak": np.zeros(n)}
    assert lower_bound(first, second, 0.0).epsilon > 4
    assert lower_bound(first, second, 0.11).epsilon < 0.05


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(InvalidInput, match="samples=9 is not allowed; expected a whole number of at least 20"):
        lower_bound({"a": np.zeros(9)}, {"a": np.zeros(9)}, 0.0)


def trained(*defenses: Defense, test: float = 0.2) -> sf.Run:
    data = sf.data.digits().rows(range(150)).clients(1, auxiliary=0.1, victims=8, test=test, seed=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        topology = vanilla(InPlaceAfterCut(), "pool")
    return sf.train(topology, data, defenses=defenses, rounds=1, optimizer=Optim("SGD", {"lr": 1e-4}))


@pytest.mark.parametrize(
    "defense",
    [
        GaussianRelease(epsilon=1.0, delta=1e-3, freeze=True),
        LaplaceRelease(epsilon=1.0, freeze=True),
        Latent(epsilon=1.0, form="utility", whole=1, fraction=0, freeze=True),
    ],
    ids=lambda d: type(d).__name__,
)
def test_a_mechanism_that_keeps_its_claim(defense: Defense) -> None:
    found = audit(trained(defense), trials=3000)
    assert found["held"]
    data, worst, ten = found["mechanisms"]
    assert [line["audited"] for line in (data, worst, ten)] == ["one release"] * 2 + ["ten releases in a row"]
    for line in (data, worst, ten):
        assert line["held"]
        assert line["found"]["epsilon"] <= line["claimed"]
        assert line["found"]["epsilon"] <= line["most"]
        assert line["found"]["confidence"] == pytest.approx(1 - 0.05 / 3), "three lines share the 5 %"
    assert worst["found"]["epsilon"] > 0.2, "the worst case is seen"
    assert ten["found"]["epsilon"] > 2 * worst["found"]["epsilon"] or ten["found"]["epsilon"] > 0.9 * ten["most"]
    if not isinstance(defense, Latent):
        assert 0.999 < worst["sensitivity"]["measured"] / worst["sensitivity"]["claimed"] <= 1 + 1e-5
    lines = format_audit(found).splitlines()
    assert all(": holds" in line or "every claim that was audited holds" in line for line in lines)
    assert all("could have been refuted" in line for line in lines if "epsilon is at least" in line)


def test_nothing_to_audit_is_refused() -> None:
    with pytest.raises(InvalidInput, match="the run has no private mechanism to audit: nothing in it carries a claim"):
        audit(trained(Noise(0.5)))
    with pytest.raises(InvalidInput, match="trials=39 is not allowed; expected a whole number of at least 40"):
        audit(trained(Noise(0.5)), trials=39)
    with pytest.raises(InvalidInput, match=r"confidence=1.0 is not allowed; expected a number in \(0, 1\)"):
        audit(trained(Noise(0.5)), confidence=1.0)


def test_without_test_rows_those_of_training_are_used() -> None:
    assert audit(trained(GaussianRelease(epsilon=1.0, freeze=True), test=0.0), trials=200)["held"]


STUDY = """
[study]
name = "private"
[data]
name = "digits"
victims = 8
[model]
name = "mlp"
hidden = [8]
[training]
rounds = 2
optimizer = {name = "SGD", lr = 0.001}
delta = 1e-4
[[topology]]
name = "vanilla"
cut = "relu1"
[[defense]]
name = "gaussian_release"
epsilon = 1.0
freeze = true
"""


@pytest.mark.drawn
def test_a_study_plans_counts_reports_and_audits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study, folder = tmp_path / "private.toml", tmp_path / "out"
    study.write_text(STUDY)
    assert main(["plan", str(study), "--schedules", "splitfed_v1", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out.splitlines()[-1])["privacy"][0]["ledger"]
    assert main(["run", str(study), "--folder", str(folder), "--json"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])["settings"][0]
    run = next((folder / "runs").iterdir())
    result = json.loads((run / "result.json").read_text())
    (total,), (counted,) = planned["totals"], result["privacy"]["ledger"]["totals"]
    assert row["promises"] == {total["protects"]: total["epsilon"]} == {counted["protects"]: counted["epsilon"]}
    assert result["privacy"]["ledger"] == result["privacy"]["planned"]
    assert planned["delta"] == 1e-4
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = (line["epsilons"][total["protects"]] for line in (lines[0], lines[-1]))
    assert last == total["epsilon"] > first
    assert "epsilon" in (folder / "results.csv").read_text().splitlines()[0].split(",")
    page = (folder / "report.html").read_text()
    assert 'id="privacy"' in page
    assert "epsilon so far" in page
    assert "Counted and planned uses differ" not in page
    assert main(["audit", str(run), "--trials", "400"]) == 0
    printed = capsys.readouterr().out
    assert "gaussian" in printed.lower()
    assert "every claim that was audited holds" in printed
    assert main(["audit", str(run), "--trials", "400", "--json"]) == 0
    (one, *_) = json.loads(capsys.readouterr().out.splitlines()[-1])["mechanisms"]
    assert (one["audited"], one["place"], one["held"]) == ("one release", "bottom->top", True)
    assert main(["audit", str(tmp_path), "--trials", "400"]) == 2
    assert "holds no finished run" in capsys.readouterr().err
