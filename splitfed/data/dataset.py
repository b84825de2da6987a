"""Data sets: rows in memory or read by index, with label sets, tasks and features; and federations that divide them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from splitfed.core.argument_kinds import guard_class, guard_constructor
from splitfed.core.errors import InvalidInput, check_names, short
from splitfed.core.rows import (
    CheckedRows,
    JoinedRows,
    RowSource,
    SelectedRows,
    as_rows_by_index,
    blocks,
    first_bad,
    join_rows,
    read_rows,
    row_numbers,
    type_name,
)
from splitfed.core.task_checks import has_own_loss
from splitfed.core.tasks import Task
from splitfed.data.conversion import check_dense
from splitfed.data.features import Feature, check_features
from splitfed.data.mixup import MixedRows
from splitfed.data.rotation import ANGLES, rotated
from splitfed.data.split import RowsToSplit, split
from splitfed.data.transform import Transform, TransformedRows
from splitfed.data.vertical import columns as columns_by_party, strips


@guard_class
@dataclass(frozen=True, eq=False, repr=False, init=False)
class Dataset:
    """Rows `x` with labels `y`, all finite, all of one shape.

    x: (n, ...) float32, or int64 for codes such as token ids: a tensor, which is shared and not copied, or a
    `RowSource`, whose rows are read by index and checked when they are read. y: (n,) int64 classes, or (n,) or (n,
    targets) float32, in memory. `value_range`: the smallest and the largest value that a float32 x may take (images: 0
    and 1), None without bounds. domains: (n,) int64, the origin of each row, or None. groups: (n,) int64, equal for
    rows that show the same thing, such as one image at several angles, or None: `clients` never divides a group between
    training and test. `features`: named parts of a row, such as the columns that one party holds; they may overlap and
    need not cover the row. `targets`: further label sets. `columns`: names of the columns of a table (those made from
    one column of text share its name); empty otherwise. `categories`: name of such a column of text -> its values, in
    the order of the 0/1 columns made from it, by which new rows are converted alike. `label_holder`: the party that
    holds y, if features belong to several. `source`: x as a `RowSource`. A data set has at least one row; only parts
    returned by `rows` may be empty. Raises `InvalidInput` that names the first bad row.
    """

    name: str
    source: RowSource
    y: Tensor
    task: Task
    value_range: tuple[float, float] | None = None
    domains: Tensor | None = None
    features: Mapping[str, Feature] = field(default_factory=dict)
    targets: Mapping[str, LabelSet] = field(default_factory=dict)
    groups: Tensor | None = None
    columns: tuple[str, ...] = ()
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    label_holder: str | None = None

    def __init__(
        self,
        name: str,
        x: Tensor | RowSource | None = None,
        y: Tensor | None = None,
        task: Task | None = None,
        value_range: tuple[float, float] | None = None,
        domains: Tensor | None = None,
        features: Mapping[str, Feature] | None = None,
        targets: Mapping[str, LabelSet] | None = None,
        groups: Tensor | None = None,
        columns: Sequence[str] = (),
        *,
        categories: Mapping[str, Sequence[str]] | None = None,
        label_holder: str | None = None,
        source: RowSource | None = None,
    ) -> None:
        """Create a data set; x, y and task are required. `source` replaces x in `dataclasses.replace`."""
        given = source if x is None else x
        if given is None or y is None or task is None:
            raise InvalidInput(f"{name}: a Dataset needs x, y and task")
        values_of = {column: tuple(values) for column, values in (categories or {}).items()}
        fields = {
            "name": name,
            "y": y,
            "task": task,
            "value_range": value_range,
            "domains": domains,
            "groups": groups,
            "features": dict(features or {}),
            "targets": dict(targets or {}),
            "columns": tuple(columns),
            "categories": values_of,
            "label_holder": label_holder,
        }
        for key, value in fields.items():
            object.__setattr__(self, key, value)
        object.__setattr__(self, "source", self._checked(given))
        check_labels(name, y, len(self), task)
        check_features(name, self.shape, self.features)
        for target, found in self.targets.items():
            check_labels(f"{name}: target {target!r}", found.y, len(self), found.task)
        for column in self.columns:
            if not isinstance(column, str) or not column:
                raise InvalidInput(f"{name}: columns has {short(column)}; expected names, text that is not empty")
        if self.columns and self.shape != (len(self.columns),):
            raise InvalidInput(f"{name}: {len(self.columns)} columns are named, and rows have shape {self.shape}")
        for column, values in self.categories.items():
            if len(values) != (count := self.columns.count(column)):
                raise InvalidInput(f"{name}: column {column!r} has {len(values)} categories and {count} columns")
        if value_range is not None:
            _check_range(name, self.source, value_range)
        for what in ("domains", "groups"):
            numbers = getattr(self, what)
            if numbers is not None and (numbers.shape != (len(self),) or numbers.dtype != torch.int64):
                raise InvalidInput(
                    f"{name}: {what} have shape {tuple(numbers.shape)} and type {type_name(numbers.dtype)}; expected "
                    f"({len(self)},) and int64"
                )

    def _checked(self, x: Tensor | RowSource) -> RowSource:
        """Return `x` as a row source whose rows are checked now if they are in memory, otherwise when they are read."""
        _check_kind(self.name, x)
        rows = as_rows_by_index(x)
        if not rows.resident:
            if isinstance(rows, CheckedRows):
                rows = rows.source
            # Rows of another data set were checked there, and mixed rows must stay outermost.
            made = isinstance(rows, (SelectedRows, JoinedRows, TransformedRows, MixedRows))
            return rows if made else CheckedRows(self.name, rows, self.value_range)
        start = 0
        for few in blocks(rows):
            if (bad := first_bad(torch.isfinite(few))) is not None:
                raise InvalidInput(f"{self.name}: x is not finite in row {start + bad}, counted from 0")
            start += len(few)
        return rows

    def __len__(self) -> int:
        return len(self.source)

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}, {len(self)} rows of {self.shape}, {self.task.name})"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row of x."""
        return self.source.shape

    @property
    def x(self) -> Tensor:
        """All rows as one tensor (n, ...); raises `InvalidInput` for rows read by index that take more than 1 GiB."""
        return read_rows(self.name, self.source)

    @property
    def discrete(self) -> bool:
        """True if x holds int64 codes, such as token ids, whose differences have no meaning."""
        return self.source.dtype == torch.int64

    @property
    def unscaled(self) -> bool:
        """True if rows are images, (channels, height, width), without a `value_range`."""
        return len(self.shape) == 3 and not self.discrete and self.value_range is None

    @property
    def tasks(self) -> dict[str | None, Task]:
        """The task of every label set: None for the main one, then the targets by name."""
        return {None: self.task, **{name: target.task for name, target in self.targets.items()}}

    def label(self, name: str | None = None) -> Tensor:
        """Return the labels of the target `name`, or the main ones y."""
        if name is None:
            return self.y
        check_names(f"target of {self.name}:", self.targets, name)
        return self.targets[name].y

    def rows(self, indices: Tensor | Sequence[int]) -> Dataset:
        """Return the rows `indices`, in this order, as a data set that reads them in place.

        `indices`: row numbers, possibly none, or a bool for each row, such as `data.y == 3`. Raises `InvalidInput` for
        others.
        """
        chosen = row_numbers(self.name, indices, len(self))
        return self._replace_fields(
            source=self.source.select(chosen),
            y=self.y[chosen],
            domains=None if self.domains is None else self.domains[chosen],
            groups=None if self.groups is None else self.groups[chosen],
            targets={name: LabelSet(t.y[chosen], t.task) for name, t in self.targets.items()},
        )

    def join(self, others: Iterable[Dataset]) -> Dataset:
        """Return the rows of this data set followed by those of `others`, which must be parts of the same source."""
        parts = [self, *others]
        for part in parts:
            for what in ("features", "targets"):
                if set(getattr(part, what)) != set(getattr(self, what)):
                    raise InvalidInput(
                        f"{self.name} has {what} {sorted(getattr(self, what))} and {part.name} "
                        f"{sorted(getattr(part, what))}; expected parts of the same source"
                    )
            mine, other = type_name(self.source.dtype), type_name(part.source.dtype)
            if mine == other:
                mine, other = f"shape {self.shape}", f"shape {part.shape}"
            if mine != other:
                raise InvalidInput(
                    f"{self.name} has rows of {mine} and {part.name} of {other}; expected parts of the same source"
                )
        domains = [part.domains for part in parts if part.domains is not None]
        groups = [part.groups for part in parts if part.groups is not None]
        return self._replace_fields(
            source=join_rows([part.source for part in parts]),
            y=torch.cat([part.y for part in parts]),
            domains=torch.cat(domains) if len(domains) == len(parts) else None,
            groups=torch.cat(groups) if len(groups) == len(parts) else None,
            targets={
                name: LabelSet(torch.cat([part.targets[name].y for part in parts]), t.task)
                for name, t in self.targets.items()
            },
        )

    def with_features(self, features: Mapping[str, Feature]) -> Dataset:
        """Return the same rows with `features` in place of their own: the part of a row that each party holds."""
        check_features(self.name, self.shape, features)
        return self._replace_fields(features=dict(features))

    def with_target(self, name: str, y: Tensor, task: Task) -> Dataset:
        """Return the same rows with a further label set `y`, as in a data set, under the new name `name`."""
        if not name or name in self.targets:
            raise InvalidInput(f"target name {name!r} of {self.name} is not allowed; expected a new one, not empty")
        check_labels(f"{self.name}: target {name!r}", y, len(self), task)
        return self._replace_fields(targets={**self.targets, name: LabelSet(y, task)})

    def with_transform(self, transform: Transform) -> Dataset:
        """Return the same rows with `transform` applied in training: it maps a row to one of the same shape and type.

        `transform(row, generator)` draws from the generator, and `transform(row)` from the default generators of torch,
        NumPy and `random`, seeded for the row: by the seed of the run, the number of the row here, and the epoch. Rows
        that are scored or attacked are not transformed. Raises `InvalidInput` for draws that cannot be repeated.
        """
        return self._replace_fields(source=TransformedRows(self.name, self.source, transform))

    def with_mixup(self, alpha: float = 0.2) -> Dataset:
        """Return the same rows, each mixed in training with another one of the same client: see `mixup`.

        `alpha` > 0: larger values mix more. Apply a transform first, if there is one. Privacy guarantees by row, and
        attacks on what a client sent of its rows, are refused with it.
        """
        return self._replace_fields(source=MixedRows(self.name, self.source, alpha))

    def vertical(self, parties: int | Mapping[str, Sequence[int | str]], *, overlap: bool = False) -> Dataset:
        """Return the same rows, of columns, with a feature for each party: see `vertical.columns`.

        A number of parties divides the columns in order among party0, party1, ...; a mapping names them, and their
        columns by number or, where columns have names, by name.
        """
        return self.with_features(columns_by_party(self.name, self.shape, parties, overlap, self.columns))

    def strips(self, count: int, names: Sequence[str] | None = None) -> Dataset:
        """Return these images with `count` vertical strips as features, left to right: see `vertical.strips`."""
        return self.with_features(strips(self.name, self.shape, count, names))

    def halves(self, names: Sequence[str] = ("left", "right")) -> Dataset:
        """Return these images with their left and right half as features; for an odd width the left is wider."""
        return self.strips(2, names)

    def rotated(self, angles: Sequence[float] = ANGLES) -> Dataset:
        """Return a copy of these images for each of `angles`, in degrees clockwise, with the angle's number as domain.

        Copies follow one another, each in the order of these rows; see `rotated`. `groups` number the original rows, so
        that `clients` divides the images once for all angles.
        """
        return self._replace_fields(
            source=as_rows_by_index(rotated(self.name, self.x, angles, self.value_range)),
            y=torch.cat([self.y] * len(angles)),
            domains=torch.arange(len(angles)).repeat_interleave(len(self)),
            groups=(torch.arange(len(self)) if self.groups is None else self.groups).repeat(len(angles)),
            targets={name: LabelSet(torch.cat([t.y] * len(angles)), t.task) for name, t in self.targets.items()},
        )

    def clients(
        self,
        count: int,
        *,
        dirichlet: float | None = None,
        minimum: int = 2,
        classes_per_client: int | None = None,
        class_spread: int = 0,
        rows_per_class: int | None = None,
        by_domain: bool = False,
        auxiliary: float | int = 0.2,
        victims: int = 64,
        validation: float = 0.1,
        test: float = 0.2,
        public: float = 0.0,
        seed: int = 0,
    ) -> Federation:
        """Return the rows split over `count` clients, with auxiliary rows for an attacker, and victims: see `split`."""
        rows = RowsToSplit(self.name, len(self), self.y, self.groups, self.domains, self.task.name)
        sources, shown = split(
            rows,
            count,
            dirichlet=dirichlet,
            minimum=minimum,
            classes_per_client=classes_per_client,
            class_spread=class_spread,
            rows_per_class=rows_per_class,
            by_domain=by_domain,
            auxiliary=auxiliary,
            victims=victims,
            validation=validation,
            test=test,
            public=public,
            seed=seed,
        )
        parts = {name: self.rows(chosen) for name, chosen in sources.items()}
        clients = []
        for i, public_rows in enumerate(shown):
            train, *scored = (parts[f"client{i}/{part}"] for part in ("train", "validation", "test"))
            clients.append(ClientData(f"client{i}", train, scored[0], scored[1], public_rows))
        return Federation(self.name, self.task, tuple(clients), parts["auxiliary"], parts["victims"], sources)

    def _replace_fields(self, **changes: Any) -> Dataset:
        # Rows of checked data need no second check, and unlike a data set a part may be empty.
        part = copy.copy(self)
        for name, value in changes.items():
            object.__setattr__(part, name, value)
        return part


