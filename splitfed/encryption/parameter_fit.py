"""Choice of CKKS parameters: the cheapest preset of sufficient depth, slots, magnitude and precision.

For an encrypted topology the needs follow from the programs of its server segments and their depth. Noise is added up
by the formulas that every ciphertext carries, so that a run does not exceed the planned error. Nothing here needs
TenSEAL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from splitfed.core.errors import InvalidInput, check_count, check_names, unknown
from splitfed.core.topology import Segment, Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.encryption.ciphertexts import BATCH, ROWS, next_power_of_two
from splitfed.encryption.noise import (
    TAIL,
    accumulate_noise,
    baby_steps,
    rotation_noise,
    scalar_noise,
    vector_noise,
)
from splitfed.encryption.parameters import PRESETS, CkksParameters
from splitfed.encryption.server_program import JoinProgram, ServerProgram, program_of, row_features
from splitfed.encryption.settings import AUTO, CONSTANT_MASK, Encryption, settings_of


def programs_of(topology: Topology, facts: TopologyFacts) -> dict[str, ServerProgram | JoinProgram]:
    """Return the program of every segment evaluated on ciphertexts, by name; raise `InvalidInput` for integers."""
    for segment in evaluated(topology):
        if not all(facts.dtypes[v].is_floating_point for v in (*segment.inputs, *segment.outputs)):
            raise InvalidInput(f"segment {segment.name!r} reads or returns whole numbers; CKKS encrypts real numbers")
    return {s.name: program_of(s.name, s.module, s.inputs, facts.shapes) for s in evaluated(topology)}


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


def choose_parameters(
    *,
    depth: int,
    precision: float,
    rows: int = 1,
    features: int = 1,
    results: int = 1,
    largest: float = 1.0,
    gain: float = 1.0,
    squares: int = 0,
    encrypted_weights: bool = False,
    layout: str = BATCH,
) -> CkksParameters:
    """Return the cheapest preset that suffices, by bytes of a fresh ciphertext.

    `depth`: multiplications in sequence (a linear layer is one, a square another), >= 0. `precision`: largest accepted
    error of a result, > 0. `rows`: rows of a batch, >= 1. `features`, `results`: of the widest linear layer, >= 1.
    `largest`: largest magnitude of any input, result or encrypted weight, > 0. `gain`: largest Euclidean norm of a row
    of weights, by which a layer multiplies errors, > 0; unused if weights are encrypted. `squares`: how many of the
    multiplications are squares. `encrypted_weights`: True if weights are encrypted as well. `layout`: "batch" or
    "rows". Raises `InvalidInput` if no preset suffices.
    """
    check_count("depth", depth)
    check_count("squares", squares)
    for name, count in (("rows", rows), ("features", features), ("results", results)):
        check_count(name, count, low=1)
    for name, value in (("precision", precision), ("largest", largest), ("gain", gain)):
        if not (isinstance(value, (int, float)) and 0 < value < math.inf):
            raise InvalidInput(f"{name}={value!r} is not allowed; expected a finite number above 0")
    if layout not in (BATCH, ROWS):
        raise unknown("layout", layout, (BATCH, ROWS))
    if squares > depth:
        raise InvalidInput(f"squares={squares} is not allowed; expected no more than depth={depth} multiplications")
    if layout == ROWS and (depth - squares > 1 or encrypted_weights):
        raise InvalidInput("the layout 'rows' holds one linear layer, with weights in plain; plan for 'batch'")
    exact = [p for p in PRESETS.values() if not p.is_lossy]
    deep = [p for p in exact if p.depth >= depth]
    if not deep:
        deepest = max(p.depth for p in exact)
        raise InvalidInput(f"depth={depth} is too deep: the scale is exhausted after {deepest} multiplications")
    width = next_power_of_two(max(features, results))
    needed, what = (rows, f"rows={rows}") if layout == BATCH else (width, f"features={features}, results={results}")
    wide = [p for p in deep if p.slots >= needed]
    if not wide:
        slots = max(p.slots for p in deep)
        advice = "; use smaller batches" if layout == BATCH else ""
        raise InvalidInput(f"{what} do not fit: a ciphertext has {slots} slots at most{advice}")
    large = [p for p in wide if p.largest >= largest]
    if not large:
        limit = max(p.largest for p in wide)
        raise InvalidInput(
            f"largest={largest:g} is beyond the scale: at depth {depth} a number may have magnitude {limit:g} at most"
        )

    # Products of ciphertexts a and b with errors e and f have errors a f and b e, independent of each other.
    layer = math.sqrt(2 * features) * largest if encrypted_weights else gain
    factors = [layer] * (depth - squares) + [2 * largest] * squares
    errors = [_largest_error(p, layout, features, results, largest, factors) for p in large]
    fine = [p for p, error in zip(large, errors, strict=True) if error <= precision]
    if not fine:
        best = min(errors)
        raise InvalidInput(f"precision={precision:g} is too fine: at depth {depth} the smallest error is {best:.1e}")
    return min(fine, key=lambda p: (p.ciphertext_bytes[-1], p.degree))


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


def _largest_error(
    p: CkksParameters, layout: str, features: int, results: int, largest: float, factors: Sequence[float]
) -> float:
    """Return the error of a result that is hardly ever exceeded; `factors`: growth of errors by each multiplication.

    The other arguments are those of `choose_parameters`.
    """
    scale = 2.0**p.scale_bits
    fresh, encoding = p.noise, scalar_noise(features, largest, scale)
    if layout == ROWS:
        steps = baby_steps(next_power_of_two(results)) - 1
        fresh = math.hypot(fresh, math.sqrt(steps) * rotation_noise(p.degree, scale))
        encoding = vector_noise(p.degree, next_power_of_two(max(features, results)), largest, scale)
    return TAIL * accumulate_noise(fresh, factors, math.hypot(p.noise, encoding))
