"""The contract of a schedule: a frozen value that trains one round over an engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from torch import Tensor

from splitfed.core.argument_kinds import check_overrides
from splitfed.core.errors import InvalidInput, check_count, check_fields, require_count, require_name
from splitfed.core.initial_weights import GIVEN
from splitfed.core.local_update import LocalUpdate, Start
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.data.batch_order import batches, poisson_batches
from splitfed.engines.base import Placement, Source, Trainer

State = dict[str, Any]

RARE = 1e-15
"Probability that a random batch is larger than `Training.largest_batch`."


def spread_counts(most: int) -> list[int]:
    """Return representative numbers from 1 to `most`: 1 to 8, powers of two with their neighbours, and `most`."""
    powers = [2**power + beside for power in range(4, most.bit_length()) for beside in (-1, 0, 1)]
    return sorted({n for n in (*range(1, 9), *powers, most) if n <= most} if most else ())


@dataclass(frozen=True)
class Training(LocalUpdate):
    """How every client trains: its local update, its batch size in rows, and the seed of the data order.

    `starts` may also be "given": topologies passed one a client keep their weights.

    `batch_sizes`: the batch size of every client, by number; () if all have `batch_size`, which is otherwise the
    largest of them. Use `of_client` for the settings of one client.
    """

    starts: str | None = field(  # type: ignore[assignment]
        default=None, metadata=require_name("starts", (*get_args(Start), GIVEN)), kw_only=True
    )
    batch_size: int = field(default=64, metadata=require_count("batch_size", low=1))
    seed: int = field(default=0, kw_only=True)
    batch_sizes: tuple[int, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for values out of range, and for a `batch_size` below or above max(`batch_sizes`)."""
        super().__post_init__()
        for client, size in enumerate(self.batch_sizes):
            check_count(f"batch_size of client {client}", size, low=1)
        if self.batch_sizes and self.batch_size != max(self.batch_sizes):
            raise InvalidInput(f"batch_size={self.batch_size} is not the largest of batch_sizes={self.batch_sizes}")

    @classmethod
    def of(cls, update: LocalUpdate, batch_size: int | Sequence[int] = 64, seed: int = 0) -> Training:
        """Return the training settings of `update` with `batch_size`, one number for all clients or one a client."""
        if not isinstance(batch_size, (list, tuple)):
            return cls(batch_size, seed=seed, **vars(update))  # type: ignore[arg-type]
        if not batch_size:
            raise InvalidInput(f"batch_size={batch_size!r} is not allowed; expected a whole number, or one a client")
        for client, size in enumerate(batch_size):
            check_count(f"batch_size of client {client}", size, low=1)
        return cls(max(batch_size), seed=seed, batch_sizes=tuple(batch_size), **vars(update))

    def of_client(self, client: int) -> Training:
        """Return the settings of `client`, with its own batch size."""
        return self if not self.batch_sizes else replace(self, batch_size=self.batch_sizes[client], batch_sizes=())

    def batches(self, rows: int, epoch: int, client: int) -> list[Tensor]:
        """Return the row numbers of every batch of `epoch` for a `client` of `rows` rows, a (batch,) tensor each."""
        size = self.of_client(client).batch_size
        if self.sampling == "poisson":
            return list(poisson_batches(rows, size, self.seed, epoch, client))
        whole = self.drop_last and rows >= size
        return list(batches(rows, size, self.seed, epoch, client, drop_last=whole))

    def steps(self, rows: int) -> int:
        """Return the number of batches in an epoch of a client that has `rows` rows."""
        incomplete = rows % self.batch_size > 0 and not (self.drop_last and rows >= self.batch_size)
        return rows // self.batch_size + incomplete

    def smallest_batch(self, rows: int) -> int:
        """Return the size in rows of the smallest batch that "shuffle" makes of `rows` rows."""
        rest = 0 if self.drop_last else rows % self.batch_size
        return min(rows, rest or self.batch_size)

    def largest_batch(self, rows: int) -> int:
        """Return the size in rows of the largest batch of a client that has `rows` rows.

        With Poisson sampling: a size that a draw exceeds with probability below `RARE` (Bernstein's inequality).
        """
        mean = min(self.batch_size, rows)
        if self.sampling == "shuffle" or mean == rows:
            return mean
        part = -math.log(RARE) / 3
        return min(rows, math.ceil(mean + part + math.sqrt(part**2 + 6 * part * mean * (1 - mean / rows))))

    def row_counts(self, rows: int) -> dict[int, str]:
        """Return the batch sizes that occur at a client of `rows` rows: size -> description of these batches.

        With Poisson sampling, where any size may occur: `spread_counts`, and the sizes near the expected one.
        """
        if self.sampling == "poisson":
            near = range(self.batch_size - 1, self.batch_size + 2)
            found = sorted({*spread_counts(rows), *(n for n in near if 0 < n <= rows)})
            return dict.fromkeys(found, "a batch drawn by chance")
        rest = 0 if self.drop_last and rows >= self.batch_size else rows % self.batch_size
        whole = {self.batch_size: "a batch"} if rows >= self.batch_size else {}
        return {**whole, **({rest: "the last batch"} if rest else {})}

    def expected(self, rows: int) -> float | None:
        """Return the expected batch size of a client that has `rows` rows; None where batch sizes are not random."""
        return None if self.sampling == "shuffle" else float(min(self.batch_size, rows))

    def epochs(self, number: int) -> range:
        """Return the epochs of round `number`, counted from the start of the run."""
        return range(number * self.local_epochs, (number + 1) * self.local_epochs)


