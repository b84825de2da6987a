"""The plan of an encrypted run: key holders, schedules and optimizers that it supports, its messages and its cost.

Whatever does not fit is refused in one line before anything is computed. Only the estimated seconds of a batch need
TenSEAL.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from splitfed.core.defense import (
    Codec,
    Defense,
    GradientDefense,
    LayerDefense,
    LearnedDefense,
    ReleaseDefense,
    WeightDefense,
)
from splitfed.core.errors import InvalidInput, check_names
from splitfed.core.optimizers import Optim
from splitfed.core.topology import Topology, member
from splitfed.core.topology_facts import TopologyFacts
from splitfed.encryption.ciphertexts import ROWS
from splitfed.encryption.flows import EncryptedSteps
from splitfed.encryption.parameter_fit import evaluated, fit_parameters, parameters_of, programs_of
from splitfed.encryption.seconds import estimate_batch
from splitfed.encryption.settings import PUBLIC_CONTEXT, WEIGHT_SHARES, Encryption, settings_of
from splitfed.encryption.stages import check_linear_in_weights
from splitfed.encryption.weight_shares import ClientShare, merge_weight_shares, share_weights
from splitfed.engines.base import Placement
from splitfed.federated.base import Method
from splitfed.planning.computation import ComputationPlan, PlannedMessage
from splitfed.schedules.base import Schedule, Training
from splitfed.schedules.segment_handover import SegmentHandover
from splitfed.secure_sum.base import Flow

SCORED_ROWS = 256
"""Rows of a batch in evaluation."""

# Bytes of the header of a public context and of the parameters before its keys.
_CONTEXT_FRAME = 350


class EncryptedPlan(ComputationPlan):
    """Checks, parameters and messages of an encrypted run, for its plan."""

    def divide(self, topology: Topology, schedule: Schedule, method: Method | None, clients: int) -> Topology:
        """Return `topology` as it is trained, with the server's weights divided into shares under "weight_shares".

        Raises `InvalidInput` for a topology, a schedule or a method that encryption does not support.
        """
        settings = settings_of(topology.computation)
        _check_graph(topology, settings)
        _check_schedule(topology, settings, schedule, clients)
        if method is not None:
            raise InvalidInput(
                f"method {type(method).__name__} reads weights and values of clients in plain; leave out the method "
                "or the encryption"
            )
        return share_weights(topology, settings) if settings.protocol == WEIGHT_SHARES else topology

    def with_parameters(
        self,
        topology: Topology,
        facts: TopologyFacts,
        defenses: Sequence[Defense],
        optims: Mapping[str, Optim],
        training: Training,
        placement: Placement,
        clients: int,
    ) -> Topology:
        """Return a divided topology with CKKS parameters by preset name.

        Raises `InvalidInput` for a server segment that is not linear, optimizers other than SGD, defenses that act on
        encrypted values, and for parameters that are too shallow, imprecise, small in magnitude or slots.
        """
        settings = settings_of(topology.computation)
        _check_defenses(topology, defenses)
        _check_optimizers(topology, settings, optims)
        if (
            placement.averaged == ()
            and clients > 1
            and not settings.leaks
            and optims[settings.holders[0]].options.get("momentum")
        ):
            warnings.warn(
                "the momentum of the server's layer is each client's own where clients hand their shares on; in plain "
                "it is one, the server's",
                stacklevel=2,
            )
        programs = programs_of(topology, facts)
        for segment in evaluated(topology) if settings.leaks else ():
            _check_one_linear(segment.name, segment.module)
        for segment in topology.segments:
            if isinstance(segment.module, ClientShare):
                shape = facts.shapes[segment.inputs[-1]]
                check_linear_in_weights(segment.name, segment.module.layer, shape)
        return fit_parameters(topology, programs, max(training.batch_size, SCORED_ROWS))

    def fit_inference(self, topology: Topology, facts: TopologyFacts, rows: int) -> Topology:
        """Return `topology` for inference only, on batches of `rows` rows, without gradients and without training.

        As many layers and squares are evaluated as the depth of the parameters allows; the protocol plays no part.
        Raises `InvalidInput` for segments that cannot be encrypted, and for parameters that do not suffice.
        """
        settings = settings_of(topology.computation)
        _check_graph(topology, settings)
        frozen = {s.name: copy.deepcopy(s.module).eval().requires_grad_(False) for s in evaluated(topology)}
        segments = tuple(replace(s, module=frozen.get(s.name, s.module)) for s in topology.segments)
        topology = share_weights(replace(topology, segments=segments), settings)
        needs = {name: replace(p, trains=False) for name, p in programs_of(topology, facts).items()}
        return fit_parameters(topology, needs, rows)

    def placement(self, topology: Topology, placement: Placement) -> Placement:
        """Return `placement` without copies of a server with fixed weights: one server computes for all clients."""
        return (
            replace(placement, copied=()) if settings_of(topology.computation).protocol == WEIGHT_SHARES else placement
        )

    def crossing_messages(
        self, topology: Topology, facts: TopologyFacts, defenses: Sequence[Defense]
    ) -> list[PlannedMessage]:
        """Return the messages of one training step; bytes of ciphertexts are within 1 %."""
        steps = EncryptedSteps(topology, facts)
        return [
            PlannedMessage(message.kind, message.sender, message.receiver, partial(steps.size, number), message.ahead)
            for number, message in enumerate(steps.step(1).messages)
        ]

    def setup_flows(self, topology: Topology, replicas: int) -> Iterator[Flow]:
        """Yield the messages with public contexts that a run of `replicas` clients sends before its first step."""
        settings, parameters = settings_of(topology.computation), parameters_of(topology)
        size = _CONTEXT_FRAME + parameters.public_key_bytes + parameters.relinearization_key_bytes
        if settings.layout == ROWS:
            size += parameters.galois_key_bytes
        first = settings.holders[0]
        for replica in range(1 if settings.keys == "shared" else replicas):
            for role in topology.roles:
                if role not in settings.holders:
                    yield PUBLIC_CONTEXT, member(first, replica), role, size

    def estimate_batch(self, topology: Topology, facts: TopologyFacts, rows: int) -> dict[str, Any]:
        """Return the cost of a batch; see `splitfed.encryption.seconds.estimate_batch`."""
        return estimate_batch(topology, facts, rows)

    def model_state(self, topology: Topology, modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
        """Return the state of the undivided model, in which the parties' shares of a layer are added up."""
        return merge_weight_shares(topology, modules)


