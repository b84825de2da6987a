"""The privacy ledger of a run before training: the schedule is played, and every release counted by row."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from splitfed.aggregation.lookup import kinds_of_sums
from splitfed.core.contents import Content
from splitfed.core.defense import UPLOAD, Calibrated, Defense, LabelDefense, privacy_event
from splitfed.core.per_client_defenses import missing, of_client
from splitfed.core.private_values import PrivateValues, made_of, made_of_sum
from splitfed.core.topology import Topology, member
from splitfed.core.topology_facts import TopologyFacts
from splitfed.core.traffic import Traffic
from splitfed.core.upload_defenses import Sent, count, find_upload_defenses, private_kinds
from splitfed.core.usage_counts import SCORED, UsageCounts, counted_kinds, counted_labels, labels_of_head
from splitfed.engines.base import FED, Batches
from splitfed.engines.inference import ROWS_AT_ONCE
from splitfed.engines.observers import Observable
from splitfed.engines.parties import RunParties
from splitfed.federated.base import Method
from splitfed.planning.counting import CountingTrainer
from splitfed.planning.simulation import simulate_rounds
from splitfed.planning.validation import Prepared, labels_of
from splitfed.privacy.charges import PartyCounts, Taken, charges, lent_charges
from splitfed.privacy.exposures import find_exposures
from splitfed.privacy.ledger import PER_ROW, Charge, Ledger, default_delta, make_ledger
from splitfed.schedules.base import Schedule, shared_roles


class Site(NamedTuple):
    """One mechanism at one place: role, place, position among the defenses, number of values, and counted kinds.

    `trains`: whether it acts only in training.
    """

    role: str
    place: str
    position: int
    values: int
    kinds: frozenset[str]
    trains: bool = False


class UsageCountingTrainer(CountingTrainer):
    """A `CountingTrainer` that also counts by row the uses of each private mechanism."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        self.uses: dict[tuple[int, str], UsageCounts] = {}
        pairs = zip(prepared.topologies, prepared.facts, strict=True)
        everybody = {id(topology): list_sites(topology, facts, prepared.defenses) for topology, facts in pairs}
        self._sites = [
            [site for site in everybody[id(topology)] if site.position not in missing(prepared.defenses, replica)]
            for replica, topology in enumerate(prepared.topologies)
        ]
        for replica, client in enumerate(prepared.data.clients):
            labels = labels_of(prepared.topologies[replica], client.train)
            for site in self._sites_of_kind(replica, "once"):
                self._uses(replica, site).take(site.place, site.position, "train", len(next(iter(labels.values()))))

    def train(
        self, replica: int, epoch: int, batches: Batches, first: int = 0, part: str = "train", task: float = 1.0
    ) -> list[float]:
        """Count the messages and uses of these steps."""
        for kind in ("activation", "gradient", "step") if task else ("activation", "gradient"):
            for site, rows in itertools.product(self._sites_of_kind(replica, kind), batches):
                self._add(replica, site, part, rows)
        return super().train(replica, epoch, batches, first, part, task)

    def consult(self, replica: int, rows: Tensor, part: str) -> None:
        """Count the messages and uses of a forward pass of `rows` alone."""
        for site in self._sites_of_kind(replica, "activation"):
            for few in () if site.trains else rows.split(ROWS_AT_ONCE):
                self._add(replica, site, part, few)
        super().consult(replica, rows, part)

    def evaluate(self, part: str) -> None:
        """Count the uses of scoring `part` once."""
        for replica in range(self.replicas):
            rows = torch.arange(self.rows(replica, part))
            for site in self._sites_of_kind(replica, "activation"):
                if not site.trains:
                    self._add(replica, site, part, rows)

    def sent(self, sent: Sent, role: str) -> None:
        """Count the uses by a message to the aggregation server."""
        guards = find_upload_defenses(self.prepared.defenses, sent.kind, sent.replica)
        if any(privacy_event(keeper.defense) is not None for keeper in guards):
            count(self.uses.setdefault((sent.replica, role), UsageCounts()), sent, guards, sent.replica)
        super().sent(sent, role)

    def party_counts(self) -> list[PartyCounts]:
        """Return the counts of every party."""
        return [
            PartyCounts(self._party(role, replica), role, replica, uses.counts)
            for (replica, role), uses in self.uses.items()
        ]

    def _sites_of_kind(self, replica: int, kind: str) -> list[Site]:
        return [site for site in self._sites[replica] if kind in site.kinds]

    def _uses(self, replica: int, site: Site) -> UsageCounts:
        return self.uses.setdefault((replica, site.role), UsageCounts())

    def _add(self, replica: int, site: Site, part: str, rows: Tensor) -> None:
        origins = self.origins.get((replica, part))
        for name, counted in [(part, rows)] if origins is None else origins.select(rows):
            self._uses(replica, site).add((site.place, site.position, replica, name), counted, site.values)


