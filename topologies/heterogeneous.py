"""Heterogeneous clients: client segments of different architectures with the same shared segments at other roles."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Head, Topology
from splitfed.topologies.fusion import Fusion


def heterogeneous(topologies: Sequence[Topology]) -> tuple[Topology, ...]:
    """Return `topologies`, one a client, for `splitfed.train`, after a check that their shared roles match.

    The segments of roles without data must hold the same module objects: build the first client's topology, then the
    others around its server's modules. All must have the same inputs, segments by name and role, values on edges, and
    heads; values within a client may differ. Raises `InvalidInput` that names the client.
    """
    client_topologies = tuple(topologies)
    if not client_topologies:
        raise InvalidInput("heterogeneous needs at least one topology")
    if not _shared(client_topologies[0]):
        raise InvalidInput(f"topology {client_topologies[0].name!r} has no segment that clients share")
    for client, topology in enumerate(client_topologies):
        for what, wanted in _plan(client_topologies[0]).items():
            plan = _plan(topology)[what]
            if plan != wanted:
                raise InvalidInput(f"client {client} has {what} {plan}; the first client has {wanted}")
        for name, module in _shared(client_topologies[0]).items():
            if not _same_module(module, _shared(topology)[name]):
                raise InvalidInput(f"segment {name!r} of client {client} is another module than the first client's")
    return client_topologies


def _plan(topology: Topology) -> dict[str, list[str]]:
    """Return descriptions of all properties in which the clients' topologies must agree."""
    return {
        "inputs": [f"{value} of {role}" for value, role in topology.inputs.items()],
        "segments": [f"{s.name} at {s.role}" for s in topology.segments],
        "crossings": [f"{e.name} with {', '.join(e.values)}" for e in topology.crossings],
        "heads": [_describe_head(head) for head in topology.heads],
        "forward_only": sorted(topology.forward_only),
    }


def _describe_head(head: Head) -> str:
    task = "the data's task" if head.task is None else f"{head.task.name} of {head.task.outputs}"
    labels = f"labels {head.target or ''}".strip()
    return f"{head.value} with {labels} by {' -> '.join(head.path)}, {task}, weight {head.weight:g}"


def _shared(topology: Topology) -> dict[str, nn.Module]:
    return {s.name: s.module for s in topology.segments if s.role not in topology.data_roles}


def _same_module(one: nn.Module, other: nn.Module) -> bool:
    # Each builder call makes a new fusion; fusions without weights are equivalent.
    fusions = isinstance(one, Fusion) and isinstance(other, Fusion) and one.how == other.how
    return one is other or fusions
