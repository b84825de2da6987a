"""Send one example batch through a topology before anything is trained, and note what each segment does.

The shapes tell a misfit by cut; whether a segment overwrites its input decides who needs a copy; whether it draws
random numbers decides who is reseeded at every step; what a value is made of decides whether it may cross, and whether
there is anything in it to defend. Modules, buffers and random state are left as they were, and
what is found depends on none of the process's random generators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from splitfed.core.contents import (
    Content,
    Origin,
    RowTracking,
    Traces,
    carried_together,
    origin_of,
    together,
    traces_of_input,
)
from splitfed.core.errors import InvalidInput, describe_failure, others_code
from splitfed.core.evaluation_changes import StateWatch
from splitfed.core.held_arrays import is_elsewhere
from splitfed.core.model_call import set_mode
from splitfed.core.model_snapshot import drawn_packages, generator_states, seed_generators, set_generators
from splitfed.core.module_copies import copy_computed, deep_copy
from splitfed.core.nested_tensors import autograd_leaves
from splitfed.core.payload import not_dense
from splitfed.core.random import derive
from splitfed.core.state_round_trip import check_round_trip, stored_tensors
from splitfed.core.topology import Segment, Topology, keeps_names
from splitfed.core.topology_facts import TopologyFacts, told_by
from splitfed.core.weight_sharing import copy_sharing


class CannotCross(InvalidInput):
    """A value that is a tensor of a kind that no message carries, however the model is cut there."""


_DENSE = {
    "sparse": "return its to_dense() there, and take to_sparse() of that behind the cut",
    "quantized": "return its dequantize() there",
    "nested": "return torch.nested.to_padded_tensor of it there",
    "": "return a dense one there",
}
"""What to write before a cut in place of a tensor of each kind."""


def pass_example(topology: Topology, batch: Mapping[str, Tensor], *, shared: bool = False) -> TopologyFacts:
    """Run `batch` (input value -> tensor of at least two rows) through copies of the segments, in training mode.

    Raises `InvalidInput` that names the segment, the edge and the shapes where something does not fit, for a value that
    is no tensor with the batch first, and for one that carries an input to a role that may not see it. `shared`: the
    copies share the memory of weights, for a caller who puts back what a forward pass has written into them.
    """
    for name in topology.inputs:
        if name not in batch:
            raise InvalidInput(f"input {name!r} of topology {topology.name!r} is fed by no data")
    values = dict(batch)
    rows, heads = len(next(iter(batch.values()))), {head.value for head in topology.heads}
    overwritten: dict[str, frozenset[str]] = {}
    stochastic: set[str] = set()
    plain_draws: set[str] = set()
    repeated: set[str] = set()
    changed: set[str] = set()
    resized: list[tuple[str, str]] = []
    reached_leaves: dict[tuple[str, str], set[int]] = {}
    leaves: dict[tuple[str, str], Tensor] = {}
    traces = {name: traces_of_input(name, batch[name]) for name in topology.inputs}
    zeros = frozenset(name for name in topology.inputs if not bool(batch[name].any()))
    for segment in topology.segments:
        if not shared:
            check_round_trip(segment.module, f"segment {segment.name!r}")
        origins_read = {name: origin_of(traces[name]) for name in segment.inputs}
        inputs = {name: _arrived(topology, name, values[name], origins_read[name]) for name in segment.inputs}
        leaves |= {(segment.name, name): leaf for name, leaf in inputs.items()}
        states = generator_states()
        try:
            seed_generators(derive(0, "probe", segment.name))
            with torch.enable_grad():
                outputs, overwritten[segment.name], draws, found, writes, other = _run_segment(
                    topology, segment, inputs, traces, zeros, shared
                )
        finally:
            set_generators(states)
        traces.update(zip(segment.outputs, found, strict=True))
        resized += [(segment.name, name) for name in other]
        if writes:
            changed.add(segment.name)
        overwritten[segment.name] |= getattr(segment.module, "may_overwrite", frozenset())
        # Other batches may take a way of a replayed model that draws.
        draws |= getattr(segment.module, "planned_draws", frozenset())
        if "torch" in draws:
            stochastic.add(segment.name)
        if draws - {"torch"}:
            plain_draws.add(segment.name)
        # A trace has no branch; of other segments the graph of one random draw tells nothing for certain.
        may = getattr(segment.module, "may_learn_from", frozenset[str]())
        learning = {id(inputs[name]) for name in segment.inputs if name in may}
        certain = not draws or keeps_names(segment.module)
        for name, value in zip(segment.outputs, outputs, strict=True):
            _check_value(segment, name, value, rows, name in heads)
            reached_leaves[segment.name, name] = (
                autograd_leaves(value) | learning if certain else {id(t) for t in inputs.values()}
            )
            values[name] = value.detach()
            if value.stride(0) == 0:
                repeated.add(name)
    batch_norm = nn.modules.batchnorm._BatchNorm
    norm = {
        s.name
        for s in topology.segments
        # What its owner has put in evaluation mode inside a module in training stays there.
        if any(
            isinstance(m, batch_norm) and (m.training or not s.module.training or m.running_mean is None)
            for m in s.module.modules()
            if not is_elsewhere(m)
        )
    }
    origins = _origins(topology, traces)
    _check_carried_inputs(topology, origins)
    return TopologyFacts(
        {name: tuple(v.shape[1:]) for name, v in values.items()},
        {name: v.dtype for name, v in values.items()},
        overwritten,
        frozenset(stochastic),
        frozenset(norm),
        _without_gradient(topology, leaves, reached_leaves),
        origins,
        frozenset(plain_draws),
        repeated=frozenset(repeated),
        changed_in_evaluation=frozenset(changed),
        resized=tuple(resized),
    )


def _origins(topology: Topology, traces: Mapping[str, Traces]) -> dict[str, Origin]:
    """Return what every value is made of; masks that tell an input to a party together are that input."""
    found = {name: origin_of(one) for name, one in traces.items()}
    received: dict[str, set[str]] = {}
    for edge in topology.crossings:
        received.setdefault(topology.role_of(edge.target), set()).update(edge.values)
    for role, values in received.items():
        closed = [name for name, owner in topology.inputs.items() if owner != role]
        found |= carried_together({value: traces[value] for value in sorted(values)}, closed)
    return found


def _check_carried_inputs(topology: Topology, origins: Mapping[str, Origin]) -> None:
    """Refuse a value that carries an input to a role that neither owns it nor may see it."""
    together = told_by(topology, origins)
    for told in together:
        carried = told.origin.inputs if told.origin.content is Content.INPUT else ()
        if closed := [name for name in carried if name not in topology.sent_inputs]:
            arguments = {v: n for s in topology.segments if s.original for v, n in s.original.arguments.items()}
            named = [arguments.get(name, name) for name in closed]
            rows, reader = f"rows of {', '.join(map(repr, named))}", told.target
            names = (*(arguments.get(name, name) for name in topology.sent_inputs), *named)
            what = f"carries the input {', '.join(map(repr, named))}"
            others = sum(one.target == told.target and one.origin == told.origin for one in together) - 1
            what += f", with {others} more that {reader} gets" if others else ""
            raise InvalidInput(
                f"value {told.value!r} on edge {told.edge!r} {what}: it is made of {rows} without any weight, and "
                f"{reader} reads them off it; cut behind a layer with weights, or allow it where {reader} may see "
                f"them: sent_inputs={names!r}"
            )


def _arrived(topology: Topology, name: str, value: Tensor, origin: Origin) -> Tensor:
    """Return `value` as a segment gets it: raw data, masks and whole numbers ask for no gradient, other values do."""
    leaf = value.detach()
    asks = name not in topology.inputs and origin.is_data and leaf.is_floating_point()
    return leaf.requires_grad_() if asks else leaf


def _without_gradient(
    topology: Topology, leaves: Mapping[tuple[str, str], Tensor], reached_leaves: Mapping[tuple[str, str], set[int]]
) -> frozenset[tuple[str, str]]:
    """Return value and reading segment wherever no gradient of a head comes back."""
    learning_values, unreached = {head.value for head in topology.heads}, set()
    for segment in reversed(topology.segments):
        reached = set().union(*(reached_leaves[segment.name, v] for v in segment.outputs if v in learning_values))
        for name in set(segment.inputs) - set(topology.inputs):
            if id(leaves[segment.name, name]) in reached:
                learning_values.add(name)
            else:
                unreached.add((name, segment.name))
    return frozenset(unreached)


def check_equal_shapes(topologies: Sequence[Topology], facts: Sequence[TopologyFacts]) -> None:
    """Refuse clients whose values enter a segment that serves them all in different shapes or types.

    One topology and one probe a client. Raises `InvalidInput` that names client, value and shapes.
    """
    first = topologies[0]
    entering = [value for s in first.segments if s.role not in first.data_roles for value in s.inputs]
    for client, client_facts in enumerate(facts):
        for value in entering:
            client_form, first_form = ((f.shapes[value], f.dtypes[value]) for f in (client_facts, facts[0]))
            if client_form != first_form:
                raise InvalidInput(
                    f"client {client} sends {value!r} as {client_form[0]} of {client_form[1]} a row, client 0 as "
                    f"{first_form[0]} of {first_form[1]}: the segment that reads it serves them all"
                )


class _Seen(NamedTuple):
    """What a segment returns, the inputs it overwrites, the packages it draws from, and the traces of what it returns.

    See `RowTracking` for these. `changed`: whether evaluation changed it; `resized`: buffers of another shape.
    """

    outputs: tuple[Tensor, ...]
    overwritten: frozenset[str]
    draws: frozenset[str]
    traces: list[Traces]
    changed: bool
    resized: tuple[str, ...]


def _run_segment(
    topology: Topology,
    segment: Segment,
    values: Mapping[str, Tensor],
    traces: Mapping[str, Traces],
    zeros: frozenset[str],
    shared: bool,
) -> _Seen:
    """Return what `segment` makes of `values`, whose traces are those in `traces`."""
    found: list[Traces] = [{} for _ in segment.outputs]
    overwritten: set[str] = set()
    draws: frozenset[str] = frozenset()
    changed = False
    # In evaluation mode first: what it overwrites there counts too, and what it returns in training is handed on.
    module = segment.module
    for training in (False, True):
        with others_code(partial(_not_copied, segment)):
            # A trace that is used leaves its modules as they were.
            if not (training and shared and isinstance(segment.module, fx.GraphModule)):
                module = (copy_sharing if shared else _copy)(segment.module)
            set_mode(module, training)
        watch = None if training or shared else StateWatch(module, segment.module)
        inputs = [values[name].clone() for name in segment.inputs]
        traced = [(x, traces[name]) for name, x in zip(segment.inputs, inputs, strict=True)]
        versions = [tensor._version for tensor in inputs]
        before = generator_states() if training else None
        with (
            others_code(lambda error: InvalidInput(_describe_misfit(topology, segment, values, error))),
            RowTracking(module, traced, zeros, segment.name) as follow,
        ):
            result = module(*inputs)
        changed = changed or (watch is not None and watch.changed())
        if before is not None:
            draws = frozenset(drawn_packages(before, generator_states()))
        outputs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        for name, value in zip(segment.outputs, outputs, strict=False):
            _check_kind(segment, name, value)
        # `tensor.data` and storages are written without a new version.
        overwritten |= {
            name
            for name, tensor, version in zip(segment.inputs, inputs, versions, strict=True)
            if tensor._version != version or not torch.equal(tensor, values[name])
        }
        if len(outputs) != len(segment.outputs):
            raise InvalidInput(
                f"segment {segment.name!r} returned {len(outputs)} values; it names {len(segment.outputs)}: "
                f"{', '.join(segment.outputs)}{_other_way(segment)}"
            )
        # In either mode it may send what it does not in the other.
        found = [
            together(before, follow.traces(value)) if isinstance(value, Tensor) else before
            for before, value in zip(found, outputs, strict=True)
        ]
    shapes = {name: tensor.shape for name, tensor in stored_tensors(segment.module)}
    resized = tuple(n for n, tensor in stored_tensors(module) if n in shapes and tensor.shape != shapes[n])
    return _Seen(outputs, frozenset(overwritten), draws, found, changed, resized)


def _copy(module: nn.Module) -> nn.Module:
    return deep_copy(module, (module,), copy_computed(module))


def _not_copied(segment: Segment, error: BaseException) -> InvalidInput:
    return InvalidInput(f"segment {segment.name!r} cannot be copied for its party: {describe_failure(error)}")


def _describe_misfit(topology: Topology, segment: Segment, values: Mapping[str, Tensor], error: BaseException) -> str:
    shapes = ", ".join(f"{name} {tuple(values[name].shape)}" for name in segment.inputs)
    edges = [e.name for e in topology.edges if e.target == segment.name]
    place = f"edge{'s' * (len(edges) > 1)} {', '.join(edges)}" if edges else f"input of {segment.name!r}"
    failure = describe_failure(error)
    if "meta" in failure and hasattr(segment.module, "replay_plan"):
        return (
            f"segment {segment.name!r} reads what another party holds (a tensor that a submodule sets on itself, "
            "weights that functional_call is given), by what shows no operation on it: return it, or cut so that one "
            f"party runs all of that ({failure})"
        )
    return f"segment {segment.name!r} cannot take what arrives on {place} ({shapes}): {failure}"


def _check_kind(segment: Segment, name: str, value: object) -> None:
    """Refuse a `value` that no message carries."""
    what = f"value {name!r} of segment {segment.name!r}"
    if not isinstance(value, Tensor):
        raise InvalidInput(f"{what} is a {type(value).__name__}, no tensor: it cannot cross a cut; return tensors")
    if (kind := not_dense(value)) is not None:
        raise CannotCross(f"{what} is {kind}, and messages carry dense tensors alone: {_DENSE.get(kind, _DENSE[''])}")
    if value.is_complex():
        raise CannotCross(
            f"{what} is {value.dtype}, and messages carry real numbers alone: return torch.view_as_real of it, and "
            "take torch.view_as_complex of that behind the cut"
        )


def _other_way(segment: Segment) -> str:
    """Return the advice for a segment that was cut by trace alone."""
    return (
        "; give rows of its input as example, to cut it by replay" if isinstance(segment.module, fx.GraphModule) else ""
    )


def _check_value(segment: Segment, name: str, value: Tensor, rows: int, learns: bool) -> None:
    if value.dim() == 0 or len(value) != rows:
        raise InvalidInput(
            f"value {name!r} of segment {segment.name!r} has shape {tuple(value.shape)}; the first dimension must "
            f"be the batch ({rows} rows here): cut where it is, or keep it first in what crosses{_other_way(segment)}"
        )
    if learns and not value.is_floating_point():
        raise InvalidInput(f"value {name!r} of segment {segment.name!r} is {value.dtype}: no loss can learn from it")