def list_sites(topology: Topology, facts: TopologyFacts, defenses: Sequence[Defense]) -> list[Site]:
    """Return the places in `topology` at which private mechanisms act."""
    sites = []
    for position, defense in enumerate(defenses):
        kinds = counted_kinds(defense)
        for name in defense.edges(topology) if kinds else ():
            edge = topology.edge(name)
            trains = topology.serving.isdisjoint(topology.readers(edge))
            acted_on = {"activation": facts.defended(edge.values), "gradient": facts.returned(topology, edge)}
            for kind, end in (("activation", edge.source), ("gradient", edge.target)):
                if kind in kinds and acted_on[kind]:
                    values = len(acted_on[kind])
                    sites.append(Site(topology.role_of(end), name, position, values, frozenset({kind}), trains))
        relabelled = defense.heads(topology) if isinstance(defense, LabelDefense) else ()
        for head in topology.heads:
            if head.value in relabelled:
                acts = counted_labels(defense, head.task)
                sites.append(Site(head.labels, labels_of_head(head.value), position, 1, acts))
    return sites


def planned_ledger(prepared: Prepared, rounds: int, evaluate_every: int = 1, delta: float | None = None) -> Ledger:
    """Return the ledger that `rounds` rounds of `prepared`, with calibrated defenses, will have; nothing is trained."""
    counting = UsageCountingTrainer(prepared)
    for number in simulate_rounds(counting, prepared, rounds):
        if (number + 1) % evaluate_every == 0 or number + 1 == rounds:
            for part in SCORED:
                counting.evaluate(part)
    taken = [Taken(*counting.step_counts(replica)) for replica in range(counting.replicas)]
    rows = sum(counting.rows(replica, "train") for replica in range(counting.replicas))
    counts = counting.party_counts()
    return _make_ledger(prepared, prepared.schedule, prepared.method, counts, taken, counting.traffic, rows, delta)


def counted_ledger(engine: Observable, schedule: Schedule, method: Method | None, delta: float | None) -> Ledger:
    """Return the ledger of the uses that the parties of `engine` have counted so far."""
    parties = engine.run_parties
    pseudonyms = {replica.pseudonym: replica.index for replica in parties.replicas}
    owner = {party.name: replica.index for replica in parties.replicas for party in replica.parties.values()}
    counts = []
    replaced: Counter[str] = Counter()
    for name, party in parties.members().items():
        if name == FED or name.startswith(f"{FED}~"):
            continue
        uses = party.state.uses
        replaced.update(uses.replaced)
        if uses.counts:
            client = None if party.role in parties.shared else owner[party.name]
            by_use = {(p, i, pseudonyms.get(c, c), part): rows for (p, i, c, part), rows in uses.counts.items()}
            counts.append(PartyCounts(party.name, party.role, client, by_use))
    taken = [Taken(counts.steps, counts.most) for counts in parties.participation]
    rows = sum(parties.owners(replica)[0].state.rows("train") for replica in range(len(parties.replicas)))
    return _make_ledger(parties, schedule, method, _sum_by_party(counts), taken, engine.traffic, rows, delta, replaced)


def cost_of_releases(engine: Observable, client: int, releases: int, delta: float) -> float | None:
    """Return the epsilon at `delta` of passing a row through the parties of `client` `releases` times after training.

    For the current weights, and not part of a run's ledger. None if some of the messages have no privacy guarantee, and
    if a segment mixes the rows of a batch.
    """
    parties = engine.run_parties
    topology, defenses = parties.topologies[client], of_client(parties.defenses, client)
    facts = parties.facts[client]
    released = [edge for edge in topology.crossings if not topology.serving.isdisjoint(topology.readers(edge))]
    sites = [
        site
        for site in list_sites(topology, facts, defenses)
        if "activation" in site.kinds and not site.trains and privacy_event(defenses[site.position]) is not None
    ]
    covered = {site.place for site in sites}
    if any(told.origin.content is Content.MASK for told in facts.told(topology)):
        return None
    if not sites or any(e.name not in covered for e in released if topology.role_of(e.source) in topology.data_roles):
        return None
    counts = [
        PartyCounts(
            s.role, s.role, client, {(s.place, s.position, client, "lent"): torch.tensor([releases * s.values])}
        )
        for s in sites
    ]
    (total, *others) = make_ledger(lent_charges(topology, facts, defenses, counts), delta).totals
    return None if others or total.counted != PER_ROW else total.epsilon


