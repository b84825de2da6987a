"""Number of optimizer steps of every party in a run, and a check that learning-rate schedulers last as long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from splitfed.core.errors import InvalidInput
from splitfed.core.executor import Combine
from splitfed.core.optimizers import last_step
from splitfed.core.topology import member
from splitfed.engines.base import Batches, ReplicaBatches, Scales
from splitfed.planning.counting import CountingTrainer
from splitfed.planning.simulation import simulate_rounds
from splitfed.planning.validation import Prepared


class StepCountingTrainer(CountingTrainer):
    """A `CountingTrainer` that counts the optimizer steps of every party; `updates`: party -> steps.

    A shared role that is copied for each client is counted for each client.
    """

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        self.updates: Counter[tuple[str, str]] = Counter()
        self._together = False

    def train(
        self, replica: int, epoch: int, batches: Batches, first: int = 0, part: str = "train", task: float = 1.0
    ) -> list[float]:
        """Count the messages and the optimizer steps of these batches."""
        taken = sum(len(rows) > 0 for rows in batches)
        if not self._together:
            self._count_updates((replica,), -(-taken // self.prepared.training.accumulate))
        return super().train(replica, epoch, batches, first, part, task)

    def train_together(
        self, epoch: int, step: int, batches: ReplicaBatches, scales: Scales, combine: Combine | None = None
    ) -> dict[int, float]:
        """Count the messages of a joint step and one optimizer step of every party."""
        self._count_updates(tuple(batches), 1)
        self._together = True
        try:
            return super().train_together(epoch, step, batches, scales, combine)
        finally:
            self._together = False

    def _count_updates(self, replicas: Sequence[int], steps: int) -> None:
        copied, owners = self.prepared.placement.copied, self.topology.data_roles
        self.updates.update(
            dict.fromkeys(
                (
                    (role, member(role, replica) if role in owners or role in copied else role)
                    for replica in replicas
                    for role in self.topology.roles
                ),
                steps,
            )
        )


def check_schedulers(prepared: Prepared, rounds: int) -> None:
    """Raise `InvalidInput` for a learning-rate scheduler that ends before the `rounds` of the run; see `last_step`."""
    ends = {role: last for role, optim in prepared.optims.items() if (last := last_step(optim)) is not None}
    ends = {role: last for role, last in ends.items() if prepared.topology.segments_of(role)}
    counted: Counter[tuple[str, str]] = Counter()
    if any(prepared.optims[role].scheduler_every == "step" for role in ends):
        trainer = StepCountingTrainer(prepared)
        for _ in simulate_rounds(trainer, prepared, rounds):
            pass
        counted = trainer.updates
    for role, last in ends.items():
        every = prepared.optims[role].scheduler_every
        steps = {name: number for (of, name), number in counted.items() if of == role}
        name, taken = max(steps.items(), key=lambda one: one[1]) if every == "step" and steps else (role, rounds)
        if taken > last:
            raise InvalidInput(
                f"scheduler {prepared.optims[role].scheduler} of {name!r} has too few steps for the run: it ends after "
                f"{last}, and is stepped {taken} times, once a {every}; give it total_steps={taken}"
            )