def _check_graph(topology: Topology, settings: Encryption) -> None:
    """Raise `InvalidInput` unless key holders and one server exchange a single value in each direction."""
    check_names("role that holds the keys:", topology.roles, *settings.holders)
    holders, others = ", ".join(settings.holders), set(topology.roles) - set(settings.holders)
    if len(others) != 1:
        raise InvalidInput(
            f"encryption takes key holders and one server; topology {topology.name!r} has {len(others)} roles beside "
            f"{holders}"
        )
    for head in topology.heads:
        if not set(head.path) <= set(settings.holders):
            raise InvalidInput(
                f"the head on {head.value!r} takes labels or its loss to {head.role!r}; expected a U-shape, in which "
                f"they stay with the key holder ({holders})"
            )
    for value, role in topology.inputs.items():
        if role not in settings.holders:
            raise InvalidInput(f"input {value!r} belongs to {role!r}; expected the key holder ({holders})")
    if len(settings.holders) > 1 and settings.leaks:
        raise InvalidInput(f"protocol {settings.protocol!r} has one key holder; {holders} were given")
    if settings.leaks and len(evaluated(topology)) != 1:
        raise InvalidInput(
            f"protocol {settings.protocol!r} has one server segment of one linear layer; {len(evaluated(topology))} "
            "were given"
        )


