"""The strongest reconstruction: the adversary's own rows choose, and work is doubled while that helps."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor

import splitfed
from splitfed.attacks.base import Knowledge, Needs, Progress
from splitfed.attacks.reconstruction import strongest
from splitfed.attacks.reconstruction.held_out import HeldOut, count_folds, hold_out, hold_out_in_folds
from splitfed.attacks.reconstruction.latent_search import LatentSearch
from splitfed.attacks.reconstruction.race import EnsembleMember, Trials
from splitfed.attacks.reconstruction.refinement import LEAST_NOISE, Refinement, measure_noise
from splitfed.attacks.reconstruction.strongest import EVALUATIONS, Strongest
from splitfed.attacks.selection import Attempt, Selection, decibels
from splitfed.core.defense import Defense
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, Stamp, View
from splitfed.defenses import Dropout, Noise, Quantization, TopK
from splitfed.registry import load
from splitfed.training.run import AttackResult
from tests.attacks.examples import digits as federation, lenet_run
from tests.thinning import thin

SMALL = Strongest(widths=(4,), passes=9000, queries=1, validation=0.25, prior=False, threat_model="white_box")
BLACK = replace(SMALL, threat_model="black_box")


@cache
def told(attack: Strongest) -> Selection:
    """What the attack says of releases with noise."""
    return selection_of(lenet_run(Noise(scale=1.0, relative=True)).attack(attack, floors=False)[0])


def selection_of(result: AttackResult) -> Selection:
    assert result.selection is not None
    return result.selection


def attempts(*given: tuple[str, int, float]) -> tuple[Attempt, ...]:
    return tuple(Attempt(member, size, 1.0, error) for member, size, error in given)


def held_out(count: int = 6, shape: tuple[int, ...] = (3,), span: tuple[float, float] | None = None) -> HeldOut:
    """Rows held out, and as many victims: nothing was released."""
    x = torch.linspace(0, 1, count * math.prod(shape)).view(count, *shape)
    knowledge = splitfed.attacks.Knowledge(shape, value_range=span, auxiliary=x)
    return HeldOut(x, count, View("server", (), {}), View("server", (), {}), knowledge)


def test_decibels() -> None:
    assert decibels(1.0, 0.1) == pytest.approx(10.0)
    assert decibels(0.1, 1.0) == pytest.approx(-10.0)
    assert decibels(0.0, 0.0) == 0.0
    assert decibels(1.0, 0.0) == math.inf


def released(x: Tensor) -> View:
    """What a server receives of rows x (n, 3): each number doubled."""
    return View("server", (Message("client", "server", "activation", "e", {"z": 2 * x}, Stamp("predict", 0, 0, 0)),))


def test_nobody_learns_from_rows_held_out_and_they_stand_behind_the_victims() -> None:
    auxiliary, victims = torch.arange(30.0).view(10, 3), torch.full((4, 3), -1.0)
    knowledge = Knowledge((3,), auxiliary=auxiliary, query=lambda x: {"z": 2 * x})
    held = hold_out("strongest", released(victims), knowledge, 0.3, torch.Generator().manual_seed(0))
    left = held.knowledge.auxiliary
    assert left is not None
    assert (len(held.x), len(left)) == (3, 7)
    assert sorted(torch.cat([held.x, left])[:, 0].tolist()) == auxiliary[:, 0].tolist()
    seen = held.view.select(kind="activation").tensors()["z"]
    assert torch.equal(seen, 2 * torch.cat([victims, held.x]))
    # Errors are those of the rows held out, whatever is said of victims.
    assert held.error(held.x + 0.5) == pytest.approx(0.25)
    assert held.own.tensors()["z"].tolist() == (2 * held.x).tolist()
    assert held.split(seen)[0].tolist() == (2 * victims).tolist()


def knowledge_of(rows: int) -> Knowledge:
    """Auxiliary rows (rows, 3), each with numbers of its own, whose release is twice the row."""
    return Knowledge((3,), auxiliary=torch.arange(3.0 * rows).view(rows, 3), query=lambda x: {"z": 2 * x})


def in_folds(rows: int, share: float = 0.25) -> HeldOut:
    """All `rows` held out in turn, behind four victims."""
    drawn = torch.Generator().manual_seed(0)
    return hold_out_in_folds("strongest", released(torch.full((4, 3), -1.0)), knowledge_of(rows), share, drawn)


def test_in_folds_every_row_is_held_out_once_from_all_that_learn_without_it() -> None:
    held = in_folds(10)
    whole = set(map(tuple, torch.arange(30.0).view(10, 3).tolist()))
    assert set(map(tuple, held.x.tolist())) == whole
    assert torch.equal(held.view.select(kind="activation").tensors()["z"][4:], 2 * held.x)
    parts = []
    for fold in held.folds:
        seen, left = fold.view.select(kind="activation").tensors()["z"], fold.knowledge.auxiliary
        assert left is not None
        assert seen[:4].tolist() == [[-2.0] * 3] * 4
        parts.append(seen[4:] / 2)
        assert len(parts[-1]) == fold.count
        assert set(map(tuple, left.tolist())) == whole - set(map(tuple, parts[-1].tolist()))
    assert torch.equal(torch.cat(parts), held.x)
    assert [fold.count for fold in held.folds] == [3, 3, 2, 2]
    assert held.fewest == 7


@pytest.mark.parametrize(
    ("share", "rows", "folds"), [(0.2, 120, 5), (0.25, 9, 4), (0.9, 40, 2), (0.01, 500, 10), (0.2, 3, 3)]
)
def test_how_many_folds(share: float, rows: int, folds: int) -> None:
    assert count_folds(rows, share) == folds


def test_how_many_rows_are_held_out() -> None:
    """A fifth, thirty at least and sixty-four at most; of fewer than three times thirty all of them in folds."""
    attack, view = Strongest(), released(torch.zeros(4, 3))
    for rows, held, folds, fewest in (
        (150, 30, 0, 120),
        (300, 60, 0, 240),
        (1000, 64, 0, 936),
        (90, 30, 0, 60),
        (89, 89, 5, 71),
    ):
        found = attack._hold_out(view, knowledge_of(rows), torch.Generator().manual_seed(5))
        assert (len(found.x), len(found.folds), found.fewest) == (held, folds, fewest)


def test_a_refinement_begins_at_what_is_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Tensor] = []

    class Recorded(Refinement):
        def run(self, steps: int, lr: float, progress: Progress | None = None) -> Tensor:
            begun.append(self.start)
            assert self.residual == pytest.approx(0.01)
            return self.start

    monkeypatch.setattr(strongest, "Refinement", Recorded)
    auxiliary = torch.linspace(0, 1, 30).view(10, 3)
    knowledge = Knowledge((3,), auxiliary=auxiliary, query=lambda x: {"z": 2 * x}, upstream=lambda x: {"z": 2 * x})
    rows = hold_out("strongest", released(torch.zeros(4, 3)), knowledge, 0.3, torch.Generator().manual_seed(0))
    trials = Trials(rows, 0, lambda done: None)
    for name, by in (("poor", 0.5), ("best", 0.1), ("fair", 0.2)):
        predictions = torch.cat([torch.full((4, 3), by), rows.x + by])
        trials.run(EnsembleMember(name, lambda view, known, size, drawn, p=predictions: p))
    trials.race(SMALL._refinements(trials, 0.1, strongest._Rows(4, 3, 7, 1, images=False)), 600)
    assert len(begun) == 4
    assert all(torch.equal(start, trials.found["best"]) for start in begun)


def test_a_refinement_of_victims_begins_at_what_has_learnt_from_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried on rows of the first fold; then for the victims, where the best one predicts anew."""
    begun: list[Tensor] = []

    class Recorded(Refinement):
        def run(self, steps: int, lr: float, progress: Progress | None = None) -> Tensor:
            begun.append(self.start)
            return self.start

    monkeypatch.setattr(strongest, "Refinement", Recorded)
    upstream = replace(knowledge_of(10), upstream=lambda x: {"z": 2 * x})
    view, drawn = released(torch.zeros(4, 3)), torch.Generator().manual_seed(0)
    rows = hold_out_in_folds("strongest", view, upstream, 0.25, drawn)
    trials = Trials(rows, 0, lambda done: None)

    def predict(view: View, known: Knowledge, size: int, drawn: torch.Generator) -> Tensor:
        assert known.auxiliary is not None
        return view.select(kind="activation").tensors()["z"] / 2 + len(known.auxiliary)

    trials.run(EnsembleMember("best", predict, learns=True))
    first, *_ = SMALL._refinements(trials, 0.1, strongest._Rows(4, 10, 7, 4, images=False))
    trials.run(first, 10)
    assert [start.sub(rows.x[:3])[:, 0].tolist() for start in begun] == [[7.0] * 3]
    found = trials.predict(first.name, view, upstream)
    assert found.tolist() == begun[1].tolist() == [[10.0] * 3] * 4
    assert len(begun) == 2


