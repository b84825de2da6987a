"""Each partition rule on label vectors small enough to check by eye."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.random import generator
from splitfed.data import from_arrays
from splitfed.data.partitions import by_domain, dirichlet, iid, pathological, uneven_classes
from splitfed.data.split import apportion, take


def covers(parts: list[Tensor], rows: int) -> bool:
    """Return whether the parts hold 0 to `rows` - 1, each once."""
    return sorted(torch.cat(parts).tolist()) == list(range(rows))


def test_iid_is_even_and_random() -> None:
    parts = iid(11, 3, generator(0))
    assert [len(part) for part in parts] == [4, 4, 3]
    assert covers(parts, 11)
    assert torch.cat(parts).tolist() == torch.cat(iid(11, 3, generator(0))).tolist()
    assert torch.cat(parts).tolist() != torch.cat(iid(11, 3, generator(1))).tolist()


def test_by_domain_takes_domains_in_order() -> None:
    domains = torch.tensor([5, 3, 5, 9, 3])
    assert [part.tolist() for part in by_domain(domains, 3)] == [[1, 4], [0, 2], [3]]


def test_clients_share_a_domain() -> None:
    domains = torch.tensor([1, 0, 1, 0, 1])
    assert [part.tolist() for part in by_domain(domains, 3)] == [[1], [0, 2, 4], [3]]


def test_fewer_clients_than_domains() -> None:
    with pytest.raises(InvalidInput, match=r"^by_domain with 2 clients, but there are 3 domains; take 3$"):
        by_domain(torch.tensor([0, 1, 2]), 2)


def test_pathological_deals_each_class_once() -> None:
    # Two clients, two classes each, four classes: nobody shares, so each client has two whole classes.
    labels = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    parts = pathological(labels, 2, 2, generator(0))
    assert covers(parts, 8)
    assert [len(part) for part in parts] == [4, 4]
    assert all(len(set(labels[part].tolist())) == 2 for part in parts)


@pytest.mark.parametrize("seed", range(20))
def test_pathological_gives_exactly_k_classes(seed: int) -> None:
    labels = torch.arange(60) % 5
    parts = pathological(labels, 7, 3, generator(seed))
    assert covers(parts, 60)
    assert [len(set(labels[part].tolist())) for part in parts] == [3] * 7
    # 21 shards of 5 classes: four classes have 4 holders and one has 5, for 12 rows each.
    holders = [sum(c in labels[part] for part in parts) for c in range(5)]
    assert sorted(holders) == [4, 4, 4, 4, 5]


def test_dirichlet_extremes() -> None:
    labels = torch.arange(400) % 4
    even = dirichlet(labels, 4, 1e6, 1, generator(0))
    assert covers(even, 400)
    # A huge alpha: a quarter of each class for each client, up to 0.1 rows of spread and rounding.
    for part in even:
        assert all(24 <= n <= 26 for n in labels[part].bincount(minlength=4).tolist())
    # A tiny alpha: each class goes to one client as a whole.
    skewed = dirichlet(labels, 2, 1e-6, 1, generator(0))
    assert covers(skewed, 400)
    assert all(n in (0, 100) for part in skewed for n in labels[part].bincount(minlength=4).tolist())


def test_dirichlet_keeps_the_minimum() -> None:
    labels = torch.arange(90) % 3
    sizes = [len(part) for seed in range(30) for part in dirichlet(labels, 5, 0.3, 6, generator(seed))]
    assert min(sizes) >= 6
    assert min(len(part) for s in range(30) for part in dirichlet(labels, 5, 0.3, 1, generator(s))) < 6


def test_dirichlet_draws_its_mean() -> None:
    # Client 0's share of a class has mean 1/2 and variance 1/(4 (2 alpha + 1)) = 1/12 at alpha = 1 (uniform).
    labels = torch.zeros(1000, dtype=torch.int64)
    shares = torch.tensor([len(dirichlet(labels, 2, 1.0, 1, generator(s))[0]) / 1000 for s in range(600)])
    assert float(shares.mean()) == pytest.approx(1 / 2, abs=4 * (1 / 12 / 600) ** 0.5)
    assert float(shares.var()) == pytest.approx(1 / 12, rel=0.15)


def test_dirichlet_gives_up_in_one_line() -> None:
    text = (
        r"^dirichlet=1e-06: in 200 draws some of 3 clients always had fewer than minimum=2 of 8 rows; "
        r"raise dirichlet, lower minimum or take fewer clients$"
    )
    with pytest.raises(InvalidInput, match=text):
        dirichlet(torch.arange(8) % 2, 3, 1e-6, 2, generator(0))


BAD = [
    (dirichlet, (4, 0.0, 1), "dirichlet=0.0 is not allowed; expected a number in (0, inf)"),
    (dirichlet, (4, 1.0, 0), "minimum=0 is not allowed; expected a whole number of at least 1"),
    (dirichlet, (4, 1.0, 4), "minimum=4 for 4 clients is more than the 12 rows there are"),
    (pathological, (4, 0), "classes_per_client=0 is not allowed; expected a whole number of at least 1"),
    (pathological, (4, 4), "classes_per_client=4 is not allowed; there are 3 classes"),
    (
        pathological,
        (2, 1),
        "classes_per_client=1 for 2 clients covers 2 of 3 classes; take 2 classes or 3 clients",
    ),
    (pathological, (5, 3), "class 0 has 4 rows for 5 clients; take fewer clients"),
]


@pytest.mark.parametrize(("rule", "arguments", "text"), BAD)
def test_refused(rule, arguments, text) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidInput) as caught:
        rule(torch.arange(12) % 3, *arguments, generator(0))
    assert str(caught.value) == text


def test_apportion_by_largest_remainder() -> None:
    # 5 x (0.5, 0.3, 0.2) = 2.5, 1.5, 1.0: one seat is left, the tie goes to the first.
    assert apportion(5, [50, 30, 20]) == [3, 1, 1]
    # 4 x (0.6, 0.4) = 2.4, 1.6: the greater remainder gets it.
    assert apportion(4, [3, 2]) == [2, 2]
    assert apportion(5, [3, 2]) == [3, 2]
    assert apportion(0, [3, 2]) == [0, 0]


def test_take_in_the_order_given() -> None:
    labels = torch.tensor([0, 0, 0, 0, 1, 1])
    order = torch.tensor([5, 3, 0, 4, 2, 1])
    taken, left = take(order, 3, labels)
    assert taken.tolist() == [5, 3, 0]
    assert left.tolist() == [4, 2, 1]
    taken, left = take(torch.tensor([0, 1, 2, 3, 4, 5]), 3, labels)
    assert taken.tolist() == [0, 1, 4]
    taken, _ = take(torch.tensor([4, 5, 0, 1]), 2, None)
    assert taken.tolist() == [4, 5]


@pytest.mark.parametrize(("spread", "allowed"), [(0, {4}), (1, {3, 4, 5}), (2, {2, 3, 4, 5}), (9, {2, 3, 4, 5})])
def test_uneven_numbers_of_classes(spread: int, allowed: set[int]) -> None:
    labels = torch.arange(500) % 5
    found = set()
    for seed in range(10):
        parts = uneven_classes(labels, 8, 4, spread, 3, generator(seed))
        counts = [labels[part].bincount(minlength=5).tolist() for part in parts]
        assert {n for count in counts for n in count} <= {0, 3}
        found |= {sum(n > 0 for n in count) for count in counts}
        assert len(set(torch.cat(parts).tolist())) == sum(len(part) for part in parts)
    assert found == allowed


def test_numbers_of_classes_are_drawn_evenly() -> None:
    labels = torch.arange(100) % 10
    parts = uneven_classes(labels.repeat(2000), 2000, 4, 2, 1, generator(0))
    counts = torch.tensor([len(part) for part in parts], dtype=torch.float64)
    # 2 to 6 with a fifth each: mean 4, deviation sqrt 2, that of the mean of 2000 is .032.
    assert float(counts.mean()) == pytest.approx(4, abs=0.13)
    assert float(counts.std()) == pytest.approx(2**0.5, rel=0.05)


def test_holders_share_a_class_where_no_number_of_rows_is_given() -> None:
    labels = torch.arange(40) % 4
    parts = uneven_classes(labels, 6, 2, 1, None, generator(1))
    held = torch.cat(parts).tolist()
    assert len(set(held)) == len(held)
    dealt = set(labels[held].tolist())
    # Every row of a class that somebody holds goes to its holders, in numbers that differ by one at most.
    assert len(held) == 10 * len(dealt)
    for c in dealt:
        sizes = [int((labels[part] == c).sum()) for part in parts]
        assert max(sizes) - min(n for n in sizes if n) <= 1


BAD_CLASSES = [
    ((4, 0, 0, None), "classes_per_client=0 is not allowed; expected a whole number of at least 1"),
    ((4, 2, -1, None), "class_spread=-1 is not allowed; expected a whole number of at least 0"),
    ((4, 2, 0, 0), "rows_per_class=0 is not allowed; expected a whole number of at least 1"),
    ((4, 4, 0, None), "classes_per_client=4 is not allowed; there are 3 classes"),
    ((4, 3, 0, 2), "class 0 has 4 rows, and 4 clients need 8; lower rows_per_class or take fewer clients"),
]


@pytest.mark.parametrize(("arguments", "text"), BAD_CLASSES)
def test_uneven_classes_refuse(arguments, text) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidInput) as caught:
        uneven_classes(torch.arange(12) % 3, *arguments, generator(0))
    assert str(caught.value) == text


def test_uneven_classes_in_a_split() -> None:
    data = from_arrays(torch.arange(200.0), torch.arange(200) % 5, name="toy")
    options: dict[str, Any] = {"victims": 0, "auxiliary": 0, "validation": 0.0, "test": 0.0}
    clients = data.clients(4, classes_per_client=3, class_spread=1, rows_per_class=10, **options).clients
    assert all(len(c.train) == 10 * len(c.train.y.unique()) for c in clients)
    assert len(data.clients(4, classes_per_client=3, rows_per_class=10, **options).clients[0].train) == 30
    with pytest.raises(
        InvalidInput, match=r"^class_spread=1 applies to clients that hold some classes; give classes_per"
    ):
        data.clients(4, class_spread=1)
    with pytest.raises(InvalidInput, match=r"^rows_per_class=2 applies to clients that hold some classes"):
        data.clients(4, dirichlet=1.0, rows_per_class=2)
