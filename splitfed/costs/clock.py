"""A simulated clock: the time training would take on given machines and links, by discrete events.

A party computes one task at a time; its uplink and its downlink each carry one message at a time. A message of n
bytes holds the uplink for n/up and the downlink for n/down seconds and arrives, if nothing is in its way, latency +
max(n/up, n/down) after it left: it streams through. So clients that send to one server share the server's downlink.
Whoever is ready first is served first; of those ready together, the lower replica. The clock draws no random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from splitfed.core.errors import InvalidInput, check_count, check_number
from splitfed.core.topology import Topology, member
from splitfed.costs.events import ReplicaWork, simulate
from splitfed.costs.machine_queues import MachineQueues
from splitfed.costs.speeds import Speeds
from splitfed.costs.steps import StepShape

Parties = Mapping[int, Mapping[str, str]]


def party_names(topology: Topology, replicas: int) -> dict[int, dict[str, str]]:
    """Return replica -> role -> party: the data owners' roles numbered by replica, the others shared by all."""
    own = topology.data_roles
    return {i: {role: member(role, i) if role in own else role for role in topology.roles} for i in range(replicas)}


class Clock:
    """Seconds since the start of training.

    `shapes`: the step of every replica, or one for all; `parties`: replica -> role -> party (see `party_names`), and
    `others` who play no role but send and receive weights, such as a server that averages them. A role that keeps a
    replica for each replica is one machine all the same. `InvalidInput` for a speed of somebody unknown.
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
        """Seconds until all that was begun is over."""
        return max([self._floor, *self._ready.values()])

    @property
    def busy(self) -> dict[str, float]:
        """Seconds each party has computed."""
        return dict(self._plant.busy)

    def train(self, batches: Mapping[int, Sequence[int]]) -> None:
        """Train replicas side by side from now on: `batches` is replica -> the rows of each of its batches.

        They begin when all that went before is over, and the clock moves on to the end of the slowest.
        """
        self._simulate(batches, together=False)

    def together(self, rows: Mapping[int, int]) -> None:
        """Take one joint step (replica -> rows): no backward begins before every replica's forward is over."""
        self._simulate({replica: [count] for replica, count in rows.items()}, together=True)

    def transfer(self, sender: str, receiver: str, nbytes: float) -> float:
        """Send `nbytes` from one party to another; return when they have arrived, in seconds.

        The sender begins as soon as it has all that was sent to it since the last training or barrier. Transfers run
        side by side, and queue for links in the order of the calls.
        """
        check_number("nbytes", nbytes, low=0)
        begin = end = max(self._floor, self._ready.get(sender, 0.0))
        if sender != receiver:
            end = self._plant.arrive(receiver, nbytes, self._plant.leave(sender, receiver, nbytes, begin))
        self._ready[receiver] = max(self._ready.get(receiver, 0.0), end)
        return end

    def barrier(self) -> None:
        """Let no party begin anything before all computations and transfers that have begun are over."""
        self._floor = self.now
        self._ready.clear()
        self._plant.release()

    def state(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {"floor": self._floor, "ready": dict(self._ready), "plant": self._plant.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`."""
        self._floor = float(state["floor"])
        self._ready = dict(state["ready"])
        self._plant.load_state(state["plant"])

    def _simulate(self, batches: Mapping[int, Sequence[int]], together: bool) -> None:
        runs = {replica: self._run(replica, rows) for replica, rows in batches.items()}
        self.barrier()
        self._floor = simulate(runs, self._plant, self._floor, together)
        self._plant.release()

    def _run(self, replica: int, rows: Sequence[int]) -> ReplicaWork:
        if replica not in self._parties or replica not in self._shapes:
            known = f"{min(self._parties)} to {max(self._parties)}" if self._parties else "none"
            raise InvalidInput(f"replica={replica!r} is not allowed; this clock knows replicas {known}")
        for count in rows:
            check_count(f"rows of a batch of replica {replica}", count, low=1)
        return ReplicaWork(self._shapes[replica], self._parties[replica], tuple(rows))
