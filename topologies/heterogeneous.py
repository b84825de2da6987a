"""Heterogeneous clients: segments of different make at the clients, one shared segment at the server."""

from __future__ import annotations

from collections.abc import Sequence

from splitfed.errors import InvalidInput
from splitfed.graph import Topology


def heterogeneous(topologies: Sequence[Topology]) -> tuple[Topology, ...]:
    """Return `topologies`, one a client, after a check that their shared roles hold the very same segments.

    The modules of the roles without data must be the same objects, reading and returning the same values; make the
    first client's topology, then the others around its server's modules. `splitfed.train` takes the result.
    """
    if not topologies:
        raise InvalidInput("heterogeneous needs at least one topology")
    first = topologies[0]
    wanted = _shared(first)
    if not wanted:
        raise InvalidInput(f"topology {first.name!r} has no segment that clients share")
    for client, topology in enumerate(topologies):
        if set(topology.roles) != set(first.roles) or set(topology.data_roles) != set(first.data_roles):
            raise InvalidInput(f"client {client} has roles {topology.roles}; the first has {first.roles}")
        found = _shared(topology)
        for name, (module, inputs, outputs) in wanted.items():
            if name not in found:
                raise InvalidInput(f"client {client} has no shared segment {name!r}; the first has {list(wanted)}")
            if found[name][0] != module:
                raise InvalidInput(f"segment {name!r} of client {client} is another module than the first client's")
            if found[name][1:] != (inputs, outputs):
                raise InvalidInput(
                    f"segment {name!r} of client {client} reads {found[name][1]} and returns {found[name][2]}; "
                    f"the first client's {inputs} and {outputs}"
                )
        if set(found) != set(wanted):
            raise InvalidInput(f"client {client} shares {sorted(found)}; the first {sorted(wanted)}")
    return tuple(topologies)


def _shared(topology: Topology) -> dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]]:
    return {s.name: (id(s.module), s.inputs, s.outputs) for s in topology.segments if s.role not in topology.data_roles}
