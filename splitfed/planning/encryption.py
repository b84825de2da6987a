"""What an encrypted run needs: who may hold keys, which schedules and optimizers go with it, and which parameters fit.

All of it is refused, in a line, before anything is computed. Nothing here needs TenSEAL but the run itself.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from splitfed.core.defense import (
    Codec,
    Defense,
    GradientDefense,
    LayerDefense,
    LearnedDefense,
    ReleaseDefense,
    WeightDefense,
)
from splitfed.core.encryption_settings import AUTO, CONSTANT_MASK, WEIGHT_SHARES, Encryption
from splitfed.core.errors import InvalidInput, check_names
from splitfed.core.optimizers import Optim
from splitfed.core.probe import Facts
from splitfed.core.topology import Segment, Topology
from splitfed.encryption.parameters import PRESETS, CkksParameters
from splitfed.encryption.planner import choose_parameters
from splitfed.encryption.server_program import JoinProgram, ServerProgram, program_of, row_features
from splitfed.encryption.stages import check_linear_in_weights
from splitfed.encryption.weight_shares import ClientShare, ServerShare, share_weights
from splitfed.engines.base import Placement
from splitfed.federated.base import Method
from splitfed.schedules.base import Schedule, Training
from splitfed.schedules.segment_handover import SegmentHandover

SCORED_ROWS = 256
"""Rows of a batch in evaluation."""


def divide(topology: Topology, plan: Schedule, method: Method | None, clients: int) -> Topology:
    """Return `topology` as its `encryption` has it trained: its server's weights in shares, where that is the protocol.

    Raises `InvalidInput` for a topology, a schedule or a method that does not go with encryption.
    """
    settings = topology.encryption
    if settings is None:
        return topology
    _check_graph(topology, settings)
    _check_schedule(topology, settings, plan, clients)
    if method is not None:
        raise InvalidInput(
            f"method {type(method).__name__} reads weights and values of clients in plain, beside an encrypted server: "
            "leave one of them out"
        )
    return share_weights(topology, settings) if settings.protocol == WEIGHT_SHARES else topology


def settle(
    topology: Topology,
    facts: Facts,
    defenses: Sequence[Defense],
    optims: Mapping[str, Optim],
    training: Training,
    placement: Placement,
    clients: int,
) -> Topology:
    """Return a divided topology with the parameters of its encryption by name; refuse what they do not hold.

    Raises `InvalidInput` for a server segment that is not linear, optimizers other than SGD, defenses that act on what
    is encrypted, and for parameters that are too shallow, too coarse, too small or too few in slots.
    """
    settings = topology.encryption
    if settings is None:
        return topology
    _check_defenses(topology, defenses)
    _check_optimizers(topology, settings, optims)
    if (
        placement.fused == ()
        and clients > 1
        and not settings.leaks
        and optims[settings.holders[0]].options.get("momentum")
    ):
        warnings.warn(
            "the momentum of the server's layer is each client's own where clients hand their shares on; in plain it "
            "is one, the server's",
            stacklevel=2,
        )
    programs = programs_of(topology, facts)
    for segment in _evaluated(topology) if settings.leaks else ():
        _check_one_linear(segment.name, segment.module)
    for segment in topology.segments:
        if isinstance(segment.module, ClientShare):
            before = segment.inputs[-1]
            rows_shape = facts.shapes[before]
            check_linear_in_weights(segment.name, segment.module.layer, rows_shape)
    rows, depth = max(training.batch_size, SCORED_ROWS), _find_depth(topology, programs)
    return replace(topology, encryption=_with_parameters(settings, programs, rows, depth))


def fit_inference(topology: Topology, facts: Facts, rows: int) -> Topology:
    """Return `topology` for inference alone on batches of `rows`: no weight learns, and no gradient takes a level.

    Raises `InvalidInput` for what cannot be encrypted, and for parameters that do not hold it.
    """
    settings = topology.encryption
    if settings is None:
        return topology
    _check_graph(topology, settings)
    frozen = {s.name: copy.deepcopy(s.module).eval().requires_grad_(False) for s in _evaluated(topology)}
    segments = tuple(replace(s, module=frozen.get(s.name, s.module)) for s in topology.segments)
    topology = share_weights(replace(topology, segments=segments), settings)
    needs = {name: replace(p, trains=False) for name, p in programs_of(topology, facts).items()}
    return replace(topology, encryption=_with_parameters(settings, needs, rows, _find_depth(topology, needs)))


def placement_of(topology: Topology, placement: Placement) -> Placement:
    """Return `placement` without copies of a server that does not learn: one computes for all clients."""
    if topology.encryption is None or topology.encryption.protocol != WEIGHT_SHARES:
        return placement
    return replace(placement, copied=())


def programs_of(topology: Topology, facts: Facts) -> dict[str, ServerProgram | JoinProgram]:
    """Return the program of every segment that is evaluated on ciphertexts, by its name; refuse whole numbers."""
    for segment in _evaluated(topology):
        if not all(facts.dtypes[v].is_floating_point for v in (*segment.inputs, *segment.outputs)):
            raise InvalidInput(f"segment {segment.name!r} reads or returns whole numbers; CKKS encrypts real numbers")
    found = {}
    for segment in _evaluated(topology):
        # The client's share of a layer, which a segment may read besides, is none of the values that it joins.
        given = segment.inputs[:1] if isinstance(segment.module, ServerShare) else segment.inputs
        found[segment.name] = program_of(segment.name, segment.module, *(facts.shapes[value] for value in given))
    return found


def parameters_of(topology: Topology) -> CkksParameters:
    """Return the parameters of a topology that `settle` has returned."""
    assert topology.encryption is not None
    return PRESETS[topology.encryption.parameters]


def _evaluated(topology: Topology) -> list[Segment]:
    assert topology.encryption is not None
    return [s for s in topology.segments if s.role not in topology.encryption.holders]


def _check_graph(topology: Topology, settings: Encryption) -> None:
    """Refuse a topology in which anything but a segment's one value passes between the key holder and one server."""
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
    if settings.leaks and len(_evaluated(topology)) != 1:
        raise InvalidInput(
            f"protocol {settings.protocol!r} has one server segment of one linear layer; {len(_evaluated(topology))} "
            "were given"
        )