def _make_ledger(
    run: Prepared | RunParties,
    schedule: Schedule,
    method: Method | None,
    counts: Sequence[PartyCounts],
    taken: Sequence[Taken],
    traffic: Traffic,
    rows: int,
    delta: float | None,
    replaced: Mapping[str, int] | None = None,
) -> Ledger:
    """Return the ledger of what a run, planned or trained, has released.

    `counts`: uses by party and row, `taken`: steps by replica, `traffic`: its messages, `rows`: training rows of all
    clients. `replaced`: place -> number of rows there that were not finite.
    """
    topology, clients, defenses = run.topologies[0], len(run.topologies), run.defenses
    kinds = frozenset(flow.kind for flow in traffic.flows if flow.receiver == FED and flow.phase == "train")
    by_schedule = clients > 1 and schedule.binds(clients) is not None
    run_charges = charges(
        run.topologies,
        run.facts,
        defenses,
        counts,
        taken,
        # True if one client's training affects other clients' segments.
        by_schedule or (clients > 1 and method is not None),
        _shows_rows_of_others(topology, schedule, clients, private_messages(method, topology, defenses), kinds),
    )
    run_charges += _method_charges(run.topologies, method, traffic)
    # A method moves weights if it sends them, or values computed with them.
    by_method = bool(kinds) and method is not None and ("weights" in kinds or method.traits(topology).post_processing)
    uploads = _find_uploads(topology, method, defenses, kinds)
    exposed = find_exposures(
        topology, defenses, run.placement.averaged, by_schedule or by_method, run.facts[0], uploads, clients
    )
    carried = [str(told) for told in run.facts[0].told(topology) if told.origin.content is Content.INPUT]
    stated = _delta(defenses, rows, delta)
    ledger = make_ledger(run_charges, stated, exposed, replaced, carried)
    if stated * rows < 1:
        return ledger
    weak = f"delta {stated:g} is not below 1 / {rows} rows: publishing one random row satisfies such a guarantee"
    totals = (replace(total, note="; ".join(filter(None, (total.note, weak)))) for total in ledger.totals)
    return replace(ledger, totals=tuple(totals))


def _delta(defenses: Sequence[Defense], rows: int, wanted: float | None) -> float:
    """Return `wanted`, otherwise the smallest delta that a defense was given, otherwise the default."""
    if wanted is not None:
        return wanted
    stated = [defense.stated_delta for defense in defenses if isinstance(defense, Calibrated)]
    return min((delta for delta in stated if delta is not None), default=default_delta(rows))


def _shows_rows_of_others(
    topology: Topology, schedule: Schedule, clients: int, private: frozenset[str], kinds: frozenset[str]
) -> bool:
    """Return whether a client's messages may reveal others' rows otherwise than through private messages of theirs."""
    shared = bool(shared_roles(topology)) or schedule.binds(clients) is not None
    return clients > 1 and (shared or not kinds <= private)


def private_messages(method: Method | None, topology: Topology, defenses: Sequence[Defense]) -> frozenset[str]:
    """Return the kinds of messages with a privacy guarantee, by defenses or by the method itself."""
    own = () if method is None else method.traits(topology).message_events
    return private_kinds(defenses) | frozenset(own)


def _method_charges(topologies: Sequence[Topology], method: Method | None, traffic: Traffic) -> list[Charge]:
    """Return the charges of the messages that the method itself makes private, one for each message flow."""
    found = []
    for client, topology in enumerate(topologies):
        events = {} if method is None else method.traits(topology).message_events
        senders = {member(role, client) for role in topology.data_roles}
        for kind, event in events.items():
            for flow, (messages, _) in traffic.flows.items():
                if (flow.phase, flow.kind, flow.receiver) == ("train", kind, FED) and flow.sender in senders:
                    place = f"{kind}{UPLOAD}"
                    found.append(Charge(client, flow.sender, place, type(method).__name__, event, every=messages))
    return found


def _find_uploads(
    topology: Topology, method: Method | None, defenses: Sequence[Defense], kinds: frozenset[str]
) -> dict[str, PrivateValues]:
    """Return description -> private values, of each kind that `method` uploads without a privacy guarantee.

    Uploads computed from weights alone are reported as weights.
    """
    if method is None or (traits := method.traits(topology)).post_processing:
        return {}
    sums, overhead = kinds_of_sums()
    told, covered, who = traits.message_values, private_messages(method, topology, defenses), type(method).__name__
    found: dict[str, PrivateValues] = {}
    for kind in sorted(kinds):
        if kind == "weights" and kind not in told:
            # Weights sent by a schedule, or computed by steps alone, are reported as weights of their role.
            continue
        if kind in sums and kind not in told:
            found[f"sums of {', '.join(sorted(told)) or 'all'} that {who} sends"] = made_of_sum(told)
        elif kind in overhead:
            found[f"{kind} that {who} sends"] = PrivateValues.NONE
        elif kind not in covered:
            found[f"{kind} that {who} sends"] = made_of(kind, told)
        elif kind not in traits.message_events:
            # Content beside the rows of a message is sent unchanged: see `splitfed.core.upload_defenses`.
            found[f"names, whole numbers and single numbers in messages of {kind}"] = made_of(kind, told)
    return found


def _sum_by_party(counts: Sequence[PartyCounts]) -> list[PartyCounts]:
    """Return the counts by party, added up over the copies of a role."""
    uses_of_party: dict[str, UsageCounts] = {}
    first_counts: dict[str, PartyCounts] = {}
    for one in counts:
        first_counts.setdefault(one.party, one)
        uses = uses_of_party.setdefault(one.party, UsageCounts())
        for key, rows in one.counts.items():
            uses.merge(key, rows)
    return [one._replace(counts=uses_of_party[name].counts) for name, one in first_counts.items()]
