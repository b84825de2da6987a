"""Tuning: the attacker's own rows choose, the victims play no part, and what cannot get releases is refused."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import splitfed
from splitfed.attacks.base import Attack, Knowledge, Needs, Progress
from splitfed.attacks.properties.attribute import Attribute
from splitfed.attacks.reconstruction.inverse_network import InverseNetwork
from splitfed.attacks.reconstruction.rmle import Rmle
from splitfed.attacks.search_space import Span
from splitfed.cli import main
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import View
from splitfed.core.random import stream
from splitfed.core.tasks import classification
from splitfed.data.dataset import Dataset, Federation
from splitfed.models.mlp import mlp
from splitfed.study.config.mistakes import InvalidStudy
from splitfed.threats.tuning import PseudoVictims
from splitfed.topologies import vanilla
from splitfed.training.run import Run
from tests.examples import toy_data
from tests.study.examples import checked, small, write

GREYS = (0.0, 0.3, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class Grey(Attack):
    """Guesses one grey for everybody, and keeps what it was shown."""

    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES, Needs.QUERIES, Needs.AUXILIARY})
    shown: ClassVar[list[tuple[View, Knowledge]]] = []

    grey: float = 0.0
    wrong: bool = False

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        self.shown.append((view, knowledge))
        (z,) = view.tensors().values()
        return torch.full((len(z), *knowledge.shape), float("nan") if self.wrong else self.grey)


@cache
def federation() -> Federation:
    data = toy_data(200).with_target("odd", toy_data(200).y % 2, classification(2))
    return data.clients(1, auxiliary=80, victims=16)


@cache
def trained(data: Federation | None = None) -> Run:
    with stream(0):
        model = mlp((1, 8, 8), 10, (48,), seed=None)
    return splitfed.train(vanilla(model, "relu1"), data or federation(), rounds=1)


def test_the_best_grey_is_the_one_nearest_to_the_pseudo_victims() -> None:
    """Over one row in four: twenty of eighty. What scores best is worked out from the rows themselves."""
    Grey.shown.clear()
    found = trained().tune(Grey(grey=1.0), {"grey": GREYS}, trials=25)
    x = PseudoVictims(trained().evaluator, Grey(), "server", 0, 0, 0.25).victims.x
    assert len(x) == 20
    errors = {grey: float((x - grey).square().mean()) for grey in GREYS}
    assert found.attack == Grey(grey=min(GREYS, key=lambda grey: errors[grey]))
    assert (found.metric, found.score) == ("mse", pytest.approx(min(errors.values()), rel=1e-5))
    assert found.given == pytest.approx(errors[1.0], rel=1e-5)
    assert {t.parameters["grey"] for t in found.trials} == set(GREYS)
    assert all(t.score == pytest.approx(errors[t.parameters["grey"]], rel=1e-5) for t in found.trials)


def test_what_it_learns_from_are_the_other_auxiliary_rows_and_never_a_victim() -> None:
    Grey.shown.clear()
    trained().tune(Grey(), {"grey": GREYS}, trials=2)
    assert len(Grey.shown) == 3, "the setting as it was given, and two more"
    pseudo = PseudoVictims(trained().evaluator, Grey(), "server", 0, 0, 0.25).victims
    expected = trained().engine.modules(0)["bottom"].eval()(pseudo.x)
    for view, knowledge in Grey.shown:
        assert knowledge.auxiliary is not None
        rows = torch.cat([knowledge.auxiliary, pseudo.x]).flatten(1)
        whole = federation().auxiliary.x.flatten(1)
        assert torch.equal(rows.sum(1).sort()[0], whole.sum(1).sort()[0])
        assert torch.allclose(view.tensors()["relu1"], expected, atol=1e-6)
        assert {(m.sender, m.receiver, m.edge) for m in view.messages} == {("client0", "server", "bottom->top")}
        assert set(view.segments) == {"top"}


@pytest.mark.parametrize("attack", [InverseNetwork(epochs=1, queries=1), Rmle(iterations=3)])
def test_other_victims_change_no_trial(attack: Attack) -> None:
    """The same training with white victims in place of the real ones: equal trials, equal parameters."""
    v = federation().victims
    white = Dataset("white", torch.ones_like(v.x), (v.y + 1) % 10, v.task, v.value_range)
    other = trained(replace(federation(), victims=white.with_target("odd", 1 - v.label("odd"), classification(2))))
    one, two = (run.tune(attack, trials=4) for run in (trained(), other))
    assert one == two
    assert len({json.dumps(t.parameters) for t in one.trials}) == 4


def test_a_hopeless_rate_is_left_behind_and_victims_profit() -> None:
    hopeless = Rmle(iterations=60, lr=1e-6, tv=1e-3)
    found = trained().tune(hopeless, {"lr": Span(1e-2, 0.2, log=True)}, trials=3, seed=3)
    assert found.score < 0.7 * found.given
    before, after = (trained().attack(a)[0].scores["attack"]["mse"].mean for a in (hopeless, found.attack))
    assert after < 0.7 * before


def test_a_hopeless_space_leaves_what_was_given() -> None:
    good = Rmle(iterations=100, lr=0.05, tv=1e-3)
    found = trained().tune(good, {"tv": Span(1e5, 1e6)}, trials=2)
    assert found.attack == good
    assert found.score == found.given < min(t.score or 0.0 for t in found.trials)


def test_guesses_of_labels_are_tuned_by_accuracy() -> None:
    attack = Attribute(attribute="odd", epochs=1, queries=1)
    found = trained().tune(attack, {"epochs": Span(1, 15)}, trials=3)
    assert found.metric == "accuracy"
    assert found.score >= max(found.given, *(t.score or 0.0 for t in found.trials))
    assert all(isinstance(t.parameters["epochs"], int) for t in found.trials)


def test_tuning_changes_nothing_and_repeats_itself() -> None:
    run, attack = trained(), InverseNetwork(epochs=1, queries=1)
    crossed, random = run.bytes, torch.get_rng_state()
    one, two, other = (run.tune(attack, trials=2, seed=s) for s in (5, 5, 6))
    assert one == two != other
    assert run.bytes == crossed
    assert torch.equal(torch.get_rng_state(), random)


def test_a_guess_that_is_not_finite_scores_nothing() -> None:
    found = trained().tune(Grey(), {"wrong": (True,)}, trials=1)
    assert [t.score for t in found.trials] == [None]
    assert found.attack == Grey()
    with pytest.raises(InvalidInput, match="Grey with its given parameters predicts numbers that are not finite"):
        trained().tune(Grey(wrong=True), {"grey": GREYS}, trials=1)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no space": ("ladder", {}, "ladder has no space of parameters to tune"),
    "no queries": (
        "unsplit",
        {"space": {"lr": Span(0.1, 1.0)}},
        "unsplit cannot be tuned: without queries or upstream weights it has no releases of its own rows",
    ),
    "members": ("lira", {"space": {"copies": (4, 6)}}, "lira cannot be tuned: it predicts no inputs or labels from"),
    "gradients": ("direct_label", {"space": {"x": (4, 6)}}, "unknown parameter of direct_label 'x'"),
    "parameter": ("rmle", {"space": {"rl": (1, 2)}}, "unknown parameter of rmle 'rl'; did you mean 'lr' or 'l2'?"),
    "no choice": ("rmle", {"space": {"lr": 1.0}}, "space['lr']=1.0 is not allowed; expected Span(low, high) or a list"),
    "trials": ("rmle", {"trials": 0}, "trials=0 is not allowed; expected a whole number of at least 1"),
    "share": ("rmle", {"share": 1.0}, "tune share=1.0 is not allowed; expected a number in (0, 1)"),
    "few": ("rmle", {"share": 0.01}, "tune share=0.01 keeps 1 of 80 auxiliary rows as pseudo-victims; expected two"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    attack, options, text = REFUSED[case]
    with pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        trained().tune(attack, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Span(2.0, 1.0), "span high=1.0 is not allowed; expected a number in (2, inf)"),
        (lambda: Span(0.0, 1.0, log=True), "span low=0.0 is not allowed; expected a number in (0, inf)"),
    ],
)
def test_spans(make: Any, text: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(text)):
        make()


def test_a_study_tunes_and_tells(tmp_path: Path) -> None:
    attack = {"name": "rmle", "budget": "quick", "iterations": 5, "tune": 2}
    study = small(attack=[attack, {"name": "rmle", "iterations": 5}], defense=[{"name": "none"}])
    assert main(["run", str(write(tmp_path, study)), "--folder", str(tmp_path / "out")]) == 0
    (folder,) = (tmp_path / "out" / "runs").iterdir()
    tuned, plain = json.loads((folder / "result.json").read_text("utf-8"))["attacks"]
    assert tuned["label"] == "rmle(budget=quick, iterations=5, tune=2)"
    assert set(tuned["tuned"]["parameters"]) == {"lr", "tv"}
    assert len(tuned["tuned"]["trials"]) == 2
    assert tuned["tuned"]["score"] <= tuned["tuned"]["given"]
    assert plain["tuned"] is None
    chosen = tuned["tuned"]["parameters"]
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert f"tuned on auxiliary rows: lr={chosen['lr']:g}, tv={chosen['tv']:g}" in page
    assert main(["run", str(tmp_path / "study.toml"), "--folder", str(tmp_path / "out"), "--resume"]) == 0


@pytest.mark.parametrize(
    ("attack", "line"),
    [
        ({"name": "unsplit", "tune": 2}, "attack[0].tune: unsplit has no space of parameters to tune"),
        ({"name": "rmle", "tune": 0}, "attack[0].tune: tune=0 is not allowed; expected a whole number of at least 1"),
    ],
)
def test_a_study_that_cannot_tune_is_refused(attack: dict[str, Any], line: str) -> None:
    with pytest.raises(InvalidStudy) as error:
        checked(small(attack=[attack]))
    assert error.value.lines == (f"study.toml: {line}",)
