"""Independent: every client trains a whole model of its own, all at the same time; nothing is averaged or handed on.

Paper: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017, whose local training it is, without the averaging.

Alone it is the baseline of training without collaboration; federated methods that aggregate by themselves run on top of
it. A round is `local_epochs` epochs, or `steps` mini-batches: each round then continues in the sequence of batches
where the round before ended, and a round counts as one epoch for everything that is drawn at random in it.
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
    """Clients train in parallel without exchange; `steps`: mini-batches in a round (None: whole epochs)."""

    steps: int | None = field(default=None, metadata=require_count("steps", low=1))

    def check(self, topology: Topology, clients: int) -> None:
        """Raise `InvalidInput` for a topology with a party that all clients share: its training is not independent."""
        super().check(topology, clients)
        if shared := shared_roles(topology):
            raise InvalidInput(
                f"schedule 'independent' trains whole models at their clients; in topology {topology.name!r} all share "
                f"{shared[0]!r}: take splitfed.topologies.local, or for split models 'splitfed_v3' or 'sequential' "
                "with hand_over='none'"
            )

    def round(self, engine: Trainer, training: Training, number: int, state: State) -> Round:
        """Train every client that takes part in round `number`."""
        turns = self.turns(engine, training, number)
        losses = engine.train_at_once({turn.client: turn.epochs for turn in turns})
        return Round([loss for found in losses.values() for loss in found], list_clients(turns), dropped_clients(turns))

    def turn(self, training: Training, rows: int, number: int, client: int, drawn: Sequence[float]) -> ClientRound:
        """Return the batches that `client`, with `rows` rows, trains in round `number`."""
        if self.steps is None:
            return super().turn(training, rows, number, client, drawn)
        return shorten_turn(client, [(number, self._batches(training, rows, number, client))], drawn, self.drop_out)

    def _batches(self, training: Training, rows: int, number: int, client: int) -> list[Tensor]:
        """Return the batches of round `number` out of the sequence of all epochs."""
        assert self.steps is not None
        whole = training.of_client(client).steps(rows)
        first = number * self.steps
        found: list[Tensor] = []
        for epoch in range(first // whole, (first + self.steps - 1) // whole + 1):
            here = training.batches(rows, epoch, client)
            found += here[max(first - epoch * whole, 0) : first + self.steps - epoch * whole]
        return found
