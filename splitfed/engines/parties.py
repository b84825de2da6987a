"""The parties of every replica, built from the topology, the defenses and the schedule's placement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch

from splitfed.core.defense import Defense, TaskWeightDefense
from splitfed.core.errors import InvalidInput
from splitfed.core.executor import ClientReplica
from splitfed.core.gradient_privatizer import PrivatizedParty
from splitfed.core.optimizers import Optim
from splitfed.core.party import Party
from splitfed.core.party_state import PartyState
from splitfed.core.per_client_defenses import missing, of_client
from splitfed.core.random import generator
from splitfed.core.step_plan import find_relabelled_heads, find_weight_defenses, segment_plans
from splitfed.core.topology import Topology, member
from splitfed.core.topology_facts import TopologyFacts
from splitfed.engines.base import FED, Placement
from splitfed.engines.participation import Participation
from splitfed.engines.party_maker import PartyMaker, make_party_maker


class RunParties:
    """All parties of a run: `replicas` as they train, `parties` by name, `fed` (aggregation server), `copies` by role.

    `topologies`, `facts` and `participation` are by replica.
    """

    def __init__(
        self,
        topologies: Sequence[Topology],
        facts: Sequence[TopologyFacts],
        placement: Placement,
        defenses: Sequence[Defense],
        optims: Mapping[str, Optim],
        seed: int,
        device: torch.device,
    ) -> None:
        self.placement = placement
        self.topologies, self.facts, self.defenses = topologies, facts, tuple(defenses)
        self.participation = [Participation() for _ in topologies]
        first = topologies[0]
        self.maker = make_party_maker(first, len(topologies))
        common = _party_factory(first, facts[0], defenses, optims, seed, device, self.maker)
        factories: dict[tuple[int, tuple[int, ...]], Callable[[str, str], Party]] = {(id(first), ()): common}
        factory_of_replica = []
        for replica, (topology, fact) in enumerate(zip(topologies, facts, strict=True)):
            key = id(topology), missing(defenses, replica)
            if key not in factories:
                factories[key] = _party_factory(
                    *(topology, fact, of_client(defenses, replica), optims, seed, device, self.maker)
                )
            factory_of_replica.append(factories[key])
        shared = [role for role in first.roles if role not in first.data_roles]
        self.shared = {role: common(role, role) for role in shared}
        own = [
            {role: factory_of_replica[replica](role, member(role, replica)) for role in topology.data_roles}
            for replica, topology in enumerate(topologies)
        ]
        self.copies = {role: [common(role, role) for _ in topologies] for role in placement.copied}
        self.fed = {role: common(role, FED) for role in placement.averaged}
        pseudonyms = _pseudonyms(first, len(topologies), seed)
        self.replicas = [
            ClientReplica(
                i,
                topology,
                {r: self.copies[r][i] if r in self.copies else {**own[i], **self.shared}[r] for r in topology.roles},
                pseudonyms[i],
            )
            for i, topology in enumerate(topologies)
        ]
        self.parties = _index_by_name([*(p for mine in own for p in mine.values()), *self.shared.values()], first)
        if self.fed:
            self.parties = {**self.parties, FED: next(iter(self.fed.values()))}
        elif placement.aggregation_server:
            self.parties = {**self.parties, FED: Party(PartyState(FED, FED, (), {}, Optim(), seed, {}, device))}

    @property
    def newest_epoch(self) -> int:
        """The newest epoch that any replica has trained in; 0 before the first."""
        return max(0, *(counts.newest for counts in self.participation))

    def party(self, replica: int, role: str) -> Party:
        """Return the party in `role` of `replica`, as it is used in training."""
        return self.replicas[replica].parties[role]

    def owners(self, replica: int) -> list[Party]:
        """Return the parties of `replica` that hold its rows."""
        place = self.replicas[replica]
        return [place.parties[role] for role in place.topology.data_roles]

    def serving(self, replica: int) -> ClientReplica:
        """Return the replica as it predicts: with the merged segments in place of its copies."""
        place = self.replicas[replica]
        if not self.copies:
            return place
        merged = {role: self.shared[role] for role in self.copies}
        return ClientReplica(place.index, place.topology, {**place.parties, **merged}, place.pseudonym)

    def members(self) -> dict[str, Party]:
        """Return every party by a unique name: copies and the aggregation server's roles have a suffix."""
        found = {name: party for name, party in self.parties.items() if name != FED}
        found |= {
            f"{role}~{replica}": party for role, copies in self.copies.items() for replica, party in enumerate(copies)
        }
        return found | {f"{FED}~{role}": party for role, party in self.fed.items()}


def _party_factory(
    topology: Topology,
    facts: TopologyFacts,
    defenses: Sequence[Defense],
    optims: Mapping[str, Optim],
    seed: int,
    device: torch.device,
    maker: PartyMaker,
) -> Callable[[str, str], Party]:
    work = segment_plans(topology, facts, defenses)
    weighing = [d for d in defenses if isinstance(d, TaskWeightDefense) and d.weighs_task]
    modules = {s.name: s.module for s in topology.segments}
    full_names = {s.name: s.full for s in topology.segments}
    relabelling = find_relabelled_heads(topology, defenses)
    guarded = find_weight_defenses(topology, defenses)

    def weight(epoch: int) -> float:
        return prod(d.task_weight(epoch) for d in weighing)

    def make(role: str, name: str) -> Party:
        optim = optims.get(role, Optim())
        weigh, labels = weight if weighing else None, relabelling.get(role)
        rest = facts.shapes, device, weigh, labels, full_names
        state = PartyState(name, role, work[role], modules, optim, seed, *rest)
        if role in guarded:
            position, defense = guarded[role]
            tells = tuple(receiver for sender, receiver in defense.norms(topology) if sender == role)
            state.privatizer = defense.privatizer(
                PrivatizedParty(name, role, state.modules, seed, position, state.device, tells)
            )
        # The aggregation server's copy of a role is never trained.
        return Party(state) if name == FED else maker.make(topology, facts, state)

    return make


def _index_by_name(parties: Sequence[Party], topology: Topology) -> dict[str, Party]:
    found: dict[str, Party] = {}
    for party in parties:
        if party.name == FED or found.setdefault(party.name, party) is not party:
            raise InvalidInput(f"two parties would be called {party.name!r}; rename a role of {topology.name!r}")
    return found


def _pseudonyms(topology: Topology, replicas: int, seed: int) -> list[int]:
    """Return the number that the messages of each replica carry.

    If some party never receives from a client directly, the numbers are shuffled: the party can distinguish the
    clients' messages, as it must, but not identify the clients.
    """
    heard = {
        topology.role_of(e.target) for e in topology.crossings if topology.role_of(e.source) in topology.data_roles
    }
    heard |= {role for head in topology.heads for role in head.path[1:2]}
    if all(role in heard for role in topology.roles if role not in topology.data_roles):
        return list(range(replicas))
    return torch.randperm(replicas, generator=generator(seed, "circuits")).tolist()
