"""How long an attack takes, told before it begins: the arithmetic by a clock of the test's own, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from splitfed.attacks.base import Attack
from splitfed.attacks.membership.copied_models import BATCH
from splitfed.attacks.membership.lira import Lira
from splitfed.attacks.membership.membership_shadow import MembershipShadow
from splitfed.attacks.membership.strongest_membership import StrongestMembership
from splitfed.attacks.reconstruction.inverse_network import InverseNetwork
from splitfed.attacks.reconstruction.linear_inverse import LinearInverse
from splitfed.attacks.reconstruction.rmle import Rmle
from splitfed.attacks.reconstruction.shadow import Shadow
from splitfed.attacks.reconstruction.strongest import Strongest
from splitfed.attacks.work import BATCHES, StatesWork, Work, sum_doublings
from splitfed.cli import main
from splitfed.core.errors import InvalidInput
from splitfed.defenses import Noise
from splitfed.threats.attack_durations import AttackDuration, plan_attack, work_of
from tests.attacks.examples import lenet_run
from tests.study.examples import small, write
from tests.threats.test_release_information import trained


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
    assert clock.sizes == [2, 4, 2, 4]
    begun = Clock(2.0, 3.0)
    assert Work(begun.run, 0, 0, (1, 2)).seconds(begun) == (2.0, 4.0)
    assert begun.sizes == [0, 0]
    busy = Clock(8.0, 0.0)
    assert Work(busy.run, 10, 10).seconds(busy) == (40.0, 40.0), "8 s for two units"


@pytest.mark.parametrize(("doublings", "wanted"), [(0, (10, 10)), (1, (30, 30)), (3, (30, 150))])
def test_doublings(doublings: int, wanted: tuple[int, int]) -> None:
    """10, 20, 40, 80: the first doubling is always tried, for without it nobody knows whether it gains."""
    assert sum_doublings(10, doublings) == wanted


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
    return plan_attack(run.evaluator, "it", attack, "server", run.data.victims, 0, 0, clock=clock)


def works(attack: Attack) -> list[Work]:
    run = lenet_run(rounds=1)
    return list(work_of(attack, *run.evaluator.prepare_attack("it", attack, "server", run.data.victims, 0, 0)))


def test_the_work_of_the_strongest_attack() -> None:
    """400 auxiliary rows, 80 of them held out, 24 victims: two widths of 10 to 80 epochs, searches of 50 to 400."""
    attack = Strongest(widths=(4, 8), epochs=10, iterations=50, doublings=3, batch_size=8)
    linear, nearest, narrow, wide, search = works(attack)
    assert (linear.most, linear.attempts) == (nearest.most, nearest.attempts) == (0, (1, 2))
    for decoder in (narrow, wide):
        # At last the chosen one learns from all rows.
        assert (decoder.least, decoder.most) == (10 + 20, 10 + 20 + 40 + 80 + 80)
        assert decoder.attempts == (2, 5)
        assert decoder.share == BATCHES * 8 / 320
    # Four weights and three reaches; the best of each is doubled, and a refinement is made for the victims.
    assert search.least == 50 * (4 + 2 + 3 + 2)
    assert search.most == 50 * (4 + 2 + 4 + 8 + 3 + 2 + 4 + 8 + 8)
    assert search.share == 24 / (24 + 80)
    assert len(works(Strongest(widths=(4,), white_box=False))) == 3


def test_what_it_tries_is_within_its_work() -> None:
    """By what the attack says it has tried: the sizes of each member, in units of its work."""
    attack = Strongest(widths=(4,), epochs=1, iterations=5, doublings=2)
    *_, decoder, search = works(attack)
    tried = lenet_run(rounds=1).attack(attack, floors=False)[0].selection
    assert tried is not None
    for work, names in ((decoder, ("inverse_network",)), (search, ("rmle", "refinement"))):
        size = sum(a.size for a in tried.tried if a.member.startswith(names))
        assert work.least <= size <= work.most


def test_the_work_of_membership() -> None:
    """60 auxiliary rows, 40 candidates: 15 left in a world of 30 candidates; a copy learns from half of what it may."""
    x = torch.randn(200, 4)
    run = trained(x, (x[:, 0] > 0).long(), [torch.nn.Linear(4, 3)], Noise(scale=0.1), 20)
    rows, asked = len(run.data.auxiliary), 40
    few = BATCHES * BATCH

    def found(attack: Attack) -> list[Work]:
        return list(work_of(attack, *run.evaluator.prepare_attack("it", attack, "server", run.data.victims, 0, 0)))

    (lira,) = found(Lira(copies=8))
    assert lira.least == lira.most == 8 * ((rows + asked) // 2) / few
    assert lira.attempts == (8, 8)
    copies, classifier = found(MembershipShadow(copies=4, classifier_epochs=30))
    assert copies.most == 4 * (rows // 2) / few
    assert classifier.most == 30 * 4 * rows / (BATCHES * 64)
    among, left = 2 * (rows // 4), rows - 3 * (rows // 4)
    copies, _ = found(StrongestMembership(copies=4, doublings=2, worlds=3))
    by_size = 2 * (left // 2) + (among + left) // 2
    assert copies.least == (3 * among + 3 * (4 + 8) * by_size) / few
    assert copies.most == (3 * among + 3 * (4 + 8 + 16) * by_size + 16 * ((asked + rows) // 2)) / few
    assert copies.attempts == (3 + 3 * 12 * 3, 3 + 3 * 28 * 3 + 16)
    before = torch.get_rng_state()
    assert run.plan_attack(Lira(copies=4, epochs=1)) is not None
    assert torch.equal(before, torch.get_rng_state())


def test_attacks_with_one_size_and_those_without() -> None:
    (network,), (search,) = works(InverseNetwork(epochs=7)), works(Rmle(iterations=9))
    assert (network.least, network.most, search.least, search.most) == (7, 7, 9, 9)
    assert works(LinearInverse()) == []
    assert plan(LinearInverse(), lambda: 0.0) is None
    assert works(Shadow()) == [], "epochs and iterations"
    assert lenet_run(rounds=1).plan_attack("dlg") is None
    for stated in (Strongest(), StrongestMembership(), Lira(), MembershipShadow()):
        assert isinstance(stated, StatesWork)


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


def test_a_study_says_it_before_the_attack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attack = {"name": "strongest", "widths": [2], "epochs": 1, "iterations": 2, "doublings": 1, "floors": False}
    study = small(attack=[attack], defense=[{"name": "none"}], training={"rounds": 1})
    command = ["run", str(write(tmp_path, study)), "--folder", str(tmp_path / "out")]
    assert main([*command, "--dry-run"]) == 0
    assert re.search(r"^strongest: about [0-9.to ]+ s here, in each run$", capsys.readouterr().out, re.MULTILINE)
    assert not (tmp_path / "out").exists(), "nothing is written"
    assert main(command) == 0
    assert re.search(r"strongest: about [0-9.to ]+ s here", capsys.readouterr().err)
