"""Defenses of some clients alone: which client has which, and what no client can have by itself.

Only what stands at a client's own parties can differ between clients; what acts at a party that all of them share,
or puts layers into segments that they average or hand over, cannot.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from splitfed.core.defense import (
    Defense,
    GradientDefense,
    LabelDefense,
    PenaltyDefense,
    ReceiverPenaltyDefense,
    ReleaseDefense,
    TaskWeightDefense,
    WeightDefense,
)
from splitfed.core.errors import InvalidInput, check_count
from splitfed.core.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Absent(Defense):
    """Stands in place of a defense that a client does not have, so that positions stay those of the run."""

    def edges(self, topology: Topology) -> tuple[str, ...]:
        """Nothing is guarded."""
        return ()


def of_client(defenses: Sequence[Defense], client: int) -> tuple[Defense, ...]:
    """Return `defenses` as `client` has them, for whatever is made of this client alone: same length, same order."""
    return tuple(_unlimited(d) if not d.clients or client in d.clients else Absent() for d in defenses)


def missing(defenses: Sequence[Defense], client: int) -> tuple[int, ...]:
    """Return the positions in `defenses` of those that are limited to other clients than `client`."""
    return tuple(i for i, d in enumerate(defenses) if d.clients and client not in d.clients)


def check_clients(defenses: Sequence[Defense], topology: Topology, clients: int) -> None:
    """Refuse a defense for clients that are not among the `clients` there are, and one that some cannot have alone."""
    for defense in defenses:
        if defense.clients:
            _check_numbers(defense, clients)
            _check_parties(defense, topology)


def _check_numbers(defense: Defense, clients: int) -> None:
    name = type(defense).__name__
    for client in defense.clients:
        check_count(f"{name} client", client)
        if client >= clients:
            raise InvalidInput(f"{name} client={client} is not allowed: there are {clients} clients, numbered from 0")
    if len(set(defense.clients)) < len(defense.clients):
        raise InvalidInput(f"{name} clients={tuple(defense.clients)} is not allowed; expected each client once")


def _check_parties(defense: Defense, topology: Topology) -> None:
    client_roles = topology.data_roles
    refusal = f"{type(defense).__name__} for some clients alone is not allowed"
    if isinstance(defense, WeightDefense):
        raise InvalidInput(
            f"{refusal}: it is accounted for the weights of all clients together; give it to all of them"
        )
    weighs_task = isinstance(defense, TaskWeightDefense) and defense.weighs_task
    relabelled = defense.heads(topology) if isinstance(defense, LabelDefense) else ()
    for head in topology.heads:
        if weighs_task and head.role not in client_roles:
            raise InvalidInput(f"{refusal}: it weighs the loss of {head.value!r}, which {head.role!r} computes for all")
        if head.value in relabelled and head.labels not in client_roles:
            raise InvalidInput(
                f"{refusal}: the labels of {head.value!r} are at {head.labels!r}, whom all clients share"
            )
    forth = isinstance(defense, ReleaseDefense | PenaltyDefense)
    back = isinstance(defense, GradientDefense | ReceiverPenaltyDefense)
    for name in defense.edges(topology):
        edge = topology.edge(name)
        for acts, what, end in ((forth, "release", edge.source), (back, "gradient", edge.target)):
            if acts and topology.role_of(end) not in client_roles:
                role = topology.role_of(end)
                raise InvalidInput(f"{refusal}: the {what} on {name!r} leaves {role!r}, whom all clients share")


def _unlimited(defense: Defense) -> Defense:
    if not defense.clients:
        return defense
    made = copy.copy(defense)
    object.__setattr__(made, "clients", ())
    return made