def test_a_refinement_stops_at_the_noise_and_comes_nearer_to_the_truth() -> None:
    """f is the identity on half of the numbers: noise of the release is the misfit that must remain."""
    drawn = torch.Generator().manual_seed(0)
    truth = torch.rand(64, 40, generator=drawn)
    first = truth + 0.5 * torch.randn(64, 40, generator=drawn)
    seen = {"z": truth[:, :20] + 0.1 * torch.randn(64, 20, generator=drawn)}

    def function(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"z": x[:, :20]}

    noise = measure_noise(function, truth, seen)
    assert noise == pytest.approx(0.01, rel=0.1)  # 1280 squares of Gaussians: a deviation of 4 %
    refined = Refinement(seen, function, first, noise, 0.25, 3.0).run(300, 0.02)
    known, other = (refined - truth)[:, :20].square().mean(), (refined - truth)[:, 20:].square().mean()
    assert float(known) < 0.03 < 0.2 < float(other)
    misfit = (function(refined)["z"] - seen["z"]).square().mean(1)
    assert float(misfit.min()) > 0.5 * noise
    assert measure_noise(function, truth, {"z": truth[:, :20]}) == pytest.approx(
        LEAST_NOISE * float(seen["z"].var()), rel=0.3
    )


def test_the_adversarys_rows_choose_and_no_victim_has_a_part_in_it() -> None:
    victims = federation().victims
    white = splitfed.Dataset("white", torch.ones_like(victims.x), victims.y, victims.task, victims.value_range)
    run = lenet_run(Noise(scale=1.0, relative=True))
    both = [told(BLACK), selection_of(run.attack(BLACK, victims=white, floors=False)[0])]
    first, second = ([(a.member, a.size, a.error) for a in one.tried] for one in both)
    assert first == second
    assert both[0].member == min(both[0].tried, key=lambda a: a.error).member == both[1].member


