"""Golden runs: equal runs have equal hashes, every pair is tried, and a comparison tells what moved."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

from splitfed.defenses import Noise
from splitfed.registry import TABLES
from tests.golden import cases, hashes
from tests.golden.__main__ import attack, train
from tests.golden.cases import KINDS, Case
from tests.golden.compare import differences
from tests.golden.explore import (
    CONTEXTS,
    TRAINED,
    Golden,
    Pair,
    Parts,
    attack_pairs,
    attempts,
    choices_of,
    training_pairs,
)

CASES = (
    Case("digits", "u_shaped", "splitfed_v1", "noise"),
    Case("parity", "vertical", "joint", "gaussian_release"),
    Case("digits", "local", "independent", method="fedproto"),
)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_same_run_has_the_same_hashes_and_another_seed_has_others(case: Case) -> None:
    run, parts = train(case)
    assert run is not None
    torch.manual_seed(5)
    again, same = train(case)
    assert parts == same
    assert attack(run, "rmle") == attack(again, "rmle")
    other = hashes.of_run(cases.train(case, rounds=2))
    assert {name for name in parts if parts[name] != other[name]} >= {"weights", "state", "metrics", "view", "traffic"}


def test_a_refusal_is_its_type_and_apart_from_it_its_text() -> None:
    run, parts = train(Case("digits", "vanilla", "independent"))
    assert run is None
    assert parts.keys() == {"refused", "text refused"}
    assert parts["refused"] == "InvalidInput"


def test_one_changed_number_moves_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases a thousandth greater: what crosses moves, and with it all that is learnt; not how much crosses."""
    before = {case.name: train(case)[1] for case in CASES[:2]}
    release = Noise.release
    monkeypatch.setattr(Noise, "release", lambda self, *given: 1.001 * release(self, *given))
    after = {case.name: train(case)[1] for case in CASES[:2]}
    (line,) = differences(before, after)
    assert line == f"moved: {CASES[0].name}: metrics, predictions, state, view, weights"


def test_hashes_tell_apart_what_differs_and_nothing_else() -> None:
    one = torch.arange(6.0)
    different = [one, one.view(2, 3), one.double(), one.int(), one + 0.0001, [one], 1, 1.0, True, "1", None, [], {}]
    assert len({hashes.of(value) for value in different}) == len(different)
    assert hashes.of({"a": 1, "b": one}) == hashes.of({"b": one.clone(), "a": 1})
    assert hashes.of(one[::2]) == hashes.of(one[::2].contiguous())
    assert hashes.leaves({"a": {"old": 1, "b": one}}) == hashes.leaves({"a": {"b": one}, "new": 1})
    assert hashes.leaves({"a": 1, "b": one}) != hashes.leaves({"a": 2, "b": one})
    with pytest.raises(TypeError, match="a result holds a object"):
        hashes.of(object())


def test_the_registry_has_no_name_without_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cases.without_case() == []
    monkeypatch.setitem(TABLES["defenses"], "new", "nowhere:New")
    monkeypatch.setitem(TABLES, "kinds", {})
    assert cases.without_case() == ["defense=new", "table kinds"]
    assert (("schedule", "joint"), ("defense", "new")) in training_pairs()
    assert (("attack", "rmle"), ("defense", "new")) in attack_pairs()


def tried(refused: Any = None, denied: Any = None) -> tuple[Golden, dict[str, Parts], dict[Case, Case | None]]:
    """Try everything with runs that cost nothing; `refused(case)` and `denied(case, attack)` say what cannot be."""
    seen: dict[Case, Case | None] = {}

    def fake(case: Case) -> tuple[Case | None, Parts]:
        assert case not in seen
        seen[case] = None if refused and refused(case) else case
        return seen[case], {}

    golden = Golden(fake, lambda run, name: (not (denied and denied(run, name)), {name: ""}))
    return golden, golden.everything(), seen


