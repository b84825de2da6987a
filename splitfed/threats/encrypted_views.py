"""What an adversary reads where a server computes on ciphertexts, and what the scorer alone reads: the key holder's.

An attack is refused where all that it would read is encrypted. Any other is handed what arrived in plain, so that it
cannot take bytes of ciphertexts for numbers; one that asks for `Needs.ENCRYPTED_LAYER` is handed everything.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from splitfed.attacks.base import Attack, Needs
from splitfed.attacks.encrypted_layer import EncryptedLayer
from splitfed.core.encryption_settings import CONSTANT_MASK, Encryption
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import FED, View
from splitfed.core.topology import Topology
from splitfed.encryption.ciphertexts import decrypt, load_ciphertexts
from splitfed.encryption.evaluating_party import MASK
from splitfed.encryption.key_holder_party import MASKED_WEIGHTS, WEIGHT
from splitfed.encryption.noise import TAIL, scalar_noise, vector_noise
from splitfed.engines.engine import Engine
from splitfed.planning.encryption import parameters_of


def check_readable(name: str, attack: Attack, engine: Engine, party: str, client: int) -> None:
    """Refuse an attack by `party` in a run with encryption, where what it would read is encrypted.

    A party without keys reads the gradients that arrive in plain under the protocols that leak, and nothing else. The
    view of a key holder has what it received as it crossed.
    """
    settings = engine.topologies[client].encryption
    if settings is None or party == FED:
        return
    encrypted = {Needs.RELEASES} if settings.leaks else {Needs.RELEASES, Needs.GRADIENTS, Needs.ENCRYPTED_LAYER}
    reads_plain = Needs.GRADIENTS in attack.requires and Needs.OWN_INPUTS not in attack.requires
    evaluates = engine.parties[party].role not in settings.holders
    if attack.requires & encrypted or (evaluates and not (settings.leaks and reads_plain)):
        beside = "beside gradients " if settings.leaks else ""
        raise InvalidInput(
            f"what {party!r} receives {beside}is encrypted under {settings.protocol!r}; {name} has nothing to read"
        )


def select_plain(view: View, attack: Attack, topology: Topology) -> View:
    """Return what of `view` is handed to `attack`: gradients of values in plain, or everything.

    What is no ciphertext but belongs to the protocol, such as a gradient of weights, is left out as well.
    """
    if topology.encryption is None or Needs.ENCRYPTED_LAYER in attack.requires:
        return view
    values = {value for edge in topology.crossings for value in edge.values}
    kept = []
    for message in view.select(kind="gradient").messages:
        tensors = {n: t for n, t in message.tensors.items() if n in values and t.is_floating_point()}
        if tensors:
            kept.append(message._replace(tensors=tensors))
    return View(view.party, tuple(kept), view.segments)


def encrypted_layer(engine: Engine, party: str, client: int) -> EncryptedLayer | None:
    """Return what `party` knows of its one layer that learns from gradients in plain; None where it has none."""
    topology, role = engine.topologies[client], engine.parties[party].role
    settings = topology.encryption
    if settings is None or not settings.leaks or role in settings.holders:
        return None
    segments, rate = topology.segments_of(role), engine.parties[party].state.rate
    if len(segments) != 1 or rate is None:
        return None
    (segment,), parameters = segments, parameters_of(topology)
    (value,), (result,) = segment.inputs, segment.outputs
    scale = 2.0**parameters.scale_bits
    return EncryptedLayer(
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


def decrypt_releases(engine: Engine, view: View, value: str) -> tuple[Tensor, float]:
    """Return what `view` holds of `value`, (rows, features), with the keys of who sent it, and its largest error."""
    keys, found = engine.run_parties.keys, []
    assert keys is not None
    for message in view.select(kind="activation").messages:
        if value in message.tensors:
            holder = keys.of(message.sender)
            found.append((load_ciphertexts(message.tensors[value], holder.public), holder))
    return torch.cat([decrypt(x, holder) for x, holder in found]).float(), max(x.precision for x, _ in found)


def check_training_attack(name: str, who: str, settings: Encryption | None, role: str) -> None:
    """Refuse an attack in the training at a party that computes on ciphertexts."""
    if settings is not None and role not in settings.holders:
        raise InvalidInput(
            f"what {name!r} receives is encrypted under {settings.protocol!r}; {who} has nothing to learn from"
        )
