"""Cut a model after named submodules into pieces that together train exactly as the whole.

Two cutters do it. A trace of the model's operations, by `torch.fx`, costs nothing in a step and is tried first; see
`splitfed.core.tracing`. What it cannot follow (branches on the mode, `no_grad`, autocast, functions with a backward of
their own, tables as results) is replayed: every piece runs the model's own `forward`; see `splitfed.core.replay`. Both
are compared with the uncut model, in `splitfed.core.equivalence`: by `cut` where an example is given, and before a run.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from inspect import signature

from torch import Tensor, nn

from splitfed.core.cut_names import Cut, read_cuts
from splitfed.core.equivalence import FailsByItself, check_counts, check_example, check_original
from splitfed.core.errors import InvalidInput, check_names, others_code, short
from splitfed.core.example_pass import CannotCross
from splitfed.core.grouping import nest
from splitfed.core.model_call import call_of, takes_by_name
from splitfed.core.model_checks import check_model, open_wrappers, without_prefix
from splitfed.core.model_snapshot import ModelSnapshot
from splitfed.core.payload import not_dense
from splitfed.core.replay import Replayed, ReplayedSegment, replay
from splitfed.core.replay_rows import most_rows, other_sizes, with_needed
from splitfed.core.topology import Original
from splitfed.core.tracing import NotTraceable, cut_by_trace
from splitfed.core.uncut_runs import UncutRuns
from splitfed.core.unread_state import refuse_unread
from splitfed.core.warming import warm_up
from splitfed.core.weight_sharing import FEW_ROWS, is_large

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


def cut(
    model: nn.Module,
    at: Sequence[str],
    example: Tensor | Mapping[str, Tensor] | None = None,
    output: str | None = None,
    chain: Sequence[str] = (),
    sent_inputs: Sequence[str] = (),
) -> tuple[Piece, ...]:
    """Cut `model` after each submodule named in `at`, in the order they run; returns `len(at) + 1` pieces.

    "before:name" cuts before a submodule. `example`: at least two rows of its input, (rows, ...), by argument if there
    are several. With it the pieces are compared with the model at once, and a model that cannot be traced is cut by
    replay, where "name#n" is after the n-th call of a submodule. `output`: which one of several results of the model
    is used, by key or place ("logits", "0"); None for all. `chain`: the party of each piece, where neighbours alone
    send to each other, and those between two others hand on what they do not read. `sent_inputs`: inputs of the model
    that may cross, changed by constants or as they are; the first piece sends them to later ones that read them (an
    attention mask), by replay alone.

    Weights that two pieces read are one tensor in both. Raises `InvalidInput` for a name that is not there, for a cut
    that leaves an empty piece, for an in-place operation whose effect would have to cross a cut, and for pieces that
    do not train as the model does.
    """
    check_model(model)
    model, prefix = open_wrappers(model)
    cuts = read_cuts(model, without_prefix(model, prefix, (at,) if isinstance(at, str) else tuple(at)))
    if chain and len(chain) != len(cuts) + 1:
        raise InvalidInput(f"chain={short(chain)} is not allowed; expected the party of each of {len(cuts) + 1} pieces")
    snapshot = ModelSnapshot(model)
    refuse_unread(snapshot.records)
    if example is None:
        if called := [cut.name for cut in cuts if cut.call is not None]:
            raise InvalidInput(f"cut {called[0]!r} names a call of a submodule; give rows as example too")
        try:
            return _pieces(_traced(model, cuts, output, chain, sent_inputs, snapshot))
        except NotTraceable as error:
            if sent_inputs:
                raise InvalidInput(f"sent_inputs={sent_inputs!r} needs rows as example, too") from error
            raise NotTraceable(f"{error}, or give rows of its input as example, to cut it by replay") from error
    # Whatever looks at the model leaves it as it was, so that one copy of it serves them all.
    return Cutter(model, example, output, chain, sent_inputs, snapshot).cut(cuts)


@dataclass(frozen=True)
class Cutter:
    """Cuts one model by the rows of an example, as `cut` describes it; `snapshot`: what the model was before.

    `runs`: keeps what the uncut model comes to, where it is cut in many places.
    """

    model: nn.Module
    example: Example
    output: str | None
    chain: Sequence[str]
    sent_inputs: Sequence[str]
    snapshot: ModelSnapshot
    runs: UncutRuns | None = None

    def cut(self, cuts: Sequence[Cut]) -> tuple[Piece, ...]:
        """Return the pieces between `cuts`, by trace or else by replay, and leave the model as it was."""
        _check_rows(self.example)
        refused: InvalidInput
        try:
            traced = self._by_trace(cuts)
        except InvalidInput as error:
            refused = error
        else:
            check_example(traced, _by_name(traced, self.example))
            try:
                pieces = self._compared(traced)
            except (FailsByItself, CannotCross):
                raise
            except InvalidInput as error:
                refused = error
            else:
                if not _count_shared(pieces):
                    return pieces
                # What a trace reads on two sides may be a shape, a type or a constant, which replay reads on none.
                try:
                    again = self._replayed_pieces(cuts)
                except InvalidInput:
                    return pieces
                return again if _count_shared(again) < _count_shared(pieces) else pieces
        # Its frames hold what was compared, gradients among it.
        traceback.clear_frames(refused.__traceback__)
        try:
            return self._replayed_pieces(cuts)
        except InvalidInput as error:
            raise error from refused

    def _replayed_pieces(self, cuts: Sequence[Cut]) -> tuple[Piece, ...]:
        """Return the pieces by replay, whose parties hold what their operations read, and as little else as will do."""
        replayed = self._by_replay(cuts)
        withheld = _withheld(replayed)
        refused: InvalidInput
        # What others' code reads may be kept for an operation of one's own.
        for held in ({}, dict.fromkeys(withheld, False), dict.fromkeys(withheld, True)):
            try:
                pieces = self._replay_compared(self._by_replay(cuts, held) if held else replayed)
                break
            except (FailsByItself, CannotCross):
                raise
            except InvalidInput as error:
                refused = error
                if not withheld:
                    raise
        else:
            raise refused
        for one in sorted(held) if len(held) > 1 and all(held.values()) else ():
            fewer = {name: whole for name, whole in held.items() if name != one}
            with suppress(InvalidInput):
                pieces = self._replay_compared(self._by_replay(cuts, fewer))
                held = fewer
        return pieces

    def _replay_compared(self, replayed: Original) -> tuple[Piece, ...]:
        check_example(replayed, _by_name(replayed, self.example))
        return self._compared(replayed)

    def _by_trace(self, cuts: Sequence[Cut]) -> Original:
        if isinstance(self.example, Mapping) and not takes_by_name(self.model, self.example):
            raise NotTraceable("rows that are no arguments of their own are followed by replay alone")
        given = self.example if isinstance(self.example, Mapping) else ()
        return _traced(self.model, cuts, self.output, self.chain, self.sent_inputs, self.snapshot, given)

    def _by_replay(self, cuts: Sequence[Cut], held: Mapping[tuple[int, str], bool] | None = None) -> Original:
        """Return the pieces by replay; `held`: number of a piece and attribute -> whether all of it is held there."""
        if isinstance(self.example, Mapping):
            check_counts(type(self.model).__name__, self.example)
        rows = _first_rows(self.example, FEW_ROWS) if is_large(self.model) else self.example
        try:
            # A party takes the same way in its first step as in all others.
            warm_up(self.snapshot, _calls_on_rows(self.model, self.example))
            there = nest((number, name, whole) for (number, name), whole in (held or {}).items())
            replayed = self._replayed(cuts, rows, there)
            if not is_large(self.model) and self._sizes(replayed):
                self.snapshot.restore()
                sizes = range(1, most_rows(_count_rows(self.example)) + 1)
                warm_up(self.snapshot, _calls_on_rows(self.model, self.example, sizes))
                replayed = self._replayed(cuts, rows, there)
                if found := self._sizes(replayed):
                    replayed = self._replayed(cuts, rows, there, found)
            replayed = with_needed(replayed, _count_rows(rows), there)
        finally:
            self.snapshot.restore()
        arguments, names = {name: name for name in replayed.inputs}, tuple(cut.name for cut in cuts)
        return Original(
            self.model,
            arguments,
            replayed.outputs,
            replayed.segments,
            names,
            replayed.reordered,
            self.output,
            replayed.sizes,
        )

    def _replayed(
        self, cuts: Sequence[Cut], rows: Example, held: Mapping[int, Mapping[str, bool]], sizes: Sequence[int] = ()
    ) -> Replayed:
        return replay(
            self.model,
            cuts,
            rows,
            self.output,
            self.chain,
            sent_inputs=self.sent_inputs,
            sizes=sizes,
            held=held,
        )

    def _sizes(self, replayed: Replayed) -> list[int]:
        return other_sizes([module for module, _, _ in replayed.segments], _count_rows(self.example))

    def _compared(self, original: Original) -> tuple[Piece, ...]:
        check_original(original, _by_name(original, self.example), self.snapshot, self.runs)
        return tuple(Piece(module, inputs, outputs, original) for module, inputs, outputs in original.pieces)


def _traced(
    model: nn.Module,
    cuts: Sequence[Cut],
    output: str | None,
    chain: Sequence[str],
    sent_inputs: Sequence[str],
    snapshot: ModelSnapshot | None = None,
    given: Collection[str] = (),
) -> Original:
    """Return the pieces by trace; refuse where a later one reads an input that is to be sent to it."""
    traced = cut_by_trace(model, cuts, output, chain, snapshot, given)
    read = {traced.arguments.get(value) for _, inputs, _ in traced.pieces[1:] for value in inputs}
    if read.intersection(sent_inputs):
        raise NotTraceable("inputs are sent by replay alone")
    check_names(f"input of {type(model).__name__}", traced.arguments.values(), *sent_inputs)
    return traced


def _check_rows(example: Example) -> None:
    """Refuse an `example` that is no rows."""
    named = example if isinstance(example, Mapping) else {"": example}
    for name, rows in named.items():
        what = f"example[{name!r}]" if name else "example"
        if not isinstance(rows, Tensor):
            raise InvalidInput(f"{what} is a {type(rows).__name__}; expected a tensor of rows, or argument -> rows")
        if rows.is_meta or (kind := not_dense(rows)) is not None:
            found = "on the meta device, without numbers" if rows.is_meta else f"{kind}"
            raise InvalidInput(f"{what} is {found}; expected a dense tensor of rows")


def _withheld(replayed: Original) -> frozenset[tuple[int, str]]:
    """Return the number of each piece with every attribute of which it has no numbers though its pass meets it."""
    modules = [module for module, _, _ in replayed.pieces if isinstance(module, ReplayedSegment)]
    return frozenset((number, name) for number, module in enumerate(modules) for name in module.withheld)


def _count_shared(pieces: Sequence[Piece]) -> int:
    """Return how many inputs, weights and buffers are read by more than one piece."""
    made = {value for piece in pieces for value in piece.outputs}
    readers = Counter(value for piece in pieces for value in piece.inputs if value not in made)
    held = Counter(n for p in pieces for n in {id(t) for t in (*p.module.parameters(), *p.module.buffers())})
    return sum(count > 1 for count in (*readers.values(), *held.values()))


def _pieces(original: Original) -> tuple[Piece, ...]:
    return tuple(Piece(module, inputs, outputs, original) for module, inputs, outputs in original.pieces)


def _by_name(original: Original, example: Example) -> Mapping[str, Tensor]:
    if isinstance(example, Tensor):
        return dict.fromkeys(original.arguments, example)
    return {value: example[name] for value, name in original.arguments.items() if name in example}


class _Fails(Exception):
    """A user's own `forward` raised something of a number of rows."""


def _first_rows(example: Example, rows: int) -> Example:
    if isinstance(example, Tensor):
        return example[:rows]
    return {name: value[:rows] for name, value in example.items()}


def _count_rows(example: Example) -> int:
    return len(example if isinstance(example, Tensor) else next(iter(example.values())))


def _calls_on_rows(model: nn.Module, example: Example, sizes: Sequence[int] = ()) -> list[Callable[[], object]]:
    """Return a call of `model` on its first row, twice, and one on its last, of numbers halved: rows may be alike.

    `sizes`: other numbers of rows that it is called with as well, where it can be.
    """
    first = next(iter(signature(model.forward).parameters), "")
    table = example if isinstance(example, Mapping) else {first: example}
    call = call_of(model, tuple(table))

    def run_rows(row: int, count: int) -> object:
        rows = {name: x[row].expand(count, *x.shape[1:]).clone() for name, x in table.items()}
        return call(model, {n: x * 0.5 if row and x.is_floating_point() else x for n, x in rows.items()})

    def run(row: int) -> object:
        for count in sizes:
            with suppress(_Fails), others_code(lambda _: _Fails()):
                run_rows(row, count)
        return run_rows(row, 2)

    return [partial(run, 0), partial(run, -1)]
