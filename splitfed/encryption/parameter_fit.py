"""Choice of CKKS parameters for an encrypted topology, from the programs of its server segments and their depth.

Nothing here needs TenSEAL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from splitfed.core.errors import InvalidInput, check_names
from splitfed.core.topology import Segment, Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.encryption.parameters import PRESETS, CkksParameters
from splitfed.encryption.planner import choose_parameters
from splitfed.encryption.server_program import JoinProgram, ServerProgram, program_of, row_features
from splitfed.encryption.settings import AUTO, CONSTANT_MASK, Encryption, settings_of
from splitfed.encryption.weight_shares import ServerShare


def programs_of(topology: Topology, facts: TopologyFacts) -> dict[str, ServerProgram | JoinProgram]:
    """Return the program of every segment evaluated on ciphertexts, by name; raise `InvalidInput` for integers."""
    for segment in evaluated(topology):
        if not all(facts.dtypes[v].is_floating_point for v in (*segment.inputs, *segment.outputs)):
            raise InvalidInput(f"segment {segment.name!r} reads or returns whole numbers; CKKS encrypts real numbers")
    found = {}
    for segment in evaluated(topology):
        # The first input alone: a segment with shares may also read the client's share, which it does not join.
        given = segment.inputs[:1] if isinstance(segment.module, ServerShare) else segment.inputs
        found[segment.name] = program_of(segment.name, segment.module, *(facts.shapes[value] for value in given))
    return found


def parameters_of(topology: Topology) -> CkksParameters:
    """Return the CKKS parameters of a topology that `fit_parameters` has returned."""
    return PRESETS[settings_of(topology.computation).parameters]


def evaluated(topology: Topology) -> list[Segment]:
    """Return the segments that are evaluated on ciphertexts."""
    return [s for s in topology.segments if s.role not in settings_of(topology.computation).holders]


def fit_parameters(topology: Topology, programs: Mapping[str, ServerProgram | JoinProgram], rows: int) -> Topology:
    """Return `topology` with parameters, by preset name, that suffice for all `programs` on batches of `rows` rows.

    Raises `InvalidInput` for given parameters that are too shallow, imprecise, small in magnitude or slots.
    """
    settings, depth = settings_of(topology.computation), _find_depth(topology, programs)
    return replace(topology, computation=_with_parameters(settings, programs, rows, depth))


def _with_parameters(
    settings: Encryption, programs: Mapping[str, ServerProgram | JoinProgram], rows: int, depth: int
) -> Encryption:
    """Return `settings` with a preset that suffices for `programs` of total `depth` on batches of `rows` rows."""
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
    """Return the largest number of multiplications on one ciphertext, added up over segments that pass it on."""
    total: dict[str, int] = {}
    for segment in evaluated(topology):
        before = [total[edge.source] for edge in topology.edges if edge.target == segment.name and edge.source in total]
        total[segment.name] = max(before, default=0) + programs[segment.name].depth
    return max(total.values(), default=0)


def _need(settings: Encryption, program: ServerProgram | JoinProgram, rows: int, depth: int) -> dict[str, Any]:
    """Return the arguments of `choose_parameters` for a program within `depth` multiplications in sequence."""
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
