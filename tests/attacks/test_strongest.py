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
from splitfed.attacks.reconstruction.combination import combine, convex_weights
from splitfed.attacks.reconstruction.held_out import HeldOut, count_folds, hold_out, hold_out_in_folds
from splitfed.attacks.reconstruction.latent_search import LatentSearch
from splitfed.attacks.reconstruction.refinement import LEAST_NOISE, Refinement, measure_noise
from splitfed.attacks.reconstruction.strongest import EnsembleMember, Strongest, Trials
from splitfed.attacks.selection import Attempt, Selection, decibels
from splitfed.core.defense import Defense
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, Stamp, View
from splitfed.defenses import Dropout, Noise, Quantization
from splitfed.registry import load
from splitfed.training.run import AttackResult
from tests.attacks.examples import digits as federation
from tests.attacks.examples import lenet_run
from tests.thinning import thin

SMALL = Strongest(widths=(4,), epochs=2, iterations=40, doublings=1, queries=1, validation=0.25, prior=False)


BLACK = replace(SMALL, white_box=False)


@cache
def told(attack: Strongest) -> Selection:
    """What the attack says of releases with noise."""
    return selection_of(lenet_run(Noise(scale=1.0, relative=True)).attack(attack)[0])


def selection_of(result: AttackResult) -> Selection:
    assert result.selection is not None
    return result.selection


def attempts(*given: tuple[str, int, float]) -> tuple[Attempt, ...]:
    return tuple(Attempt(member, size, 1.0, error) for member, size, error in given)


def held_out(count: int = 6, shape: tuple[int, ...] = (3,), span: tuple[float, float] | None = None) -> HeldOut:
    """Rows held out, and as many victims: nothing was released."""
    x = torch.linspace(0, 1, count * math.prod(shape)).view(count, *shape)
    knowledge = splitfed.attacks.Knowledge(shape, value_range=span, auxiliary=x)
    return HeldOut(x, View("server", (), {}), knowledge)


def test_decibels() -> None:
    assert decibels(1.0, 0.1) == pytest.approx(10.0)
    assert decibels(0.1, 1.0) == pytest.approx(-10.0)
    assert decibels(0.0, 0.0) == 0.0
    assert decibels(1.0, 0.0) == math.inf


def test_the_gain_is_the_most_that_a_last_doubling_gained() -> None:
    tried = attempts(("closed", 0, 0.1), ("a", 5, 0.8), ("a", 10, 0.4), ("b", 3, 0.9), ("b", 6, 0.8))
    told = Selection("closed", tried)
    assert told.gain == pytest.approx(10 * math.log10(2))
    assert told.converged is False
    assert replace(told, tried=(*tried, *attempts(("a", 20, 0.399)))).gain == pytest.approx(10 * math.log10(9 / 8))
    assert replace(told, tried=(*tried, *attempts(("a", 20, 0.399), ("b", 12, 0.9)))).converged is True
    assert Selection("a", attempts(("a", 4, 0.3), ("a", 8, 0.25)), "auc").gain == pytest.approx(0.05)
    assert Selection("a", attempts(("a", 4, 0.3), ("a", 8, 0.295)), "auc").converged is True
    rising = Selection("a", attempts(("a", 5, 0.4), ("a", 10, 0.2), ("b", 3, 0.9)))
    assert rising.curve() == [(1.0, 0.4), (2.0, 0.2), (3.0, 0.2)]


def test_without_a_doubling_nothing_is_said_of_convergence() -> None:
    told = Selection("closed", attempts(("closed", 0, 0.5), ("a", 5, 0.4)))
    assert told.gain is None
    assert told.converged is None


def test_a_member_is_doubled_while_that_gains_a_fifth_of_a_decibel() -> None:
    rows = held_out()

    def predict(view: View, known: Knowledge, size: int, drawn: torch.Generator) -> torch.Tensor:
        # 3 dB a doubling up to 8, then nothing.
        return torch.cat([rows.x, rows.x + 1 / min(size, 8) ** 0.5])

    for doublings, sizes in ((0, [1]), (2, [1, 2, 4]), (9, [1, 2, 4, 8, 16])):
        trials = Trials(rows, 0, lambda done: None)
        trials.run(EnsembleMember("m", 1, predict), doublings)
        assert [a.size for a in trials.tried] == sizes
    assert trials.tried[-1].error == pytest.approx(1 / 8)