def test_every_pair_is_covered_where_nothing_is_refused() -> None:
    _, found, seen = tried()
    kinds = {kind: set(TABLES[KINDS[kind]]) for kind in TRAINED}
    expected = sum(len(kinds[a]) * len(kinds[b]) for a, b in combinations(TRAINED, 2))
    pairs = training_pairs()
    assert len(set(pairs)) == len(pairs) == expected
    trained = {pair for case in seen for pair in combinations(choices_of(case), 2)}
    assert trained >= set(pairs)
    asked = attack_pairs()
    assert len(set(asked)) == len(TABLES["attacks"]) * sum(map(len, kinds.values()))
    attacked = {(("attack", name), one) for case in seen for name in found[case.name] for one in choices_of(case)}
    assert attacked >= set(asked)
    assert tried()[1] == found


def test_a_refused_pair_hides_no_other() -> None:
    """Where a topology refuses one defense, and a method all topologies but one, all others are trained."""
    bad: Pair = (("topology", "u_shaped"), ("defense", "noise"))

    def refused(case: Case) -> bool:
        whole = case.method == "fedavg" and case.topology != "local"
        return whole or (case.topology, case.defense) == ("u_shaped", "noise")

    golden, _, seen = tried(refused)
    trained = {pair for case, run in seen.items() if run for pair in combinations(choices_of(case), 2)}
    impossible = {bad} | {(("topology", t), ("method", "fedavg")) for t in TABLES["topologies"] if t != "local"}
    assert golden.refused == impossible
    assert set(training_pairs()) - trained == impossible
    assert Case("digits", "u_shaped", "splitfed_v1", "noise") in seen


def test_a_denied_attack_is_tried_elsewhere() -> None:
    denied = lambda case, name: name == "rmle" and case.schedule != "joint"  # noqa: E731
    golden, found, _ = tried(denied=denied)
    attacked = {pair for pair in golden.covered if pair[0] == ("attack", "rmle")}
    assert attacked >= {(("attack", "rmle"), ("defense", name)) for name in TABLES["defenses"]}
    assert "rmle" in found[Case("digits", "vertical", "sequential").name]


def test_a_pair_is_tried_in_every_context_once() -> None:
    found = list(attempts(("topology", "local"), ("schedule", "independent")))
    assert found == [Case("digits", "local", "independent"), Case("parity", "local", "independent")]
    assert len(list(attempts(("defense", "noise"), ("method", "fedavg")))) == len(CONTEXTS)


BASE = {
    "data=digits method=old": {"weights": "a1", "text ledger": "b1", "attack rmle": "c1"},
    "data=digits method=same": {"weights": "a2"},
    "data=digits method=lost": {"weights": "a3"},
}


def test_a_comparison_tells_numbers_wording_and_missing_cases() -> None:
    assert differences(BASE, BASE) == []
    now = {
        "data=digits method=old": {"weights": "a9", "text ledger": "b9", "attack rmle": "refused: InvalidInput"},
        "data=digits method=same": {"weights": "a2", "attack grn": "c2"},
        "data=digits method=won": {"weights": "a3"},
    }
    assert differences(BASE, now) == [
        "moved: data=digits method=old: attack rmle (c1 -> refused: InvalidInput), weights",
        "moved: data=digits method=same: attack grn (only now)",
        "only in the base: data=digits method=lost",
        "only now: data=digits method=won",
        "wording: data=digits method=old: text ledger",
    ]


def test_renamed_names_still_compare() -> None:
    now = {name.replace("method=old", "method=new"): dict(parts) for name, parts in BASE.items()}
    now["data=digits method=new"]["attack rml"] = now["data=digits method=new"].pop("attack rmle")
    assert len(differences(BASE, now)) == 2
    assert differences(BASE, now, {"method=old": "method=new", "attack=rmle": "attack=rml"}) == []
    assert differences({"intruder=sdar": {}}, {"intruder=sd": {}}, {"attack=sdar": "attack=sd"}) == []
