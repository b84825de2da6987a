"""Steps that all clients take together: what `blind` and `sglr` share."""

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
    """One step of the server serves a batch of every client.

    A client with fewer batches than the others, or one that has dropped out, is left out of the steps that follow;
    where fewer clients are there than the quorum, the round ends.
    """

    @property
    def independent(self) -> bool:
        """Every step of the shared parties is on the rows of several clients."""
        return False

    def check(self, topology: Topology, clients: int) -> None:
        """Refuse a topology without a shared role: there would be no common step."""
        super().check(topology, clients)
        if not shared_roles(topology):
            raise InvalidInput(
                f"one common step needs a party that all clients share; topology {topology.name!r} has no party "
                "without data"
            )

    def steps(
        self, training: Training, number: int, turns: list[ClientRound]
    ) -> Iterator[tuple[int, int, dict[int, Tensor], bool]]:
        """Yield epoch, step, each client's batch, and whether enough clients are still there."""
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
    """Return each client's share of the rows: with it the sum of the losses is the mean over all rows."""
    total = sum(len(rows) for rows in batches.values())
    return {client: len(rows) / total for client, rows in batches.items()}
