"""A simulated clock: the time training would take on given machines and links, by discrete events.

A party computes one task at a time; its uplink and its downlink each carry one message at a time. A message of n bytes
occupies the uplink for n/up and the downlink for n/down seconds and arrives, without waiting, latency + max(n/up,
n/down) after it left, as it is streamed. So clients that send to one server share the server's downlink. Requests are
served in the order in which they are ready, ties by the lower replica. The clock draws no random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from splitfed.core.errors import InvalidInput, check_count, check_number
from splitfed.core.topology import Topology, member
from splitfed.costs.events import MachineQueues, ReplicaWork, Simulation
from splitfed.costs.speeds import Speeds
from splitfed.costs.steps import StepShape

Parties = Mapping[int, Mapping[str, str]]


def party_names(topology: Topology, replicas: int) -> dict[int, dict[str, str]]:
    """Return replica -> role -> party: the data owners' roles numbered by replica, the others shared by all."""
    own = topology.data_roles
    return {i: {role: member(role, i) if role in own else role for role in topology.roles} for i in range(replicas)}


class Clock:
    """Simulated seconds since the start of training.

    `shapes`: the step of every replica, or one for all; `parties`: replica -> role -> party (see `party_names`), and
    `others`: parties without a role that send and receive weights, such as an aggregation server. A role with a copy
    for each replica is a single machine. Raises `InvalidInput` for a speed of an unknown party.
    """

    def __init__(
        self, shapes: StepShape | Mapping[int, StepShape], speeds: Speeds, parties: Parties, others: Iterable[str] = ()
    ) -> None:
        self._shapes = dict.fromkeys(parties, shapes) if isinstance(shapes, StepShape) else dict(shapes)
        self._parties = {replica: dict(names) for replica, names in parties.items()}
        roles = {party: role for names in parties.values() for role, party in names.items()}
        speeds.check([*roles, *others], [*roles.values(), *others])
        self._plant = MachineQueues(speeds, roles)
        self._floor = 0.0
        self._ready: dict[str, float] = {}

    @property
    def now(self) -> float:
        """Seconds until everything that was started has ended."""
        return max([self._floor, *self._ready.values()])

    @property
    def busy(self) -> dict[str, float]:
        """Computing time of each party, in seconds."""
        return dict(self._plant.busy)

    def train(self, batches: Mapping[int, Sequence[int]]) -> None:
        """Train replicas in parallel from now on: `batches` is replica -> the rows of each of its batches.

        They start when everything before has ended, and the clock moves to the end of the slowest.
        """
        self._simulate(batches, together=False)

    def together(self, rows: Mapping[int, int]) -> None:
        """Take one joint step (replica -> rows): backward passes start after the forward passes of all replicas."""
        self._simulate({replica: [count] for replica, count in rows.items()}, together=True)

    def transfer(self, sender: str, receiver: str, nbytes: float) -> float:
        """Send `nbytes` from one party to another; return the time of arrival, in seconds.

        The sender starts when it has received all that was sent to it since the last training or barrier. Transfers run
        in parallel, and queue for links in the order of the calls.
        """
        check_number("nbytes", nbytes, low=0)
        begin = end = max(self._floor, self._ready.get(sender, 0.0))
        if sender != receiver:
            end = self._plant.arrive(receiver, nbytes, self._plant.leave(sender, receiver, nbytes, begin))
        self._ready[receiver] = max(self._ready.get(receiver, 0.0), end)
        return end

    def barrier(self) -> None:
        """Delay everything that follows until all started computations and transfers have ended."""
        self._floor = self.now
        self._ready.clear()
        self._plant.release()

    def state(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {"floor": self._floor, "ready": dict(self._ready), "plant": self._plant.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        self._floor = float(state["floor"])
        self._ready = dict(state["ready"])
        self._plant.load_state(state["plant"])

    def _simulate(self, batches: Mapping[int, Sequence[int]], together: bool) -> None:
        runs = {replica: self._run(replica, rows) for replica, rows in batches.items()}
        self.barrier()
        self._floor = Simulation(runs, self._plant, self._floor, together).end
        self._plant.release()

    def _run(self, replica: int, rows: Sequence[int]) -> ReplicaWork:
        if replica not in self._parties or replica not in self._shapes:
            known = f"{min(self._parties)} to {max(self._parties)}" if self._parties else "none"
            raise InvalidInput(f"replica={replica!r} is not allowed; this clock knows replicas {known}")
        for count in rows:
            check_count(f"rows of a batch of replica {replica}", count, low=1)
        return ReplicaWork(self._shapes[replica], self._parties[replica], tuple(rows))
