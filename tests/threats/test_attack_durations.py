"""How long an attack takes, told before it begins: the arithmetic by a clock of the test's own, and what is refused."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from splitfed.attacks.base import Attack, Knowledge, Releases
from splitfed.attacks.membership import membership_shadow
from splitfed.attacks.membership.copied_models import Copies, copies_work
from splitfed.attacks.membership.lira import Lira
from splitfed.attacks.membership.membership_shadow import MembershipShadow
from splitfed.attacks.membership.strongest_membership import StrongestMembership
from splitfed.attacks.networks.row_lbfgs import RowLbfgs
from splitfed.attacks.reconstruction import strongest
from splitfed.attacks.reconstruction.inverse_network import InverseNetwork
from splitfed.attacks.reconstruction.linear_inverse import LinearInverse
from splitfed.attacks.reconstruction.query_inversion import QueryInversion
from splitfed.attacks.reconstruction.race import rungs
from splitfed.attacks.reconstruction.rmle import Rmle
from splitfed.attacks.reconstruction.shadow import Shadow
from splitfed.attacks.reconstruction.strongest import LOOK, SEARCHED, Strongest
from splitfed.attacks.work import BATCHES, OneOf, StatesWork, Work
from splitfed.cli import main
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import View
from splitfed.study.run.progress import Lines, ProgressEvent, Watcher
from splitfed.threats.attack_durations import AttackDuration, plan_attack, work_of
from splitfed.training.run import Run
from tests.attacks.examples import lenet_run
from tests.examples import asked
from tests.study.examples import small, write
from tests.thinning import thin


class Clock:
    """Time that passes as `run` says alone: `start` seconds to begin, and `unit` for each of its size."""

    def __init__(self, start: float, unit: float) -> None:
        self.now, self.start, self.unit, self.sizes = 0.0, start, unit, list[int]()

    def __call__(self) -> float:
        return self.now

    def run(self, size: int) -> None:
        self.sizes.append(size)
        # The first run is slow, as one is that imports and compiles.
        self.now += self.start + self.unit * size + (100.0 if len(self.sizes) == 1 else 0.0)


def test_the_arithmetic() -> None:
    """Of a quarter of the rows: 2 s to begin, 3 s a unit; 30 units in two attempts to 150 in five."""
    clock = Clock(2.0, 3.0)
    assert Work(clock.run, 30, 150, (2, 5), 0.25, timed=2).seconds(clock) == (
        pytest.approx((30 * 3 + 2 * 2) / 0.25),
        pytest.approx((150 * 3 + 5 * 2) / 0.25),
    )
    assert clock.sizes == [2, 2, 4, 2, 4]
    begun = Clock(2.0, 3.0)
    assert Work(begun.run, 0, 0, (1, 2)).seconds(begun) == (2.0, 4.0)
    assert begun.sizes == [0, 0]
    flat = Clock(8.0, 0.0)
    assert Work(flat.run, 10, 10).seconds(flat) == (8.0, 8.0), "what beginning takes is not scaled"
    assert max(flat.sizes) == 16


def test_a_difference_that_drowns_in_the_jitter_of_the_clock_is_not_scaled() -> None:
    """5 ms a unit, 50 ms to begin, and 10 ms of jitter either way: a thousand units take 5 s, not 25 s."""
    clock = Clock(0.05, 0.005)

    def run(size: int) -> None:
        clock.run(size)
        clock.now += 0.01 * (-1) ** len(clock.sizes)

    least, most = Work(run, 1000, 1000).seconds(clock)
    assert 4.0 < least <= most < 6.0
    assert sum(clock.sizes) < 1000


def test_the_line() -> None:
    said = [(0.5, 0.5), (2.04, 2.01), (240, 540), (30, 90), (3600, 9000)]
    assert [str(AttackDuration("strongest", *pair)) for pair in said] == [
        "strongest: about 0.5 s here",
        "strongest: about 2 s here",
        "strongest: about 4 to 9 min here",
        "strongest: about 0.5 to 1.5 min here",
        "strongest: about 1 to 2.5 h here",
    ]


def plan(attack: Attack, clock: Callable[[], float]) -> AttackDuration | None:
    run = lenet_run(rounds=1)
    return plan_attack(run.evaluator, asked(run.evaluator, attack, "server", seed=0), clock)


def everything(attack: Attack) -> Sequence[Work | OneOf]:
    run = lenet_run(rounds=1)
    return work_of(attack, *run.evaluator.prepare_attack(asked(run.evaluator, attack, "server", seed=0)))


def works(attack: Attack) -> list[Work]:
    return [one for one in everything(attack) if isinstance(one, Work)]


def test_the_work_of_the_strongest_attack() -> None:
    """400 auxiliary rows, 64 of them held out, 24 victims: a look, then decoders and searches, or searches alone."""
    attack = Strongest(widths=(4, 8), passes=60_000, batch_size=8, prior=False, threat_model="white_box")
    found = everything(attack)
    linear, nearest, narrow, wide, *searches = (one for one in found if isinstance(one, Work))
    assert (linear.most, linear.attempts) == (nearest.most, nearest.attempts) == (0, (1, 2))
    look, row_passes = LOOK * 120_000, strongest.EVALUATIONS * SEARCHED
    for decoder in (narrow, wide):
        assert decoder.least == decoder.most == int(look / 4 / 336)
        assert decoder.share == BATCHES * 8 / 336
    for search in searches:
        assert search.most == int(look / 4 / row_passes)
        assert search.share == 24 / SEARCHED
    (one,) = (one for one in found if isinstance(one, OneOf))
    apart, alone = one.options
    decoders, searched = apart[:3], apart[3:]
    first = int(rungs(2, 60_000, 1.0)[0][1] / 336)
    for race, passes, cost, size in (
        (decoders, 60_000, 336, first),
        (searched, 60_000 - look, row_passes, 0),
        (alone, 120_000 - look, row_passes, 0),
    ):
        *both, stays = race
        # The look was the searches' first rung.
        assert [piece.most for piece in both if isinstance(piece, Work)] == [size] * (2 if size else 0)
        # All that is left goes to the one that stays, whichever it is, and to its last prediction.
        assert isinstance(stays, OneOf)
        later = [piece.most for (piece,) in stays.options if isinstance(piece, Work)]
        assert later == pytest.approx([(passes - 2 * cost * size) / cost] * 2)
    # Closed forms, a look at three, and what goes on.
    assert len(everything(replace(attack, widths=(4,), threat_model="black_box"))) == 2 + 3 + 1


@pytest.mark.parametrize(
    ("folds", "threat_model"), thin([(1, "white_box"), (1, "black_box"), (2, "white_box"), (2, "black_box")], 3)
)
def test_it_takes_no_more_row_passes_than_it_is_given(
    folds: int, threat_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows times epochs of every decoder, losses and queries of every search, over all folds and the last prediction.

    There are twice as many of images where there are searches.
    """
    monkeypatch.setattr(strongest, "ENOUGH", 0 if folds == 1 else 1000)
    attack = Strongest(widths=(2,), passes=20_000, queries=1, prior=False, validation=0.5, threat_model=threat_model)
    passes, learn, search, ask = list[int](), InverseNetwork.run, RowLbfgs.run, QueryInversion.run

    def learnt(self: InverseNetwork, view: View, knowledge: Knowledge, *more: Any) -> torch.Tensor:
        assert knowledge.auxiliary is not None
        passes.append(self.epochs * len(knowledge.auxiliary))
        return learn(self, view, knowledge, *more)

    def searched(self: RowLbfgs, *more: Any) -> torch.Tensor:
        found = search(self, *more)
        passes.append(self.evaluations)
        return found

    def asked(self: QueryInversion, view: View, knowledge: Knowledge, *more: Any) -> torch.Tensor:
        counted, query = [0], knowledge.query
        assert query is not None

        def count(x: torch.Tensor) -> Releases:
            counted[0] += len(x)
            return query(x)

        found = ask(self, view, replace(knowledge, query=count), *more)
        # To begin with the regression, the variance and the repetition are asked of auxiliary rows.
        assert knowledge.auxiliary is not None
        passes.append(counted[0] - 2 * len(knowledge.auxiliary) - 15)
        return found

    monkeypatch.setattr(InverseNetwork, "run", learnt)
    monkeypatch.setattr(RowLbfgs, "run", searched)
    monkeypatch.setattr(QueryInversion, "run", asked)
    lenet_run(rounds=1, cut="pool2").attack(attack, floors=False)
    assert 20_000 < sum(passes) < 42_000


