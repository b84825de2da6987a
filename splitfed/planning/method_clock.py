"""The simulated clock beside a federated method: the steps that it takes, and what crosses between the rounds.

Steps are as many as the method really takes, those that only compute a gradient (`Learner.gradient`) among them; what
is computed forward alone (embeddings, scores of public rows) and what the aggregation server computes take no time.
What crosses in a query or a fusion goes side by side, all of one kind between two parties as one transfer, in the order
in which it began; steps taken there come after it.
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
    """A learner whose steps are noted in `steps`, the rows of each; everything else is the learner's own."""

    def __init__(self, inner: Learner, steps: list[int]) -> None:
        self._inner, self._steps = inner, steps

    def __getattr__(self, name: str) -> Any:
        """Return what the learner has."""
        return getattr(self._inner, name)

    def at(self, role: str) -> StepCountingLearner:
        """Return the client's party in `role` alone, its steps noted as well."""
        return StepCountingLearner(self._inner.at(role), self._steps)

    def train(
        self, epoch: int, batches: Sequence[Tensor], first: int = 0, part: str = "train", task: float = 1.0
    ) -> list[float]:
        """Record the batches' sizes for the clock, and let the learner take the steps."""
        self._steps.extend(len(rows) for rows in batches if len(rows))
        return self._inner.train(epoch, batches, first, part, task)

    def gradient(self, batches: Sequence[Tensor]) -> dict[str, Tensor]:
        """Record the batches' sizes for the clock, and return the learner's gradient."""
        self._steps.extend(len(rows) for rows in batches if len(rows))
        return self._inner.gradient(batches)


class MethodClock:
    """Moves `clock` by what the clients of a method do and send; `learners` are the given ones, their steps noted."""

    def __init__(self, clock: Clock, traffic: Traffic, learners: Sequence[Learner]) -> None:
        self.clock, self.traffic = clock, traffic
        self._steps: dict[int, list[int]] = {one.replica: [] for one in learners}
        noted: list[Any] = [StepCountingLearner(one, self._steps[one.replica]) for one in learners]
        self.learners: tuple[Learner, ...] = tuple(noted)

    def pop_steps(self, replica: int) -> list[int]:
        """Return the rows of each step that `replica` has taken since this was last asked."""
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
