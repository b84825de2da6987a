"""What a role must do for each segment it holds: worked out once from the topology, the probe and the defenses.

Duties name edges and roles only; they hold no module and no tensor, so parties can share them freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitfed.defense import Defense
from splitfed.graph import Edge, Head, Topology
from splitfed.probe import Facts


@dataclass(frozen=True)
class Guard:
    """A defense on one edge: its `position` among the run's defenses, and its share of their penalties."""

    defense: Defense
    position: int
    share: float


@dataclass(frozen=True)
class Port:
    """One edge as a segment sees it: the segment and the role at its other end (None: the same party).

    `returns`: whether a gradient comes back on it.
    """

    edge: str
    segment: str
    role: str | None
    values: tuple[str, ...]
    guards: tuple[Guard, ...]
    returns: bool = True


@dataclass(frozen=True)
class Duty:
    """One segment's work: what it reads and from where, what it returns and to whom, the heads on it."""

    segment: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    own: frozenset[str]
    overwritten: frozenset[str]
    stochastic: bool
    arrivals: tuple[Port, ...]
    departures: tuple[Port, ...]
    heads: tuple[Head, ...]


def duties(topology: Topology, facts: Facts, defenses: Sequence[Defense]) -> dict[str, tuple[Duty, ...]]:
    """Return the duties of every role, after each defense has said that it applies (or refused)."""
    for defense in defenses:
        defense.check(topology, facts)
    guarded = [defense.edges(topology) for defense in defenses]
    guards = {
        edge.name: tuple(
            Guard(defense, position, 1.0 / len(guarded[position]))
            for position, defense in enumerate(defenses)
            if edge.name in guarded[position]
        )
        for edge in topology.edges
    }

    def port(edge: Edge, near: str, far: str) -> Port:
        crosses = topology.role_of(near) != topology.role_of(far)
        role = topology.role_of(far) if crosses else None
        returns = edge.name not in topology.forward_only
        return Port(edge.name, far, role, edge.values, guards[edge.name], returns)

    work: dict[str, list[Duty]] = {role: [] for role in topology.roles}
    for segment in topology.segments:
        work[segment.role].append(
            Duty(
                segment.name,
                segment.inputs,
                segment.outputs,
                frozenset(v for v in segment.inputs if v in topology.inputs),
                facts.overwritten[segment.name],
                segment.name in facts.stochastic,
                tuple(port(e, segment.name, e.source) for e in topology.edges if e.target == segment.name),
                tuple(port(e, segment.name, e.target) for e in topology.edges if e.source == segment.name),
                tuple(h for h in topology.heads if h.value in segment.outputs),
            )
        )
    return {role: tuple(found) for role, found in work.items()}


def relabelled(topology: Topology, defenses: Sequence[Defense]) -> dict[str, dict[str, tuple[Head, tuple[Guard, ...]]]]:
    """Return, by the role that holds the labels, the heads whose labels some defense changes, and which do."""
    chosen = [defense.heads(topology) for defense in defenses]
    found: dict[str, dict[str, tuple[Head, tuple[Guard, ...]]]] = {}
    for head in topology.heads:
        guards = tuple(Guard(d, i, 1.0) for i, d in enumerate(defenses) if head.value in chosen[i])
        if guards:
            found.setdefault(head.labels, {})[head.value] = (head, guards)
    return found