class CountedCopies:
    """Work that is counted: 20 for a copy, 10 for a batch of 16, .1 for a row that is asked about; of a classifier too.

    `knowledge`: of 120 auxiliary rows and 60 candidates.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        x, y = torch.arange(120.0)[:, None], torch.arange(120) % 2
        self.knowledge = Knowledge(
            (1,), auxiliary=x, auxiliary_labels=y, classes=2, imitate=self.imitate,
            candidates=x[:60], candidate_labels=y[:60], predict=self.predict,
        )  # fmt: skip
        learn = membership_shadow.train_classifier

        def train(like: Any, passes: Any, labels: torch.Tensor, *more: Any, epochs: int, **settings: Any) -> Any:
            self.now += 5 + epochs * -(-len(labels) // 64)
            return learn(like, passes, labels, *more, epochs=1, **settings)

        monkeypatch.setattr(membership_shadow, "train_classifier", train)

    def __call__(self) -> float:
        return self.now

    def imitate(self, x: torch.Tensor, y: torch.Tensor, epochs: int | None, batch: int | None, seed: int) -> Any:
        assert (epochs, batch) == (2, 16)
        self.now += 20 + 2 * 10 * -(-len(x) // 16)
        return self

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        self.now += 0.1 * len(x)
        return torch.zeros(len(x), 2)

    def of(self, attack: Attack) -> float:
        """What `attack` does."""
        before = self.now
        attack(View("server", (), {}), self.knowledge, torch.Generator().manual_seed(0))
        return self.now - before

    def stated(self, attack: Attack) -> tuple[float, float]:
        """What it says that it does."""
        pieces = [one.seconds(self) for one in work_of(attack, View("server", (), {}), self.knowledge)]
        return sum(least for least, _ in pieces), sum(most for _, most in pieces)


HALVES = 0.08
"""A copy of `lira` learns from a random half of rows, which may be a batch of 16 more or less than half: as a share."""


@pytest.mark.parametrize("attack", [Lira(4), Lira(4, online=False), MembershipShadow(4)])
def test_the_work_of_attacks_with_copies(attack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, ready = CountedCopies(monkeypatch), replace(attack, epochs=2, batch_size=16)
    least, most = counted.stated(ready)
    assert least == most == pytest.approx(counted.of(ready), rel=HALVES)


def test_the_strongest_membership_attack_works_as_much_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever attack is chosen at last, and whether or not more copies gain: counted, and no clock of a machine."""
    counted = CountedCopies(monkeypatch)
    attack = StrongestMembership(copies=4, doublings=2, worlds=2, epochs=2, batch_size=16)
    least, most = counted.stated(attack)
    error, found = StrongestMembership._error, dict[tuple[str, bool], float]()
    for best in ("MembershipThreshold", "MembershipShadow", "Lira"):
        for rising in (False, True):

            def judged(
                self: StrongestMembership, one: Any, *more: Any, best: str = best, rising: bool = rising
            ) -> float:
                error(self, one, *more)
                gained = 0.02 * getattr(one, "copies", 0) ** 0.5 if rising else 0.0
                return (0.3 if type(one).__name__ == best and getattr(one, "online", True) else 0.6) - gained

            monkeypatch.setattr(StrongestMembership, "_error", judged)
            found[best, rising] = counted.of(attack)
    assert found["MembershipThreshold", False] == min(found.values()) == pytest.approx(least, rel=HALVES)
    assert max(found.values()) == max(found["MembershipShadow", True], found["Lira", True])
    assert max(found.values()) == pytest.approx(most, rel=HALVES)


