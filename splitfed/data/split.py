"""Split of a data set: victims, auxiliary rows, and clients with training, validation and test rows each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_count, check_number
from splitfed.core.random import generator
from splitfed.data.partitions import (
    by_domain as partition_by_domain,
    dirichlet as partition_dirichlet,
    iid,
    pathological,
    uneven_classes,
)


class RowsToSplit(NamedTuple):
    """The properties of the rows to split: their number, labels y, and groups and domains, if there are any."""

    name: str
    length: int
    y: Tensor
    groups: Tensor | None
    domains: Tensor | None
    task: str

    @property
    def classes(self) -> Tensor | None:
        """The class of each row, (rows,) int64; None if y is not a class."""
        return self.y if self.y.dim() == 1 and self.y.dtype == torch.int64 else None


def split(
    data: RowsToSplit,
    count: int,
    *,
    dirichlet: float | None,
    minimum: int,
    classes_per_client: int | None,
    class_spread: int = 0,
    rows_per_class: int | None = None,
    by_domain: bool,
    auxiliary: float | int,
    victims: int,
    validation: float,
    test: float,
    public: float = 0.0,
    seed: int,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the row numbers of each part, all disjoint, and the public training rows of each of `count` clients.

    Parts are called as in `Federation.sources`. Equal arguments give equal splits.

    First `victims` rows, then `auxiliary` (a whole number of rows, or a fraction of all of them) are taken at random,
    in proportion to the classes; victims come first so that they do not depend on the number of auxiliary rows. The
    other rows go to the clients: by `dirichlet` (label skew of that concentration, redrawn until every client has
    `minimum` rows), by `classes_per_client` (plus or minus `class_spread`, with `rows_per_class` of each: see
    `uneven_classes`), `by_domain`, or otherwise at random in equal numbers. Each client sets round(fraction x its rows)
    aside for `validation` and `test`, and trains on the remaining rows, of which round(`public` x all its rows) are
    public, taken in proportion to the classes.

    If the clients' rows have groups of several rows (one image at several angles), whole groups are set aside, the same
    for all clients, so that no client trains on another's test images: round(fraction x groups) of them, which is a
    client's fraction of its own rows if it holds each group once. Victims and auxiliary rows are taken row by row.
    """
    check_count("minimum", minimum)
    check_count("seed", seed)
    known = _check_sizes(data, count, auxiliary, victims, validation, test)
    _check_public(public, validation, test)
    labels = data.classes
    order = torch.randperm(data.length, generator=generator(seed, "data", "order"))
    chosen, order = take(order, victims, labels)
    prior, order = take(order, known, labels)
    positions = _partition(
        data,
        order,
        count,
        seed,
        dirichlet=dirichlet,
        minimum=minimum,
        classes=classes_per_client,
        spread=class_spread,
        rows=rows_per_class,
        domains=by_domain,
    )
    sources = {"auxiliary": prior, "victims": chosen}
    places = _group_parts(data, order, validation, test, seed)
    shown = []
    for i, mine in enumerate(positions):
        shuffled = order[mine][torch.randperm(len(mine), generator=generator(seed, "data", "client", i))]
        parts = _divide_client(shuffled, validation, test, places)
        sources |= {f"client{i}/{part}": rows for part, rows in parts.items()}
        train = parts["train"]
        own = None if labels is None else labels[train]
        shown.append(take(torch.arange(len(train)), min(round(public * len(mine)), len(train)), own)[0])
    return sources, shown


def _divide_client(rows: Tensor, validation: float, test: float, places: Tensor | None) -> dict[str, Tensor]:
    """Return a client's shuffled `rows` for validation, test and training; `places`: their parts by group, if any."""
    if places is None:
        sizes = [round(validation * len(rows)), round(test * len(rows))]
        parts = torch.split(rows, [*sizes, len(rows) - sum(sizes)])
    else:
        parts = tuple(rows[places[rows] == part] for part in range(3))
    return dict(zip(("validation", "test", "train"), parts, strict=True))


def _check_public(public: float, validation: float, test: float) -> None:
    check_number("public", public, low=0, high=1)
    if validation + test + public > 1 + 1e-9:
        raise InvalidInput(
            f"public={public:g} is more than validation={validation:g} and test={test:g} leave for training; expected "
            f"at most {1 - validation - test:g}"
        )