@guard_constructor
@dataclass(frozen=True, eq=False)
class ClientData:
    """Rows of one client; `validation` and `test` may be empty, `train` not.

    `shown`: (rows,) int64, the numbers of its public training rows, each once; empty by default. Raises `InvalidInput`
    for others.
    """

    name: str
    train: Dataset
    validation: Dataset
    test: Dataset
    shown: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def __post_init__(self) -> None:
        shown = row_numbers(f"{self.name}: shown", self.shown, len(self.train))
        if len(shown.unique()) < len(shown):
            raise InvalidInput(f"{self.name}: shown has a row twice; expected training rows, each once")
        object.__setattr__(self, "shown", shown)

    @property
    def public(self) -> Dataset:
        """The training rows that the client sends to other clients; they are also in `train`."""
        return self.train.rows(self.shown)


@guard_constructor
@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """One data set split into disjoint parts, stored as row numbers of the common rows.

    `auxiliary`: rows that an attacker may know beforehand; `victims`: rows whose privacy is measured; no client trains
    on either. `sources`: part -> (rows,) int64 positions in the data set, for "auxiliary", "victims", "client0/train",
    "client0/validation", "client0/test", ... Raises `InvalidInput` if a client has no training row, and if two parts
    share a row.
    """

    name: str
    task: Task
    clients: tuple[ClientData, ...]
    auxiliary: Dataset
    victims: Dataset
    sources: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        if not self.clients:
            raise InvalidInput(f"{self.name}: a federation needs at least one client")
        for client in self.clients:
            if len(client.train) == 0:
                raise InvalidInput(
                    f"{client.name} has no training rows ({len(client.validation)} validation, "
                    f"{len(client.test)} test); take fewer clients or a less skewed partition"
                )
        _check_disjoint(self.sources)

    def __len__(self) -> int:
        return len(self.clients)

    def __repr__(self) -> str:
        rows = f"{len(self.auxiliary)} auxiliary, {len(self.victims)} victims"
        return f"Federation({self.name!r}, {len(self)} clients, {rows})"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row of x."""
        return self.victims.shape

    @property
    def features(self) -> Mapping[str, Feature]:
        """The named parts of a row, such as the columns that one party holds."""
        return self.victims.features

    @property
    def tasks(self) -> dict[str | None, Task]:
        """The task of every label set: None for the main one, then the targets by name."""
        return self.victims.tasks

    def test_union(self) -> Dataset:
        """Return the test rows of all clients, client by client; empty if no client has any."""
        first, *others = self.clients
        return first.test.join(client.test for client in others)


def _check_kind(name: str, x: Tensor | RowSource) -> None:
    if isinstance(x, Tensor):
        if x.device.type != "cpu":
            raise InvalidInput(f"{name}: x is on {x.device}; expected cpu; batches are moved to a device when used")
        check_dense(f"{name}: x", x)
        good, shape = x.dim() > 1 and x.numel() > 0, tuple(x.shape)
    else:
        shape = (len(x), *x.shape)
        good = len(shape) > 1 and 0 not in shape
    if x.dtype not in (torch.float32, torch.int64) or not good:
        raise InvalidInput(
            f"{name}: x has shape {shape} and type {type_name(x.dtype)}; "
            f"expected (rows, ...) with at least one row, and float32 or int64"
        )


def _check_range(name: str, rows: RowSource, value_range: tuple[float, float]) -> None:
    low, high = value_range
    if rows.dtype == torch.int64:
        raise InvalidInput(
            f"{name}: value_range=({low}, {high}) is not allowed for int64 rows; it bounds real numbers, such as pixels"
        )
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InvalidInput(f"{name}: value_range=({low}, {high}) is not allowed; expected two numbers, low < high")
    start = 0
    for few in blocks(rows) if rows.resident else ():
        if (bad := first_bad((few >= low) & (few <= high))) is not None:
            where = f"in row {start + bad}, counted from 0"
            raise InvalidInput(f"{name}: x leaves its value range [{low:g}, {high:g}] {where}")
        start += len(few)


def _check_disjoint(sources: Mapping[str, Tensor]) -> None:
    for part, given in sources.items():
        if given.dtype != torch.int64 or given.dim() != 1:
            raise InvalidInput(
                f"sources[{part!r}] has shape {tuple(given.shape)} and type {type_name(given.dtype)}; expected (rows,) "
                "and int64"
            )
    rows = torch.cat([torch.zeros(0, dtype=torch.int64), *sources.values()])
    values, counts = rows.unique(return_counts=True)
    for row in values[counts > 1].tolist():
        first, second, *_ = [part for part, given in sources.items() for _ in (given == row).nonzero()]
        raise InvalidInput(f"row {row} is in {first} and in {second}; expected disjoint parts")


@dataclass(frozen=True, eq=False)
class LabelSet:
    """A label set with its task; y: (n,) int64 classes, or (n,) or (n, targets) float32."""

    y: Tensor
    task: Task


def check_labels(name: str, y: Tensor, rows: int, task: Task) -> None:
    """Raise `InvalidInput`, which `name` begins, unless y has a label a row, of a type and shape that `task` takes."""
    if y.device.type != "cpu":
        raise InvalidInput(f"{name}: y is on {y.device}; expected cpu, like x")
    check_dense(f"{name}: y", y)
    if y.dim() == 0 or len(y) != rows:
        raise InvalidInput(f"{name}: x has {rows} rows and y has shape {tuple(y.shape)}; expected a label a row")
    kinds = [torch.int64] if task.name in ("classification", "binary") else [torch.int64, torch.float32]
    if y.dtype not in kinds:
        given, *allowed = (str(kind).removeprefix("torch.") for kind in (y.dtype, *kinds))
        raise InvalidInput(f"{name}: y has type {given}; expected {' or '.join(allowed)} for {task.name}")
    width = math.prod(y.shape[1:])
    if task.name == "regression" and task.outputs not in (None, width) and not has_own_loss(task):
        raise InvalidInput(
            f"{name}: y has shape {tuple(y.shape)}, {width} targets a row, and the task outputs={task.outputs}; "
            f"expected as many: regression({width}), or y of shape ({rows}, {task.outputs})"
        )
    try:
        task.check(y)
    except InvalidInput as error:
        raise InvalidInput(f"{name}: {error}") from None