def test_copies_of_many_rows_grow_in_proportion() -> None:
    """Eight batches of 16 are a unit of the larger ones; the small ones are timed as they are."""
    asked = list[tuple[int, int]]()

    class Copy:
        def __init__(self, x: torch.Tensor) -> None:
            self.rows = len(x)

        def predict(self, x: torch.Tensor) -> torch.Tensor:
            asked.append((self.rows, len(x)))
            return x

    knowledge = Knowledge(
        (1,), auxiliary=torch.zeros(50, 1), auxiliary_labels=torch.zeros(50), imitate=lambda x, *_: Copy(x)
    )
    copies = [Copies(2, 5, 17, 3), Copies(1, 4, 256, 7), Copies(3, 3, 640, 9)]
    small, large = copies_work(knowledge, 1, 16, copies)
    assert (small.least, small.most, small.attempts) == (0, 0, (2, 5))
    assert (large.least, large.most, large.attempts) == (1 * 2 + 3 * 5, 4 * 2 + 3 * 5, (4, 7))
    small.run(0)
    large.run(2)
    assert asked == [(17, 3), (256, 9)]


def test_of_several_works_one_alone_is_done() -> None:
    clock = Clock(2.0, 0.0)
    pieces = [Work(clock.run, 0, 0, counts) for counts in ((1, 2), (3, 4), (0, 9))]
    Work(clock.run, 0, 0).seconds(clock)
    assert OneOf((pieces[:2], pieces[2:])).seconds(clock) == (0.0, 18.0)