def _check_schedule(topology: Topology, settings: Encryption, plan: Schedule, clients: int) -> None:
    """Refuse a schedule that trains the server's layer otherwise than the protocol can."""
    name, place = type(plan).__name__, plan.placement(topology)
    if not plan.independent or topology.forward_only or topology.lessons:
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
            "hand_over='server' shows the server the clients' shares at successive times, and their difference tells "
            "activations; encryption takes 'peer'"
        )
    servers = set(topology.roles) - set(settings.holders)
    handed = isinstance(plan, SegmentHandover) and plan.hand_over == "peer" and plan.binds(clients) is not None
    averaged = set(settings.holders) <= set(place.fused) and servers <= set(place.copied)
    if not (handed or averaged):
        raise InvalidInput(
            f"schedule {name} would not train the clients' shares as it trains the server's layer, which they stand "
            "for; encryption takes 'sequential' with hand_over='peer', or 'splitfed_v1'"
        )


def _check_defenses(topology: Topology, defenses: Sequence[Defense]) -> None:
    crossings, roles = {edge.name for edge in topology.crossings}, {s.role for s in _evaluated(topology)}
    acting = (ReleaseDefense, GradientDefense, Codec, LayerDefense, LearnedDefense)
    for defense in defenses:
        name = type(defense).__name__
        if isinstance(defense, acting) and crossings.intersection(defense.edges(topology)):
            raise InvalidInput(
                f"{name} acts on what crosses, which is encrypted: the server cannot read it, and has nothing to be "
                "defended against there; leave one of them out"
            )
        if isinstance(defense, WeightDefense) and roles.intersection(defense.guards(topology)):
            raise InvalidInput(
                f"{name} guards the weights of {sorted(roles)[0]!r}, which do not learn there; name the key holder's"
            )


