"""Charges of the privacy ledger, from counted uses: what learns before a mechanism, and whose rows it reveals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn

from splitfed.core.defense import UPLOAD, Defense, LabelDefense, WeightDefense, privacy_event
from splitfed.core.grouping import nest
from splitfed.core.privacy_events import Event, Neighbours, Protects
from splitfed.core.row_independence import mixes_rows
from splitfed.core.topology import Edge, Topology, member
from splitfed.core.topology_facts import TopologyFacts
from splitfed.core.usage_counts import OWN, SHOWN, Key, counted_kinds
from splitfed.privacy.ledger import Charge
from splitfed.privacy.row_mixing import release_mixes


class PartyCounts(NamedTuple):
    """Use counts of one party: its name and role, its client (None: it serves all), and its `UsageCounts.counts`."""

    party: str
    role: str
    client: int | None
    counts: Mapping[Key, Tensor]


class Taken(NamedTuple):
    """Number of steps a client took part in, and the largest number of steps any of its rows was in, one an epoch."""

    steps: int
    epochs: int


def charges(
    topologies: Sequence[Topology],
    facts: Sequence[TopologyFacts],
    defenses: Sequence[Defense],
    counts: Sequence[PartyCounts],
    taken: Sequence[Taken],
    travels: bool,
    mingles: bool = True,
) -> list[Charge]:
    """Return the charges of a run: of releases, gradients and labels as counted, of weights by the steps `taken`.

    `topologies`, `facts`: of each client. Replicas in the keys of `counts` are clients. `travels`: whether the schedule
    relays or averages weights. `mingles`: whether what one client sends to the aggregation server may depend on the
    rows of others in any way except by their private releases.
    """
    rows_of_uses = nest(
        ((client if replica == OWN and client is not None else replica, party, place, position), part, rows)
        for party, _, client, uses in counts
        for (place, position, replica, part), rows in uses.items()
    )
    roles = {party: role for party, role, *_ in counts}
    charge_list = []
    mixing: dict[tuple[int, str, int], bool] = {}
    # What others have released of rows that a client has shown: uses of the row that they used most.
    lent: Counter[tuple[int, str, str, str, Event]] = Counter()
    for (client, party, place, position), parts in rows_of_uses.items():
        topology, defense = topologies[client], defenses[position]
        event = privacy_event(defense)
        assert event is not None
        if place.endswith(UPLOAD):
            # Origin of all of a client's rows of a class, by segments that learn: nothing is provable but all together.
            named = replace(event, protects=Protects.MESSAGES, neighbours=Neighbours.SAME_CLASS)
            label, some = type(defense).__name__, _is_of_some(defense, defenses, topology, len(topologies))
            charge_list.append(Charge(client, party, place, label, named, parts, 0, True, mingles, False, some))
            continue
        makers = _find_makers(topology, place, defense)
        learns, guarded = _find_learning(topology, makers, defenses)
        shared = roles[party] not in topology.data_roles
        key = id(topology), place, position
        if key not in mixing:
            mixing[key] = (
                not learns and bool(makers) and _mixes_rows(topology, facts[client], place, makers, defenses, position)
            )
        # The rows of a batch are of one client, so that what mixes them carries nothing to another one.
        others_rows = {part: rows for part, rows in parts.items() if part.startswith(SHOWN)}
        label, wide = type(defense).__name__, learns or mixing[key]
        moves = (learns and (travels or shared)) or (wide and bool(others_rows))
        if not wide:
            parts = {part: rows for part, rows in parts.items() if part not in others_rows}
            for part, rows in others_rows.items():
                owners = _owners(part, client, len(topologies))
                lent.update({(owner, party, place, label, event): int(rows.max()) for owner in owners})
        some = _is_of_some(defense, defenses, topology, len(topologies))
        charge_list.append(Charge(client, party, place, label, event, parts, 0, wide, moves, guarded, some))
    return [*_add_lent_rows(charge_list, lent), *_weight_charges(topologies, defenses, taken)]


def _is_of_some(defense: Defense, defenses: Sequence[Defense], topology: Topology, clients: int) -> bool:
    """Return whether only some clients have `defense`, or one of its kind with other settings, at its places."""
    if not defense.clients:
        return False

    def places(one: Defense) -> tuple[object, ...]:
        return type(one), one.edges(topology), one.uploads, one.heads(topology) if isinstance(one, LabelDefense) else ()

    alike = [one.clients for one in defenses if places(one) == places(defense)]
    return all(alike) and len({client for some in alike for client in some}) < clients


def _owners(part: str, client: int, clients: int) -> list[int]:
    """Return the clients whose rows may be counted under `part` at `client`."""
    named = part.rpartition(" ")[2]
    return [int(named)] if named.isdecimal() else [other for other in range(clients) if other != client]


def _add_lent_rows(charge_list: Sequence[Charge], lent: Mapping[tuple[int, str, str, str, Event], int]) -> list[Charge]:
    """Return the charges with the releases of a client's rows by others added to all of its rows.

    `lent`: (client, releasing party, place, defense, event) -> uses of the row that was used most there.
    """
    left, found = dict(lent), []
    for charge in charge_list:
        mine = [
            key for key in left if (key[0], *key[2:]) == (charge.client, charge.place, charge.defense, charge.event)
        ]
        found.append(replace(charge, every=charge.every + sum(left.pop(key) for key in mine)))
    return found + [
        Charge(client, party, place, label, event, every=times)
        for (client, party, place, label, event), times in left.items()
    ]


def lent_charges(
    topology: Topology, facts: TopologyFacts, defenses: Sequence[Defense], counts: Sequence[PartyCounts]
) -> list[Charge]:
    """Return the charges of rows that are released after training and were not trained on, as in `counts`.

    Given the weights, they cost what their own releases cost, unless a step before the mechanism mixes the rows of a
    batch; `Charge.learns` then states that only the composition of all releases is bounded.
    """
    charge_list = []
    for party, _, _, uses in counts:
        for (place, position, client, part), rows in uses.items():
            event, makers = privacy_event(defenses[position]), _find_makers(topology, place, defenses[position])
            assert event is not None
            mixes = bool(makers) and _mixes_rows(topology, facts, place, makers, defenses, position)
            label = type(defenses[position]).__name__
            charge_list.append(Charge(client, party, place, label, event, {part: rows}, 0, mixes))
    return charge_list


def learns_from_rows(module: nn.Module) -> bool:
    """Return whether `module` changes with the rows it processes, or its output for a row depends on other rows."""
    # What the user froze inside a module in training mode stays frozen; a whole one in evaluation mode does not.
    return any(p.requires_grad for p in module.parameters()) or any(
        isinstance(inner, nn.modules.batchnorm._BatchNorm) or getattr(inner, "track_running_stats", False)
        for inner in module.modules()
        if inner.training or not module.training
    )


def _find_makers(topology: Topology, place: str, defense: Defense) -> set[str]:
    """Return the segments that compute what `defense` guards at a place; empty if the place is no edge."""
    edge = next((e for e in topology.crossings if e.name == place), None)
    if edge is None:
        return set()
    # A gradient is made by everything: the way there and the way back.
    if "gradient" in counted_kinds(defense):
        return {s.name for s in topology.segments}
    return _segments_before(topology, edge)


def _find_learning(topology: Topology, makers: set[str], defenses: Sequence[Defense]) -> tuple[bool, bool]:
    """Return whether any of the segments `makers` learns without a private guard, and whether any learns with one."""
    private = find_private_roles(topology, defenses)
    segments = [s for s in topology.segments if s.name in makers and learns_from_rows(s.module)]
    return any(s.role not in private for s in segments), any(s.role in private for s in segments)


def find_private_roles(topology: Topology, defenses: Sequence[Defense]) -> set[str]:
    """Return the roles whose weights are guarded with a privacy guarantee; empty if the defense has none."""
    guarding = (d for d in defenses if isinstance(d, WeightDefense) and privacy_event(d) is not None)
    return {role for defense in guarding for role in defense.guards(topology)}


def _mixes_rows(
    topology: Topology, facts: TopologyFacts, place: str, makers: set[str], defenses: Sequence[Defense], position: int
) -> bool:
    """Return whether any step before the mechanism at `position` of `place` mixes the rows of a batch."""
    inner = [e for e in topology.crossings if e.name == place or e.target in makers]
    return mixes_rows(topology, facts, makers) or any(
        release_mixes(defense, topology, facts, near.name)
        for near in inner
        for defense in (defenses[:position] if near.name == place else defenses)
        if near.name in defense.edges(topology)
    )


def _segments_before(topology: Topology, edge: Edge) -> set[str]:
    """Return all segments upstream of `edge`."""
    values, segments = set(edge.values), set()
    for segment in reversed(topology.segments):
        if values.intersection(segment.outputs):
            values.update(segment.inputs)
            segments.add(segment.name)
    return segments


def _weight_charges(
    topologies: Sequence[Topology], defenses: Sequence[Defense], taken: Sequence[Taken]
) -> list[Charge]:
    charge_list = []
    for defense in (d for d in defenses if isinstance(d, WeightDefense)):
        for client, topology in enumerate(topologies):
            roles = defense.guards(topology)
            used = defense.weight_uses(client, *taken[client]) if roles else None
            if used is not None:
                event, times = used
                names = ", ".join(member(r, client) if r in topology.data_roles else r for r in roles)
                place = f"weights of {', '.join(roles)}"
                charge_list.append(Charge(client, names, place, type(defense).__name__, event, every=times))
    return charge_list
