"""The strongest membership attack is chosen on imitated runs, of which the adversary knows who was a member."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import splitfed
from splitfed.attacks.base import Attack, Knowledge, Progress, Target
from splitfed.attacks.membership.strongest_membership import MembershipMember, StrongestMembership
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import View
from splitfed.registry import TABLES, load
from splitfed.topologies import vanilla
from tests.attacks.examples import MEMBER_BATCH, by_heart
from tests.examples import InPlaceAfterCut, toy_data

SMALL = StrongestMembership(copies=4, doublings=2, worlds=2, epochs=4, batch_size=MEMBER_BATCH)


def world(rows: int = 40) -> Knowledge:
    """Rows whose only number is their place; an imitation says which it was trained on."""

    class Copy:
        def __init__(self, x: Tensor) -> None:
            self.known = set(x.flatten().tolist())

        def predict(self, x: Tensor) -> Tensor:
            return torch.tensor([[1.0 if v in self.known else 0.0, 0.0] for v in x.flatten().tolist()])

    x = torch.arange(float(rows))[:, None]
    return Knowledge(
        (1,),
        auxiliary=x,
        auxiliary_labels=torch.zeros(rows, dtype=torch.int64),
        classes=2,
        imitate=lambda x, y, epochs, batch_size, seed: Copy(x),
        candidates=x[:4] + 100,
        candidate_labels=torch.zeros(4, dtype=torch.int64),
        predict=lambda x: torch.zeros(len(x), 2),
    )


def test_an_imitated_run_knows_its_members_and_keeps_its_rows_apart() -> None:
    imitated = SMALL._imitate(world(), torch.Generator().manual_seed(0))
    known = imitated.knowledge
    assert known.candidates is not None
    assert known.auxiliary is not None
    assert known.predict is not None
    answered = known.predict(known.candidates)[:, 0] > 0
    assert answered.tolist() == imitated.members.tolist() == [True] * 10 + [False] * 10
    assert not set(known.candidates.flatten().tolist()) & set(known.auxiliary.flatten().tolist())
    assert not bool((known.predict(known.auxiliary)[:, 0] > 0).any())


def test_the_attack_that_is_best_on_imitated_runs_is_turned_on_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, bool]] = []

    def fake(name: str, size: int, quality: Callable[[int], float]) -> Attack:
        class Fake(Attack):
            requires = SMALL.requires

            def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
                assert knowledge.predict is not None
                assert knowledge.candidates is not None
                real = bool((knowledge.candidates >= 100).all())
                asked.append((name, size, real))
                truth = knowledge.predict(knowledge.candidates)[:, 0]
                wrong = round((1 - quality(size)) * len(truth) / 2)
                return torch.where(torch.arange(len(truth)) < wrong, -1.0, truth)

        return Fake()

    members = [
        MembershipMember("poor", lambda size: fake("poor", size, lambda size: 0.0)),
        MembershipMember("rising", lambda size: fake("rising", size, lambda size: size / 16), 4),
        MembershipMember("flat", lambda size: fake("flat", size, lambda size: 0.5), 4),
    ]
    monkeypatch.setattr(StrongestMembership, "_members", lambda self: members)
    outcome = SMALL(View("server", (), {}), world(), torch.Generator().manual_seed(0))
    assert outcome.selection is not None
    assert outcome.selection.member == "rising"
    assert outcome.selection.converged is False
    # Two worlds each; a member that gains nothing is doubled once.
    assert [(n, s) for n, s, real in asked if not real] == [
        *[("poor", 0)] * 2,
        *[("rising", n) for n in (4, 4, 8, 8, 16, 16)],
        *[("flat", n) for n in (4, 4, 8, 8)],
    ]
    assert [(n, s) for n, s, real in asked if real] == [("rising", 16)]
    assert outcome.prediction.shape == (4,)


def test_every_attack_that_needs_no_more_than_it_is_a_member() -> None:
    members = {type(member.attack(max(member.size, 4))) for member in SMALL._members()}
    found = [load("attacks", name) for name in TABLES["attacks"]]
    able = {attack for attack in found if attack.target is Target.MEMBERS and attack.requires <= SMALL.requires}
    assert members == able - {StrongestMembership}
    names = [member.name for member in SMALL._members()]
    assert names == ["membership_threshold", "membership_shadow", "lira", "lira, offline"]


def test_no_candidate_has_a_part_in_the_choice() -> None:
    run, attack = by_heart(), StrongestMembership(copies=4, doublings=1, worlds=1, epochs=4, batch_size=MEMBER_BATCH)
    victims = run.data.victims
    other = victims.rows(torch.arange(len(victims)).flip(0)[: len(victims) // 2])
    told = [run.attack(attack, victims=rows)[0].selection for rows in (victims, other)]
    assert told[0] is not None
    assert told[1] is not None
    first, second = ([(a.member, a.size, a.error) for a in one.tried] for one in told if one is not None)
    assert first == second


def test_refusals() -> None:
    with pytest.raises(InvalidInput, match=re.escape("strongest_membership copies=5 is not allowed")):
        StrongestMembership(copies=5)
    data = toy_data(60).clients(1, auxiliary=12, victims=8)
    run = splitfed.train(vanilla(InPlaceAfterCut(), "conv"), data, rounds=1)
    with pytest.raises(InvalidInput, match="needs at least 16 auxiliary rows, to imitate the run; found 12"):
        run.attack("strongest_membership")
