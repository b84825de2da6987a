"""Checks before training, on made-up rows, that every row's gradient in a model is independent of all other rows.

Clipping per row bounds nothing if one row's gradient depends on another row, of this batch or of an earlier one. So the
outputs and the state of segments, the loss (`splitfed.core.row_independence`), and the inputs of every layer with
weights must not depend on other rows. The per-row gradients must sum to those of autograd, and training must not change
any buffer. Lists of layers that a library supports are not used.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput, first_line
from splitfed.core.held_arrays import is_elsewhere
from splitfed.core.plain_values import same_tensors
from splitfed.core.random import derive, stream
from splitfed.core.row_independence import findings, in_training
from splitfed.core.row_losses import rows_equal
from splitfed.core.topology import Segment, Topology
from splitfed.core.topology_facts import Finding, TopologyFacts
from splitfed.core.trial_rows import draw_values
from splitfed.defenses.per_example_gradients import (
    Call,
    LayerUse,
    layers_with_weights,
    own_weights,
    per_row_gradients,
    record_calls,
)

NAME = "dp_sgd"

ROWS = 4
"""Number of made-up rows in a test batch."""

_TOLD = {
    "state": "segment {segment!r}: its state {name!r} is updated from the rows without noise",
    "output": "beside segment {segment!r}: it mixes the rows of a batch in {name!r}",
    "memory": "beside segment {segment!r}: it keeps rows in {name}",
    "next batch": "beside segment {segment!r}: {name!r} depends on the rows of the batch before",
    "count": "beside segment {segment!r}: {name!r} of a row depends on its position in the batch, or on the batch "
    "size, so with sampling='poisson' one more row changes all others: compute it from the row alone, or use 'shuffle'",
}


_KEPT = torch.arange(ROWS) > 0


class _Ran(NamedTuple):
    """Result of one pass of a segment: its outputs, and the uses of its layers."""

    module: nn.Module
    outputs: tuple[Tensor, ...]
    calls: list[Call]


def check_rowwise(topology: Topology, facts: TopologyFacts, guarded: Sequence[str]) -> None:
    """Raise `InvalidInput` if a row's gradient at the roles `guarded` would depend on other rows."""
    check_batch_norm(topology)
    for finding in findings(topology, facts, [segment.name for segment in topology.segments]):
        _refuse(finding, topology)
    one = {n: draw_values((ROWS, *facts.shapes[n]), facts.dtypes[n], "one", n) for n in topology.inputs}
    other = {name: torch.cat([_random_like(value[:1], "other", name), value[1:]]) for name, value in one.items()}
    for segment in topology.segments:
        watched = layers_with_weights(segment.module) if segment.role in guarded else {}
        first, second = (_run_segment(segment, values, watched) for values in (one, other))
        if watched:
            fewer = _run_segment(segment, {name: value[:-1] for name, value in one.items()}, watched)
            _check_layers(segment, watched, first, second, fewer)
            _check_same(segment, one, watched, first)
            _check_sums(segment, watched, first)
        for values, ran in ((one, first), (other, second)):
            values.update(zip(segment.outputs, (t.detach() for t in ran.outputs), strict=True))


def _refuse(finding: Finding, topology: Topology) -> None:
    if finding.kind in ("loss", "scale"):
        task = next(head.task for head in topology.heads if head.value == finding.name)
        assert task is not None
        why = "one row changes the gradients of others" if finding.kind == "loss" else "it weighs rows otherwise"
        raise InvalidInput(
            f"{NAME} needs a loss that is the mean over the rows; that of {task.name!r} is not: {why}, so use the "
            "mean of per-row losses, as reduction='none' and then .mean()"
        )
    # Weights do not learn from what is computed in evaluation mode.
    if finding.kind == "evaluation":
        return
    way = ""
    if finding.kind == "state":
        owner = finding.name.rpartition(".")[0]
        found = replacement(topology.segment(finding.segment).module.get_submodule(owner))
        way = (
            f"; {found or 'take it out, or put the layer that holds it in evaluation mode if it leaves it alone then'}"
        )
    raise InvalidInput(f"{NAME} cannot train {_TOLD[finding.kind].format(**finding._asdict())}{way}")


def check_batch_norm(topology: Topology) -> None:
    """Raise `InvalidInput` for batch norm in training mode at any party."""
    for segment in topology.segments:
        for name, layer in segment.module.named_modules():
            if not isinstance(layer, nn.modules.batchnorm._BatchNorm) or is_elsewhere(layer):
                continue
            if layer.training or not segment.module.training or layer.running_mean is None:
                # Of its statistics, what has none needs others; a segment is put in training as a whole.
                way = "put it in evaluation mode" if name and layer.running_mean is not None else "take it out"
                ways = [puts for puts in (replacement(layer),) if puts] or ["put group norm there"]
                raise InvalidInput(
                    f"{NAME} cannot train beside batch norm {name or segment.name!r} of segment {segment.name!r}: it "
                    f"mixes the rows of a batch, whatever its party; {ways[0]}, or {way}"
                )


def replacement(layer: nn.Module) -> str | None:
    """Return what `replace=True` does with `layer`, as a clause; None if it keeps it."""
    from opacus.validators import ModuleValidator

    if type(layer) not in ModuleValidator.FIXERS:
        return None
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        return "replace=True puts group norm there"
    if isinstance(layer, nn.modules.instancenorm._InstanceNorm):
        return "replace=True takes its statistics out" if layer.track_running_stats else None
    return f"replace=True puts DP{type(layer).__name__} there"


