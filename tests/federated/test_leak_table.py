"""The page on methods says of every method what its clients upload and which attack reads it, or why none does."""

from __future__ import annotations

from splitfed.attacks.base import Needs, Target
from splitfed.registry import TABLES, load
from tests.federated import leak_table
from tests.federated.leak_table import GOALS, NO_ATTACK, PAGE, on_uploads, row, table, written
from tests.pages import read


def test_every_cell_is_an_attack_or_says_why_there_is_none() -> None:
    for method in TABLES["methods"]:
        for goal in GOALS:
            attacks, reason = row(method).attacks[goal], NO_ATTACK.get((method, goal))
            assert bool(attacks) != bool(reason), f"{method}, {goal}: {attacks or 'no attack'}, {reason or 'no reason'}"


def test_every_attack_on_uploads_reads_some_method_for_one_of_the_goals() -> None:
    used = {name for method in TABLES["methods"] for found in row(method).attacks.values() for name in found}
    # iDLG reads the class of a single row off a gradient, and the clients of these runs have several.
    assert used == set(on_uploads()) - {"idlg"}
    assert {load("attacks", name).target for name in used} <= {one for targets in GOALS.values() for one in targets}


def test_an_attack_that_is_new_in_the_registry_enters_by_what_it_reads() -> None:
    reading = [name for name in TABLES["attacks"] if load("attacks", name).reads]
    assert set(reading) < set(on_uploads())
    assert all(Needs.UPDATES in load("attacks", name).requires for name in set(on_uploads()) - set(reading))
    assert not any(load("attacks", name).target is Target.LABELS for name in on_uploads())


def test_the_page_has_the_table_as_it_is() -> None:
    assert written(read(PAGE)) == table(), f"python -m {leak_table.__name__}"


def test_what_the_methods_of_the_survey_upload_is_read_for_every_goal() -> None:
    expected = {
        "fml": ("weights", "upload_membership", "update_shares", "dlg"),
        "fedkd": ("update", "upload_membership", "update_shares", "upload_inversion"),
        "fedakt": ("weights", "upload_membership", "update_shares", "dlg"),
        "fedproto": ("prototype", "prototype_membership", "class_shares", "prototype_inversion"),
        "feddistill": ("soft labels", "prototype_membership", "class_shares", "prototype_inversion"),
        "fedmd": ("soft labels", "upload_membership", "class_shares", "upload_inversion"),
        "mafml": ("soft labels", "upload_membership", "class_shares", "upload_inversion"),
    }
    for method, (kind, *attacks) in expected.items():
        found = row(method)
        assert kind in found.kinds
        for goal, name in zip(GOALS, attacks, strict=True):
            assert name in found.attacks[goal], (method, goal)
