"""The simulated clock of a federated method: its training steps, and its messages between the rounds.

All steps that the method takes count, also those that only compute a gradient (`Learner.gradient`); forward passes
alone (embeddings, scores of public rows) and the aggregation server's computations take no time. Messages of one kind
between two parties in a query or an aggregation are one transfer, in the order in which they started, and run in
parallel; steps taken there come after the transfers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from splitfed.core.traffic import Flow, Traffic
from splitfed.costs.clock import Clock
from splitfed.engines.base import FED
from splitfed.federated.learner import Learner


class StepCountingLearner:
    """A learner that records the batch sizes of its steps in `steps`, and forwards everything else."""

    def __init__(self, inner: Learner, steps: list[int]) -> None:
        self._inner, self._steps = inner, steps

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the wrapped learner."""
        return getattr(self._inner, name)

    def at(self, role: str) -> StepCountingLearner:
        """Return the client's party in `role` alone, its steps noted as well."""
        return StepCountingLearner(self._inner.at(role), self._steps)

    def train(
        self, epoch: int, batches: Sequence[Tensor], first: int = 0, part: str = "train", task: float = 1.0
    ) -> list[float]:
        """Record the batch sizes for the clock, and train."""
        self._steps.extend(len(rows) for rows in batches if len(rows))
        return self._inner.train(epoch, batches, first, part, task)

    def gradient(self, batches: Sequence[Tensor]) -> dict[str, Tensor]:
        """Record the batch sizes for the clock, and return the gradient."""
        self._steps.extend(len(rows) for rows in batches if len(rows))
        return self._inner.gradient(batches)


class MethodClock:
    """Moves `clock` by the steps and messages of a method's clients; `learners` wrap the given ones."""

    def __init__(self, clock: Clock, traffic: Traffic, learners: Sequence[Learner]) -> None:
        self.clock, self.traffic = clock, traffic
        self._steps: dict[int, list[int]] = {one.replica: [] for one in learners}
        noted: list[Any] = [StepCountingLearner(one, self._steps[one.replica]) for one in learners]
        self.learners: tuple[Learner, ...] = tuple(noted)

    def pop_steps(self, replica: int) -> list[int]:
        """Return the batch sizes of the steps of `replica` since the last call."""
        found = list(self._steps[replica])
        self._steps[replica].clear()
        return found

    @contextmanager
    def advance_clock(self) -> Iterator[None]:
        """Advance the clock by the aggregation server's transfers inside the block, then by the steps taken there."""
        before = self._flows()
        yield
        for flow, nbytes in self._flows().items():
            if (more := nbytes - before.get(flow, 0)) > 0:
                self.clock.transfer(flow.sender, flow.receiver, more)
        self.clock.barrier()
        steps = {replica: sizes for replica in self._steps if (sizes := self.pop_steps(replica))}
        if steps:
            self.clock.train(steps)

    def _flows(self) -> dict[Flow, int]:
        return {
            flow: nbytes
            for flow, (_, nbytes) in self.traffic.flows.items()
            if flow.phase == "train" and FED in (flow.sender, flow.receiver)
        }
