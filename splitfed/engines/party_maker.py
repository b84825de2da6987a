"""Construction of the parties of a run, plain or for the secure computation of its topology."""

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
    """Builds the parties of a run of `replicas` clients, the first with `topology`, and stores their keys.

    Plain parties have no keys; a subclass adds what a secure computation needs.
    """

    def __init__(self, topology: Topology, replicas: int) -> None:
        """Make or load the keys, of which plain parties have none."""

    def make(self, topology: Topology, facts: TopologyFacts, state: PartyState) -> Party:
        """Return the party with `state`."""
        return Party(state)

    def introduce(self, parties: Mapping[str, Party], deliver: Callable[[Message], Message], stamp: Stamp) -> None:
        """Let `parties`, by name, exchange what they need before the first step, such as public keys."""

    def write_keys(self) -> None:
        """Write the keys that are in no file yet into the key folder, if there is one."""

    def state(self) -> dict[str, Any]:
        """Write the keys, and return what a checkpoint needs to identify them, without any secret."""
        return {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise `InvalidInput` for a checkpoint that was written under other keys."""


def make_party_maker(topology: Topology, replicas: int) -> PartyMaker:
    """Return the builder of the parties of a run of `replicas` clients, the first with `topology`."""
    kind = PartyMaker if topology.computation is None else resolve(topology.computation.parties)
    maker: PartyMaker = kind(topology, replicas)
    return maker
