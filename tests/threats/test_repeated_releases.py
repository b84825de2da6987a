"""Several releases of a row: the mean has the noise's variance divided by their number, and nothing else changes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from math import sqrt
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from splitfed.attacks.base import Attack, Knowledge, Needs, Progress
from splitfed.attacks.gradients.dlg import Dlg
from splitfed.attacks.labels.norm import Norm
from splitfed.attacks.membership.membership_threshold import MembershipThreshold
from splitfed.attacks.reconstruction.inversion import noise_variance
from splitfed.attacks.reconstruction.linear_inverse import LinearInverse
from splitfed.attacks.reconstruction.nearest import Nearest
from splitfed.attacks.reconstruction.refinement import measure_noise
from splitfed.attacks.reconstruction.rmle import Rmle
from splitfed.attacks.uploads.class_shares import ClassShares
from splitfed.cli import main
from splitfed.core.defense import Defense
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, Stamp, View
from splitfed.core.random import derive, generator, stream
from splitfed.defenses import Dropout, GaussianRelease, LaplaceRelease, Noise
from splitfed.encryption.settings import Encryption
from splitfed.planning.private import cost_of_releases
from splitfed.privacy.gaussian_mechanism import gaussian_epsilon
from splitfed.study.run import reattack
from splitfed.study.run.progress import Lines
from splitfed.study.run.runner import run_attack
from splitfed.threats.attack_result import AttackResult
from splitfed.threats.repeated_releases import RepeatedReleases, check_releases, mean_release, mean_view
from splitfed.threats.tuning import PseudoVictims
from splitfed.training.run import Run
from tests.attacks.examples import two_party
from tests.study.examples import checked, small, write
from tests.threats.test_release_information import trained

SCALE = 0.7
VARIANCES = torch.linspace(0.4, 2, 4).double() ** 2


@dataclass(frozen=True)
class Keeper(Attack):
    """Keeps what it was shown, and predicts zeros."""

    requires: ClassVar[frozenset[Needs]] = frozenset(
        {Needs.RELEASES, Needs.QUERIES, Needs.AUXILIARY, Needs.UPSTREAM, Needs.ARCHITECTURE}
    )
    shown: ClassVar[list[tuple[View, Knowledge]]] = []

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        self.shown[:] = [(view, knowledge)]
        return torch.zeros(len(next(iter(view.tensors().values()))), *knowledge.shape)


@cache
def linear_gaussian() -> Run:
    """Four numbers of different variances, mixed to five, with noise of deviation .7; 400 victims."""
    x = torch.randn(2000, 4, generator=generator(0, "rows")) * VARIANCES.sqrt().float()
    with stream(1):
        client = [nn.Linear(4, 5)]
    return trained(x, (x[:, 3] > 0).long(), client, Noise(scale=SCALE), 400)


@cache
def keep(releases: int, run: Run) -> tuple[View, Knowledge]:
    """Return what an attack by the server of `run` is shown."""
    run.attack(Keeper(), releases=releases, floors=False)
    return Keeper.shown.pop()


@cache
def result_of(releases: int, attack: Attack | None = None) -> AttackResult:
    """Return what `attack`, by default `linear_inverse`, achieves in the linear Gaussian world."""
    (found,) = linear_gaussian().attack(attack or LinearInverse(), releases=releases)
    return found


def mse(result: AttackResult, who: str = "attack") -> float:
    return result.scores[who]["mse"].mean


def mixing() -> tuple[Tensor, Tensor]:
    """Return A (5, 4) and the bias (5,) of the client that was trained."""
    state = linear_gaussian().state_dict()
    return state["part0.weight"].double(), state["part0.bias"].double()


def posterior(releases: int) -> Tensor:
    """Return (T^-1 + R A'A/s²)^-1, the covariance of a row given R of its releases, T that of rows."""
    weight, _ = mixing()
    return torch.linalg.inv(torch.diag(1 / VARIANCES) + releases * weight.T @ weight / SCALE**2)


@pytest.mark.parametrize("releases", [1, 4, 16])
def test_the_linear_inverse_reaches_the_closed_form(releases: int) -> None:
    """x ~ N(0, T), z = A x + N(0, s²) R times: nobody's error is below tr((T^-1 + R A'A/s²)^-1)/d on average."""
    run, covariance = linear_gaussian(), posterior(releases)
    found, least = mse(result_of(releases)), float(covariance.trace()) / 4
    # The variance of a row's squared error is 2 tr(P²)/d²; six coefficients of each number from some 1000 rows.
    deviation = sqrt(2 * float(covariance.square().sum())) / 4 / sqrt(400)
    assert found == pytest.approx(least, abs=4 * deviation + least * 6 / 1000)
    # On the same releases the best estimate is the posterior mean: what the rows happen to be drops out.
    weight, bias = mixing()
    z = next(iter(run.observe(releases=releases).tensors().values())).double()
    best = releases * (z - bias) @ weight @ covariance / SCALE**2
    optimal = float((best - run.data.victims.x.double()).square().mean())
    assert found == pytest.approx(optimal, rel=0.02)
    assert mse(result_of(releases), "linear_inverse") == pytest.approx(optimal, rel=0.02), "the floor has as many"


@pytest.mark.exhaustive
def test_every_release_more_is_a_gain() -> None:
    for attack in (LinearInverse(), Nearest((10,)), Rmle(iterations=100, lr=0.1, tv=0.0)):
        errors = [mse(result_of(releases, attack)) for releases in (1, 4, 16)]
        assert errors[0] > 1.05 * errors[1] > 1.05**2 * errors[2]
    for floor in ("linear_inverse", "nearest_1", "nearest_10"):
        errors = [mse(result_of(releases), floor) for releases in (1, 4, 16)]
        assert errors[0] > errors[1] > errors[2]
    assert len({mse(result_of(releases), "mean_image") for releases in (1, 4, 16)}) == 1


def test_hopeless_noise_stays_hopeless() -> None:
    """Deviation 1000, of the mean of sixteen 250: nothing is to be learnt beyond the mean row."""
    x = torch.randn(600, 4, generator=generator(0, "rows"))
    run = trained(x, (x[:, 0] > 0).long(), [nn.Linear(4, 4)], Noise(scale=1e3), 150)
    (found,) = run.attack(LinearInverse(), releases=16)
    assert mse(found) == pytest.approx(mse(found, "mean_image"), rel=0.02)
    assert not found.under_trained


def test_the_first_release_is_that_of_a_single_one_and_every_other_has_draws_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, numbers = linear_gaussian(), list[tuple[str, int]]()
    predict = run.engine.predict

    def noted(client: int, part: str, phase: str, number: int, **more: Any) -> Any:
        numbers.append((part, number))
        return predict(client, part, phase, number, **more)

    monkeypatch.setattr(run.engine, "predict", noted)
    for releases in (1, 3):
        numbers.clear()
        run.attack(Keeper(), releases=releases, floors=False)
        query = Keeper.shown.pop()[1].query
        assert query is not None
        query(run.data.auxiliary.x[:5])
        query(run.data.auxiliary.x[:5])
        victims, asked = ([n for part, n in numbers if part == name] for name in ("victims", "query"))
        assert (len(victims), len(asked)) == (releases, 2 * releases)
        assert victims[0] == derive(run.seed, "victims")
        assert len({*victims, *asked}) == 3 * releases
        if releases == 1:
            first = asked
        else:
            assert [asked[0], asked[3]] == first


def test_one_release_is_what_it_was() -> None:
    run = linear_gaussian()
    (asked,), (without,) = run.attack(LinearInverse(), releases=1), run.attack(LinearInverse())
    assert torch.equal(asked.prediction, without.prediction)
    assert asked.scores == without.scores
    assert asked.repeated is None
    assert asked.releases == 1
    assert "release" not in repr(asked)


@torch.no_grad()
@pytest.mark.parametrize("releases", [1, 4, 16])
def test_what_is_shown_has_the_noise_of_a_mean(releases: int) -> None:
    """Victims, queries, samples with the weights, samples of a clone; s²/R over at least 400 x 5 numbers."""
    with torch.enable_grad():  # the run may be trained here
        view, knowledge = keep(releases, linear_gaussian())
    x, rows = linear_gaussian().data.victims.x, linear_gaussian().data.auxiliary.x[:500]
    assert knowledge.query is not None
    assert knowledge.upstream is not None
    assert knowledge.sample is not None
    assert knowledge.architecture is not None
    seen, clean, asked = view.tensors(), knowledge.upstream(x), knowledge.query(rows)
    drawn, clone = knowledge.sample(rows), knowledge.architecture(3)
    wanted = SCALE**2 / releases
    # The relative error of a variance from n numbers is sqrt(2/n).
    near = 5 * sqrt(2 / 2000)
    for found, mean in (
        (seen, clean),
        (asked, knowledge.upstream(rows)),
        (drawn, knowledge.upstream(rows)),
        (clone.sample(rows), clone(rows)),
        (clone.sample(rows, 7), clone(rows)),
    ):
        assert float((found["part0"] - mean["part0"]).square().mean()) == pytest.approx(wanted, rel=near)
    assert torch.equal(clone.sample(rows, 7)["part0"], clone.sample(rows, 7)["part0"])
    # What the searches take the noise for.
    assert measure_noise(knowledge.upstream, x, seen) == pytest.approx(wanted, rel=near)
    assert noise_variance(knowledge.upstream, knowledge.sample, x) == pytest.approx(wanted, rel=near)
    trained_once = clone.in_training(rows, 7)[0]["part0"] - clone(rows)["part0"]
    assert float(trained_once.square().mean()) == pytest.approx(SCALE**2, rel=near), (
        "a step of training has one release"
    )


def test_releases_that_are_all_equal_are_said_to_be_and_change_nothing() -> None:
    x = torch.randn(120, 4, generator=generator(0, "rows"))
    run = trained(x, (x[:, 0] > 0).long(), [nn.Linear(4, 3), nn.Tanh()], Noise(scale=0.0), 20)
    attacks = (LinearInverse(), Rmle(iterations=3))
    for once, often in zip(run.attack(attacks), run.attack(attacks, releases=3), strict=True):
        assert torch.equal(once.prediction, often.prediction)
        assert once.scores == often.scores
        assert often.repeated == RepeatedReleases(3, equal=True)
        assert "3 releases of each row, all equal, as no random defense acts on them" in repr(often)


def test_results_say_how_many_releases_there_were() -> None:
    found = result_of(4)
    assert found.releases == 4
    assert "400 victims, 4 releases of each row: " in repr(found)
    assert {row["releases"] for row in found.rows()} == {4}
    assert "4 releases of each row" in found._repr_html_()
    assert str(RepeatedReleases(2, trained_on_one=True)).endswith("; its networks were trained on single ones")


def test_other_random_defenses_gain_too() -> None:
    x = torch.randn(300, 4, generator=generator(0, "rows"))
    run = trained(x, (x[:, 0] > 0).long(), [nn.Linear(4, 6)], Dropout(rate=0.5), 80)
    errors = [mse(run.attack(LinearInverse(), releases=releases, floors=False)[0]) for releases in (1, 8)]
    assert errors[1] < 0.8 * errors[0]


class Refused(NamedTuple):
    attack: Attack
    encryption: Encryption | None
    reads: str


@pytest.mark.parametrize(
    "case",
    [
        Refused(Norm(), None, "a training step"),
        Refused(Dlg(), None, "a recorded round of training"),
        Refused(ClassShares(), None, "what clients send for a method in training"),
        Refused(MembershipThreshold(), None, "no release"),
        Refused(LinearInverse(), Encryption(), "what arrives encrypted"),
    ],
    ids=lambda case: case.reads,
)
def test_several_releases_are_refused_where_they_mean_nothing(case: Refused) -> None:
    check_releases("it", case.attack, 1, case.encryption)
    with pytest.raises(InvalidInput, match=rf"^releases=5 is not allowed; expected 1, as it reads {case.reads}: "):
        check_releases("it", case.attack, 5, case.encryption)


def test_it_is_refused_before_anything_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    run = linear_gaussian()
    for name in ("predict", "rehearse"):
        monkeypatch.setattr(run.engine, name, lambda *_, **__: pytest.fail("rows have passed"))
    with pytest.raises(InvalidInput, match=r"^releases=2 is not allowed; expected 1, as norm reads a training step"):
        run.attack([LinearInverse(), "norm"], releases=2)
    with pytest.raises(InvalidInput, match=r"as norm reads a training step"):
        run.evaluator.requests([("norm", Norm())], "server", releases=2)
    for wrong in (0, True, 1.5):
        with pytest.raises(InvalidInput, match="releases="):
            run.attack(LinearInverse(), releases=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"releases=2 is not allowed; expected 1 in a training step"):
        run.observe(releases=2, phase=Norm.phase)


def view_of(**tensors: Tensor) -> View:
    return View("server", (Message("client", "server", "activation", "cut", tensors, Stamp("predict", 0, 0, 0)),), {})


def test_the_mean_of_what_arrives() -> None:
    z, ids = torch.tensor([[1.0, 2.0]]), torch.tensor([[3, 4]])
    found, equal = mean_view((view_of(z=z + i, ids=ids, half=(z + i).half()) for i in range(4)), 4)
    assert not equal
    assert torch.equal(found.tensors()["z"], torch.tensor([[2.5, 3.5]]))
    assert torch.equal(found.tensors()["ids"], ids)
    assert found.tensors()["half"].dtype == torch.float32, "half precision would round the noise that is left"
    assert torch.equal(found.tensors()["half"], torch.tensor([[2.5, 3.5]]))
    # Thirds have no sum in float32 that a division undoes: equal ones are not added.
    third = torch.full((1, 5), 1 / 3)
    found, equal = mean_view((view_of(z=third) for _ in range(3)), 3)
    assert equal
    assert torch.equal(found.tensors()["z"], third)


def test_what_has_no_mean_is_refused() -> None:
    for other in (torch.tensor([5]), torch.tensor([True])):
        with pytest.raises(InvalidInput, match=r"^releases=2 takes the mean of what arrives, and 'ids' arrives as "):
            mean_release([{"ids": torch.zeros_like(other)}, {"ids": other}], 2)
    for changed in ({"y": torch.zeros(2)}, {"z": torch.zeros(3)}, {"z": torch.zeros(2).double()}, {}):
        with pytest.raises(InvalidInput, match="release 2 of the same rows differs from the first one in "):
            mean_release([{"z": torch.zeros(2)}, changed], 2)


def test_fisher_information_adds_up() -> None:
    x = torch.randn(200, 4, generator=generator(0, "rows"))
    relative = trained(x, (x[:, 0] > 0).long(), [nn.Linear(4, 3)], Noise(scale=1.0, relative=True), 40)
    for run in (linear_gaussian(), relative):
        once, often = (run.measure_release(releases=releases) for releases in (1, 9))
        assert once.bound is not None
        assert often.bound is not None
        assert once.mutual is not None
        assert often.mutual is not None
        assert (once.releases, often.releases) == (1, 9)
        assert often.bound.dfil == pytest.approx(9 * once.bound.dfil, rel=1e-12)
        assert often.bound.directions < once.bound.directions
        assert once.mutual.upper < often.mutual.upper
        assert once.usable is not None
        assert often.usable is not None
        assert once.usable.mean < often.usable.mean
    bound = linear_gaussian().measure_release(releases=16).bound
    assert bound is not None
    # The prior is that of 1000 rows.
    assert bound.matrix == pytest.approx(float(posterior(16).trace()) / 4, rel=4 * sqrt(2 / 1000))


def test_mutual_information_of_two_releases_is_that_of_one_with_less_noise() -> None:
    """For Gaussian noise; both by sampling, at different draws."""
    x = torch.randn(400, 2, generator=generator(0, "rows"))
    y = (x[:, 0] > 0).long()
    twice = trained(x, y, [nn.Identity()], Noise(scale=1.0), 100).measure_release(releases=2).mutual
    once = trained(x, y, [nn.Identity()], Noise(scale=sqrt(0.5)), 100).measure_release().mutual
    assert once is not None
    assert twice is not None
    assert twice.lower == pytest.approx(once.lower, abs=4 * (once.lower_error + twice.lower_error))


def private_run(defense: Defense) -> Run:
    x = 0.3 * torch.randn(120, 4, generator=generator(0, "rows"))
    return trained(x, (x[:, 0] > 0).long(), [nn.Linear(4, 3)], defense, 20)


def test_a_result_says_what_all_releases_cost_a_row() -> None:
    """R Gaussian releases of multiplier m are one of multiplier m / sqrt(R)."""
    run = private_run(GaussianRelease(clip=1.0, noise_multiplier=4.0, freeze=True))
    repeated = run.attack(LinearInverse(), releases=9, floors=False)[0].repeated
    assert repeated is not None
    assert repeated.delta == run.ledger.delta
    assert repeated.epsilon == pytest.approx(gaussian_epsilon(4 / 3, run.ledger.delta), rel=1e-6)
    assert repeated.each == pytest.approx(gaussian_epsilon(4.0, run.ledger.delta), rel=1e-6)
    assert f"9 releases of each row, which cost it epsilon {repeated.epsilon:.4g} at delta" in str(repeated)
    pure = private_run(LaplaceRelease(clip=1.0, epsilon=0.1))
    costs = [cost_of_releases(pure.engine, 0, releases, 1e-12) for releases in (1, 3)]
    assert costs == [pytest.approx(0.1, rel=1e-3), pytest.approx(0.3, rel=1e-3)], "by itself, as no weight learnt of it"
    assert cost_of_releases(private_run(Noise()).engine, 0, 3, 1e-5) is None, "noise promises nothing"


def test_the_cost_is_not_told_where_releases_cross_without_a_promise() -> None:
    """One of two parties alone is guarded."""
    run = two_party(GaussianRelease(clip=1.0, noise_multiplier=4.0, on=("bottom_left->fusion",)))
    assert cost_of_releases(run.engine, 0, 3, 1e-5) is None
    covered = two_party(GaussianRelease(clip=1.0, noise_multiplier=4.0))
    both = cost_of_releases(covered.engine, 0, 3, 1e-5)
    assert both == pytest.approx(gaussian_epsilon(4 / sqrt(6), 1e-5), rel=1e-6), "of a row's two parts three each"


def test_tuning_has_as_many_releases() -> None:
    run = linear_gaussian()
    noise = []
    for releases in (1, 16):
        bench = PseudoVictims(run.evaluator, LinearInverse(), "server", 0, 0, 0.25, releases)
        z = bench._view.tensors()["part0"]
        upstream = run.evaluator.grants.trained_segments(0, "server")
        noise.append(float((z - upstream(bench.victims.x)["part0"]).square().mean()))
    assert noise[0] / noise[1] == pytest.approx(16, rel=5 * sqrt(2 * 2 / (250 * 5)))
    with pytest.raises(InvalidInput, match="releases=0"):
        run.tune(LinearInverse(), releases=0)


ATTACK = {"name": "linear_inverse", "releases": 4}


def test_a_study_says_how_many() -> None:
    grid = checked(small(attack=[ATTACK, {"name": "linear_inverse"}]))
    several, one = grid.cells[0].attacks
    assert (several.releases, one.releases) == (4, 1)
    assert "releases=4" in several.label
    assert "releases" not in one.label
    assert [setting.table.get("releases") for setting in (several, one)] == [4, None]
    (again,) = checked(small(attack=[several.table])).cells[0].attacks
    assert again.releases == 4


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({**ATTACK, "releases": 0}, r"attack\[0\]\.releases"),
        ({**ATTACK, "releases": 1.5}, r"attack\[0\]\.releases"),
        (
            {"name": "norm", "releases": 2},
            r"attack\[0\]\.releases: releases=2 is not allowed; expected 1",
        ),
    ],
)
def test_a_wrong_number_is_refused_in_its_place(table: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        checked(small(attack=[table]))


@pytest.mark.exhaustive
def test_from_a_study_to_report_and_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = small(attack=[ATTACK], defense=[{"name": "noise", "scale": 1.0}], training={"rounds": 1})
    command = ["run", str(write(tmp_path, study)), "--folder", str(tmp_path / "out")]
    assert main(command) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "had 4 releases of each row" in printed
    (noisy,) = (tmp_path / "out" / "runs").iterdir()
    (entry,) = json.loads((noisy / "result.json").read_text("utf-8"))["attacks"]
    assert (entry["releases"]["count"], entry["releases"]["equal"]) == (4, False)
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert "4 releases of each row" in page
    assert "An adversary who gets one release of a row learns less." in page
    scores = noisy / "attacks" / "linear_inverse.json"
    kept = scores.read_bytes()
    (noisy / "result.json").unlink()
    assert main([*command, "--resume"]) == 0
    assert scores.read_bytes() == kept, "an attack that was finished is read back"
    cell = reattack.load_finished_run(noisy)[1]
    other = replace(cell.attacks[0], releases=3)
    anew = run_attack(reattack.rebuild_run(noisy), other, noisy, Lines(1))
    assert anew["releases"]["count"] == 3, "what has another number of releases is not"
    capsys.readouterr()
    assert main(["attack", str(noisy), "--attack", "linear_inverse", "--releases", "2", "--json"]) == 0
    (again,) = json.loads(capsys.readouterr().out)
    assert again["releases"]["count"] == 2
    assert again["scores"]["mse"]["attack"]["mean"] > entry["scores"]["mse"]["attack"]["mean"]
    assert main(["attack", str(noisy), "--attack", "linear_inverse", "--releases", "0"]) == 2
    assert "releases=0 is not allowed" in capsys.readouterr().err