def _check_optimizers(topology: Topology, settings: Encryption, optims: Mapping[str, Optim]) -> None:
    """Refuse what is not the same step on a share as on the whole layer."""
    servers = dict.fromkeys(s.role for s in _evaluated(topology))
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
                f"clip_norm={optim.clip_norm:g} of {role!r} is not allowed beside encryption: nobody there knows the "
                "norm of the whole gradient"
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
    """Refuse what the published protocols do not train: anything but one linear layer."""
    weighted = [m for m in module.modules() if any(True for _ in m.parameters(recurse=False))]
    if len(weighted) != 1 or not isinstance(weighted[0], nn.Linear):
        kinds = ", ".join(type(m).__name__ for m in weighted) or "no layer with weights"
        raise InvalidInput(f"segment {name!r} has {kinds}; the protocols that leak train one torch.nn.Linear")


def _with_parameters(
    settings: Encryption, programs: Mapping[str, ServerProgram | JoinProgram], rows: int, depth: int
) -> Encryption:
    """Return `settings` with a preset that holds all `programs`, `depth` in sequence, on batches of `rows`."""
    needs = [_need(settings, program, rows, depth) for program in programs.values()]
    if settings.parameters == AUTO:
        best = max((choose_parameters(**need) for need in needs), key=lambda p: (p.depth, p.degree))
        name = next(name for name, found in PRESETS.items() if found is best)
        return _with_parameters(replace(settings, parameters=name), programs, rows, depth)
    check_names("encryption preset", (AUTO, *PRESETS), settings.parameters)
    found = PRESETS[settings.parameters]
    if depth > found.depth:
        raise InvalidInput(
            f"segments {', '.join(programs)} take {depth} multiplications in sequence, forward and back; preset "
            f"{settings.parameters!r} has {found.depth}: the scale is exhausted"
        )
    if settings.layout == "batch" and rows > found.slots:
        raise InvalidInput(
            f"batches of {rows} rows do not fit into the {found.slots} slots of preset {settings.parameters!r}; use "
            "smaller batches"
        )
    if settings.bound > found.largest:
        raise InvalidInput(
            f"bound={settings.bound:g} is beyond the scale; preset {settings.parameters!r} holds magnitudes up to "
            f"{found.largest:g}"
        )
    return settings


def _find_depth(topology: Topology, programs: Mapping[str, ServerProgram | JoinProgram]) -> int:
    """Return how many multiplications any ciphertext takes: those of segments that hand ciphertexts on, added up."""
    total: dict[str, int] = {}
    for segment in _evaluated(topology):
        before = [total[edge.source] for edge in topology.edges if edge.target == segment.name and edge.source in total]
        total[segment.name] = max(before, default=0) + programs[segment.name].depth
    return max(total.values(), default=0)


def _need(settings: Encryption, program: ServerProgram | JoinProgram, rows: int, depth: int) -> dict[str, Any]:
    """Return what `choose_parameters` asks for a program, where `depth` multiplications follow one another."""
    if settings.layout == "rows" and (len(program.maps) != 1 or settings.protocol == CONSTANT_MASK):
        raise InvalidInput("layout='rows' holds one linear layer, under 'weight_shares'; take 'batch'")
    maps = [affine for affine in program.maps if affine is not None]
    widths = [row_features(shape) for shape in program.shapes]
    joined = len(program.shapes) if isinstance(program, JoinProgram) else 1
    bound, gain = settings.bound * joined, 1.0 if joined > 1 else 1e-6
    largest = bound
    for affine in program.maps:
        bound = bound**2 if affine is None else float((affine.weight.abs().sum(1) * bound + affine.bias.abs()).max())
        largest = max(largest, bound)
    for affine in maps:
        back = float(affine.weight.abs().sum(0).max()) * settings.bound
        largest = max(largest, back)
        gain = max(gain, float(affine.weight.norm(dim=1).max()), float(affine.weight.norm(dim=0).max()))
    return {
        "depth": depth,
        "precision": settings.precision,
        "rows": rows if settings.layout == "batch" else 1,
        "features": max(widths),
        "results": max(widths),
        "largest": largest,
        "gain": gain,
        "squares": program.depth - len(maps) if program.squares else 0,
        "layout": settings.layout,
    }