def test_members_by_what_is_known() -> None:
    names = [a.member for a in told(SMALL).tried]
    assert names[:2] == ["linear_inverse", "nearest"]
    assert names[-1] == "combination"
    searches = {"lbfgs_inversion, prior 0", "lbfgs_inversion, prior 0.0001", "refinement, reach 3"}
    assert {"inverse_network, width 4"} | searches < set(names)
    assert "latent_search" not in names
    seen = {a.member for a in told(replace(BLACK, prior=True)).tried}
    assert seen == {"linear_inverse", "nearest", "inverse_network, width 4", "combination"}
    assert BLACK.uses == {Needs.TRAINING_ATTACK} == SMALL.uses - {Needs.UPSTREAM}


def test_a_decoder_of_each_width_takes_part() -> None:
    """Of tables they are narrower, and learn from as many rows again that are drawn."""
    rows = strongest._Rows(victims=8, held=10, kept=40, folds=1, images=True)
    attack = Strongest(widths=(4, 16))
    of_images, of_tables = (attack._decoders(rows._replace(images=one)) for one in (True, False))
    assert [member.name for member in of_images] == ["inverse_network, width 4", "inverse_network, width 16"]
    assert [member.name for member in of_tables] == ["inverse_network, width 1", "inverse_network, width 4"]
    assert [member.passes for member in (*of_images, *of_tables)] == [40, 40, 80, 80]


def test_under_noise_a_white_box_tries_all_that_a_black_box_does() -> None:
    """With the same draws, so that it never chooses worse for what it knows more."""
    black, white = ([(a.member, a.size, a.error) for a in told(attack).tried[:-1]] for attack in (BLACK, SMALL))
    assert white[: len(black)] == black
    assert min(a.error for a in told(SMALL).tried) <= min(a.error for a in told(BLACK).tried[:-1])


@pytest.mark.parametrize(
    ("kind", "share", "evaluations"), [("lbfgs_inversion", 0.8, EVALUATIONS), ("refinement", 0.2, 1.0)]
)
def test_under_noise_refinements_have_a_fifth_of_the_work_of_searches(
    kind: str, share: float, evaluations: float
) -> None:
    """Sixteen rows held out are searched for in every trial, and 24 victims by the size of the last one."""
    sizes = [a.size for a in told(SMALL).tried if a.member.startswith(kind)]
    took = evaluations * (16 * sum(sizes) + 24 * sizes[-1]) / SMALL.passes
    assert share - 0.05 < took <= share


def test_where_searches_are_ahead_at_a_first_look_they_have_the_work_of_decoders() -> None:
    found = selection_of(lenet_run().attack(SMALL, floors=False)[0])
    sizes = [a.member for a in found.tried if a.size]
    assert sum(name.startswith("inverse_network") for name in sizes) == 1
    assert sum(name.startswith("lbfgs_inversion") for name in sizes) == 3
    ahead = max(a.size for a in found.tried if a.member == "lbfgs_inversion, prior 0")
    # Sixteen rows held out and 24 victims have all that the look left: nobody is tried twice with little work.
    assert 0.85 < EVALUATIONS * (16 + 24) * ahead / (2 * SMALL.passes) < 0.95


