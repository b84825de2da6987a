"""Split of each client's model into base and head, of which a method averages one and leaves the client the other."""

from __future__ import annotations

from splitfed.core.errors import InvalidInput, check_names
from splitfed.core.topology import Topology
from splitfed.federated.topology_values import only_client


def split_base_head(who: str, topology: Topology, head: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the segments of the base and those of the head, in the order they run.

    `head`: the first segment of the head among those that the client holds (None: the last of them). Raises
    `InvalidInput` for clients that hold a single segment, and for an unknown `head`.
    """
    names = tuple(s.name for s in topology.segments_of(only_client(who, topology)))
    if len(names) < 2:
        raise InvalidInput(
            f"{who} needs a cut between base and head within the client's segments, here {', '.join(names)}: cut the "
            "model there (splitfed.topologies.local(model, cuts=...))"
        )
    first_of_head = names[-1] if head is None else head
    check_names(f"{who} head", names[1:], first_of_head)
    place = names.index(first_of_head)
    return names[:place], names[place:]
