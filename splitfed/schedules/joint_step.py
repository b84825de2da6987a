"""Joint steps of all clients, shared by the schedules `blind` and `sglr`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.executor import Combine
from splitfed.core.topology import Topology
from splitfed.engines.base import ReplicaBatches, Scales, Trainer
from splitfed.schedules.base import Round, State, Training, shared_roles
from splitfed.schedules.sampling_and_dropout import Averaged, ClientRound, dropped_clients, examples, list_clients


@dataclass(frozen=True, kw_only=True)
class JointStep(Averaged):
    """Base of schedules in which one step of the server uses a batch of every client.

    A client that has used all its batches or has dropped out takes no part in the steps that follow; when fewer clients
    than the quorum remain, the round ends.
    """

    @property
    def independent(self) -> bool:
        """False: every step of the shared parties uses rows of several clients."""
        return False

    def check(self, topology: Topology, clients: int) -> None:
        """Raise `InvalidInput` for a topology without a shared role, which a joint step needs."""
        super().check(topology, clients)
        if not shared_roles(topology):
            raise InvalidInput(
                f"a joint step needs a party that all clients share; topology {topology.name!r} has no party without "
                "data"
            )

    def round(self, engine: Trainer, training: Training, number: int, state: State) -> Round:
        """Take joint steps until all batches are used, between the averages of client segments if there are any."""
        turns = self.turns(engine, training, number)
        averages = bool(self.placement(engine.topology).averaged)
        losses: list[float] = []
        enough = True
        if averages:
            engine.download(list_clients(turns), number)
        for epoch, step, batches, enough in self._steps(training, number, turns):
            if not enough:
                break
            combine = self.combined(engine.topology, training.seed, epoch, step, len(batches))
            losses += engine.train_together(epoch, step, batches, self.shares(batches), combine).values()
        enough = enough and self.enough(turns)
        if averages and enough:
            engine.upload(examples(engine, turns), number)
        return Round(losses, list_clients(turns), dropped_clients(turns), enough)

    def shares(self, batches: ReplicaBatches) -> Scales:
        """Return each client's share of all rows: the losses, weighted by it, add up to the mean loss over all rows."""
        total = sum(len(rows) for rows in batches.values())
        return {client: len(rows) / total for client, rows in batches.items()}

    def combined(self, topology: Topology, seed: int, epoch: int, step: int, clients: int) -> Combine | None:
        """Return the function that replaces the gradients of the `clients` of a step; None leaves them unchanged."""
        return None

    def _steps(
        self, training: Training, number: int, turns: list[ClientRound]
    ) -> Iterator[tuple[int, int, dict[int, Tensor], bool]]:
        """Yield (epoch, step, client -> row numbers of its batch, whether the quorum is still met)."""
        for local, epoch in enumerate(training.epochs(number)):
            batches = {turn.client: turn.epochs[local][1] for turn in turns}
            for step in range(max((len(steps) for steps in batches.values()), default=0)):
                present = {client: steps[step] for client, steps in batches.items() if step < len(steps)}
                here = [turn.completes(local) or len(turn.epochs[local][1]) > step for turn in turns]
                here_now = [replace(turn, finished=is_here) for turn, is_here in zip(turns, here, strict=True)]
                yield epoch, step, present, self.enough(here_now)
