"""Calibration of method and defenses for the length of the run, and a check that schedulers of rates last as long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from splitfed.core.defense import Calibrated, Terms
from splitfed.core.errors import InvalidInput, about
from splitfed.core.executor import Combine
from splitfed.core.optimizers import last_step
from splitfed.core.topology import member
from splitfed.engines.base import Batches, ReplicaBatches, Scales
from splitfed.planning.counting import CountingTrainer
from splitfed.planning.simulation import count_rounds, simulate_rounds
from splitfed.planning.validation import Prepared
from splitfed.privacy.accountants import calibrate


def calibrate_defenses(
    prepared: Prepared, rounds: int, obstacle: str | None = None, doubt: str | None = None
) -> Prepared:
    """Return `prepared` with its method and its defenses calibrated for `rounds` rounds.

    See `Calibrated` and `Method.for_rounds`. `obstacle` and `doubt`: what the caller knows against a privacy guarantee;
    see `Terms`.
    """
    if prepared.method is not None:
        prepared = replace(prepared, method=prepared.method.for_rounds(rounds))
    with about("optimizer"):
        check_schedulers(prepared, rounds)
    if not any(isinstance(defense, Calibrated) for defense in prepared.defenses):
        return prepared
    counting = count_rounds(prepared, rounds)
    steps, epochs = zip(*(counting.step_counts(replica) for replica in range(counting.replicas)), strict=True)
    training = prepared.training
    terms = Terms(
        prepared.topologies,
        prepared.facts,
        (),
        tuple(counting.rows(replica, "train") for replica in range(counting.replicas)),
        training.batch_size,
        training.sampling == "poisson",
        steps,
        epochs,
        calibrate,
        obstacle or _obstacle(prepared),
        doubt,
        training.batch_sizes,
    )
    defenses = prepared.defenses
    settled_defenses = (
        d.calibrate(replace(terms, others=(*defenses[:i], *defenses[i + 1 :]))) if isinstance(d, Calibrated) else d
        for i, d in enumerate(defenses)
    )
    return replace(prepared, defenses=tuple(settled_defenses))


def _obstacle(prepared: Prepared) -> str | None:
    if not prepared.schedule.independent:
        return f"schedule {type(prepared.schedule).__name__}: its steps take the rows of several clients at once"
    method = prepared.method
    if method is not None and not method.traits(prepared.topology).post_processing:
        own = "give the method private= in place of dp_sgd, or " if hasattr(method, "private") else ""
        return (
            f"method {type(method).__name__}, whose messages follow from more than the parties' steps: {own}take a "
            "method that averages the weights these lead to, such as fedavg"
        )
    return None


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
