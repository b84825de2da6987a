"""The base of the methods that average a part of each client's model, and leave it the rest: where the border is."""

from __future__ import annotations

from dataclasses import dataclass

from splitfed.core.errors import InvalidInput, unknown
from splitfed.core.topology import Topology
from splitfed.federated.averaging import Averaging
from splitfed.federated.topology_values import only_client


@dataclass(frozen=True, kw_only=True)
class Bordered(Averaging):
    """`head`: the first segment of the head among those that the client holds (default: the last of them)."""

    head: str | None = None

    def check(self, topology: Topology, clients: int) -> None:
        """Refuse clients that hold a single piece, and a head that is not there."""
        self.split_base_head(topology)
        super().check(topology, clients)

    def split_base_head(self, topology: Topology) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the segments of the base and those of the head, in the order they run."""
        names = tuple(s.name for s in topology.segments_of(only_client(self.who, topology)))
        if len(names) < 2:
            raise InvalidInput(
                f"{self.who} needs a border within what the client holds, which is {', '.join(names)} here: cut the "
                "model there (splitfed.topologies.local(model, cuts=...))"
            )
        first_of_head = names[-1] if self.head is None else self.head
        if first_of_head not in names[1:]:
            raise unknown(f"{self.who} head", first_of_head, names[1:])
        place = names.index(first_of_head)
        return names[:place], names[place:]