def _check_schedule(topology: Topology, settings: Encryption, plan: Schedule, clients: int) -> None:
    """Raise `InvalidInput` for a schedule that trains the server's layer as the protocol does not support."""
    name, place = type(plan).__name__, plan.placement(topology)
    if not plan.independent or topology.forward_only or topology.training_only:
        raise InvalidInput(
            f"schedule {name} takes steps of several clients together, or with losses of its own; encryption takes "
            "'sequential' or 'splitfed_v1'"
        )
    if settings.leaks:
        if place.copied:
            raise InvalidInput(
                f"schedule {name} trains copies of the server's layer; protocol {settings.protocol!r} has one, take "
                "'sequential', 'alternate' or 'splitfed_v2'"
            )
        return
    if clients == 1:
        return
    if isinstance(plan, SegmentHandover) and plan.hand_over == "server":
        raise InvalidInput(
            "hand_over='server' shows the server the clients' shares at successive times, and their difference "
            "reveals activations; encryption takes 'peer'"
        )
    servers = set(topology.roles) - set(settings.holders)
    handed = isinstance(plan, SegmentHandover) and plan.hand_over == "peer" and plan.binds(clients) is not None
    averaged = set(settings.holders) <= set(place.averaged) and servers <= set(place.copied)
    if not (handed or averaged):
        raise InvalidInput(
            f"schedule {name} would not train the clients' shares as it trains the server's layer, which they stand "
            "for; encryption takes 'sequential' with hand_over='peer', or 'splitfed_v1'"
        )


def _check_defenses(topology: Topology, defenses: Sequence[Defense]) -> None:
    crossings, roles = {edge.name for edge in topology.crossings}, {s.role for s in evaluated(topology)}
    acting = (ReleaseDefense, GradientDefense, Codec, LayerDefense, LearnedDefense)
    for defense in defenses:
        name = type(defense).__name__
        if isinstance(defense, acting) and crossings.intersection(defense.edges(topology)):
            raise InvalidInput(
                f"{name} acts on messages that are encrypted, which the server cannot read anyway; leave out the "
                "defense or the encryption"
            )
        if isinstance(defense, WeightDefense) and roles.intersection(defense.guards(topology)):
            raise InvalidInput(
                f"{name} protects the weights of {sorted(roles)[0]!r}, which are not trained there; name the key "
                "holder's role"
            )


def _check_optimizers(topology: Topology, settings: Encryption, optims: Mapping[str, Optim]) -> None:
    """Raise `InvalidInput` for optimizers whose step on a share differs from that on the whole layer."""
    servers = dict.fromkeys(s.role for s in evaluated(topology))
    for role in (*servers, *(() if settings.leaks else settings.holders)):
        optim = optims[role]
        options = dict(optim.options)
        if optim.name != "SGD":
            raise InvalidInput(f"optimizer {optim.label} of {role!r} is not allowed beside encryption; expected SGD")
        if optim.groups:
            raise InvalidInput(
                f"parameter groups of {role!r} are not allowed beside encryption: a layer's share has one rate for all"
            )
        if optim.clip_norm is not None:
            raise InvalidInput(
                f"clip_norm={optim.clip_norm:g} of {role!r} is not allowed beside encryption: no party knows the norm "
                "of the whole gradient"
            )
        for option in ("weight_decay", "nesterov", "maximize", "dampening"):
            if options.get(option):
                raise InvalidInput(
                    f"{option}={options[option]!r} of {role!r} is not allowed beside encryption; SGD may have lr and "
                    "momentum"
                )
    for role in () if settings.leaks else servers:
        for holder in settings.holders:
            if optims[role] != optims[holder]:
                raise InvalidInput(
                    f"the optimizers of {role!r} and {holder!r} differ; the weights of {role!r} learn as a share of "
                    "the key holder's, so give both the same"
                )


def _check_one_linear(name: str, module: nn.Module) -> None:
    """Raise `InvalidInput` for anything but one linear layer, which is all that the published protocols train."""
    weighted = [m for m in module.modules() if any(True for _ in m.parameters(recurse=False))]
    if len(weighted) != 1 or not isinstance(weighted[0], nn.Linear):
        kinds = ", ".join(type(m).__name__ for m in weighted) or "no layer with weights"
        raise InvalidInput(f"segment {name!r} has {kinds}; the protocols that leak train one torch.nn.Linear")
