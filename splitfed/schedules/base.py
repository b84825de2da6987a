"""The contract of a schedule: a frozen value that trains one round over an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from splitfed.engines.base import Engine
from splitfed.errors import check_count
from splitfed.graph import Topology

State = dict[str, Any]


@dataclass(frozen=True)
class Training:
    """How every client trains: rows a batch, epochs a round, and the seed of the data order."""

    batch_size: int = 64
    local_epochs: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse counts below one."""
        check_count("batch_size", self.batch_size, low=1)
        check_count("local_epochs", self.local_epochs, low=1)


@dataclass(frozen=True)
class Schedule:
    """Base of all schedules: the state is a plain dictionary, made by `start` and changed by `round` only."""

    def check(self, topology: Topology, clients: int) -> None:
        """Refuse, before training, a topology or a number of clients this schedule cannot serve."""

    def start(self, clients: int) -> State:
        """Return the state before the first round: plain values."""
        return {}

    def round(self, engine: Engine, training: Training, number: int, state: State) -> list[float]:
        """Train round `number`; return the losses of its steps in the order they ran."""
        raise NotImplementedError

    def newest(self, client: int, state: State) -> int:
        """Return the client whose segments `client` would use now: its own, unless segments are handed on."""
        return client

    def handed_over(self, topology: Topology, clients: int, rounds: int) -> int:
        """Return the bytes of weights that cross in `rounds` rounds."""
        return 0