def test_where_they_are_not_a_white_box_tries_all_that_a_black_box_does() -> None:
    """Eight values of a row tell a search little, and decoders are slow: they have all the work they have alone."""
    run = lenet_run(TopK(k=8))
    black, white = (selection_of(run.attack(one, floors=False)[0]) for one in (BLACK, SMALL))
    wanted, found = ([(a.member, a.size, a.error) for a in one.tried if a.size] for one in (black, white))
    # With weights nobody asks by differences.
    assert {one for one in wanted if not one[0].startswith("query_inversion")} < set(found)
    assert not any(name.startswith("refinement") for name, *_ in found)


def test_queries_search_where_they_are_answered_alike() -> None:
    """And with the work of the decoders where these are behind at a first look."""
    attack = replace(BLACK, passes=30_000)
    found = selection_of(lenet_run().attack(attack, floors=False)[0])
    sizes = {a.member: a.size for a in found.tried if a.size}
    assert set(sizes) == {"inverse_network, width 4", "query_inversion, prior 0", "query_inversion, prior 0.0001"}
    assert found.member.startswith("query_inversion")
    # 16 rows held out and 24 victims.
    assert 0.85 < (16 + 24) * max(sizes.values()) / (2 * attack.passes) < 0.95
    assert not any(a.member.startswith("query_inversion") for a in told(BLACK).tried)


def test_a_release_that_is_a_function_of_the_row_needs_no_refinement() -> None:
    found = selection_of(lenet_run().attack(SMALL, floors=False)[0])
    assert not any(a.member.startswith("refinement") for a in found.tried)
    assert found.member.startswith(("lbfgs_inversion", "combination"))


def test_with_weights_a_row_is_found_that_no_regression_finds() -> None:
    run = lenet_run(cut="pool2")
    black, white = (run.attack(attack, floors=False)[0].scores["attack"]["psnr"].mean for attack in (BLACK, SMALL))
    assert white > black + 2


def test_the_search_in_a_prior_is_a_member_of_the_longer_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [Strongest.with_budget(name).prior for name in ("quick", "standard", "full")] == [False, False, True]
    short = {**LatentSearch.budgets["quick"], "epochs": 2, "latent_iterations": 3}
    monkeypatch.setattr(
        strongest,
        "load",
        lambda kind, name: partial(load(kind, name), **short) if name == "latent_search" else load(kind, name),
    )
    told = selection_of(lenet_run().attack(replace(SMALL, prior=True, passes=20_000), floors=False)[0])
    assert [a.size for a in told.tried if a.member == "latent_search"]


def test_what_was_chosen_learns_from_all_rows() -> None:
    """300 rows do not determine an inverse of 384 released numbers, and 400 do: a difference of 40 dB."""
    run = lenet_run()
    (strong,), (linear,) = run.attack(BLACK, floors=False), run.attack("linear_inverse", floors=False)
    assert strong.scores["attack"]["psnr"].mean > linear.scores["attack"]["psnr"].mean - 10


@dataclass(frozen=True)
class Revealed(Strongest):
    """Keeps what every member predicts of the victims, for somebody who knows the truth."""

    kept: dict[str, Tensor] = field(default_factory=dict, compare=False)

    def compare(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Trials:
        trials = super().compare(view, knowledge, generator, progress)
        names = dict.fromkeys(a.member for a in trials.tried if a.error < math.inf)
        self.kept.update({name: trials.predict(name, view, knowledge) for name in names})
        return trials


# Five defenses at four cuts: twenty cells.
DEFENSES: dict[str, tuple[Defense, ...]] = {
    "none": (),
    "weak noise": (Noise(scale=0.3, relative=True),),
    "noise": (Noise(scale=1.0, relative=True),),
    "dropout": (Dropout(rate=0.5),),
    "quantization": (Quantization(bits=2),),
}
CELLS = [(cut, name) for cut in ("relu1", "pool1", "relu2", "pool2") for name in DEFENSES]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("cut", "name"), thin(CELLS, 20))
def test_the_choice_is_as_good_as_that_of_the_truth(cut: str, name: str) -> None:
    """It may miss the member that is best on the victims by .2 dB of their mean squared error."""
    attack = Revealed.with_budget("quick", threat_model="white_box")
    (result,) = lenet_run(*DEFENSES[name], cut=cut).attack(attack, floors=False)
    truth = federation().victims.x
    span = federation().victims.value_range
    assert span is not None
    errors = {n: float((p.clamp(*span) - truth).square().mean()) for n, p in attack.kept.items()}
    assert decibels(errors[selection_of(result).member], min(errors.values())) < 0.2


def test_refusals() -> None:
    with pytest.raises(InvalidInput, match=re.escape("strongest widths=() is not allowed")):
        Strongest(widths=())
    with pytest.raises(InvalidInput, match=re.escape("strongest passes=0 is not allowed")):
        Strongest(passes=0)
    with pytest.raises(InvalidInput, match="unknown strongest threat_model 'grey_box'"):
        Strongest(threat_model="grey_box")
