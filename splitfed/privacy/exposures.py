"""Messages that leave a data owner without a privacy guarantee, and the private values that each of them depends on.

For the privacy of a label only dependence on labels matters, since features count as known. Messages computed from
labels depend on them, and so does all that is learnt from a loss on them: gradients, weights, and what is computed from
those. A defense that changes labels once covers both; one that changes them in each step covers the loss alone. A
message that depends on labels otherwise is returned by the aggregation server in some form, so all that is learnt then
depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from splitfed.core.contents import Content
from splitfed.core.defense import Defense, LabelDefense, WeightDefense, privacy_event
from splitfed.core.privacy_events import Protects
from splitfed.core.private_values import BOTH, FEATURES, LABELS, PrivateValues
from splitfed.core.topology import Segment, Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.core.usage_counts import counted_kinds, counted_labels
from splitfed.privacy.charges import find_private_roles, learns_from_rows

Exposures = dict[str, PrivateValues]
"""Description of a place -> the private values that its messages depend on; in the order of the topology."""


def find_exposures(
    topology: Topology,
    defenses: Sequence[Defense],
    averaged: Sequence[str],
    travels: bool,
    facts: TopologyFacts | None = None,
    uploads: Mapping[str, PrivateValues] | None = None,
    clients: int = 0,
) -> Exposures:
    """Return what leaves a data owner without a privacy guarantee.

    `averaged`: roles whose weights are averaged; `travels`: whether weights leave their client at all. `facts` state
    what crosses beside features: lengths and masks, which no mechanism covers. `uploads`: description of what a
    federated method sends without a guarantee -> the private values it is computed from. `clients`: number of clients,
    0: unknown.
    """
    changed_once, changed = _guarded_heads(topology, defenses)
    heads = {head.value for head in topology.heads}
    bare = PrivateValues.NONE if heads <= changed_once else LABELS
    sent = {place: made & (FEATURES | bare) for place, made in (uploads or {}).items()}
    learnt = FEATURES if heads <= changed and not any(made & LABELS for made in sent.values()) else BOTH
    covered = _Covered(topology, defenses, clients)
    return {
        **_crossings(topology, covered, learnt, facts),
        **dict.fromkeys(_labels(topology, covered), LABELS),
        **dict.fromkeys(_weights(topology, defenses, averaged, travels, facts), learnt),
        **{place: learnt | made if made & FEATURES else made for place, made in sent.items() if made},
    }


class _Covered:
    """The places whose messages have a privacy guarantee: of all clients, or of some."""

    def __init__(self, topology: Topology, defenses: Sequence[Defense], clients: int) -> None:
        self._by_all: set[tuple[str, str]] = set()
        self._clients: dict[tuple[str, str], set[int]] = {}
        for defense in defenses:
            for guarded in self._places(topology, defense):
                self._clients.setdefault(guarded, set()).update(defense.clients)
                if not defense.clients or len(self._clients[guarded]) == clients:
                    self._by_all.add(guarded)

    @staticmethod
    def _places(topology: Topology, defense: Defense) -> set[tuple[str, str]]:
        places = {(kind, place) for kind in counted_kinds(defense) for place in defense.edges(topology)}
        if _promises_labels(defense) and isinstance(defense, LabelDefense):
            places |= {("label", head) for head in defense.heads(topology)}
        return places

    def exception(self, kind: str, place: str) -> str | None:
        """Return as a clause the clients whose messages of `kind` at `place` are not covered; None if all are."""
        if (kind, place) in self._by_all:
            return None
        clients = self._clients.get((kind, place))
        return f" of all clients but {', '.join(map(str, sorted(clients)))}" if clients else ""


def _crossings(topology: Topology, covered: _Covered, learnt: PrivateValues, facts: TopologyFacts | None) -> Exposures:
    """Return the uncovered releases and gradients that leave a data owner, and values with lengths or masks."""
    owners, found = topology.data_roles, {}
    for edge in topology.crossings:
        source, target = topology.role_of(edge.source), topology.role_of(edge.target)
        if facts is not None and not facts.data(edge.values):
            continue
        if source in owners and (left := covered.exception("activation", edge.name)) is not None:
            found[f"releases on {edge.name} ({source} to {target}){left}"] = learnt
        returns = edge.name not in topology.forward_only
        if target in owners and returns and (left := covered.exception("gradient", edge.name)) is not None:
            found[f"gradients on {edge.name} ({target} to {source}){left}"] = learnt
    told = () if facts is None else facts.told(topology)
    return found | {str(one): FEATURES for one in told if one.origin.content is Content.MASK}


def _labels(topology: Topology, covered: _Covered) -> list[str]:
    """Return the heads whose labels cross without a guarantee."""
    heads = [(head, covered.exception("label", head.value)) for head in topology.heads if len(head.path) > 1]
    return [f"labels of {h.value} ({' to '.join(h.path)}){left}" for h, left in heads if left is not None]


def _weights(
    topology: Topology, defenses: Sequence[Defense], averaged: Sequence[str], travels: bool, facts: TopologyFacts | None
) -> list[str]:
    """Return the norms of per-row gradients, and the weights that depend on rows, that leave their owner unguarded."""
    owners, guarded = topology.data_roles, find_private_roles(topology, defenses)
    norms = dict.fromkeys(pair for d in defenses if isinstance(d, WeightDefense) for pair in d.norms(topology))
    crossing = (averaged or owners) if averaged or travels else ()
    roles = [role for role in crossing if any(_changes(s, facts) for s in topology.segments_of(role))]
    return [
        *(f"norms of each row's gradient ({a} to {b})" for a, b in norms if a in owners),
        *(f"weights of {role}" for role in roles if role not in guarded),
    ]


def _changes(segment: Segment, facts: TopologyFacts | None) -> bool:
    """Return whether the sent weights of `segment` change with rows: a weight that learns, or a buffer."""
    if facts is None or facts.row_findings is None:
        return learns_from_rows(segment.module) or any(True for _ in segment.module.buffers())
    kept = {finding.segment for finding in facts.row_findings if finding.kind in ("state", "memory")}
    return segment.name in kept or learns_from_rows(segment.module)


def _guarded_heads(topology: Topology, defenses: Sequence[Defense]) -> tuple[set[str], set[str]]:
    """Return the heads whose labels are changed once with a guarantee, and those changed once or in each step.

    Defenses of some clients count too, as their guarantee is about these clients alone.
    """
    once: set[str] = set()
    changed: set[str] = set()
    for defense in defenses:
        if not (_promises_labels(defense) and isinstance(defense, LabelDefense)):
            continue
        for head in topology.heads:
            if head.value in defense.heads(topology):
                changed.add(head.value)
                if "once" in counted_labels(defense, head.task):
                    once.add(head.value)
    return once, changed


def _promises_labels(defense: Defense) -> bool:
    event = privacy_event(defense)
    return event is not None and event.protects is Protects.LABELS
