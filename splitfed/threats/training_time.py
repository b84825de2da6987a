"""Installs training attacks at parties, after checking that they can work there, and grants them their knowledge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from splitfed.attacks.base import Knowledge, Needs, check_rows
from splitfed.attacks.training_time.training_attack import GRANTED_IN_TRAINING, AttackSite, TrainingAttack
from splitfed.core.errors import InvalidInput, check_names
from splitfed.core.messages import View
from splitfed.core.payload import copy_modules
from splitfed.core.per_client_defenses import of_client
from splitfed.core.random import derive
from splitfed.core.topology import Edge, Segment, Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.data.dataset import Federation
from splitfed.engines.observers import Observable
from splitfed.planning.validation import Prepared
from splitfed.registry import load
from splitfed.threats.computation_views import views_of
from splitfed.threats.fresh_segments import Architecture, head_after
from splitfed.threats.imitated_defenses import ImitatedSender
from splitfed.threats.knowledge import class_count, feed_of


def place_attacks(engine: Observable, prepared: Prepared, attacks: Mapping[str, TrainingAttack | str]) -> None:
    """Install every training attack at its party; a name stands for the attack with its usual budget.

    Raises `InvalidInput` for an unknown party, and for an attack that cannot work at its party.
    """
    for name, attack in attacks.items():
        plan = resolve_attack(attack)
        check_names("party for a training attack", engine.parties, name)
        role = engine.parties[name].role
        views_of(prepared.topology).check_learning(name, type(plan).__name__, prepared.topology, role)
        rows = prepared.data.victims
        check_rows(plan, rows.discrete, prepared.data.name, rows.unscaled)
        needs = plan.needs(_labels(prepared.topology, engine.parties[name].role) is not None)
        if never := [need for need in Needs if need in needs.difference(GRANTED_IN_TRAINING)]:
            raise InvalidInput(
                f"{type(plan).__name__} needs {', '.join(never)}; inside training an attack is granted "
                f"{', '.join(GRANTED_IN_TRAINING)} only (what arrives needs no grant)"
            )
        knowledge = _knowledge(engine, prepared, name, needs).only(needs)
        missing = knowledge.missing(needs, View(name, ()))
        if missing:
            raise InvalidInput(f"{type(plan).__name__} needs {', '.join(missing)}; this run does not grant that")
        engine.join(name, plan.enter(attack_site(engine, prepared, name, type(plan).__name__, knowledge)))


def check_questions(engine: Observable, data: Federation, evaluated: Iterable[str]) -> None:
    """Raise `InvalidInput` if a party in `evaluated` has no training attack, or if the run has no victims."""
    for party in evaluated:
        check_names("party with a training attack", engine.training_attacks, party)
        if len(data.victims) == 0:
            raise InvalidInput(
                f"there are no victims to evaluate the attack at {party!r} on: set some aside (victims=64)"
            )


def resolve_attack(given: TrainingAttack | str) -> TrainingAttack:
    """Return the training attack given by instance or name; raise `InvalidInput` for an attack of another kind."""
    found = load("attacks", given) if isinstance(given, str) else given
    plan = found.with_budget() if isinstance(found, type) and issubclass(found, TrainingAttack) else found
    if not isinstance(plan, TrainingAttack):
        raise InvalidInput(f"training attack {given!r} is not an attack that runs during training")
    return plan


def attack_site(engine: Observable, prepared: Prepared, party: str, who: str, knowledge: Knowledge) -> AttackSite:
    """Return the attack's site at `party`; raise `InvalidInput` unless exactly one value with data arrives there."""
    topology, facts = prepared.topology, prepared.facts[0]
    role = engine.parties[party].role
    if role in topology.data_roles or not topology.segments_of(role):
        raise InvalidInput(f"{who} works at a party that others send to and that has no data; {party!r} is none")
    edge, value = _arrival(topology, facts, role, who, party)
    segments, out = _segments_and_output(topology, role, value, who, party)
    seed = derive(prepared.training.seed, "intruder", party)

    def modules(pseudonym: int) -> Mapping[str, nn.Module]:
        return copy_modules(
            next(replica for replica in engine.run_parties.replicas if replica.pseudonym == pseudonym)
            .parties[role]
            .state.modules
        )

    # What it knows is the experimenter's own: a training attack must not be able to change the run by writing into it.
    return AttackSite(
        party,
        edge.name,
        value,
        facts.shapes[value],
        edge.name not in topology.forward_only,
        _labels(topology, role),
        segments,
        out,
        facts.shapes[out],
        knowledge,
        _sender(engine, prepared, edge, seed),
        modules,
        seed,
    ).copy()


def _labels(topology: Topology, role: str) -> str | None:
    """Return the head whose labels arrive at `role`; None if none do."""
    return next((h.value for h in topology.heads if role in h.path[1:]), None)


def _arrival(topology: Topology, facts: TopologyFacts, role: str, who: str, party: str) -> tuple[Edge, str]:
    arriving = [e for e in topology.crossings if topology.role_of(e.target) == role]
    received = [(e, value) for e in arriving for value in facts.data(e.values)]
    if len(received) != 1:
        values = ", ".join(repr(value) for _, value in received)
        raise InvalidInput(
            f"{who} needs a party that receives one value with data; {party!r} receives {values or 'none'}"
        )
    return received[0]


def _segments_and_output(
    topology: Topology, role: str, value: str, who: str, party: str
) -> tuple[tuple[Segment, ...], str]:
    """Return the role's segments in execution order, and the one value that they compute for a head or other roles."""
    segments = topology.segments_of(role)
    inner = {v for s in segments for v in s.inputs}
    leaving = {v for e in topology.crossings if topology.role_of(e.source) == role for v in e.values}
    final = {h.value for h in topology.heads if h.role == role}
    outs = [v for s in segments for v in s.outputs if v in leaving | final or v not in inner]
    if len(outs) != 1:
        raise InvalidInput(f"{who} needs a party that computes one value from it; {party!r} computes {', '.join(outs)}")
    return segments, outs[0]


def _sender(engine: Observable, prepared: Prepared, edge: Edge, seed: int) -> ImitatedSender:
    """Return the attack's imitation of the defenses on `edge`, those of the first client if clients differ.

    States and random numbers are the attack's own. Noise whose strength the sender's own layers have learnt (`mid`,
    `shredder`) is not drawn, as the attack does not know it.
    """
    topology, guards = prepared.topology, of_client(prepared.defenses, 0)
    return ImitatedSender(
        topology, prepared.facts[0], guards, edge, feed_of(topology, prepared.data), seed, engine.device
    )


def _knowledge(engine: Observable, prepared: Prepared, party: str, needs: frozenset[Needs]) -> Knowledge:
    """Return what `party` may know in training; architectures are those of the first client if clients differ."""
    data, topology, role = prepared.data, prepared.topology, engine.parties[party].role
    seed = derive(prepared.training.seed, "intruder", party)
    architecture = None
    if Needs.ARCHITECTURE in needs:
        guards = of_client(prepared.defenses, 0)
        # A party that works where one value arrives has no segment upstream of it.
        architecture = Architecture(
            topology, prepared.facts[0], guards, role, seed, {}, feed_of(topology, prepared.data), engine.device
        )
    return Knowledge(
        data.shape,
        data.victims.value_range,
        data.auxiliary.x.to(engine.device),
        device=engine.device,
        classes=class_count(data.task),
        auxiliary_labels=data.auxiliary.y.to(engine.device),
        architecture=architecture,
        head=head_after(topology, role, derive(seed, "head")) if Needs.HEAD in needs else None,
    )
