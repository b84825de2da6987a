"""What a role must do for each segment it holds: worked out once from the topology, the probe and the defenses.

Segment plans name edges and roles only; they hold no module and no tensor, so parties can share them freely.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from splitfed.core.contents import describe
from splitfed.core.defense import (
    Codec,
    Defense,
    GradientDefense,
    LabelDefense,
    LayerDefense,
    LearnedDefense,
    PenaltyDefense,
    ReceiverPenaltyDefense,
    ReleaseDefense,
    WeightDefense,
)
from splitfed.core.errors import InvalidInput
from splitfed.core.grouping import nest
from splitfed.core.topology import Edge, Head, Topology, frozen_modules
from splitfed.core.usage_counts import counted_kinds, counted_labels

if TYPE_CHECKING:
    from splitfed.core.topology_facts import TopologyFacts

D_co = TypeVar("D_co", bound=Defense, covariant=True)


@dataclass(frozen=True)
class EdgeDefense(Generic[D_co]):
    """A defense on one edge: its `position` among the run's defenses, and its share of their penalties.

    `counts`: what of its work is counted for the privacy ledger; see `splitfed.core.usage_counts`.
    """

    defense: D_co
    position: int
    share: float
    counts: frozenset[str] = frozenset()

    @cached_property
    def release_defense(self) -> ReleaseDefense | None:
        """The defense where it acts on releases, else None."""
        return self.defense if isinstance(self.defense, ReleaseDefense) else None

    @cached_property
    def penalty_defense(self) -> PenaltyDefense | None:
        """The defense where it adds a penalty at the sender, else None."""
        return self.defense if isinstance(self.defense, PenaltyDefense) else None


@dataclass(frozen=True)
class Port:
    """One edge as a segment sees it: the segment and the role at its other end (None: the same party).

    `returned`: the values whose gradient comes back on it. `defended`: those that defenses of releases act on;
    `dataless`: those that hold no data (constants, masks), which cross as they are.
    """

    edge: str
    segment: str
    role: str | None
    values: tuple[str, ...]
    guards: tuple[EdgeDefense[Defense], ...]
    returned: tuple[str, ...]
    defended: tuple[str, ...]
    dataless: frozenset[str] = frozenset()

    @property
    def returns(self) -> bool:
        """Whether a gradient comes back on it."""
        return bool(self.returned)

    @cached_property
    def release_defenses(self) -> tuple[EdgeDefense[Defense], ...]:
        """Those that act on what leaves, or want something of it."""
        return tuple(g for g in self.guards if g.release_defense is not None or g.penalty_defense is not None)

    @cached_property
    def receiver_defenses(self) -> tuple[EdgeDefense[ReceiverPenaltyDefense], ...]:
        """Those that want something where it is read."""
        wanting = (guard for guard in self.guards if isinstance(guard.defense, ReceiverPenaltyDefense))
        return tuple(cast(EdgeDefense[ReceiverPenaltyDefense], guard) for guard in wanting)

    @cached_property
    def gradient_defenses(self) -> tuple[EdgeDefense[GradientDefense], ...]:
        """Those that act on the gradient that goes back."""
        acting = (guard for guard in self.guards if isinstance(guard.defense, GradientDefense))
        return tuple(cast(EdgeDefense[GradientDefense], guard) for guard in acting)

    @cached_property
    def packs(self) -> bool:
        """Whether what crosses may take fewer bytes than its tensors."""
        return any(isinstance(guard.defense, Codec) for guard in self.guards)


@dataclass(frozen=True)
class SegmentPlan:
    """One segment's work: what it reads and from where, what it returns and to whom, the heads on it.

    `frozen`: the modules inside it that stay in evaluation mode in training; see `topology.frozen_modules`. `dataless`:
    those of its inputs that hold no data, for which no gradient is asked. `stochastic`, `plain_draws`: whether it draws
    random numbers of torch, of NumPy or Python.
    """

    segment: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    own: frozenset[str]
    overwritten: frozenset[str]
    stochastic: bool
    arrivals: tuple[Port, ...]
    departures: tuple[Port, ...]
    heads: tuple[Head, ...]
    frozen: tuple[str, ...]
    dataless: frozenset[str] = frozenset()
    plain_draws: bool = False

    @cached_property
    def ports_to_others(self) -> tuple[Port, ...]:
        """The departures to other parties."""
        return tuple(port for port in self.departures if port.role is not None)

    @cached_property
    def penalized_arrivals(self) -> tuple[Port, ...]:
        """The arrivals whose defenses may want something at this end."""
        return tuple(port for port in self.arrivals if port.receiver_defenses)


def segment_plans(
    topology: Topology,
    facts: TopologyFacts,
    defenses: Sequence[Defense],
    frozen: Mapping[str, tuple[str, ...]] | None = None,
    *,
    checked: bool = False,
) -> dict[str, tuple[SegmentPlan, ...]]:
    """Return the segment plans of every role, after each defense has said that it applies (or refused).

    `frozen`: what `topology.frozen_modules` returns, for a part of a larger topology. `checked`: the defenses were
    asked with the modules of the run, and `topology` has others in the same places, or none.
    """
    for defense in () if checked else defenses:
        defense.check(topology, facts)
    guarded = [defense.edges(topology) for defense in defenses]
    counts = [counted_kinds(defense) for defense in defenses]
    guards = {
        edge.name: tuple(
            EdgeDefense(defense, position, 1.0 / len(guarded[position]), counts[position])
            for position, defense in enumerate(defenses)
            if edge.name in guarded[position]
        )
        for edge in topology.edges
    }

    for edge in topology.edges:
        _check_order(edge.name, guards[edge.name])
        _check_numbers(edge, guards[edge.name], facts)

    def port(edge: Edge, near: str, far: str) -> Port:
        crosses = topology.role_of(near) != topology.role_of(far)
        role = topology.role_of(far) if crosses else None
        dataless = frozenset(edge.values).difference(facts.data(edge.values))
        returned, defended = facts.returned(topology, edge), facts.defended(edge.values)
        return Port(edge.name, far, role, edge.values, guards[edge.name], returned, defended, dataless)

    frozen = frozen_modules(topology) if frozen is None else frozen
    work: dict[str, list[SegmentPlan]] = {role: [] for role in topology.roles}
    for segment in topology.segments:
        work[segment.role].append(
            SegmentPlan(
                segment.name,
                segment.inputs,
                segment.outputs,
                frozenset(v for v in segment.inputs if v in topology.inputs),
                facts.overwritten[segment.name],
                segment.name in facts.stochastic,
                tuple(port(e, segment.name, e.source) for e in topology.edges if e.target == segment.name),
                tuple(port(e, segment.name, e.target) for e in topology.edges if e.source == segment.name),
                tuple(h for h in topology.heads if h.value in segment.outputs),
                frozen[segment.name],
                frozenset(segment.inputs).difference(facts.data(segment.inputs)),
                segment.name in facts.plain_draws,
            )
        )
    return {role: tuple(found) for role, found in work.items()}


def _check_order(edge: str, guards: Sequence[EdgeDefense[Defense]]) -> None:
    """Refuse what looks at the row again after a private mechanism: no promise would be left."""
    private = None
    for guard in guards:
        kind = type(guard.defense).__name__
        if private is not None and guard.release_defense is not None and guard.release_defense.peeks:
            raise InvalidInput(
                f"{kind} cannot stand behind {private} on edge {edge!r}: what it adds depends on the rows, and no "
                f"noise covers that; name it before {private}"
            )
        if "activation" in guard.counts:
            private = kind


def _check_numbers(edge: Edge, guards: Sequence[EdgeDefense[Defense]], facts: TopologyFacts) -> None:
    """Refuse whole numbers that hold data on `edge` beside what must change all that does, and warn beside the rest.

    What holds no data is nothing to defend, and an edge that carries nothing else no place for a defense.
    """
    data, defended = facts.data(edge.values), facts.defended(edge.values)
    if guards and not data:
        kind, told = type(guards[0].defense).__name__, facts.origin(edge.values[0])
        raise InvalidInput(
            f"{kind} finds nothing to act on: edge {edge.name!r} carries {describe(told)} alone; leave it out of on"
        )
    left = [v for v in data if v not in defended]
    for guard in guards if left else ():
        kind, what = type(guard.defense).__name__, f"{left[0]!r}, {facts.dtypes[left[0]]}, on edge {edge.name!r}"
        if "activation" in guard.counts or isinstance(guard.defense, (LayerDefense, LearnedDefense, Codec)):
            raise InvalidInput(f"{kind} cannot act on {what}: cut where only floating numbers cross")
        if not defended:
            raise InvalidInput(
                f"{kind} finds no floating number to act on: {what}; leave the edge out of on, or cut where floating "
                "numbers cross"
            )
        if guard.release_defense is not None or guard.penalty_defense is not None:
            warnings.warn(f"{kind} leaves {what} as it is: whole numbers cross undefended", stacklevel=2)


def find_relabelled_heads(
    topology: Topology, defenses: Sequence[Defense]
) -> dict[str, dict[str, tuple[Head, tuple[EdgeDefense[LabelDefense], ...]]]]:
    """Return the heads whose labels some defense changes: role that holds the labels -> value -> (head, defenses)."""
    heads_of_defense = [(i, d, d.heads(topology)) for i, d in enumerate(defenses) if isinstance(d, LabelDefense)]
    guards = {
        head.value: tuple(
            EdgeDefense(d, i, 1.0, counted_labels(d, head.task))
            for i, d, heads in heads_of_defense
            if head.value in heads
        )
        for head in topology.heads
    }
    return nest((h.labels, h.value, (h, guards[h.value])) for h in topology.heads if guards[h.value])


def find_weight_defenses(topology: Topology, defenses: Sequence[Defense]) -> dict[str, tuple[int, WeightDefense]]:
    """Return the defense that guards the weights of each role, with its position, or refuse two for one role."""
    defense_of_role: dict[str, tuple[int, WeightDefense]] = {}
    for position, defense in enumerate(defenses):
        if not isinstance(defense, WeightDefense):
            continue
        for role in defense.guards(topology):
            if role in defense_of_role:
                raise InvalidInput(f"the weights of role {role!r} have two guards; give one, or other roles to each")
            defense_of_role[role] = (position, defense)
    return defense_of_role
