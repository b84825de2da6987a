"""The race of members: the best third goes on with three times the work, judged by rows held out."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from splitfed.attacks.base import Knowledge
from splitfed.attacks.reconstruction.held_out import hold_out, hold_out_in_folds
from splitfed.attacks.reconstruction.race import EnsembleMember, Trials, combine, convex_weights, rungs
from splitfed.core.messages import View
from tests.attacks.test_strongest import held_out, in_folds, knowledge_of, released


def halving(name: str, floor: float = 0.0, **how: float) -> EnsembleMember:
    """A member whose squared error is 1 / size, but never below `floor`; a unit of its size is a row pass."""

    def predict(view: View, known: Knowledge, size: int, drawn: torch.Generator) -> Tensor:
        x = torch.linspace(0, 1, 18).view(6, 3)
        return torch.cat([x, x + max(1 / size, floor) ** 0.5])

    return EnsembleMember(name, predict, passes=1.0, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("members", "counts"), [(1, [1, 1]), (2, [2, 1]), (3, [3, 1]), (4, [4, 2, 1]), (9, [9, 3, 1]), (10, [10, 4, 2, 1])]
)
@pytest.mark.parametrize("last", [0.0, 1.0, 4.0])
def test_all_rungs_and_the_last_prediction_together_take_the_budget(
    members: int, counts: list[int], last: float
) -> None:
    found = rungs(members, 1000.0, last)
    assert [count for count, _ in found] == counts
    works = [work for _, work in found]
    assert all(later == pytest.approx(3 * work) for work, later in pairwise(works))
    assert sum(count * work for count, work in found) + last * works[-1] == pytest.approx(1000.0)


def test_the_best_go_on_with_three_times_the_work() -> None:
    trials = Trials(held_out(), 0, lambda done: None)
    members = [halving("stuck", 0.5), halving("good"), halving("fair", 0.05), halving("poor", 0.9)]
    trials.race(members, 19 * 10.0)
    assert [(a.member, a.size) for a in trials.tried] == [
        *[(name, 10) for name in ("stuck", "good", "fair", "poor")],
        ("good", 30),
        ("fair", 30),
        ("good", 90),
    ]
    assert trials.chosen == "good"
    assert trials.selection.gain == pytest.approx(10 * math.log10(2), rel=1e-3)
    assert trials.selection.converged is False


def test_whose_least_work_is_more_than_its_share_takes_no_part_and_is_told() -> None:
    trials = Trials(held_out(), 0, lambda done: None)
    trials.race([halving("slow", least=50), halving("begins late", start=11.0), halving("quick")], 60.0)
    assert {a.member for a in trials.tried} == {"quick"}
    assert [(one.member, one.reason) for one in trials.selection.left_out] == [
        ("slow", "50 row passes at least, and its share is 10"),
        ("begins late", "12 row passes at least, and its share is 10"),
    ]


def test_a_search_is_tried_without_victims_and_searches_for_them_at_last() -> None:
    asked: list[int] = []

    def predict(view: View, known: Knowledge, size: int, drawn: torch.Generator) -> Tensor:
        seen = view.select(kind="activation").tensors()["z"] / 2
        asked.append(len(seen))
        return seen

    view = released(torch.zeros(4, 3))
    held = hold_out("strongest", view, knowledge_of(10), 0.3, torch.Generator().manual_seed(0))
    trials = Trials(held, 0, lambda done: None)
    assert trials.run(EnsembleMember("search", predict, learns=True, searches=True)) == 0.0
    assert asked == [3]
    assert trials.predict("search", view, knowledge_of(10)).tolist() == [[0.0] * 3] * 4
    assert asked == [3, 4]
    folded, asked[:] = Trials(in_folds(10), 0, lambda done: None), []
    assert folded.run(EnsembleMember("search", predict, learns=True, searches=True)) == 0.0
    assert asked == [3], "one fold is enough for a search"


def test_what_learnt_without_few_rows_does_not_learn_anew() -> None:
    asked: list[int] = []

    def predict(view: View, known: Knowledge, size: int, drawn: torch.Generator) -> Tensor:
        asked.append(size)
        return view.select(kind="activation").tensors()["z"] / 2

    view = released(torch.zeros(4, 3))
    held = hold_out("strongest", view, knowledge_of(10), 0.3, torch.Generator().manual_seed(0))
    for anew, calls in ((False, 1), (True, 2)):
        asked.clear()
        trials = Trials(held, 0, lambda done: None, anew)
        trials.run(EnsembleMember("decoder", predict, learns=True), 5)
        assert trials.predict("decoder", view, knowledge_of(10)).tolist() == [[0.0] * 3] * 4
        assert asked == [5] * calls


def test_predictions_that_are_not_finite_are_never_chosen() -> None:
    rows, trials = held_out(), Trials(held_out(), 0, lambda done: None)
    trials.run(EnsembleMember("nan", lambda view, known, size, drawn: torch.full((12, 3), float("nan"))))
    trials.run(EnsembleMember("bad", lambda view, known, size, drawn: torch.full((12, 3), 1e6)))
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
    weights, crossed = combine(rows.x, [first, second], 6)
    assert rows.error(crossed) == pytest.approx(1.0)
    assert weights == pytest.approx([0.5, 0.5])


def test_in_folds_a_member_is_judged_on_rows_that_it_has_not_learnt_from() -> None:
    """It knows its own rows by heart, and of any other nothing: no row is one of its own."""
    held, trials, asked = in_folds(10), Trials(in_folds(10), 0, lambda done: None), list[tuple[int, int]]()

    def predict(view: View, known: Knowledge, size: int, drawn: torch.Generator) -> Tensor:
        seen, own = view.select(kind="activation").tensors()["z"] / 2, known.auxiliary
        assert own is not None
        asked.append((len(seen), len(own)))
        found = (seen[:, None] == own[None]).all(2).any(1)
        return torch.where(found[:, None], seen, seen + 7)

    trials.run(EnsembleMember("by heart", predict, learns=True))
    assert asked == [(7, 7), (7, 7), (6, 8), (6, 8)]
    assert trials.tried[0].error == pytest.approx(49.0)
    trials.run(EnsembleMember("taught by nobody", predict))
    assert asked[4:] == [(14, 10)], "what does not learn needs no folds"
    # At last it learns from all.
    trials.predict("by heart", held.view, knowledge_of(10))
    assert asked[5:] == [(14, 10)]
    assert trials.selection.criterion == "on held-out rows, in 4 folds"


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

                trials.run(EnsembleMember(name, predict, learns=True))
            wrong[way] += trials.chosen == "poor"
    assert wrong["folds"] < wrong["once"], wrong


def test_the_size_at_which_a_member_is_best_is_kept_and_not_the_last() -> None:
    """First .01, with twice the work .09; another has .04."""
    rows = held_out()

    def off(by: float, name: str, first: int, learns: bool = False) -> EnsembleMember:
        def predict(view: View, known: Knowledge, size: int, drawn: torch.Generator) -> Tensor:
            return torch.cat([torch.full_like(rows.x, size), rows.x + (by if size == first else 0.3)])

        return EnsembleMember(name, predict, learns)

    for learns in (False, True):
        trials = Trials(rows, 0, lambda done: None)
        for size in (5, 10):
            trials.run(off(0.1, "falling", 5, learns), size)
        trials.run(off(0.2, "other", 1), 1)
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

            return EnsembleMember(name, predict)

        trials = Trials(rows, 7, lambda done: None)
        for name in names:
            for size in (1, 2, 4):
                trials.run(drawing(name), size)
        return found

    both = draws("a", "b")
    assert len(set(both.values())) == len(both) == 6
    assert draws("b") == {key: value for key, value in both.items() if key[0] == "b"}


def test_predictions_are_brought_into_the_range_of_the_data_before_they_are_judged() -> None:
    rows = held_out(span=(0.0, 1.0))
    trials = Trials(rows, 0, lambda done: None)
    trials.run(EnsembleMember("far", lambda view, known, size, drawn: torch.full((12, 3), 50.0)))
    assert trials.tried[0].error == pytest.approx(float((1 - rows.x).square().mean()))
    assert float(trials.found["far"].max()) == 1.0


def test_what_counts_for_little_is_left_out_of_a_combination_whose_weights_still_sum_to_one() -> None:
    """The best weights are .995 and .005: the second member is left out, and the first has the whole weight."""
    rows, trials = held_out(), Trials(held_out(), 0, lambda done: None)
    away = torch.ones(6, 3) * torch.tensor([1.0, -1.0, 0.5])
    for name, by in (("near", -0.005), ("far", 0.995)):
        predictions = torch.cat([torch.full((6, 3), 2.0), rows.x + by * away])
        trials.run(EnsembleMember(name, lambda view, known, size, drawn, p=predictions: p))
    trials.combine()
    assert trials.tried[-1].error < min(a.error for a in trials.tried[:-1])
    assert trials.chosen == "combination"
    found = trials.predict("combination", View("server", (), {}), rows.knowledge)
    assert found.tolist() == [[2.0] * 3] * 6


def test_a_combination_of_a_single_row_is_never_chosen() -> None:
    rows = held_out(1)
    assert bool(combine(rows.x, [rows.x + 0.1], 1)[1].isnan().all())
    trials = Trials(rows, 0, lambda done: None)
    trials.run(EnsembleMember("alone", lambda view, known, size, drawn: torch.cat([rows.x, rows.x + 1.0])))
    trials.combine()
    assert trials.tried[-1].error == math.inf
    assert trials.chosen == "alone"


def test_a_combination_is_judged_on_both_halves() -> None:
    """Of six rows the odd ones are foretold, the even ones are missed by one."""
    rows = held_out(6)
    even = (torch.arange(6) % 2 == 0).unsqueeze(1)
    assert rows.error(combine(rows.x, [rows.x + even * 1.0], 6)[1]) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("learnt", "closed", "chosen"),
    [
        ((1.0, 1.0, 1.0, 1.0, 1.0, 9.0), 1.1, "learnt"),  # one row makes the difference
        ((1.0, 1.0, 1.0, 1.0, 1.0, 1.2), 0.8, "closed"),  # all rows do
        ((1.0, 1.0, 1.0, 1.0, 1.0, 99.0), 0.8, "closed"),  # so they do where one has a large error
    ],
)
@pytest.mark.parametrize("searches", [False, True])
def test_what_did_not_learn_is_chosen_where_it_is_better_by_more_than_chance(
    learnt: tuple[float, ...], closed: float, chosen: str, searches: bool
) -> None:
    """A closed form, or a search."""
    rows = held_out(6)
    trials = Trials(rows, 0, lambda done: None)
    for name, passes, errors in (("learnt", 1.0, learnt), ("closed", float(searches), (closed,) * 6)):
        searching = searches and name == "closed"
        own = rows.x + torch.tensor(errors).sqrt()[:, None]
        own = own if searching else torch.cat([rows.x, own])
        member = EnsembleMember(name, lambda view, known, size, drawn, p=own: p, passes=passes, searches=searching)
        trials.run(member, int(passes))
    assert trials.tried[1].error < trials.tried[0].error
    assert trials.chosen == chosen


@pytest.mark.parametrize(("span", "chosen"), [((0.0, 1.0), "exact but once"), (None, "never far")])
def test_images_of_a_known_range_are_judged_in_decibels_as_their_score_is(
    span: tuple[float, float] | None, chosen: str
) -> None:
    """Seven of eight images exact, and one missed by .01, are 90 dB of 100; .001 everywhere is 30 dB."""
    x = torch.linspace(0, 1, 32).view(8, 1, 2, 2)
    known = replace(held_out().knowledge, shape=(1, 2, 2), value_range=span)
    rows = replace(held_out(), x=x, count=8, knowledge=known)

    def missing(name: str, squared: list[float]) -> EnsembleMember:
        off = torch.tensor(squared).sqrt().view(8, 1, 1, 1) * torch.where(x < 0.5, 1.0, -1.0)
        return EnsembleMember(name, lambda view, known, size, drawn: torch.cat([x, x + off]), passes=1.0)

    trials = Trials(rows, 0, lambda done: None)
    trials.run(missing("exact but once", [0.01, *[0.0] * 7]), 1)
    trials.run(missing("never far", [0.001] * 8), 1)
    assert trials.chosen == chosen


@pytest.mark.parametrize(("scale", "span", "converged"), [(1, None, True), (1, (0.0, 1.0), True), (1e-6, None, False)])
def test_a_reconstruction_at_the_cap_of_the_psnr_has_converged(
    scale: float, span: tuple[float, float] | None, converged: bool
) -> None:
    """Errors of 1e-13 and 1e-14 are 10 dB apart; of rows in [0, 1] both are 100 dB, of a millionth of those neither."""
    known = replace(held_out().knowledge, value_range=span)
    x = scale * torch.linspace(0, 1, 18, dtype=torch.float64).view(6, 3)
    trials = Trials(replace(held_out(), x=x, knowledge=known), 0, lambda done: None)
    near = EnsembleMember("near", lambda view, known, size, drawn: torch.cat([x, x + 10 ** (-size / 2)]), passes=1.0)
    for size in (13, 14):
        trials.run(near, size)
    assert trials.selection.converged is converged


def test_a_first_look_takes_each_once_and_says_who_is_ahead() -> None:
    trials = Trials(held_out(), 0, lambda done: None)
    good, poor, slow = halving("good"), halving("poor", 0.5), halving("slow", least=50)
    assert trials.look([good, poor, slow], 10.0) == 20.0
    assert [(a.member, a.size) for a in trials.tried] == [("good", 10), ("poor", 10)]
    assert trials.leads([good, slow], [poor], 4.9)
    assert not trials.leads([good, slow], [poor], 5.1)
    assert not trials.leads([slow], [poor], 0.0)
    assert trials.leads([good], [slow], 1e9), "who found nothing is behind"


def test_a_look_is_the_first_rung_of_a_race_and_who_was_best_in_it_has_all_that_is_left() -> None:
    trials = Trials(held_out(), 0, lambda done: None)
    members = [halving("poor", 0.5), halving("good", last=2.0), halving("slow", least=50)]
    assert trials.look(members, 10.0) == 20.0
    trials.race(members, 300.0, looked=True)
    assert [(a.member, a.size) for a in trials.tried] == [("poor", 10), ("good", 10), ("good", 100)]
    assert [one.member for one in trials.selection.left_out] == ["slow"]


def test_whose_share_of_a_look_was_too_small_has_a_first_rung_of_its_own() -> None:
    """Of 1200 row passes three members have 100 each there, and the last one, with twice that for victims, the rest."""
    trials = Trials(held_out(), 0, lambda done: None)
    members = [halving("good", last=2.0), halving("poor", 0.5), halving("slow", 0.4, least=50)]
    trials.look(members, 10.0)
    trials.race(members, 1200.0, looked=True)
    assert [(a.member, a.size) for a in trials.tried] == [("good", 10), ("poor", 10), ("slow", 100), ("good", 366)]
    assert trials.selection.left_out == ()


def test_where_nobody_could_be_looked_at_nobody_races() -> None:
    trials = Trials(held_out(), 0, lambda done: None)
    slow = [halving("slow", least=50)]
    trials.run(halving("other"), 1)
    assert trials.look(slow, 10.0) == 0.0
    trials.race(slow, 120.0, looked=True)
    assert [a.member for a in trials.tried] == ["other"]
    assert [one.reason for one in trials.selection.left_out] == ["50 row passes at least, and its share is 30"]


def test_a_row_that_is_asked_for_several_times_counts_as_one_in_what_is_chance() -> None:
    """Noise is drawn for each of four queries; a difference of one row is no less of a chance for that."""
    knowledge = knowledge_of(10)
    drawn = torch.Generator().manual_seed(0)

    def query(x: Tensor) -> dict[str, Tensor]:
        return {"z": 2 * x + torch.randn(x.shape, generator=drawn)}

    held = hold_out("strongest", released(torch.zeros(4, 3)), replace(knowledge, query=query), 0.3, drawn)
    assert (held.count, len(held.x)) == (3, 120)
    assert torch.equal(held.x[:3], held.x[3:6])
    seen = held.own.tensors()["z"]
    assert not torch.equal(seen[:3], seen[3:6])
    trials = Trials(held, 0, lambda done: None)
    for name, passes, errors in (("learnt", 1.0, (1.0, 1.0, 9.0)), ("closed", 0.0, (1.1, 1.1, 1.1))):
        own = held.x + torch.tensor(errors).sqrt().repeat(40)[:, None]
        both = torch.cat([torch.zeros(4, 3), own])
        trials.run(EnsembleMember(name, lambda view, known, size, drawn, p=both: p, passes=passes), int(passes))
    assert trials.chosen == "learnt"


def test_what_learns_asks_for_its_rows_beside_those_held_out() -> None:
    """A release that is divided by the largest number of its batch tells of a row that nobody learns from."""
    rows = torch.arange(1.0, 31.0).view(10, 3)

    def query(x: Tensor) -> dict[str, Tensor]:
        return {"z": x / x.max()}

    known = Knowledge((3,), auxiliary=rows, query=query)
    for share in (0.3, 0.1):
        held = hold_out("strongest", released(torch.zeros(4, 3)), known, share, torch.Generator().manual_seed(1))
        left, ask = held.knowledge.auxiliary, held.knowledge.query
        assert left is not None
        assert ask is not None
        assert torch.equal(ask(left)["z"], left / 30)
    for fold in hold_out_in_folds(
        "strongest", released(torch.zeros(4, 3)), known, 0.3, torch.Generator().manual_seed(1)
    ).folds:
        left, ask = fold.knowledge.auxiliary, fold.knowledge.query
        assert left is not None
        assert ask is not None
        assert torch.equal(ask(left)["z"], left / 30)
