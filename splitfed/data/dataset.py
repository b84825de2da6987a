"""A data set is two tensors and a task, checked when it is made."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splitfed.data.federation import Federation
from splitfed.data.split import split
from splitfed.errors import InvalidInput
from splitfed.task import Task


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Rows `x` with labels `y`, all finite, all of one shape, in memory.

    x: (n, ...) float32. y: (n,) int64 classes, or (n,) or (n, targets) float32. `value_range` are the least
    and the greatest value that an x may take (images: 0 and 1), None where there is no such bound. domains:
    (n,) int64, where a row comes from, or None. A data set has at least one row; only the parts that `rows`
    returns may be empty. Raises `InvalidInput` that names the first bad row.
    """

    name: str
    x: Tensor
    y: Tensor
    task: Task
    value_range: tuple[float, float] | None = None
    domains: Tensor | None = None

    def __post_init__(self) -> None:
        _check_x(self.name, self.x)
        _check_y(self.name, self.y, self.x, self.task)
        if self.value_range is not None:
            _check_range(self.name, self.x, self.value_range)
        if self.domains is not None and (self.domains.shape != (len(self),) or self.domains.dtype != torch.int64):
            raise InvalidInput(
                f"{self.name}: domains have shape {tuple(self.domains.shape)} and type "
                f"{_type(self.domains)}; expected ({len(self)},) and int64"
            )

    def __len__(self) -> int:
        return len(self.x)

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}, {len(self)} rows of {self.shape}, {self.task.name})"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row of x."""
        return tuple(self.x.shape[1:])

    def rows(self, indices: Tensor | Sequence[int]) -> Dataset:
        """Return these rows, in this order, as a data set with memory of its own; `indices` may be empty."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        outside = (chosen < 0) | (chosen >= len(self))
        if bool(outside.any()):
            raise InvalidInput(f"{self.name} has no row {int(chosen[outside][0])}; expected 0 to {len(self) - 1}")
        domains = None if self.domains is None else self.domains[chosen]
        return self._with(self.x[chosen], self.y[chosen], domains)

    def join(self, others: Iterable[Dataset]) -> Dataset:
        """Return the rows of this data set and of `others`, parts of the same source, one after another."""
        parts = [self, *others]
        domains = [part.domains for part in parts if part.domains is not None]
        return self._with(
            torch.cat([part.x for part in parts]),
            torch.cat([part.y for part in parts]),
            torch.cat(domains) if len(domains) == len(parts) else None,
        )

    def clients(
        self,
        count: int,
        *,
        dirichlet: float | None = None,
        minimum: int = 2,
        classes_per_client: int | None = None,
        by_domain: bool = False,
        auxiliary: float | int = 0.2,
        victims: int = 64,
        validation: float = 0.1,
        test: float = 0.2,
        seed: int = 0,
    ) -> Federation:
        """Split the rows over `count` clients, auxiliary rows for an attacker, and victims: see `split`."""
        return split(
            self,
            count,
            dirichlet=dirichlet,
            minimum=minimum,
            classes_per_client=classes_per_client,
            by_domain=by_domain,
            auxiliary=auxiliary,
            victims=victims,
            validation=validation,
            test=test,
            seed=seed,
        )

    def _with(self, x: Tensor, y: Tensor, domains: Tensor | None) -> Dataset:
        # Rows of checked data need no second check, and unlike a data set a part may be empty.
        part = copy.copy(self)
        for name, value in (("x", x), ("y", y), ("domains", domains)):
            object.__setattr__(part, name, value)
        return part


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _first_bad(good: Tensor) -> int | None:
    """Return the first row of `good` (n, ...) that is not all true."""
    bad = ~good.reshape(len(good), -1).all(1)
    return int(bad.nonzero()[0]) if bool(bad.any()) else None


def _check_x(name: str, x: Tensor) -> None:
    if x.device.type != "cpu":
        raise InvalidInput(f"{name}: x is on {x.device}; expected cpu, batches move to a device when they are used")
    if x.dtype != torch.float32 or x.dim() < 2 or x.numel() == 0:
        raise InvalidInput(
            f"{name}: x has shape {tuple(x.shape)} and type {_type(x)}; "
            f"expected (rows, ...) with at least one row, and float32"
        )
    bad = _first_bad(torch.isfinite(x))
    if bad is not None:
        raise InvalidInput(f"{name}: x is not finite in row {bad}")


def _check_y(name: str, y: Tensor, x: Tensor, task: Task) -> None:
    if y.device.type != "cpu":
        raise InvalidInput(f"{name}: y is on {y.device}; expected cpu, like x")
    if y.dim() == 0 or len(y) != len(x):
        raise InvalidInput(f"{name}: x has {len(x)} rows and y has shape {tuple(y.shape)}; expected a label a row")
    kinds = [torch.int64] if task.name in ("classification", "binary") else [torch.int64, torch.float32]
    if y.dtype not in kinds:
        allowed = " or ".join(str(kind).removeprefix("torch.") for kind in kinds)
        raise InvalidInput(f"{name}: y has type {_type(y)}; expected {allowed} for {task.name}")
    try:
        task.check(y)
    except InvalidInput as error:
        raise InvalidInput(f"{name}: {error}") from None


def _check_range(name: str, x: Tensor, value_range: tuple[float, float]) -> None:
    low, high = value_range
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InvalidInput(f"{name}: value_range=({low}, {high}) is not allowed; expected two numbers, low < high")
    bad = _first_bad((x >= low) & (x <= high))
    if bad is not None:
        raise InvalidInput(f"{name}: x leaves its value range [{low:g}, {high:g}] in row {bad}")
