"""The contract of a schedule: a frozen value that trains one round over an engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from torch import Tensor

from splitfed.core.errors import InvalidInput, check_count, check_fields, require_count, require_name
from splitfed.core.initial_weights import GIVEN
from splitfed.core.local_update import LocalUpdate, Start
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.data.batch_order import batches, poisson_batches
from splitfed.engines.base import Placement, Source, Trainer

State = dict[str, Any]

RARE = 1e-15
"""Chance of a draw of more rows than are reckoned with."""


def spread_counts(most: int) -> list[int]:
    """Return numbers of rows that stand for all from 1 to `most`: the first eight, and near powers of two."""
    powers = [2**power + beside for power in range(4, most.bit_length()) for beside in (-1, 0, 1)]
    return sorted({n for n in (*range(1, 9), *powers, most) if n <= most} if most else ())


@dataclass(frozen=True)
class Training(LocalUpdate):
    """How every client trains: its local update, rows a batch, and the seed of the data order.

    `starts` may also be "given": topologies that were given one a client keep their weights.

    `batch_sizes`: rows a batch of every client by number, where they differ; () where all have `batch_size`, which is
    otherwise the largest of them. What is asked of one client is asked of `of_client`.
    """

    starts: str | None = field(  # type: ignore[assignment]
        default=None, metadata=require_name("starts", (*get_args(Start), GIVEN)), kw_only=True
    )
    batch_size: int = field(default=64, metadata=require_count("batch_size", low=1))
    seed: int = field(default=0, kw_only=True)
    batch_sizes: tuple[int, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        """Refuse values out of their range, and sizes that do not go together."""
        super().__post_init__()
        for client, size in enumerate(self.batch_sizes):
            check_count(f"batch_size of client {client}", size, low=1)
        if self.batch_sizes and self.batch_size != max(self.batch_sizes):
            raise InvalidInput(f"batch_size={self.batch_size} is not the largest of batch_sizes={self.batch_sizes}")

    @classmethod
    def of(cls, update: LocalUpdate, batch_size: int | Sequence[int] = 64, seed: int = 0) -> Training:
        """Return the training of an update in batches of `batch_size`, one for all clients or one a client."""
        if not isinstance(batch_size, (list, tuple)):
            return cls(batch_size, seed=seed, **vars(update))  # type: ignore[arg-type]
        if not batch_size:
            raise InvalidInput(f"batch_size={batch_size!r} is not allowed; expected a whole number, or one a client")
        for client, size in enumerate(batch_size):
            check_count(f"batch_size of client {client}", size, low=1)
        return cls(max(batch_size), seed=seed, batch_sizes=tuple(batch_size), **vars(update))

    def of_client(self, client: int) -> Training:
        """Return how `client` trains, with the batch size that it has."""
        return self if not self.batch_sizes else replace(self, batch_size=self.batch_sizes[client], batch_sizes=())

    def batches(self, rows: int, epoch: int, client: int) -> list[Tensor]:
        """Return the rows, of a `client` that has `rows`, of every step of `epoch`."""
        size = self.of_client(client).batch_size
        if self.sampling == "poisson":
            return list(poisson_batches(rows, size, self.seed, epoch, client))
        whole = self.drop_last and rows >= size
        return list(batches(rows, size, self.seed, epoch, client, drop_last=whole))

    def steps(self, rows: int) -> int:
        """Return how many batches an epoch of a client that has `rows` consists of."""
        incomplete = rows % self.batch_size > 0 and not (self.drop_last and rows >= self.batch_size)
        return rows // self.batch_size + incomplete

    def smallest_batch(self, rows: int) -> int:
        """Return the rows of the smallest batch that "shuffle" makes of `rows`."""
        rest = 0 if self.drop_last else rows % self.batch_size
        return min(rows, rest or self.batch_size)

    def largest_batch(self, rows: int) -> int:
        """Return how many rows the largest batch of a client that has `rows` has.

        Of batches drawn by chance: a number that a draw exceeds with a chance below `RARE` (Bernstein's inequality).
        """
        mean = min(self.batch_size, rows)
        if self.sampling == "shuffle" or mean == rows:
            return mean
        part = -math.log(RARE) / 3
        return min(rows, math.ceil(mean + part + math.sqrt(part**2 + 6 * part * mean * (1 - mean / rows))))

    def row_counts(self, rows: int) -> dict[int, str]:
        """Return how many rows batches of a client that has `rows` have -> which do, in words.

        Of batches drawn by chance, which may have any number: `spread_counts`, and what is near the expected number.
        """
        if self.sampling == "poisson":
            near = range(self.batch_size - 1, self.batch_size + 2)
            found = sorted({*spread_counts(rows), *(n for n in near if 0 < n <= rows)})
            return dict.fromkeys(found, "a batch drawn by chance")
        rest = 0 if self.drop_last and rows >= self.batch_size else rows % self.batch_size
        whole = {self.batch_size: "a batch"} if rows >= self.batch_size else {}
        return {**whole, **({rest: "the last batch"} if rest else {})}

    def expected(self, rows: int) -> float | None:
        """Return the expected size of a batch of a client that has `rows`; None where sizes are not left to chance."""
        return None if self.sampling == "shuffle" else float(min(self.batch_size, rows))

    def epochs(self, number: int) -> range:
        """Return the epochs of round `number`, counted from the start of the run."""
        return range(number * self.local_epochs, (number + 1) * self.local_epochs)


@dataclass(frozen=True)
class Round:
    """What a round did: the losses of its steps in the order they ran, and who took part.

    `dropped`: the clients that left before their last step. `averaged`: False where too few finished for anything to
    be averaged.
    """

    losses: list[float]
    clients: tuple[int, ...] = field(default=())
    dropped: tuple[int, ...] = ()
    averaged: bool = True


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Base of all schedules: the state is a plain dictionary, made by `start` and changed by `round` only."""

    def __post_init__(self) -> None:
        """Refuse a parameter that is not what its metadata require."""
        check_fields(self)

    def check(self, topology: Topology, clients: int) -> None:
        """Refuse, before training, a topology or a number of clients this schedule cannot serve."""

    def prepare(self, topology: Topology, facts: TopologyFacts, seed: int) -> Topology:
        """Return the topology to train: this one, unless the schedule adds segments to it."""
        return topology

    def placement(self, topology: Topology) -> Placement:
        """Return what the schedule needs beside one party a client and one a shared role."""
        return Placement()

    def rates(self, topology: Topology, clients: int) -> dict[str, float]:
        """Return what the learning rate of a role is multiplied by (a role that is not named: by one)."""
        return {}

    def start(self, clients: int) -> State:
        """Return the state before the first round: plain values."""
        return {}

    def round(self, engine: Trainer, training: Training, number: int, state: State) -> Round:
        """Train round `number`."""
        raise NotImplementedError

    @property
    def independent(self) -> bool:
        """Whether every step of every party is on the rows of one client."""
        return True

    @property
    def accumulates(self) -> bool:
        """Whether a client's batches follow one another, so that one optimizer step may stand for several of them."""
        return self.independent

    def newest(self, client: int, state: State) -> Source:
        """Return whose client segments `client` would use now: its own, unless they are handed on or averaged."""
        return client

    def binds(self, clients: int) -> str | None:
        """Return what the schedule does that takes client segments of one make, or None: clients may differ."""
        return None


def shared_roles(topology: Topology) -> tuple[str, ...]:
    """Return the roles that one party plays for all clients: those without data of their own, with segments."""
    return tuple(r for r in topology.roles if r not in topology.data_roles and topology.segments_of(r))


def client_roles(topology: Topology) -> tuple[str, ...]:
    """Return the roles each client has a party of its own in, where they hold segments."""
    return tuple(role for role in topology.data_roles if topology.segments_of(role))