def _random_like(like: Tensor, *words: str) -> Tensor:
    return draw_values(like.shape, like.dtype, *words)


def _run_segment(segment: Segment, values: Mapping[str, Tensor], watched: Mapping[str, nn.Module]) -> _Ran:
    module = in_training(segment.module)
    calls: list[Call] = []
    given = [values[name].clone() for name in segment.inputs]
    layers = [module.get_submodule(name) for name in watched]
    rows = len(given[0])
    with torch.enable_grad(), stream(derive(0, NAME, segment.name)), record_calls(layers, calls, rows):
        result = module(*given)
    return _Ran(module, tuple(result) if isinstance(result, (tuple, list)) else (result,), calls)


def _check_layers(segment: Segment, watched: Mapping[str, nn.Module], one: _Ran, other: _Ran, fewer: _Ran) -> None:
    """Raise `InvalidInput` for a layer whose inputs have no row for each row of the batch.

    `other` is a pass with another first row, `fewer` one without the last row.
    """
    names = {id(ran.module.get_submodule(name)): name for ran in (one, other, fewer) for name in watched}
    for calls in itertools.zip_longest(one.calls, other.calls, fewer.calls):
        inputs = [() if call is None else (call.x, *call.more) for call in calls]
        layer = next(call.layer for call in calls if call is not None)
        same = len({len(given) for given in inputs}) == 1
        for first, second, third in zip(*inputs, strict=False):
            same = same and rows_equal(first, second, _KEPT) and len(third) == ROWS - 1
        if same:
            continue
        way = (
            "give it one row for all, as torch.arange(n).unsqueeze(0)"
            if isinstance(layer, nn.Embedding)
            else "give it all rows, as of experts each gets every row and counts nothing where it is not chosen"
        )
        raise _layer_error(segment, names[id(layer)], layer, "its input has no row for each row of the batch", way)


def _check_same(segment: Segment, values: Mapping[str, Tensor], watched: Mapping[str, nn.Module], ran: _Ran) -> None:
    """Raise `InvalidInput` for a layer that computes one row for all, which the model does not use equally for each."""
    shared = [call.layer for call in ran.calls if call.x.stride()[:1] == (0,)]
    plain = _run_segment(segment, values, {}) if shared else ran
    if not all(map(same_tensors, plain.outputs, ran.outputs)):
        name = next(n for n in watched if ran.module.get_submodule(n) is shared[0])
        raise _layer_error(
            segment, name, shared[0], "it computes one row for all, which is not used equally for each", ""
        )


def _check_sums(segment: Segment, watched: Mapping[str, nn.Module], ran: _Ran) -> None:
    """Raise `InvalidInput` unless per-row gradients sum to that of autograd, for a random output gradient."""
    roots = [t for t in ran.outputs if t.requires_grad]
    cotangents = [_random_like(t.detach(), segment.name, str(i)) for i, t in enumerate(roots)]
    weights = {n: p for n, p in ran.module.named_parameters() if p.requires_grad}
    places: list[Any] = [*weights.values(), *(call.edge for call in ran.calls)]
    sums_found: Sequence[Tensor | None] = (
        torch.autograd.grad(roots, places, cotangents, allow_unused=True) if roots else ()
    )
    sums: dict[nn.Parameter, Tensor] = {}
    for call, g in zip(ran.calls, sums_found[len(weights) :], strict=True):
        if g is None:
            continue
        name = next(n for n in watched if ran.module.get_submodule(n) is call.layer)
        try:
            own = per_row_gradients(LayerUse(call.layer, call.x, g, call.more))
        except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError) as error:
            raise _layer_error(segment, name, call.layer, f"no gradient row by row ({first_line(error)})") from error
        for weight, rows in own.items():
            sums[weight] = sums.get(weight, torch.zeros_like(weight)) + rows.sum(0)
    owners = {id(p): n for n in watched for p in own_weights(ran.module.get_submodule(n))}
    for (name, weight), g in zip(weights.items(), sums_found, strict=False):
        mine, true = sums.get(weight, torch.zeros_like(weight)), torch.zeros_like(weight) if g is None else g
        if not torch.allclose(mine, true, rtol=1e-3, atol=1e-5 + 1e-4 * float(true.abs().max())):
            owner = owners[id(weight)]
            layer = ran.module.get_submodule(owner)
            raise _layer_error(segment, owner, layer, f"the gradient of weight {name!r} row by row is unknown")


def _layer_error(segment: Segment, name: str, layer: nn.Module, why: str, way: str = "") -> InvalidInput:
    place = f"layer {name!r} ({type(layer).__name__})" if name else f"the {type(layer).__name__} itself"
    if not way and any(isinstance(m, nn.Dropout) and m.p > 0 for m in layer.modules()):
        way = "set the dropout inside it to 0"
    frozen = "freeze it if it need not learn: its weights' requires_grad_(False)"
    ways = ", or ".join(one for one in (replacement(layer), way, frozen) if one)
    return InvalidInput(f"{NAME} cannot train {place} of segment {segment.name!r}: {why}; {ways}")
