"""Values by their keys, by hand."""

from __future__ import annotations

import torch

from splitfed.core.grouping import group_pairs, nest, total_pairs


def test_values_and_keys_keep_the_order_in_which_they_come() -> None:
    groups = group_pairs([("b", 2), ("a", 3), ("b", 1), ("b", 5)])
    assert list(groups.items()) == [("b", [2, 1, 5]), ("a", [3])]
    assert group_pairs(iter(())) == {}


def test_sums_are_added_as_they_come_and_change_no_summand() -> None:
    """1e16 + 1 - 1e16 is 0 in float64, in any other order 1 or another number."""
    assert total_pairs([("x", 1e16), ("y", 2.0), ("x", 1.0), ("x", -1e16)]) == {"x": 0.0, "y": 2.0}
    first = torch.ones(2)
    totals = total_pairs([("t", first), ("t", 2 * torch.ones(2))])
    assert totals["t"].tolist() == [3.0, 3.0]
    assert first.tolist() == [1.0, 1.0]


def test_of_two_values_at_one_place_the_last_counts() -> None:
    nested = nest([("b", 1, "x"), ("a", 1, "y"), ("b", 2, "z"), ("b", 1, "w")])
    assert list(nested.items()) == [("b", {1: "w", 2: "z"}), ("a", {1: "y"})]
