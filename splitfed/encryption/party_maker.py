"""Construction of the parties of an encrypted run, and storage of their key pairs in a key folder for resumed runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, Stamp
from splitfed.core.party import Party
from splitfed.core.party_state import PartyState
from splitfed.core.topology import Topology, member
from splitfed.core.topology_facts import TopologyFacts
from splitfed.encryption.evaluating_party import EvaluatingParty
from splitfed.encryption.key_holder_party import KeyHolderParty
from splitfed.encryption.keys import KeyHolder, load_keys, make_keys
from splitfed.encryption.parameters import preset
from splitfed.encryption.server_program import packed_width
from splitfed.encryption.settings import settings_of
from splitfed.engines.party_maker import PartyMaker

SHARED = "clients"


class EncryptedPartyMaker(PartyMaker):
    """Builds key holders and evaluating parties of a run; key pairs are one a client, or one for all.

    Keys are loaded from the key folder if they are there. Raises `InvalidInput` for a key file of other parameters, a
    corrupted one, and one open to other users.
    """

    def __init__(self, topology: Topology, replicas: int) -> None:
        self._settings = settings = settings_of(topology.computation)
        holders = [member(role, replica) for role in settings.holders for replica in range(replicas)]
        self._folder = None if settings.key_folder is None else Path(settings.key_folder).expanduser()
        self._name_of = dict.fromkeys(holders, SHARED) if settings.keys == "shared" else {h: h for h in holders}
        self._loaded: set[str] = set()
        self._pairs = {name: self._load_or_make(name) for name in dict.fromkeys(self._name_of.values())}

    def keys_of(self, party: str) -> KeyHolder:
        """Return the key pair of `party`."""
        return self._pairs[self._name_of[party]]

    def make(self, topology: Topology, facts: TopologyFacts, state: PartyState) -> Party:
        """Return the party with `state`: a key holder, or an evaluating party without keys."""
        settings = settings_of(topology.computation)
        if state.role not in settings.holders:
            return EvaluatingParty(state, settings, facts.shapes)
        servers = [role for role in topology.roles if role not in settings.holders]
        held = facts.shapes, facts.dtypes, _widths(topology, facts.shapes)
        return KeyHolderParty(state, settings, self.keys_of(state.name), servers, *held)

    def introduce(self, parties: Mapping[str, Party], deliver: Callable[[Message], Message], stamp: Stamp) -> None:
        """Send the public context of every key pair to every party that computes on ciphertexts."""
        servers = [party for party in parties.values() if isinstance(party, EvaluatingParty)]
        for name in self._pairs:
            first, *others = (party for party, key in self._name_of.items() if key == name)
            holder = parties[first]
            assert isinstance(holder, KeyHolderParty)
            for server in servers:
                message = holder.public_context(server.name, f"{holder.role}->{server.role}", stamp)
                server.accept_context(deliver(message), [first, *others])

    def write_keys(self) -> None:
        """Write the keys that are in no file yet into the key folder, if there is one."""
        for name, pair in self._pairs.items():
            if self._folder is not None and name not in self._loaded:
                try:
                    self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                except OSError as error:
                    where = f"key_folder={str(self._folder)!r} cannot be made here ({error.strerror})"
                    raise InvalidInput(f"{where}; give another") from None
                pair.save(self._path(name))
                self._loaded.add(name)

    def state(self) -> dict[str, Any]:
        """Write unsaved keys to the key folder; return party -> fingerprint for a checkpoint, without any secret."""
        self.write_keys()
        return {name: pair.fingerprint.hex() for name, pair in self._pairs.items()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise `InvalidInput` for a checkpoint that was written under other keys."""
        for name, pair in self._pairs.items():
            if state.get(name) == pair.fingerprint.hex():
                continue
            if self._folder is None:
                raise InvalidInput(
                    "the run was encrypted under keys that were not saved; give key_folder before the first round of "
                    "a run that is to be resumed"
                )
            what = "holds other keys" if name in self._loaded else "is missing"
            raise InvalidInput(
                f"key file {str(self._path(name))!r} {what}: the checkpoint was written under the keys of {name!r} "
                f"with fingerprint {str(state.get(name))[:8]}; put the file back"
            )

    def _load_or_make(self, name: str) -> KeyHolder:
        parameters = preset(self._settings.parameters)
        rotations = self._settings.layout == "rows"
        if self._folder is None or not self._path(name).exists():
            return make_keys(parameters, rotations=rotations)
        pair = load_keys(self._path(name))
        if pair.parameters != parameters or (rotations and not pair.public.has_rotations):
            raise InvalidInput(
                f"key file {str(self._path(name))!r} is of other parameters ({pair.parameters.describe()}) than the "
                f"run's {self._settings.parameters!r}; give another key_folder"
            )
        self._loaded.add(name)
        return pair

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}.key"


def _widths(topology: Topology, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return edge -> width of a packed row: the larger of inputs and outputs of the server's layer."""
    settings, widths = settings_of(topology.computation), {}
    for segment in topology.segments:
        if segment.role in settings.holders:
            continue
        for edge in topology.crossings:
            if segment.name in (edge.source, edge.target):
                widths[edge.name] = packed_width(segment, shapes)
    return widths
