"""Which party a role of an encrypted topology is played by, and the public contexts that are sent before training."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from splitfed.core.encryption_settings import Encryption
from splitfed.core.messages import Message, Stamp
from splitfed.core.party import Party
from splitfed.core.party_state import PartyState
from splitfed.core.probe import Facts
from splitfed.core.topology import Topology, member
from splitfed.encryption.ciphertexts import next_power_of_two
from splitfed.encryption.evaluating_party import EvaluatingParty
from splitfed.encryption.key_holder_party import KeyHolderParty
from splitfed.encryption.run_keys import RunKeys
from splitfed.encryption.server_program import row_features


def keys_of(topology: Topology, replicas: int) -> RunKeys:
    """Return the key pairs of a run of `topology`, which has an `encryption`, with so many clients."""
    assert topology.encryption is not None
    holder = topology.encryption.key_holder
    return RunKeys(topology.encryption, [member(holder, replica) for replica in range(replicas)])


def make_party(topology: Topology, facts: Facts, state: PartyState, keys: RunKeys) -> Party:
    """Return the party that has `state` in an encrypted run: one that holds keys, or one that computes without."""
    settings = topology.encryption
    assert settings is not None
    if state.role != settings.key_holder:
        return EvaluatingParty(state, settings, facts.shapes)
    servers = [role for role in topology.roles if role != settings.key_holder]
    held = facts.shapes, facts.dtypes, _widths(topology, settings, facts.shapes)
    return KeyHolderParty(state, settings, keys.of(state.name), servers, *held)


def send_contexts(
    parties: Mapping[str, Party], keys: RunKeys, deliver: Callable[[Message], Message], stamp: Stamp
) -> None:
    """Let every key holder send its public context to every party that computes on ciphertexts."""
    servers = [party for party in parties.values() if isinstance(party, EvaluatingParty)]
    for first, clients in keys.groups().items():
        holder = parties[first]
        assert isinstance(holder, KeyHolderParty)
        for server in servers:
            message = holder.public_context(server.name, f"{holder.role}->{server.role}", stamp)
            server.accept_context(deliver(message), clients)


def _widths(topology: Topology, settings: Encryption, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return for each edge how wide a packed row is: what goes in or comes out of the server's layer, if wider."""
    widths = {}
    for segment in topology.segments:
        if segment.role == settings.key_holder:
            continue
        wide = max(row_features(shapes[value]) for value in (*segment.inputs, *segment.outputs))
        for edge in topology.crossings:
            if segment.name in (edge.source, edge.target):
                widths[edge.name] = next_power_of_two(wide)
    return widths
