"""Traffic: bytes and messages counted by phase, kind, sender and receiver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Flow(NamedTuple):
    """One direction of one kind of message between two parties, in one phase."""

    phase: str
    kind: str
    sender: str
    receiver: str


class Traffic:
    """Counts every message a link carries.

    `counters`: (phase, kind, sender, receiver) -> [messages, bytes], to which a link adds by itself: that happens three
    times a step, where a call or a tuple with names costs as much as the rest.
    """

    def __init__(self) -> None:
        self.counters: dict[tuple[str, str, str, str], list[int]] = {}

    def add(self, phase: str, kind: str, sender: str, receiver: str, nbytes: int) -> None:
        """Add one message of `nbytes`."""
        entry = self.counters.setdefault((phase, kind, sender, receiver), [0, 0])
        entry[0] += 1
        entry[1] += nbytes

    @property
    def flows(self) -> dict[Flow, tuple[int, int]]:
        """Messages and bytes of every flow."""
        return {Flow(*flow): (messages, nbytes) for flow, (messages, nbytes) in self.counters.items()}

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
        return [[*flow, *entry] for flow, entry in self.counters.items()]

    def load_state(self, state: list[list[Any]]) -> None:
        """Go back to `state`."""
        self.counters = {(row[0], row[1], row[2], row[3]): [int(row[4]), int(row[5])] for row in state}

    def by_kind(self, phase: str = "train") -> Mapping[str, int]:
        """Return the bytes of `phase` by kind of message."""
        kinds = {flow.kind for flow in self.flows if flow.phase == phase}
        return {kind: self.bytes(phase, kind) for kind in sorted(kinds)}
