"""What an adversary reads where a server computes on ciphertexts, and what the scorer alone reads: the key holder's.

An attack is refused where all that it would read is encrypted. Any other is handed what arrived in plain, so that it
cannot take bytes of ciphertexts for numbers; one that asks for `Needs.ENCRYPTED_LAYER` is handed everything.
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
        """Refuse an attack by `party` where what it would read is encrypted.

        A party without keys reads the gradients that arrive in plain under the protocols that leak, and nothing else.
        The view of a key holder has what it received as it crossed.
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
        """Refuse an attack in the training at a party that computes on ciphertexts."""
        settings = settings_of(topology.computation)
        if role not in settings.holders:
            raise InvalidInput(
                f"what {name!r} receives is encrypted under {settings.protocol!r}; {who} has nothing to learn from"
            )

    def select(self, view: View, attack: Attack, topology: Topology) -> View:
        """Return what of `view` is handed to `attack`: gradients of values in plain, or everything.

        What is no ciphertext but belongs to the protocol, such as a gradient of weights, is left out as well.
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
        """Return what `party` knows of its one layer that learns from gradients in plain; nothing where it has none."""
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
        """Return what the layer of `knowledge` has read in `view`, decrypted with the keys of who sent it."""
        maker, layer, found = engine.run_parties.maker, knowledge.encrypted_layer, []
        assert isinstance(maker, EncryptedPartyMaker)
        assert layer is not None
        for message in view.select(kind="activation").messages:
            if layer.value in message.tensors:
                holder = maker.keys_of(message.sender)
                found.append((load_ciphertexts(message.tensors[layer.value], holder.public), holder))
        numbers = torch.cat([decrypt(x, holder) for x, holder in found]).float()
        return layer.value, numbers, max(x.precision for x, _ in found)
