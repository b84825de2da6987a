"""Queues of machines and links: each serves one request at a time, in the order of the calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splitfed.costs.speeds import Machine, Speeds

_KINDS = ("compute", "up", "down")


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
