"""Who holds which rows: the clients with their parts, the attacker's auxiliary rows, and the victims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from splitfed.core.argument_kinds import guard_constructor
from splitfed.core.errors import InvalidInput
from splitfed.core.tasks import Task

if TYPE_CHECKING:
    from splitfed.data.dataset import Dataset
    from splitfed.data.features import Feature


@guard_constructor
@dataclass(frozen=True, eq=False)
class ClientData:
    """What one client holds; `validation` and `test` may be empty, `train` is not.

    `shown`: (rows,) int64, which of its training rows it shows to others, each once; none unless given. Raises
    `InvalidInput` for others.
    """

    name: str
    train: Dataset
    validation: Dataset
    test: Dataset
    shown: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def __post_init__(self) -> None:
        found = self.shown
        if found.dtype != torch.int64 or found.dim() != 1 or found.device.type != "cpu":
            raise InvalidInput(
                f"{self.name} shows rows of shape {tuple(found.shape)} and type "
                f"{str(found.dtype).removeprefix('torch.')} on {found.device}; expected (rows,), int64, on cpu"
            )
        outside = found[(found < 0) | (found >= len(self.train))].tolist()
        if outside or len(found.unique()) < len(found):
            told = f"row {outside[0]}" if outside else "a row twice"
            raise InvalidInput(
                f"{self.name} shows {told}; expected training rows, 0 to {len(self.train) - 1}, each once"
            )

    @property
    def public(self) -> Dataset:
        """The training rows that the client shows to others; they stay in `train`."""
        return self.train.rows(self.shown)


@guard_constructor
@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """One data set split into disjoint parts: row numbers of rows that they all read where these are.

    `auxiliary` is what an attacker may know beforehand, `victims` are the rows whose privacy is measured; no
    client trains on either. `sources` says where each part came from: "auxiliary", "victims",
    "client0/train", "client0/validation", "client0/test", ... -> (rows,) int64 positions in the data set.
    Raises `InvalidInput` when a client has no training row, or when two parts share a row.
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
        return (
            f"Federation({self.name!r}, {len(self)} clients, {len(self.auxiliary)} auxiliary, "
            f"{len(self.victims)} victims)"
        )

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
        """Return the test rows of all clients, client by client; empty when no client has any."""
        first, *others = self.clients
        return first.test.join(client.test for client in others)


def _check_disjoint(sources: Mapping[str, Tensor]) -> None:
    for part, given in sources.items():
        if given.dtype != torch.int64 or given.dim() != 1:
            kind = str(given.dtype).removeprefix("torch.")
            raise InvalidInput(
                f"sources[{part!r}] has shape {tuple(given.shape)} and type {kind}; expected (rows,) and int64"
            )
    rows = torch.cat([torch.zeros(0, dtype=torch.int64), *sources.values()])
    if len(torch.unique(rows)) == len(rows):
        return
    owner: dict[int, str] = {}
    for part, indices in sources.items():
        for row in indices.tolist():
            if row in owner:
                raise InvalidInput(f"row {row} is in {owner[row]} and in {part}; expected disjoint parts")
            owner[row] = part
