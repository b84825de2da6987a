"""Tables aligned by hand and at random, against a join written in another way; and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from splitfed.data import Table, align, feed
from splitfed.data.alignment.align import Counts
from splitfed.data.alignment.keys import AlignmentMessage
from tests.examples import refusal

# ann, bob and eve are known to both; ida to the bank alone, zoe to the clinic alone, and she stands there twice.
BANK = Table(["eve", "ann", "ida", "bob"], torch.arange(8.0).reshape(4, 2))
CLINIC = Table(
    ["bob", "zoe", "ann", "eve", "zoe"],
    10 * torch.arange(20.0).reshape(5, 1, 2, 2),
    torch.tensor([1, 0, 0, 1, 2]),
)
LABELS = Table(["bob", "ann"], y=torch.tensor([0.5, 1.5]))


def test_two_parties() -> None:
    found = align({"bank": BANK, "clinic": CLINIC}, "clinic", duplicates="first")
    data = found.dataset
    assert repr(found) == "Alignment(3 records of bank, clinic)"
    assert found.keys == ("ann", "bob", "eve")
    assert {party: rows.tolist() for party, rows in found.rows.items()} == {"bank": [1, 3, 0], "clinic": [2, 0, 3]}
    assert data.x.tolist() == [[2, 3, 80, 90, 100, 110], [6, 7, 0, 10, 20, 30], [0, 1, 120, 130, 140, 150]]
    assert data.y.tolist() == [0, 1, 1]
    # Three classes, although the row of class 2 is not common.
    assert (data.name, data.task.outputs) == ("aligned", 3)
    parts = feed(data.x, {"bank": "bank", "clinic": "clinic"}, data.features)
    assert parts["bank"].tolist() == [[2, 3], [6, 7], [0, 1]]
    assert parts["clinic"].shape == (3, 1, 2, 2)
    assert parts["clinic"][1].tolist() == [[[0, 10], [20, 30]]]


def test_report() -> None:
    report = align({"bank": BANK, "clinic": CLINIC}, "clinic", duplicates="first").report
    assert report.parties == {"bank": Counts(4, 0, 0, 1, 3), "clinic": Counts(5, 1, 1, 1, 3)}
    # Four keys of four bytes of length, one of kind and three letters; three positions of eight bytes.
    assert report.crossings == (
        AlignmentMessage("bank", "clinic", "keys", 32),
        AlignmentMessage("clinic", "bank", "rows", 24),
    )
    assert (report.messages, report.bytes) == (2, 56)
    assert str(report).splitlines() == [
        "party   rows  repeated keys  left out  unmatched  kept",
        "bank       4              0         0          1     3",
        "clinic     5              1         1          1     3",
        "2 messages, 56 bytes sent",
    ]


def test_duplicates() -> None:
    tables = {"bank": Table(["a", "b", "a", "c"], torch.arange(4.0)), "shop": Table(["c", "b", "a"], y=np.arange(3.0))}
    assert refusal(align, tables, "shop") == (
        "party 'bank' has key 'a' 2 times; expected once, or duplicates='first' or 'drop'"
    )
    first = align(tables, "shop", duplicates="first")
    assert (first.keys, first.dataset.x.tolist()) == (("a", "b", "c"), [[0], [1], [3]])
    assert first.report.parties["bank"] == Counts(rows=4, repeated=1, left_out=1, unmatched=0, kept=3)
    dropped = align(tables, "shop", duplicates="drop")
    assert (dropped.keys, dropped.dataset.x.tolist()) == (("b", "c"), [[1], [3]])
    assert dropped.report.parties["bank"] == Counts(rows=4, repeated=1, left_out=2, unmatched=0, kept=2)
    assert dropped.report.parties["shop"] == Counts(rows=3, repeated=0, left_out=0, unmatched=1, kept=2)


def test_labels_without_x() -> None:
    found = align({"bank": BANK, "registry": LABELS}, "registry")
    assert found.dataset.y.tolist() == [1.5, 0.5]
    assert found.dataset.task.name == "regression"
    assert list(found.dataset.features) == ["bank"]
    assert list(found.rows) == ["bank", "registry"]


def test_keys_from_arrays_and_whole_numbers() -> None:
    # As text 10 would come before 9.
    tables = {"a": Table(np.array([10, 9, 8]), np.arange(3)), "b": Table(torch.tensor([9, 10]), y=np.array([0, 1]))}
    found = align(tables, "b")
    assert found.keys == (9, 10)
    assert found.dataset.x.tolist() == [[1], [0]]
    tables = {"a": Table(np.array(["q", "p"]), np.arange(2)), "b": Table(list(np.array(["p"])), y=np.array([0]))}
    assert align(tables, "b").keys == ("p",)


def test_without_keys_by_position() -> None:
    found = align({"a": Table(x=torch.tensor([3.0, 4.0])), "b": Table(x=torch.ones(2, 2), y=torch.tensor([1, 0]))}, "b")
    assert found.dataset.x.tolist() == [[3, 1, 1], [4, 1, 1]]
    assert found.keys == ()
    assert found.report.crossings == ()
    assert found.report.parties["a"] == Counts(2, 0, 0, 0, 2)


KEYS = st.lists(st.integers(0, 9), min_size=1, max_size=12, unique=True)


@given(st.tuples(KEYS, KEYS, KEYS), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_three_parties_against_a_join_in_another_way(keys: tuple[list[int], ...], random: Any) -> None:
    """The number that a party holds of key k is k + 100 times its own number: so is the joined row."""
    shuffled = [random.sample(mine, len(mine)) for mine in keys]
    expected = [k for k in range(10) if all(k in mine for mine in keys)]
    for order in (keys, shuffled):
        tables = {f"p{i}": Table(mine, torch.tensor([k + 100.0 * i for k in mine])) for i, mine in enumerate(order)}
        tables["y"] = Table(list(range(10)), y=torch.arange(10.0))
        if not expected:
            assert refusal(align, tables, "y").startswith("at most 0 keys are common to 'p0' (with")
            continue
        found = align(tables, "y")
        assert found.dataset.x.tolist() == [[k, k + 100.0, k + 200.0] for k in expected]
        assert found.dataset.y.tolist() == expected
        for party, counts in found.report.parties.items():
            assert counts.rows == len(tables[party].keys) == counts.left_out + counts.unmatched + counts.kept
            assert counts.kept == len(expected)


ONE, TWO = torch.ones(1), torch.ones(2)
Y1, Y2 = torch.tensor([0]), torch.tensor([0, 1])
BAD: list[tuple[dict[str, Table], str, dict[str, Any], str]] = [
    ({"a": Table(["k"], ONE, Y1)}, "a", {}, "tables of ['a'] are not enough to align; expected two parties or more"),
    ([BANK, CLINIC], "a", {}, "tables is a list; expected a mapping of party to table"),  # type: ignore[list-item]
    (
        {"bank": BANK, "clinic": CLINIC},
        "clinc",
        {},
        "unknown party with the labels 'clinc'; did you mean 'clinic'? (allowed: bank, clinic)",
    ),
    (
        {"bank": BANK, "clinic": CLINIC},
        "clinic",
        {"duplicates": "last"},
        "unknown duplicates 'last' (allowed: drop, first, refuse)",
    ),
    (
        {"bank": BANK, "clinic": CLINIC},
        "clinic",
        {"minimum": 0},
        "minimum=0 is not allowed; expected a whole number of at least 1",
    ),
    ({"bank": BANK, "clinic": CLINIC}, "bank", {}, "party 'bank' has no y, and labels='bank'"),
    ({"a": Table(["k"], ONE, Y1), "b": Table(["k"], ONE, Y1)}, "b", {}, "party 'a' has a y, and labels='b'"),
    (
        {"a": Table(["k"]), "b": Table(["k"], ONE, Y1)},
        "b",
        {},
        "party 'a' has no x; only the party with the labels may lack one",
    ),
    (
        {"a": Table(["k"], torch.zeros(0, 3)), "b": Table(["k"], ONE, Y1)},
        "b",
        {},
        "party 'a': x has shape (0, 3); expected at least one row",
    ),
    (
        {"a": Table(["k"], ONE), "b": Table(["k"], TWO, Y1)},
        "b",
        {},
        "party 'b' has 2 rows of x and 1 labels; expected as many",
    ),
    (
        {"a": Table(x=TWO), "b": Table(y=Y1), "c": Table(x=TWO)},
        "b",
        {},
        "tables without keys differ in length: 'a' has 2, 'b' has 1, 'c' has 2 rows; give keys to align them by",
    ),
    (
        {"a": Table(x=ONE), "b": Table(["k"], y=Y1)},
        "b",
        {},
        "party 'a' has no keys, others have; expected keys of all parties or of none",
    ),
    (
        {"a": Table(["k"], TWO), "b": Table(["k"], y=Y1)},
        "b",
        {},
        "party 'a' has 1 keys and 2 rows; expected a key a row",
    ),
    ({"a": Table("k", ONE), "b": Table(["k"], y=Y1)}, "b", {}, "keys of party 'a' are one str; expected a key a row"),
    (
        {"a": Table([1.0, 2.0], TWO), "b": Table([1], y=Y1)},
        "b",
        {},
        "party 'a' has key 1.0 in row 0, a float; expected text or a whole number",
    ),
    (
        {"a": Table([1, True], TWO), "b": Table([1], y=Y1)},
        "b",
        {},
        "party 'a' has key True in row 1, a bool; expected text or a whole number",
    ),
    (
        {"a": Table(["\ud800"], ONE), "b": Table(["k"], y=Y1)},
        "b",
        {},
        "party 'a' has key '\\ud800' in row 0; expected text that UTF-8 can write",
    ),
    (
        {"a": Table([1, "1"], TWO), "b": Table([1], y=Y1)},
        "b",
        {},
        "party 'a' has keys 1 and '1'; expected all text or all numbers",
    ),
    (
        {"a": Table([1, 2], TWO), "b": Table(["1", "2"], y=Y2)},
        "b",
        {},
        "keys of two kinds never match: 'a' has numbers, 'b' has text; expected one kind",
    ),
    (
        {"a": Table([1, 2], TWO), "b": Table([3, 4], y=Y2)},
        "b",
        {},
        "at most 0 keys are common to 'a' (with 2), 'b' (with 2); expected at least minimum=1",
    ),
    (
        {"a": Table([1, 1], TWO), "b": Table([1, 2], y=Y2)},
        "b",
        {"duplicates": "drop"},
        "at most 0 keys are common to 'a' (with 0), 'b' (with 2); expected at least minimum=1",
    ),
    (
        {"a": Table([1, 2], TWO), "b": Table([2, 3], y=Y2)},
        "b",
        {"minimum": 2},
        "at most 1 keys are common to 'a' (with 2), 'b' (with 2); expected at least minimum=2",
    ),
    (
        {"a": Table(["k"], torch.tensor([float("nan")])), "b": Table(["k"], y=Y1)},
        "b",
        {},
        "aligned: x is not finite in row 0, counted from 0",
    ),
]


@pytest.mark.parametrize(("tables", "labels", "options", "text"), BAD)
def test_refused(tables: dict[str, Table], labels: str, options: dict[str, Any], text: str) -> None:
    assert refusal(align, tables, labels, **options) == text
