"""Independent: every client trains a whole model of its own, all at the same time; nothing is averaged or handed on.

Paper: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017, whose clients train between two averages; here there is none.

By itself it is training alone, which every federated method has to beat; methods that aggregate by themselves are
layered on it. A round is `local_epochs` epochs, or `steps` mini-batches: then the batches of one round go on where
those of the round before ended, and a round counts as an epoch for all that is drawn in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from splitfed.core.errors import InvalidInput, require_count
from splitfed.core.topology import Topology
from splitfed.engines.base import Trainer
from splitfed.schedules.base import Round, State, Training, shared_roles
from splitfed.schedules.sampling_and_dropout import ClientRound, Sampled, dropped_clients, list_clients, shorten_turn


@dataclass(frozen=True, kw_only=True)
class Independent(Sampled):
    """Clients in parallel, each alone; `steps`: how many mini-batches a round has (None: whole epochs)."""

    steps: int | None = field(default=None, metadata=require_count("steps", low=1))

    def check(self, topology: Topology, clients: int) -> None:
        """Refuse a topology with a party that all clients share: there, nobody trains alone."""
        super().check(topology, clients)
        if shared := shared_roles(topology):
            raise InvalidInput(
                f"schedule 'independent' trains whole models at their clients; in topology {topology.name!r} all share "
                f"{shared[0]!r}: take splitfed.topologies.local, or another schedule"
            )

    def round(self, engine: Trainer, training: Training, number: int, state: State) -> Round:
        """Train every client that takes part."""
        turns = self.turns(engine, training, number)
        losses = engine.train_at_once({turn.client: turn.epochs for turn in turns})
        return Round([loss for found in losses.values() for loss in found], list_clients(turns), dropped_clients(turns))

    def turn(self, training: Training, rows: int, number: int, client: int, drawn: Sequence[float]) -> ClientRound:
        """Return what `client` does in round `number`."""
        if self.steps is None:
            return super().turn(training, rows, number, client, drawn)
        return shorten_turn(client, [(number, self._batches(training, rows, number, client))], drawn, self.drop_out)

    def _batches(self, training: Training, rows: int, number: int, client: int) -> list[Tensor]:
        """Return the batches of round `number` out of the endless row of epochs."""
        assert self.steps is not None
        whole = training.of_client(client).steps(rows)
        first = number * self.steps
        found: list[Tensor] = []
        for epoch in range(first // whole, (first + self.steps - 1) // whole + 1):
            here = training.batches(rows, epoch, client)
            found += here[max(first - epoch * whole, 0) : first + self.steps - epoch * whole]
        return found
