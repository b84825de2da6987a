"""Cut a model after named submodules into pieces that together train exactly as the whole.

Two cutters do it. A trace of the model's operations, by `torch.fx`, costs nothing in a step and is tried first; see
`splitfed.core.tracing`. What it cannot follow (branches on the mode, `no_grad`, autocast, functions with a backward of
their own, tables as results) is replayed: every piece runs the model's own `forward`; see `splitfed.core.replay`. Both
are compared with the uncut model, in `splitfed.core.equivalence`: by `cut` where an example is given, and before a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from splitfed.core.equivalence import FailsByItself, check_example, check_original
from splitfed.core.errors import InvalidInput, unknown
from splitfed.core.model_snapshot import ModelSnapshot
from splitfed.core.replay import replay
from splitfed.core.topology import Original
from splitfed.core.tracing import cut_by_trace

Example = Tensor | Mapping[str, Tensor]
"""Rows of a model's input, by name of the argument where there are several."""


@dataclass(frozen=True)
class Piece:
    """One piece of a cut model: `module` reads `inputs` and returns `outputs` (names of values).

    `original`: the model and all of its pieces.
    """

    module: nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    original: Original | None = field(default=None, compare=False, repr=False)


def cut(model: nn.Module, at: Sequence[str], example: Tensor | Mapping[str, Tensor] | None = None) -> tuple[Piece, ...]:
    """Cut `model` after each submodule named in `at`, in the order they run; returns `len(at) + 1` pieces.

    `example`: at least two rows of its input, (rows, ...), by argument if there are several. With it the pieces are
    compared with the model at once, and a model that cannot be traced is cut by replay, where "name#n" is after the
    n-th call of a submodule. Raises `InvalidInput` for a name that is not there, for a cut that leaves an empty piece,
    for weights used on two sides of a cut, for an in-place operation whose effect would have to cross a cut, and for
    pieces that do not train as the model does.
    """
    names = (at,) if isinstance(at, str) else tuple(at)
    modules = {name for name, _ in model.named_modules() if name}
    for name in names:
        if name.partition("#")[0] not in modules:
            raise unknown(f"submodule of {type(model).__name__}", name, modules)
    if example is None:
        if any("#" in name for name in names):
            raise InvalidInput(f"cuts {', '.join(map(repr, names))} name calls of submodules; give rows as example too")
        try:
            return _pieces(cut_by_trace(model, names))
        except InvalidInput as error:
            if "splitfed.Segment" not in str(error) and "in the place of buffer" not in str(error):
                raise
            raise InvalidInput(f"{error}, or give rows of its input as example, to cut it by replay") from error
    refused: InvalidInput
    try:
        traced = cut_by_trace(model, names)
    except InvalidInput as error:
        refused = error
    else:
        check_example(traced, _by_name(traced, example))
        try:
            return _pieces(_compared(traced, example))
        except FailsByItself:
            raise
        except InvalidInput as error:
            refused = error
    try:
        replayed = _cut_by_replay(model, names, example)
        check_example(replayed, _by_name(replayed, example))
        return _pieces(_compared(replayed, example))
    except InvalidInput as error:
        raise error from refused


def _pieces(original: Original) -> tuple[Piece, ...]:
    return tuple(Piece(module, inputs, outputs, original) for module, inputs, outputs in original.pieces)


def _by_name(original: Original, example: Example) -> Mapping[str, Tensor]:
    return example if isinstance(example, Mapping) else dict.fromkeys(original.arguments, example)


def _compared(original: Original, example: Example) -> Original:
    check_original(original, _by_name(original, example))
    return original


def _cut_by_replay(model: nn.Module, names: tuple[str, ...], example: Example) -> Original:
    snapshot = ModelSnapshot(model)
    try:
        replayed = replay(model, names, example)
    finally:
        snapshot.restore()
    arguments = {name: name for name in replayed.inputs}
    return Original(model, arguments, replayed.outputs, replayed.segments, names, replayed.reordered)
