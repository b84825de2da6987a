"""What an adversary can read in an encrypted run, and the key holder's decrypted values for the scorer.

An attack is refused if all messages that it would read are encrypted. Other attacks get only what arrived in the clear,
so that they cannot take bytes of ciphertexts for numbers; one that needs `Needs.ENCRYPTED_LAYER` gets all messages.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from splitfed.attacks.base import Attack, Knowledge, Needs
from splitfed.attacks.encrypted_layer import EncryptedLayer
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import FED, View
from splitfed.core.topology import Topology
from splitfed.encryption.ciphertexts import decrypt, load_ciphertexts
from splitfed.encryption.evaluating_party import MASK
from splitfed.encryption.key_holder_party import WEIGHT
from splitfed.encryption.noise import TAIL, scalar_noise, vector_noise
from splitfed.encryption.parameter_fit import parameters_of
from splitfed.encryption.party_maker import EncryptedPartyMaker
from splitfed.encryption.settings import CONSTANT_MASK, MASKED_WEIGHTS, settings_of
from splitfed.engines.engine import Engine
from splitfed.threats.computation_views import ComputationViews


class EncryptedViews(ComputationViews):
    """What the parties of an encrypted run can read."""

    def check_readable(self, name: str, attack: Attack, engine: Engine, party: str, client: int) -> None:
        """Raise `InvalidInput` for an attack by `party` whose required messages are encrypted.

        A party without keys reads only the gradients that arrive in the clear under the protocols that leak. The view
        of a key holder holds its received messages as they were sent, before decryption.
        """
        if party == FED:
            return
        settings = settings_of(engine.topologies[client].computation)
        encrypted = {Needs.RELEASES} if settings.leaks else {Needs.RELEASES, Needs.GRADIENTS, Needs.ENCRYPTED_LAYER}
        reads_plain = Needs.GRADIENTS in attack.requires and Needs.OWN_INPUTS not in attack.requires
        evaluates = engine.parties[party].role not in settings.holders
        if attack.requires & encrypted or (evaluates and not (settings.leaks and reads_plain)):
            beside = "beside gradients " if settings.leaks else ""
            raise InvalidInput(
                f"what {party!r} receives {beside}is encrypted under {settings.protocol!r}; {name} has nothing to read"
            )

    def check_learning(self, name: str, who: str, topology: Topology, role: str) -> None:
        """Raise `InvalidInput` for an attack during training at a party that computes on ciphertexts."""
        settings = settings_of(topology.computation)
        if role not in settings.holders:
            raise InvalidInput(
                f"what {name!r} receives is encrypted under {settings.protocol!r}; {who} has nothing to learn from"
            )

    def select(self, view: View, attack: Attack, topology: Topology) -> View:
        """Return the part of `view` that `attack` gets: gradients of values in the clear, or everything.

        Plain tensors that belong to the protocol, such as a gradient of weights, are left out as well.
        """
        if Needs.ENCRYPTED_LAYER in attack.requires:
            return view
        values = {value for edge in topology.crossings for value in edge.values}
        kept = []
        for message in view.select(kind="gradient").messages:
            tensors = {n: t for n, t in message.tensors.items() if n in values and t.is_floating_point()}
            if tensors:
                kept.append(message._replace(tensors=tensors))
        return View(view.party, tuple(kept), view.segments)

    def knowledge(self, engine: Engine, party: str, client: int) -> dict[str, EncryptedLayer]:
        """Return `Knowledge` fields on the layer that `party` trains with plain gradients; empty if it has none."""
        topology, role = engine.topologies[client], engine.parties[party].role
        settings = settings_of(topology.computation)
        segments, rate = topology.segments_of(role), engine.parties[party].state.rate
        if not settings.leaks or role in settings.holders or len(segments) != 1 or rate is None:
            return {}
        (segment,), parameters = segments, parameters_of(topology)
        (value,), (result,) = segment.inputs, segment.outputs
        scale = 2.0**parameters.scale_bits
        layer = EncryptedLayer(
            segment=segment.name,
            value=value,
            result=result,
            weight=WEIGHT,
            masked=MASKED_WEIGHTS if settings.protocol == CONSTANT_MASK else None,
            mask=MASK,
            rate=rate,
            bound=settings.bound,
            fresh=TAIL * parameters.noise,
            encoding=TAIL * scalar_noise(1, settings.bound, scale),
            # One rescaling of the sum, and the weights that are added to it.
            rounding=TAIL * math.hypot(parameters.noise, vector_noise(parameters.degree, 1, 1.0, scale)),
        )
        return {"encrypted_layer": layer}

    def read_hidden(self, engine: Engine, view: View, knowledge: Knowledge) -> tuple[str, Tensor, float]:
        """Return value name, decrypted inputs and precision of the layer in `knowledge`, from messages in `view`."""
        maker, layer, found = engine.run_parties.maker, knowledge.encrypted_layer, []
        assert isinstance(maker, EncryptedPartyMaker)
        assert layer is not None
        for message in view.select(kind="activation").messages:
            if layer.value in message.tensors:
                holder = maker.keys_of(message.sender)
                found.append((load_ciphertexts(message.tensors[layer.value], holder.public), holder))
        numbers = torch.cat([decrypt(x, holder) for x, holder in found]).float()
        return layer.value, numbers, max(x.precision for x, _ in found)