def _group_parts(data: RowsToSplit, order: Tensor, validation: float, test: float, seed: int) -> Tensor | None:
    """Return for each row of `data` whether its group is set aside for validation (0), test (1) or none of them (2).

    None if no two of the rows in `order` are in the same group.
    """
    if data.groups is None:
        return None
    groups, which = torch.unique(data.groups, return_inverse=True)
    if int(which[order].bincount().max()) < 2:
        return None
    drawn = torch.randperm(len(groups), generator=generator(seed, "data", "groups"))
    place = torch.full((len(groups),), 2)
    first, second = round(validation * len(groups)), round(test * len(groups))
    place[drawn[:first]], place[drawn[first : first + second]] = 0, 1
    return place[which]


def _check_sizes(
    data: RowsToSplit, count: int, auxiliary: float | int, victims: int, validation: float, test: float
) -> int:
    """Return the number of auxiliary rows; raise `InvalidInput` for sizes that exceed the data."""
    check_count("clients", count, low=1)
    check_count("victims", victims)
    check_number("validation", validation, low=0, high=1, open_high=True)
    check_number("test", test, low=0, high=1, open_high=True)
    if validation + test >= 1:
        raise InvalidInput(f"validation={validation:g} and test={test:g} leave no training rows; expected a sum < 1")
    known = _auxiliary_rows(auxiliary, data.length)
    if (left := data.length - victims - known) < count:
        raise InvalidInput(
            f"{data.name} has {data.length} rows: victims={victims} and auxiliary={auxiliary} ({known} rows) "
            f"leave {max(left, 0)} for {count} clients; expected at least one a client"
        )
    return known


def _auxiliary_rows(auxiliary: float | int, rows: int) -> int:
    if isinstance(auxiliary, float):
        check_number("auxiliary", auxiliary, low=0, high=1, open_high=True)
        return round(auxiliary * rows)
    check_count("auxiliary", auxiliary)
    return auxiliary


def _partition(
    data: RowsToSplit,
    order: Tensor,
    count: int,
    seed: int,
    *,
    dirichlet: float | None,
    minimum: int,
    classes: int | None,
    spread: int,
    rows: int | None,
    domains: bool,
) -> list[Tensor]:
    """Return the positions of each client in `order`, the remaining rows, by the one given rule."""
    given = {
        "dirichlet": dirichlet is not None,
        "classes_per_client": classes is not None,
        "by_domain": domains,
    }
    names = [name for name, is_given in given.items() if is_given]
    if len(names) > 1:
        raise InvalidInput(f"{' and '.join(names)} are two partitions; expected one")
    if classes is None and (spread != 0 or rows is not None):
        told = f"class_spread={spread}" if spread != 0 else f"rows_per_class={rows}"
        raise InvalidInput(f"{told} applies to clients that hold some classes; give classes_per_client too")
    labels = data.classes
    random = generator(seed, "data", "partition")
    if domains:
        if data.domains is None:
            raise InvalidInput(f"by_domain=True, but {data.name} has no domains")
        return partition_by_domain(data.domains[order], count)
    if dirichlet is None and classes is None:
        return iid(len(order), count, random)
    if labels is None:
        raise InvalidInput(f"{names[0]} needs class labels; {data.name} is a {data.task} task")
    if dirichlet is not None:
        return partition_dirichlet(labels[order], count, dirichlet, minimum, random)
    assert classes is not None
    if spread == 0 and rows is None:
        return pathological(labels[order], count, classes, random)
    return uneven_classes(labels[order], count, classes, spread, rows, random)


def take(order: Tensor, count: int, labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return `count` rows of `order` and the others, both in the order given.

    order: (n,) int64 row numbers, shuffled. labels: (rows,) int64 classes by row number; the number from each class is
    its share by the method of largest remainders (ties to the lower class). Without labels the first rows are taken.
    """
    if labels is None:
        return order[:count], order[count:]
    _, classes, sizes = torch.unique(labels[order], return_inverse=True, return_counts=True)
    quota = apportion(count, sizes.tolist())
    taken = torch.zeros(len(order), dtype=torch.bool)
    for c, share in enumerate(quota):
        taken[(classes == c).nonzero().flatten()[:share]] = True
    return order[taken], order[~taken]


def apportion(count: int, sizes: list[int]) -> list[int]:
    """Return `count` divided in proportion to `sizes`, by largest remainders: sums to `count`, none above its size.

    >>> apportion(5, [50, 30, 20])
    [3, 1, 1]
    """
    total = sum(sizes)
    quota = [count * size // total for size in sizes]
    remainder = [count * size % total for size in sizes]
    for c in sorted(range(len(sizes)), key=lambda c: -remainder[c])[: count - sum(quota)]:
        quota[c] += 1
    return quota
