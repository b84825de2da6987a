"""The parties of a run, made one by one: in plain, or as the secure computation of its topology has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from splitfed.core.messages import Message, Stamp
from splitfed.core.party import Party
from splitfed.core.party_state import PartyState
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.registry import resolve


class PartyMaker:
    """Makes the parties of a run of `replicas` clients, the first of whom has `topology`, and keeps their keys.

    In plain there are none; a subclass has what a secure computation needs.
    """

    def __init__(self, topology: Topology, replicas: int) -> None:
        """Make or load the keys."""

    def make(self, topology: Topology, facts: TopologyFacts, state: PartyState) -> Party:
        """Return the party that has `state`."""
        return Party(state)

    def introduce(self, parties: Mapping[str, Party], deliver: Callable[[Message], Message], stamp: Stamp) -> None:
        """Let `parties`, by name, send each other what they need before the first step."""

    def write_keys(self) -> None:
        """Write the keys that are in no file yet into the key folder, where there is one."""

    def state(self) -> dict[str, Any]:
        """Write the keys, and return what a checkpoint must say of them: no secret is in it."""
        return {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse to go on from a checkpoint that was written under other keys."""


def make_party_maker(topology: Topology, replicas: int) -> PartyMaker:
    """Return who makes the parties of a run of so many clients, the first of whom has `topology`."""
    kind = PartyMaker if topology.computation is None else resolve(topology.computation.parties)
    maker: PartyMaker = kind(topology, replicas)
    return maker