def test_attacks_with_one_size_and_those_without() -> None:
    (network,), (search,) = works(InverseNetwork(epochs=7)), works(Rmle(iterations=9))
    assert (network.least, network.most, search.least, search.most) == (7, 7, 9, 9)
    assert works(LinearInverse()) == []
    assert plan(LinearInverse(), lambda: 0.0) is None
    assert works(Shadow()) == [], "epochs and iterations"
    assert lenet_run(rounds=1).plan_attack("dlg") is None
    for stated in (Strongest(), StrongestMembership(), Lira(), MembershipShadow()):
        assert isinstance(stated, StatesWork)


@pytest.mark.exhaustive
def test_planning_changes_no_result_and_refuses_as_the_attack_does() -> None:
    run, attack = lenet_run(rounds=1), InverseNetwork(epochs=1, queries=1)
    (before,) = run.attack(attack, floors=False)
    planned = run.plan_attack(attack)
    assert planned is not None
    assert 0 < planned.least == planned.most
    assert torch.equal(run.attack(attack, floors=False)[0].prediction, before.prediction)
    with pytest.raises(InvalidInput, match="releases=2 is not allowed; expected 1, as lira reads no release"):
        run.plan_attack("lira", releases=2)
    with pytest.raises(InvalidInput, match="unknown budget"):
        run.plan_attack("strongest", budget="enormous")


@pytest.mark.exhaustive
def test_a_study_says_it_before_the_attack_once_for_runs_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two seeds of two budgets: a line for each budget, and its work is timed once."""
    attack = {"name": "strongest", "widths": [2], "queries": 1, "floors": False}
    study = small(
        attack=[{**attack, "passes": count} for count in (4000, 8000)],
        defense=[{"name": "none"}],
        training={"rounds": 1},
    )
    study["study"]["seeds"] = [0, 1]
    command = ["run", str(write(tmp_path, study)), "--folder", str(tmp_path / "out")]
    assert main([*command, "--dry-run"]) == 0
    line = r"strongest: about [0-9.to ]+ s here"
    assert len(re.findall(rf"^{line}, in each run$", capsys.readouterr().out, re.MULTILINE)) == 2
    assert not (tmp_path / "out").exists(), "nothing is written"
    timed, plan = list[object](), Run.plan_attack

    def counted(self: Run, attack: Any, **more: Any) -> AttackDuration | None:
        timed.append(attack)
        return plan(self, attack, **more)

    monkeypatch.setattr(Run, "plan_attack", counted)
    assert main(command) == 0
    assert len(re.findall(line, capsys.readouterr().err)) == 2
    assert [one.passes for one in timed if isinstance(one, Strongest)] == [4000, 8000]


def test_of_several_workers_one_says_it() -> None:
    """Each times it once; who hears them prints the first line of each key, and any other line as often as it comes."""
    heard = io.StringIO()
    lines, asked = Lines(1, file=heard), list[str]()

    def tell(line: str) -> str:
        asked.append(line)
        return line

    for number in range(2):
        said: list[ProgressEvent] = []
        worker = Watcher(said.append)
        for key in ("a", "a", "b"):
            worker.note_once(key, partial(tell, f"{key} {number}"))
        worker.note("died")
        for event in said:
            lines.tell(event)
    assert asked == ["a 0", "b 0", "a 1", "b 1"]
    assert heard.getvalue().splitlines() == ["a 0", "b 0", "died", "died"]
