"""Places where a model can be cut: every submodule is tried by `cut`, and what crosses behind it is measured.

One pass through the uncut model says in which order the submodules return, and how many multiply-adds have run by then.
Then the model is cut after each of them, one at a time, and every cut is compared with the uncut model as any other cut
is, so that a place is possible if training there is exact, and else refused for the reason that `cut` gives. The uncut
model is run once for all of them; see `splitfed.core.uncut_runs`.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from splitfed.core.block_names import block_names
from splitfed.core.cut_names import read_cuts
from splitfed.core.cutting import Cutter, Example, Piece
from splitfed.core.equivalence import FailsByItself
from splitfed.core.equivalence_sides import required_arguments
from splitfed.core.errors import InvalidInput, check_count, describe_failure, others_code
from splitfed.core.example_pass import pass_example
from splitfed.core.flop_counter import flop_counter
from splitfed.core.model_call import call_of
from splitfed.core.model_checks import check_model, open_wrappers
from splitfed.core.model_snapshot import ModelSnapshot
from splitfed.core.nested_tensors import tensors_of
from splitfed.core.replay import ReplayedSegment
from splitfed.core.topology import Head, Segment, Topology
from splitfed.core.uncut_runs import UncutRuns
from splitfed.core.unread_state import refuse_unread

_ROWS = 2  # batch norm refuses a single row in training


@dataclass(frozen=True)
class CutValue:
    """One value that crosses a cut: its `shape` without the batch dimension, and whether its gradient is `returned`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    returned: bool

    @property
    def bytes(self) -> int:
        """Bytes of one row, in one direction."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class CutPlace:
    """What a cut of a model behind one submodule, or behind one call of it ("name#n"), comes to.

    `aliases`: other names of the same place, a container's and that of its last child, say. `refusal`: why the model
    cannot be cut here, None where it can; `called`: whether `forward` calls the submodule at all. Of a place that is
    possible: `method`, by which it is cut, "trace" or "replay"; `values`, which cross; `parameters` and
    `multiply_adds` (of one row, forward) before and after it.
    """

    name: str
    aliases: tuple[str, ...] = ()
    refusal: str | None = None
    called: bool = True
    method: Literal["trace", "replay"] | None = None
    values: tuple[CutValue, ...] = ()
    parameters: tuple[int, int] = (0, 0)
    multiply_adds: tuple[int, int] = (0, 0)

    @property
    def possible(self) -> bool:
        """Whether the pieces train exactly as the model does."""
        return self.refusal is None

    @property
    def depth(self) -> int:
        """How deep the submodule lies: 1 for one of the model itself."""
        return self.name.count(".") + 1

    @property
    def forward_bytes(self) -> int:
        """Bytes of one row that cross forward."""
        return sum(value.bytes for value in self.values)

    @property
    def backward_bytes(self) -> int:
        """Bytes of one row that come back in training: those of every value whose gradient returns."""
        return sum(value.bytes for value in self.values if value.returned)

    @property
    def bytes(self) -> int:
        """Bytes of one row in both directions of a training step; labels are not counted."""
        return self.forward_bytes + self.backward_bytes


@dataclass
class _Recording:
    """What one pass through the uncut model has shown: submodule -> (moment, multiply-adds so far) of every return."""

    returns: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    total: int = 0


@dataclass(frozen=True)
class _Attempt:
    """One name to cut after: the `moment` at which it returns, counted in operations, None where it never does."""

    name: str
    moment: int | None
    multiply_adds: int


def cut_places(
    model: nn.Module,
    example: Example,
    depth: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    output: str | None = None,
    sent_inputs: Sequence[str] = (),
    blocks: bool = False,
) -> tuple[CutPlace, ...]:
    """Return the places behind all submodules of `model`, in the order they run; those never called come last.

    `example`: at least two rows of its input, (rows, ...), by argument if there are several. `depth`: how deep
    submodules are looked for, None for all. `progress` is told how many of how many names have been tried. `output` and
    `sent_inputs` as for `cut`. `blocks`: only the elements of the outermost lists of repeated blocks, and the
    submodules beside these lists; see `block_names`. Every name is one `cut` with its comparison, so that a model of
    many submodules takes long; the uncut model is run once for all of them, and what it came to is kept meanwhile: up
    to eight times the weights, of a model of 2**24 weights and more their gradients once. The model is left as it was.
    Raises `InvalidInput` for a model that fails by itself on these rows, and for `blocks` of one that repeats none.
    """
    check_model(model)
    model, _ = open_wrappers(model)
    if depth is not None:
        check_count("depth", depth, low=1)
    if depth is not None and blocks:
        raise InvalidInput(f"depth={depth} and blocks exclude each other: blocks lie as deep as they do; give one")
    names = block_names(model) if blocks else _names_to(model, depth)
    inputs = _inputs_by_name(model, example)
    snapshot = ModelSnapshot(model)
    try:
        recording = _record(model, inputs)
        snapshot.restore()
        attempts = _list_attempts(names, recording)
        cutter = Cutter(model, inputs, output, (), sent_inputs, snapshot, UncutRuns())
        found: list[tuple[_Attempt, CutPlace]] = []
        for number, attempt in enumerate(attempts):
            if progress is not None:
                progress(number, len(attempts))
            found.append((attempt, _try_cut(cutter, inputs, attempt, recording.total)))
            snapshot.restore()
    finally:
        snapshot.restore()
    if progress is not None:
        progress(len(attempts), len(attempts))
    return _merge(found)


def deepest(model: nn.Module) -> int:
    """Return the depth of the deepest submodule of `model`, 0 where it has none."""
    return max((name.count(".") + 1 for name, _ in model.named_modules() if name), default=0)


def _inputs_by_name(model: nn.Module, example: Example) -> dict[str, Tensor]:
    if not isinstance(example, (Tensor, Mapping)):
        raise InvalidInput(f"example is a {type(example).__name__}; expected rows of the input, or argument -> rows")
    parameters = inspect.signature(model.forward).parameters
    if not parameters:
        raise InvalidInput(f"forward of {type(model).__name__} takes no argument")
    # One tensor without names is every input, as for `cut`.
    own = {next(iter(parameters)): None, **dict.fromkeys(required_arguments(model))}
    inputs = dict(example) if isinstance(example, Mapping) else dict.fromkeys(own, example)
    for name, rows in inputs.items():
        if (count := len(rows) if rows.dim() else 0) < _ROWS:
            raise InvalidInput(f"example has {count} rows for the input {name!r}; expected at least {_ROWS}")
    return inputs


class _OperationCount(TorchFunctionMode):
    """Counts the calls of functions of torch that return or change a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one call and count it; a question such as for a shape is none."""
        returned = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "__get__" and (returned is None or tensors_of(returned)):
            self.number += 1
        return returned


def _record(model: nn.Module, inputs: Mapping[str, Tensor]) -> _Recording:
    """Run `model` on two rows in training mode, and note every return of a submodule."""
    recording, operations, flops = _Recording(), _OperationCount(), flop_counter()

    def note(name: str, *_: Any) -> None:
        recording.returns[name].append((operations.number, flops.get_total_flops() // (2 * _ROWS)))

    hooks = [m.register_forward_hook(partial(note, name)) for name, m in model.named_modules() if name]
    call = call_of(model, list(inputs))
    try:
        with others_code(partial(_fails_by_itself, model)), torch.enable_grad(), flops, operations:
            call(model.train(), {name: rows[:_ROWS].clone() for name, rows in inputs.items()})
    finally:
        for hook in hooks:
            hook.remove()
    recording.total = flops.get_total_flops() // (2 * _ROWS)
    return recording


def _fails_by_itself(model: nn.Module, error: BaseException) -> InvalidInput:
    return InvalidInput(f"{type(model).__name__} fails by itself with {_ROWS} rows: {describe_failure(error)}")


def _names_to(model: nn.Module, depth: int | None) -> tuple[str, ...]:
    names = (name for name, _ in model.named_modules() if name)
    return tuple(name for name in names if depth is None or name.count(".") < depth)


def _list_attempts(names: Sequence[str], recording: _Recording) -> list[_Attempt]:
    """Return all names to cut after in the order they return, of those that return together the outermost first."""
    attempts = []
    for name in names:
        returns = recording.returns.get(name, [])
        moment, done = returns[-1] if returns else (None, recording.total)
        attempts.append(_Attempt(name, moment, done))
        if len(returns) > 1:
            attempts += [_Attempt(f"{name}#{i}", *one) for i, one in enumerate(returns, start=1)]
    end = 1 + max((a.moment for a in attempts if a.moment is not None), default=0)
    return sorted(attempts, key=lambda a: (end if a.moment is None else a.moment, a.name.count("."), "#" in a.name))


def _try_cut(cutter: Cutter, inputs: Mapping[str, Tensor], attempt: _Attempt, total: int) -> CutPlace:
    try:
        refuse_unread(cutter.snapshot.records)
        before, after = cutter.cut(read_cuts(cutter.model, (attempt.name,)))
        values = _measure_values(before, after, inputs, cutter.sent_inputs)
    except FailsByItself:
        raise
    except InvalidInput as error:
        return CutPlace(attempt.name, refusal=" ".join(str(error).split()), called=attempt.moment is not None)
    counts = [sum(weight.numel() for weight in piece.module.parameters()) for piece in (before, after)]
    return CutPlace(
        attempt.name,
        method="replay" if isinstance(before.module, ReplayedSegment) else "trace",
        values=values,
        parameters=(counts[0], counts[1]),
        multiply_adds=(attempt.multiply_adds, total - attempt.multiply_adds),
    )


def _measure_values(
    before: Piece, after: Piece, inputs: Mapping[str, Tensor], sent_inputs: Sequence[str]
) -> tuple[CutValue, ...]:
    """Return what crosses between two pieces at two parties; refuse where raw data would, but for `sent_inputs`."""
    original = before.original
    assert original is not None
    for value in after.inputs:
        if value not in before.outputs:
            where, name = "on both sides of" if value in before.inputs else "behind", original.arguments[value]
            raise InvalidInput(
                f"the input {name!r} is read {where} this cut: raw data never crosses; cut elsewhere, or allow it by "
                f"sent_inputs={(name,)!r}"
            )
    segments = (
        Segment("before", "client", before.module, before.inputs, before.outputs),
        Segment("after", "server", after.module, after.inputs, after.outputs),
    )
    owners = dict.fromkeys(before.inputs, "client")
    makers = {value: segment.role for segment in segments for value in segment.outputs}
    heads = tuple(Head(value, makers[value], makers[value]) for value in dict.fromkeys(original.outputs))
    allowed = [value for value in owners if original.arguments[value] in sent_inputs]
    topology = Topology("cut", segments, owners, heads, sent_inputs=allowed)
    facts = pass_example(topology, {v: inputs[original.arguments[v]][:_ROWS] for v in owners}, shared=True)
    (edge,) = topology.crossings
    returned = facts.returned(topology, edge)
    return tuple(CutValue(v, facts.shapes[v], facts.dtypes[v], v in returned) for v in edge.values)


def _merge(found: Sequence[tuple[_Attempt, CutPlace]]) -> tuple[CutPlace, ...]:
    """Return the places, those together that stand at one moment and come to the same; all names stay told."""
    places: dict[tuple[Any, ...], CutPlace] = {}
    for attempt, place in found:
        shapes = tuple((value.shape, value.dtype) for value in place.values)
        key = (attempt.name if attempt.moment is None else attempt.moment, place.possible, shapes)
        first = places.setdefault(key, place)
        if first is not place:
            places[key] = replace(first, aliases=(*first.aliases, place.name))
    return tuple(places.values())