def test_of_several_settings_only_the_best_is_doubled() -> None:
    rows, trials = held_out(), Trials(held_out(), 0, lambda done: None)

    def off(by: float) -> EnsembleMember:
        return EnsembleMember(
            f"off by {by}", 1, lambda view, known, size, drawn: torch.cat([rows.x, rows.x + by / size])
        )

    trials.run_best(iter([off(0.3), off(0.1), off(0.2)]), 2)
    assert [(a.member, a.size) for a in trials.tried] == [
        *[(f"off by {by}", 1) for by in (0.3, 0.1, 0.2)],
        ("off by 0.1", 2),
        ("off by 0.1", 4),
    ]
    assert trials.chosen == "off by 0.1"


def test_predictions_that_are_not_finite_are_never_chosen() -> None:
    rows, trials = held_out(), Trials(held_out(), 0, lambda done: None)
    trials.run(EnsembleMember("nan", 0, lambda view, known, size, drawn: torch.full((12, 3), float("nan"))), 0)
    trials.run(EnsembleMember("bad", 0, lambda view, known, size, drawn: torch.full((12, 3), 1e6)), 0)
    trials.combine()
    assert trials.chosen in {"bad", "combination"}
    assert set(trials.found) == {"bad"}
    prediction = trials.predict(trials.chosen, View("server", (), {}), rows.knowledge)
    assert prediction.tolist() == [[1e6] * 3] * 6


def test_weights_of_a_combination_are_convex_and_the_best_ones() -> None:
    truth = torch.linspace(0, 1, 60).view(20, 3)
    up, down = truth + 0.3, truth - 0.1
    assert convex_weights([up, down], truth) == pytest.approx([0.25, 0.75])
    # The best without a bound would be 2 and -1.
    assert convex_weights([truth + 0.1, truth + 0.2], truth) == pytest.approx([1.0, 0.0])


def test_a_combination_is_judged_on_rows_that_it_was_not_fitted_to() -> None:
    """Two predictions that are each right on one half: the weights of one half are wrong on the other."""
    rows = held_out(6)
    even = (torch.arange(6) % 2 == 0).unsqueeze(1)
    first, second = rows.x + even * 1.0, rows.x + ~even * 1.0
    predictions = [torch.cat([rows.x, one]) for one in (first, second)]
    weights, error = combine(rows, predictions)
    assert error == pytest.approx(1.0)
    assert weights == pytest.approx([0.5, 0.5])


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
    assert held.error(torch.cat([victims + 9, held.x + 0.5])) == pytest.approx(0.25)
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


def test_in_folds_a_member_is_judged_on_rows_that_it_has_not_learnt_from() -> None:
    """It knows its own rows by heart, and of any other nothing: no row is one of its own."""
    held, trials, asked = in_folds(10), Trials(in_folds(10), 0, lambda done: None), list[tuple[int, int]]()

    def predict(view: View, known: Knowledge, size: int, drawn: torch.Generator) -> Tensor:
        seen, own = view.select(kind="activation").tensors()["z"] / 2, known.auxiliary
        assert own is not None
        asked.append((len(seen), len(own)))
        found = (seen[:, None] == own[None]).all(2).any(1)
        return torch.where(found[:, None], seen, seen + 7)

    trials.run(EnsembleMember("by heart", 0, predict, learns=True), 0)
    assert asked == [(7, 7), (7, 7), (6, 8), (6, 8)]
    assert trials.tried[0].error == pytest.approx(49.0)
    trials.run(EnsembleMember("taught by nobody", 0, predict), 0)
    assert asked[4:] == [(14, 10)], "what does not learn needs no folds"
    # At last it learns from all.
    trials.predict("by heart", held.view, knowledge_of(10))
    assert asked[5:] == [(14, 10)]
    assert trials.selection.criterion == "on held-out rows, in 4 folds"


@pytest.mark.parametrize(
    ("share", "rows", "folds"), [(0.2, 120, 5), (0.25, 9, 4), (0.9, 40, 2), (0.01, 500, 10), (0.2, 3, 3)]
)
def test_how_many_folds(share: float, rows: int, folds: int) -> None:
    assert count_folds(rows, share) == folds


def test_with_thirty_rows_to_hold_out_a_single_hold_out_chooses_as_it_always_did() -> None:
    """Of 300 rows a fifth: the second order that the seed gives, and one view."""
    attack, view = Strongest(), released(torch.zeros(4, 3))
    order = [torch.randperm(300, generator=drawn) for drawn in [torch.Generator().manual_seed(5)] for _ in range(2)][1]
    held = attack._hold_out(view, knowledge_of(300), torch.Generator().manual_seed(5))
    assert held.folds == ()
    assert held.x[:, 0].tolist() == (3.0 * order[:60]).tolist()
    assert held.fewest == 240
    assert attack._hold_out(view, knowledge_of(150), torch.Generator().manual_seed(5)).folds == ()
    few = attack._hold_out(view, knowledge_of(147), torch.Generator().manual_seed(5))
    assert (len(few.x), len(few.folds), few.fewest) == (147, 5, 117)


