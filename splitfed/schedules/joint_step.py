"""Joint steps of all clients, shared by the schedules `blind` and `sglr`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Topology
from splitfed.schedules.base import Training, shared_roles
from splitfed.schedules.sampling_and_dropout import Averaged, ClientRound


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

    def steps(
        self, training: Training, number: int, turns: list[ClientRound]
    ) -> Iterator[tuple[int, int, dict[int, Tensor], bool]]:
        """Yield (epoch, step, client -> row numbers of its batch, whether the quorum is still met)."""
        for local, epoch in enumerate(training.epochs(number)):
            batches = {turn.client: turn.epochs[local][1] for turn in turns}
            for step in range(max((len(steps) for steps in batches.values()), default=0)):
                present = {client: steps[step] for client, steps in batches.items() if step < len(steps)}
                here = [turn.completes(local) or len(turn.epochs[local][1]) > step for turn in turns]
                yield (
                    epoch,
                    step,
                    present,
                    self.enough([replace(t, finished=h) for t, h in zip(turns, here, strict=True)]),
                )


def by_rows(batches: dict[int, Tensor]) -> dict[int, float]:
    """Return each client's share of all rows: the losses, weighted by it, add up to the mean loss over all rows."""
    total = sum(len(rows) for rows in batches.values())
    return {client: len(rows) / total for client, rows in batches.items()}
