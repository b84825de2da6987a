"""Values put together by their keys, in the order in which they come."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

from torch import Tensor

K = TypeVar("K", bound=Hashable)
L = TypeVar("L", bound=Hashable)
V = TypeVar("V")
A = TypeVar("A", int, float, Tensor)


def group_pairs(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return key -> the values that stand beside it in `pairs`; keys and values in the order in which they come."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def total_pairs(pairs: Iterable[tuple[K, A]]) -> dict[K, A]:
    """Return key -> the sum of the numbers or tensors that stand beside it in `pairs`, added as they come."""
    totals: dict[K, A] = {}
    for key, value in pairs:
        totals[key] = totals[key] + value if key in totals else value
    return totals


def nest(items: Iterable[tuple[K, L, V]]) -> dict[K, dict[L, V]]:
    """Return outer key -> inner key -> value, keys in the order in which they come; the last value of two counts."""
    nested: dict[K, dict[L, V]] = {}
    for outer, inner, value in items:
        nested.setdefault(outer, {})[inner] = value
    return nested


def overlapping(spans: Iterable[tuple[int, int, K]]) -> list[list[K]]:
    """Return the keys of spans (start, end, key) that overlap, by groups of two or more, as they come."""
    groups: list[list[tuple[int, K]]] = []
    reached = 0
    for number, (start, end, key) in sorted(enumerate(spans), key=lambda one: one[1][:2]):
        if not groups or start >= reached:
            groups.append([])
        groups[-1].append((number, key))
        reached = max(reached, end)
    return [[key for _, key in sorted(group, key=lambda one: one[0])] for group in groups if len(group) > 1]