def test_the_demo_and_the_boards_of_images_are_chosen_without_folds() -> None:
    """They promise a minute, and were measured so."""
    assert Strongest(validation=0.1)._folds(450) == 1
    assert Strongest()._folds(300) == 1
    assert Strongest()._folds(120) == 5


def test_in_folds_the_better_of_two_is_found_more_often_where_few_rows_have_most_of_the_error() -> None:
    """Log-normal errors, of which one member has 1.3 times as much on average: of forty choices fewer are wrong."""
    wrong = {"once": 0, "folds": 0}
    for seed in range(40):
        drawn = torch.Generator().manual_seed(seed)
        knowledge, victims = knowledge_of(120), released(torch.zeros(1, 3))
        errors = {
            name: by * torch.randn(120, generator=drawn).mul(1.5).exp() for name, by in (("good", 1.0), ("poor", 1.3))
        }
        for way, held in (
            ("once", hold_out("strongest", victims, knowledge, 0.2, drawn)),
            ("folds", hold_out_in_folds("strongest", victims, knowledge, 0.2, drawn)),
        ):
            trials = Trials(held, 0, lambda done: None)
            for name, error in errors.items():

                def predict(
                    view: View, known: Knowledge, size: int, drawn: torch.Generator, e: Tensor = error
                ) -> Tensor:
                    rows = view.select(kind="activation").tensors()["z"] / 2
                    return rows + e[(rows[:, 0] / 3).long()].sqrt()[:, None]

                trials.run(EnsembleMember(name, 0, predict, learns=True), 0)
            wrong[way] += trials.chosen == "poor"
    assert wrong["folds"] < wrong["once"], wrong


def test_the_size_at_which_a_member_is_best_is_kept_and_not_the_last() -> None:
    """First .01, with twice the work .09; another has .04."""
    rows = held_out()

    def off(by: float, name: str, first: int, learns: bool = False) -> EnsembleMember:
        def predict(view: View, known: Knowledge, size: int, drawn: torch.Generator) -> Tensor:
            return torch.cat([torch.full_like(rows.x, size), rows.x + (by if size == first else 0.3)])

        return EnsembleMember(name, first, predict, learns)

    for learns in (False, True):
        trials = Trials(rows, 0, lambda done: None)
        trials.run(off(0.1, "falling", 5, learns), 3)
        trials.run(off(0.2, "other", 1), 0)
        assert [a.size for a in trials.tried] == [5, 10, 1]
        assert trials.chosen == "falling"
        found = trials.predict("falling", View("server", (), {}), rows.knowledge)
        assert float(found[0, 0]) == 5.0


def test_attempts_draw_random_numbers_of_their_own() -> None:
    """Another member before it, or one more size, changes none of them."""
    rows = held_out()

    def draws(*names: str) -> dict[tuple[str, int], float]:
        found: dict[tuple[str, int], float] = {}

        def drawing(name: str) -> EnsembleMember:
            def predict(view: View, known: Knowledge, size: int, drawn: torch.Generator) -> Tensor:
                found[name, size] = float(torch.rand((), generator=drawn))
                return torch.cat([rows.x, rows.x + 1 / size])

            return EnsembleMember(name, 1, predict)

        trials = Trials(rows, 7, lambda done: None)
        for name in names:
            trials.run(drawing(name), 2)
        return found

    both = draws("a", "b")
    assert len(set(both.values())) == len(both) == 6
    assert draws("b") == {key: value for key, value in both.items() if key[0] == "b"}


def test_predictions_are_brought_into_the_range_of_the_data_before_they_are_judged() -> None:
    rows = held_out(span=(0.0, 1.0))
    trials = Trials(rows, 0, lambda done: None)
    trials.run(EnsembleMember("far", 0, lambda view, known, size, drawn: torch.full((12, 3), 50.0)), 0)
    assert trials.tried[0].error == pytest.approx(float((1 - rows.x).square().mean()))
    assert float(trials.found["far"].max()) == 1.0


