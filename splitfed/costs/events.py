"""Discrete-event simulation of the steps of many replicas on shared machines, whose requests wait in queues.

Requests are made in the order in which tasks are ready, ties by the lower replica, then the earlier step and task. As a
machine serves requests in order, the end of a task is known when it is requested.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitfed.costs.speeds import Machine, Speeds
from splitfed.costs.steps import StepShape

_KINDS = ("compute", "up", "down")

Event = tuple[float, int, int, int, bool]  # when, replica, step, task, whether a message has reached the downlink


@dataclass(frozen=True)
class ReplicaWork:
    """Work of one replica: the shape of its steps, role -> party, and the rows of each of its batches."""

    shape: StepShape
    parties: Mapping[str, str]
    rows: Sequence[int]


@dataclass
class _Open:
    """A step in progress: for each task, how many tasks it still waits for, and its earliest start."""

    waits: list[int]
    ready: list[float]
    left: int


class Simulation:
    """The replicas `runs`, run on `plant` from time `start`; `end`: that of the last task, in seconds.

    `together`: backward tasks start after the forward tasks of all replicas.
    """

    def __init__(self, runs: Mapping[int, ReplicaWork], plant: MachineQueues, start: float, together: bool) -> None:
        self._runs, self._plant, self._start, self._together = runs, plant, start, together
        self._heap: list[Event] = []
        self._open: dict[tuple[int, int], _Open] = {}
        self._forwards = sum(not t.backward for run in runs.values() for t in run.shape.tasks) if together else 0
        self._gate = self.end = start
        for replica, run in runs.items():
            if run.rows:
                self._begin(replica, 0)
        while self._heap:
            self._next()

    def _begin(self, replica: int, step: int) -> _Open:
        tasks = self._runs[replica].shape.tasks
        waits = [len(t.after) + (len(t.previous) if step else 0) + (self._together and t.backward) for t in tasks]
        found = self._open[replica, step] = _Open(waits, [self._start] * len(tasks), len(tasks))
        for task, count in enumerate(waits):
            if not count:
                heapq.heappush(self._heap, (self._start, replica, step, task, False))
        return found

    def _next(self) -> None:
        time, replica, step, index, reached = heapq.heappop(self._heap)
        run = self._runs[replica]
        task, rows = run.shape.tasks[index], run.rows[step]
        party, size = run.parties[task.role], task.size * rows
        if task.receiver is None:
            self._finish(replica, step, index, self._plant.compute(party, size, time))
        elif reached:
            self._finish(replica, step, index, self._plant.arrive(run.parties[task.receiver], size, time))
        else:
            at = self._plant.leave(party, run.parties[task.receiver], size, time)
            heapq.heappush(self._heap, (at, replica, step, index, True))

    def _finish(self, replica: int, step: int, index: int, time: float) -> None:
        run = self._runs[replica]
        self.end = max(self.end, time)
        same, later = run.shape.followers
        self._complete_dependency(replica, step, same[index], time)
        if step + 1 < len(run.rows) and later[index]:
            self._complete_dependency(replica, step + 1, later[index], time)
        here = self._open[replica, step]
        here.left -= 1
        if not here.left:
            del self._open[replica, step]
        if self._together and not run.shape.tasks[index].backward:
            self._finish_forward(time)

    def _complete_dependency(self, replica: int, step: int, tasks: Iterable[int], time: float) -> None:
        """Record for each of `tasks` that one of the tasks it waits for has ended at `time`."""
        open_step = self._open.get((replica, step)) or self._begin(replica, step)
        for task in tasks:
            open_step.ready[task] = max(open_step.ready[task], time)
            open_step.waits[task] -= 1
            if not open_step.waits[task]:
                heapq.heappush(self._heap, (open_step.ready[task], replica, step, task, False))

    def _finish_forward(self, time: float) -> None:
        self._gate = max(self._gate, time)
        self._forwards -= 1
        if not self._forwards:
            for replica, run in self._runs.items():
                back = [index for index, task in enumerate(run.shape.tasks) if task.backward]
                self._complete_dependency(replica, 0, back, self._gate)


class MachineQueues:
    """The parties' processors, uplinks and downlinks: when each is free, and how long each has computed.

    `roles`: party -> role; a party without an entry is the only one in a role of its own name.
    """

    def __init__(self, speeds: Speeds, roles: Mapping[str, str]) -> None:
        self._speeds, self._roles = speeds, dict(roles)
        self._machines: dict[str, Machine] = {}
        self._free: dict[str, dict[str, float]] = {kind: {} for kind in _KINDS}
        self.busy: dict[str, float] = {}

    def compute(self, party: str, flops: float, asked: float) -> float:
        """Compute `flops` at `party` from time `asked` in s, or from when it is free; return the end, in s."""
        duration = flops / self._machine(party).compute
        self.busy[party] = self.busy.get(party, 0.0) + duration
        return self._serve("compute", party, asked, duration)

    def leave(self, sender: str, receiver: str, nbytes: float, asked: float) -> float:
        """Send `nbytes` over the sender's uplink at time `asked`; return when the receiver's downlink can start, in s.

        That is the arrival of the first byte, delayed so that a fast downlink need not wait for a slow uplink.
        """
        near, far = self._machine(sender), self._machine(receiver)
        duration = nbytes / near.up
        start = self._serve("up", sender, asked, duration) - duration
        return start + max(near.latency, far.latency) + max(0.0, duration - nbytes / far.down)

    def arrive(self, receiver: str, nbytes: float, asked: float) -> float:
        """Receive `nbytes` over the downlink from time `asked`, or from when it is free; return the end, in s."""
        return self._serve("down", receiver, asked, nbytes / self._machine(receiver).down)

    def release(self) -> None:
        """Mark all processors and links as free at any time; `busy` is kept."""
        for free in self._free.values():
            free.clear()

    def state(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {"free": {kind: dict(free) for kind, free in self._free.items()}, "busy": dict(self.busy)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        self._free = {kind: dict(state["free"][kind]) for kind in _KINDS}
        self.busy = dict(state["busy"])

    def _serve(self, kind: str, party: str, asked: float, duration: float) -> float:
        free = self._free[kind]
        end = free[party] = max(asked, free.get(party, 0.0)) + duration
        return end

    def _machine(self, party: str) -> Machine:
        if party not in self._machines:
            self._machines[party] = self._speeds.of(party, self._roles.get(party, party))
        return self._machines[party]
