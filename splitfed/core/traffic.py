"""Traffic: bytes and messages counted by phase, kind, sender and receiver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from splitfed.core.messages import Message


class Flow(NamedTuple):
    """One direction of one kind of message between two parties, in one phase."""

    phase: str
    kind: str
    sender: str
    receiver: str


class Traffic:
    """Counts every message a link carries."""

    def __init__(self) -> None:
        self._flows: dict[tuple[str, str, str, str], list[int]] = {}

    def count(self, message: Message) -> None:
        """Add one message; what is consulted within training belongs to it."""
        # All in one: this runs three times a step, and a call more, or a tuple with names, costs as much as the rest.
        phase = message.stamp.phase
        flow = ("train" if phase == "consult" else phase, message.kind, message.sender, message.receiver)
        entry = self._flows.get(flow)
        if entry is None:
            entry = self._flows[flow] = [0, 0]
        entry[0] += 1
        if message.packed is not None:
            entry[1] += message.packed
        else:
            for tensor in message.tensors.values():
                entry[1] += tensor.nbytes

    def add(self, phase: str, kind: str, sender: str, receiver: str, nbytes: int) -> None:
        """Add one message of `nbytes`."""
        entry = self._flows.setdefault((phase, kind, sender, receiver), [0, 0])
        entry[0] += 1
        entry[1] += nbytes

    @property
    def flows(self) -> dict[Flow, tuple[int, int]]:
        """Messages and bytes of every flow."""
        return {Flow(*flow): (messages, nbytes) for flow, (messages, nbytes) in self._flows.items()}

    def bytes(self, phase: str | None = "train", kind: str | None = None) -> int:
        """Return the bytes of `phase` and `kind` (None: of any)."""
        return sum(
            nbytes
            for flow, (_, nbytes) in self.flows.items()
            if (phase is None or flow.phase == phase) and (kind is None or flow.kind == kind)
        )

    def messages(self, phase: str | None = "train") -> int:
        """Return the number of messages of `phase` (None: of any)."""
        return sum(n for flow, (n, _) in self.flows.items() if phase is None or flow.phase == phase)

    def state(self) -> list[list[Any]]:
        """Return all counts as plain values."""
        return [[*flow, *entry] for flow, entry in self._flows.items()]

    def load_state(self, state: list[list[Any]]) -> None:
        """Go back to `state`."""
        self._flows = {(row[0], row[1], row[2], row[3]): [int(row[4]), int(row[5])] for row in state}

    def by_kind(self, phase: str = "train") -> Mapping[str, int]:
        """Return the bytes of `phase` by kind of message."""
        kinds = {flow.kind for flow in self.flows if flow.phase == phase}
        return {kind: self.bytes(phase, kind) for kind in sorted(kinds)}