def test_what_counts_for_little_is_left_out_of_a_combination_whose_weights_still_sum_to_one() -> None:
    """The best weights are .995 and .005: the second member is left out, and the first has the whole weight."""
    rows, trials = held_out(), Trials(held_out(), 0, lambda done: None)
    away = torch.ones(6, 3) * torch.tensor([1.0, -1.0, 0.5])
    for name, by in (("near", -0.005), ("far", 0.995)):
        predictions = torch.cat([torch.full((6, 3), 2.0), rows.x + by * away])
        trials.run(EnsembleMember(name, 0, lambda view, known, size, drawn, p=predictions: p), 0)
    trials.combine()
    assert trials.tried[-1].error < min(a.error for a in trials.tried[:-1])
    assert trials.chosen == "combination"
    found = trials.predict("combination", View("server", (), {}), rows.knowledge)
    assert found.tolist() == [[2.0] * 3] * 6


def test_a_combination_of_a_single_row_is_never_chosen() -> None:
    rows = held_out(1)
    assert combine(rows, [torch.cat([rows.x, rows.x + 0.1])])[1] == math.inf


def test_a_combination_is_judged_on_both_halves() -> None:
    """Of six rows the odd ones are foretold, the even ones are missed by one."""
    rows = held_out(6)
    even = (torch.arange(6) % 2 == 0).unsqueeze(1)
    assert combine(rows, [torch.cat([rows.x, rows.x + even * 1.0])])[1] == pytest.approx(0.5)


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
        trials.run(EnsembleMember(name, 0, lambda view, known, size, drawn, p=predictions: p), 0)
    trials.run_best(SMALL._refinements(trials), 0)
    assert begun
    assert all(torch.equal(start, trials.found["best"]) for start in begun)


def test_a_refinement_of_victims_begins_at_what_has_learnt_from_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried once, beside all rows held out in folds; then for the victims, where the best one predicts anew."""
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

    trials.run(EnsembleMember("best", 0, predict, learns=True), 0)
    first = next(SMALL._refinements(trials))
    trials.run(first, 0)
    assert [start[4:].sub(rows.x)[:, 0].tolist() for start in begun] == [[7.0] * 6 + [8.0] * 4]
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
    both = [told(BLACK), selection_of(run.attack(BLACK, victims=white)[0])]
    first, second = ([(a.member, a.size, a.error) for a in one.tried] for one in both)
    assert first == second
    assert both[0].member == min(both[0].tried, key=lambda a: a.error).member == both[1].member


def test_members_by_what_is_known() -> None:
    names = [a.member for a in told(SMALL).tried]
    assert names[:2] == ["linear_inverse", "nearest"]
    assert names[-1] == "combination"
    assert {"inverse_network, width 4", "rmle, tv 0.01", "refinement, reach 3"} < set(names)
    assert "latent_search" not in names
    seen = {a.member for a in told(replace(BLACK, prior=True)).tried}
    assert seen == {"linear_inverse", "nearest", "inverse_network, width 4", "combination"}
    assert BLACK.uses == {Needs.TRAINING_ATTACK} == SMALL.uses - {Needs.UPSTREAM}


def test_the_search_in_a_prior_is_a_member_of_the_longer_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [Strongest.with_budget(name).prior for name in ("quick", "standard", "full")] == [False, True, True]
    short = {**LatentSearch.budgets["fast"], "epochs": 2, "latent_iterations": 3}
    monkeypatch.setattr(
        strongest,
        "load",
        lambda kind, name: partial(load(kind, name), **short) if name == "latent_search" else load(kind, name),
    )
    told = selection_of(lenet_run().attack(replace(SMALL, prior=True, iterations=5))[0])
    assert [a.size for a in told.tried if a.member == "latent_search"][:2] == [5, 10]


def test_what_was_chosen_learns_from_all_rows() -> None:
    """300 rows do not determine an inverse of 384 released numbers, and 400 do: a difference of 40 dB."""
    run = lenet_run()
    (strong,), (linear,) = run.attack(BLACK), run.attack("linear_inverse")
    assert strong.scores["attack"]["psnr"].mean > linear.scores["attack"]["psnr"].mean - 0.2


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
    budget = {**Strongest.budgets["quick"], **({} if name == "none" else {"iterations": 60})}
    attack = Revealed(**budget)
    (result,) = lenet_run(*DEFENSES[name], cut=cut).attack(attack)
    truth = federation().victims.x
    span = federation().victims.value_range
    assert span is not None
    errors = {n: float((p.clamp(*span) - truth).square().mean()) for n, p in attack.kept.items()}
    assert decibels(errors[selection_of(result).member], min(errors.values())) < 0.2


def test_refusals() -> None:
    with pytest.raises(InvalidInput, match=re.escape("strongest widths=() is not allowed")):
        Strongest(widths=())
    with pytest.raises(InvalidInput, match=re.escape("strongest doublings=0 is not allowed")):
        Strongest(doublings=0)