@dataclass(frozen=True)
class Round:
    """Result of one round: the losses of its steps in the order they ran, and the clients that took part.

    `dropped`: the clients that left before their last step. `averaged`: False where too few clients finished, so that
    nothing was averaged.
    """

    losses: list[float]
    clients: tuple[int, ...] = field(default=())
    dropped: tuple[int, ...] = ()
    averaged: bool = True


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Base of all schedules: the state is a plain dictionary, made by `start` and changed by `round` only."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise `InvalidInput` for a method that overrides one of this class and takes other arguments."""
        super().__init_subclass__(**options)
        check_overrides(cls, Schedule)

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for parameters that the metadata of their fields do not allow."""
        check_fields(self)

    def check(self, topology: Topology, clients: int) -> None:
        """Raise `InvalidInput` for a topology or a number of clients that this schedule cannot train."""

    def prepare(self, topology: Topology, facts: TopologyFacts, seed: int) -> Topology:
        """Return the topology to train: `topology`, unless the schedule adds segments to it."""
        return topology

    def placement(self, topology: Topology) -> Placement:
        """Return the parties that the schedule needs beyond one for each client and one for each shared role."""
        return Placement()

    def rates(self, topology: Topology, clients: int) -> dict[str, float]:
        """Return role -> factor on its learning rate; 1 for a role that is not named."""
        return {}

    def start(self, clients: int) -> State:
        """Return the state before the first round, plain values only."""
        return {}

    def round(self, engine: Trainer, training: Training, number: int, state: State) -> Round:
        """Train round `number` and return its losses and participants."""
        raise NotImplementedError

    @property
    def independent(self) -> bool:
        """True if every training step of every party uses rows of a single client."""
        return True

    @property
    def accumulates(self) -> bool:
        """True if a client's batches follow one another, so that one optimizer step may accumulate several of them."""
        return self.independent

    def newest(self, client: int, state: State) -> Source:
        """Return whose segments `client` would use now: a client's number, or the aggregation server."""
        return client

    def binds(self, clients: int) -> str | None:
        """Return why client segments must have the same architecture, as a verb phrase; None if they may differ."""
        return None


def shared_roles(topology: Topology) -> tuple[str, ...]:
    """Return the roles that one party plays for all clients: those with segments but without data."""
    return tuple(r for r in topology.roles if r not in topology.data_roles and topology.segments_of(r))


def client_roles(topology: Topology) -> tuple[str, ...]:
    """Return the roles with segments in which each client has a party of its own."""
    return tuple(role for role in topology.data_roles if topology.segments_of(role))
