"""What a value that crosses is made of, found by following the rows of every input through a segment as it runs.

There are four contents. CONSTANT: from shapes and constants. MASK: from lengths, masks or comparisons of ids. INPUT:
from rows through no weight, as x, 2x - 1 or a normalisation by constants. FEATURES: from rows through weights, or from
weights alone. What meets becomes the higher of the two, so that a weight makes features of whatever it is combined
with, a single number that multiplies an image included; buffers are constants. A value may have several contents in
different places (`cat([x, h])`): one that has an input anywhere carries that input.

Of an input of whole numbers or booleans a comparison is a mask, and so are the additive form of one, zeros and a
huge negative number, and the place of its largest number, by which the end of a text is found. A comparison with many
numbers (`ids[..., None] == arange(words)`) is the input itself, and so is what many comparisons, or few that tell all
of its numbers apart, have been put into; a length, one number a row, may be compared with all places. Masks that one
party gets count together, as if they were one value. A comparison of
real numbers stays an input: a thresholded image is an image. A single truth value of a whole batch, by which `forward`
branches, tells as much as a length, and so does a single whole number of ids.

Every operation is seen below autograd, custom functions and submodules; what is noted is noted for the memory that an
operation has written, so that views and operations in place need no rule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from splitfed.core.nested_tensors import tensors_of

MASKED = -1000.0
"""What an additive mask adds to a masked place is this or less."""

_JOINED = frozenset(("cat", "stack", "_cat", "hstack", "vstack"))
_PICKED_NAMES = """
gather index index_select take masked_select embedding index_put index_put_ _unsafe_index _unsafe_masked_index
scatter scatter_ where masked_fill masked_fill_ masked_scatter masked_scatter_ index_copy index_copy_ index_fill
index_fill_
"""
_PICKED = frozenset(_PICKED_NAMES.split())
_WITH_NUMBERS = frozenset(["where", "masked_fill", "masked_fill_", "scatter", "scatter_", "index_fill", "index_fill_"])
_OVERWRITING = frozenset(("copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "set_"))
_SHAPED_LIKE_NAMES = """
zeros_like ones_like full_like empty_like rand_like randn_like randint_like new_zeros new_ones new_full new_empty
new_empty_strided
"""
_SHAPED_LIKE = frozenset(_SHAPED_LIKE_NAMES.split())
_ORDERS = frozenset(("lt", "le", "gt", "ge"))
_COMPARISONS = _ORDERS | {"eq", "ne"}
_PLACES = frozenset(("argmax", "argmin"))
_CASTS = frozenset(("_to_copy", "clone", "copy_", "lift_fresh_copy", "lift_fresh", "alias", "detach", "contiguous"))
_LEAVES = frozenset(("numpy", "tolist", "__array__", "item", "__float__", "__int__", "__dlpack__"))


class Content(IntEnum):
    """What a value is made of; whatever is INPUT or FEATURES is data."""

    CONSTANT = 0
    MASK = 1
    INPUT = 2
    FEATURES = 3


class _Grade(IntEnum):
    """The contents as they are followed: rows of whole numbers may still become a mask."""

    CONSTANT = 0
    MASK = 1
    IDS = 2
    REAL = 3
    FEATURES = 4


_CONTENT = {
    _Grade.CONSTANT: Content.CONSTANT,
    _Grade.MASK: Content.MASK,
    _Grade.IDS: Content.INPUT,
    _Grade.REAL: Content.INPUT,
    _Grade.FEATURES: Content.FEATURES,
}

MANY = 8
"""All masks that a party gets tell at most so many kinds of ids apart: padding, beginning, end and the like."""

_LENGTH = "length"


class Question(NamedTuple):
    """A comparison that was made of `inputs`, whole numbers: of which tensor, with what; `distinct`: numbers there."""

    inputs: frozenset[str]
    compared: tuple[str, int] | frozenset[str]
    value: Any
    distinct: int


Sources = frozenset[str | Question]
"""Names of inputs, and of masks the questions that were asked of them."""

Traces = Mapping[_Grade, Sources]
"""Every grade that some place of a value has -> the inputs whose rows are behind it there."""

_NOTHING: Traces = {_Grade.CONSTANT: frozenset()}
_WEIGHT: Traces = {_Grade.FEATURES: frozenset()}


class Origin(NamedTuple):
    """What a value is made of: its `content`, and of INPUT and MASK the names of the inputs that it tells of."""

    content: Content
    inputs: tuple[str, ...] = ()

    @property
    def is_data(self) -> bool:
        """Whether there is something in it to defend, to score and to attack."""
        return self.content >= Content.INPUT


def describe(made: Origin) -> str:
    """Say what a value tells that is made so, in a few words that may follow "reveals" or "carries"."""
    named = ", ".join(map(repr, made.inputs))
    told = {
        Content.CONSTANT: "constants",
        Content.MASK: f"lengths or a mask of {named}" if named else "lengths or a mask",
        Content.INPUT: f"the input {named}",
        Content.FEATURES: "features",
    }
    return told[made.content]


FEATURES = Origin(Content.FEATURES)
"""What a value of which nothing is known is taken for."""


def traces_of_input(name: str, rows: Tensor) -> Traces:
    """Return the traces of the raw input `name`."""
    real = rows.is_floating_point() or rows.is_complex()
    return {_Grade.REAL if real else _Grade.IDS: frozenset((name,))}


def origin_of(traces: Traces) -> Origin:
    """Return what a value with `traces` is made of."""
    carried = set(_revealed(traces.get(_Grade.MASK, frozenset())))
    for grade in (_Grade.IDS, _Grade.REAL):
        carried.update(_names(traces.get(grade, frozenset())))
    if carried:
        return Origin(Content.INPUT, tuple(sorted(carried)))
    highest = max(traces)
    return Origin(_CONTENT[highest], tuple(sorted(_names(traces[highest]))) if highest is _Grade.MASK else ())


def carried_together(received: Mapping[str, Traces], closed: Collection[str]) -> dict[str, Origin]:
    """Return the values among those that one party gets (name -> traces) that carry an input by being taken together.

    Masks tell of the same ids, so that all of them count for what is told apart. `closed`: inputs that the party lacks.
    """
    masks = {value: traces.get(_Grade.MASK, frozenset()) for value, traces in received.items()}
    revealed = _revealed(frozenset().union(*masks.values())) & frozenset(closed)
    found: dict[str, Origin] = {}
    for value, sources in masks.items():
        asked = frozenset().union(*(one.inputs for one in sources if isinstance(one, Question))) & revealed
        if asked:
            alone = origin_of(received[value])
            also = alone.inputs if alone.content is Content.INPUT else ()
            found[value] = Origin(Content.INPUT, tuple(sorted({*asked, *also})))
    return found


def _names(sources: Sources) -> frozenset[str]:
    return frozenset(one for one in sources if isinstance(one, str))


def _revealed(sources: Sources) -> frozenset[str]:
    """Return the inputs of which the questions among `sources` tell many kinds of numbers apart, or all there are."""
    asked: dict[frozenset[str], dict[Any, set[Question]]] = {}
    for one in sources:
        # A length may be told in full.
        if isinstance(one, Question) and one.value != _LENGTH:
            asked.setdefault(one.inputs, {}).setdefault(one.compared, set()).add(one)
    found: frozenset[str] = frozenset()
    for inputs, compared in asked.items():
        kinds = math.prod(len({one.value for one in questions}) + 1 for questions in compared.values())
        distinct = max(one.distinct for questions in compared.values() for one in questions)
        if distinct > 2 and kinds >= min(distinct, MANY + 1):
            found |= inputs
    return found


def together(*found: Traces) -> dict[_Grade, Sources]:
    """Return the traces of values that stand side by side, each as it is."""
    made: dict[_Grade, Sources] = {}
    for traces in found:
        for grade, names in traces.items():
            made[grade] = made.get(grade, frozenset()) | names
    return made


def _combined(found: Iterable[Traces]) -> Traces:
    """Return the traces of what is computed from values with the traces `found`: everything may meet everything."""
    made: Traces = _NOTHING
    for traces in found:
        met: dict[_Grade, Sources] = {}
        for grade, names in made.items():
            for other, more in traces.items():
                highest = max(grade, other)
                met[highest] = met.get(highest, frozenset()) | names | more
        made = met
    return made


def _picked(sources: Collection[Traces], pickers: Collection[Traces]) -> Traces:
    """Return the traces of what `pickers` choose among `sources`: rows that were chosen are still rows.

    Of what holds no rows, the choice is what is told.
    """
    choice = _combined(pickers)
    found: list[Traces] = []
    for grade, names in together(*sources).items():
        one: Traces = {grade: names}
        found.append(one if grade in (_Grade.IDS, _Grade.REAL) else _combined((one, choice)))
    return together(*found)


class RowTracking:
    """Follows the rows of `inputs` (tensor and its traces) through what `module` does within its block.

    `place`: names the module among those that hand values to each other.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Iterable[tuple[Tensor, Traces]],
        zeros: Collection[str] = (),
        place: str = "",
    ) -> None:
        self._operations = _Operations(zeros, place)
        self._exits = _Exits(self._operations)
        for inner in module.modules():
            known = (*inner._buffers.values(), *vars(inner).values())
            for tensor in (one for one in known if isinstance(one, Tensor)):
                self._operations.note(tensor, _NOTHING)
        for weight in module.parameters():
            self._operations.note(weight, _WEIGHT)
        for tensor, traces in inputs:
            names = _names(traces.get(_Grade.IDS, frozenset()))
            self._operations.note(tensor, traces, names)
            self._operations.rows = len(tensor)
            self._operations.distinct[names] = len(tensor.unique()) if names else 0

    def __enter__(self) -> RowTracking:
        """Begin."""
        self._exits.__enter__()  # type: ignore[no-untyped-call]
        self._operations.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """End."""
        self._operations.__exit__(*error)  # type: ignore[no-untyped-call]
        self._exits.__exit__(*error)  # type: ignore[no-untyped-call]

    def traces(self, tensor: Tensor) -> Traces:
        """Return the traces of a tensor that was made."""
        return self._operations.traces(tensor)


class _Exits(TorchFunctionMode):
    """Sees where numbers leave torch (NumPy, lists), and may come back as tensors that nothing is known of."""

    def __init__(self, operations: _Operations) -> None:
        super().__init__()
        self._operations = operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one call, and note what leaves by it."""
        if getattr(func, "__name__", "") in _LEAVES and isinstance(args[0], Tensor):
            self._operations.let_out(args[0])
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Notes of every operation what it has made."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # To hide it from torch's compiler would load that, which takes longer than a plan.
        return False

    def __init__(self, zeros: Collection[str], place: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._place = place
        self._found: dict[int, Traces] = {}
        self._zeros = frozenset(zeros)
        self.rows = 0
        self.distinct: dict[frozenset[str], int] = {}
        # What is a copy of a tensor, or another view of it, is asked the same questions.
        self._copied: dict[int, tuple[str, int] | frozenset[str]] = {}
        self._numbers = itertools.count()
        # Kept, so that no other memory gets the address, and no other tensor without a storage the identity.
        self._kept: list[StorageWeakRef | Tensor] = []
        self._outside: Traces = _NOTHING

    def note(self, tensor: Tensor, traces: Traces, copied: tuple[str, int] | frozenset[str] | None = None) -> None:
        """Note the traces of all that shares the memory of `tensor`, and what it is a copy of."""
        key = _memory(tensor)
        if key not in self._found:
            self._kept.append(tensor if key < 0 else StorageWeakRef(tensor.untyped_storage()))
        self._found[key] = traces
        self._copied[key] = self._number() if copied is None else copied

    def _number(self) -> tuple[str, int]:
        return self._place, next(self._numbers)

    def traces(self, tensor: Tensor) -> Traces:
        """Return the traces of `tensor`; of one that no operation has made those of what has left torch so far."""
        return self._found.get(_memory(tensor), self._outside)

    def let_out(self, tensor: Tensor) -> None:
        """Note that the numbers of `tensor` are read outside of torch."""
        if tensor.dtype is not torch.bool:
            self._outside = together(self._outside, self.traces(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and note what it has made."""
        given = kwargs or {}
        # What a function with a backward of its own does to its result, a pass that counts operations would count.
        with torch._C.DisableTorchFunction():
            given_tensors = tensors_of((args, given))
            memory = [_memory(one) for one in given_tensors]
            read = [(one, self._found.get(key, self._outside)) for one, key in zip(given_tensors, memory, strict=True)]
            name, places = _name_and_written(func)
            written = [
                one
                for place, word in places
                for one in tensors_of(args[place] if place < len(args) else given.get(word))
            ]
            returned = func(*args, **given)
            made = tensors_of(returned)
            if written or made:
                self._note_made(name, args, read, memory, written, made)
        return returned

    def _note_made(
        self,
        name: str,
        args: Any,
        read: list[tuple[Tensor, Traces]],
        memory: list[int],
        written: list[Tensor],
        made: list[Tensor],
    ) -> None:
        kept = [traces for one, traces in read if not (name in _OVERWRITING and one is args[0])]
        traces = self._result(name, args, kept)
        copied = self._copied.get(memory[-1 if name == "copy_" else 0]) if name in _CASTS and memory else None
        for tensor in written:
            result = self._as_mask(name, tensor, traces, args, read)
            whole = tensor.numel() * tensor.element_size() >= _size(tensor)
            self.note(tensor, result if whole else together(self.traces(tensor), result), copied if whole else None)
        for tensor in made:
            # A view has what is noted for its memory.
            if _memory(tensor) not in memory:
                one = tensor.dim() == 0 and any(_is_whole(given) for given, _ in read)
                made_of = _as_number(tensor, traces) if one else self._as_mask(name, tensor, traces, args, read)
                self.note(tensor, made_of, copied)

    def _result(self, name: str, args: Any, read: list[Traces]) -> Traces:
        if name in _SHAPED_LIKE:
            return _NOTHING
        if name in _JOINED:
            return together(*read) if read else _NOTHING
        if name not in _PICKED:
            return _combined(read)
        of = [[self.traces(one) for one in tensors_of(argument)] for argument in args]
        # Of torch.where the first is the choice; of all others the first is chosen from, the second is the choice.
        if name == "where":
            pickers, sources = of[:1], of[1:]
        elif name in ("gather", "index", "index_select", "take", "masked_select", "embedding", "_unsafe_index"):
            pickers, sources = of[1:], of[:1]
        elif name.startswith(("masked_", "index_put")):
            pickers, sources = of[1:2], [*of[:1], *of[2:]]
        else:
            # scatter, index_copy, index_fill: self, dimension, index, source.
            pickers, sources = of[2:3], [*of[:1], *of[3:]]
        flat = [one for found in sources for one in found]
        if name in _WITH_NUMBERS or not flat:
            # What they put in may be a plain number.
            flat.append(_NOTHING)
        return _picked(flat, [one for found in pickers for one in found])

    def _as_mask(
        self, name: str, tensor: Tensor, traces: Traces, args: Any, read: list[tuple[Tensor, Traces]]
    ) -> Traces:
        """Return `traces` of a result, or those of a mask where it is one."""
        if max(traces) > _Grade.IDS or _Grade.IDS not in traces:
            return traces
        if (questions := self._questions(name, tensor, args, read)) is None:
            return traces
        mask = {_Grade.MASK: questions.union(*traces.values())}
        if tensor.dtype is torch.bool or name in _PLACES:
            return mask
        if name in _CASTS or tensor.is_meta or tensor.is_complex() or not tensor.numel():
            return traces
        zero, blocked = tensor == 0, tensor <= MASKED
        if not bool((zero | blocked).all()):
            return traces
        if bool(blocked.any()):
            return mask if bool((tensor == tensor.min()).logical_or(zero).all()) else traces
        # Nothing is masked in these rows; but of an input that is zero throughout nothing can be said.
        return mask if not self._zeros.intersection(traces[_Grade.IDS]) else traces

    def _questions(self, name: str, tensor: Tensor, args: Any, read: list[tuple[Tensor, Traces]]) -> Sources | None:
        """Return what an operation with the result `tensor` asks of ids; None where each is asked for many numbers."""
        ids = [(one, _names(traces[_Grade.IDS])) for one, traces in read if _Grade.IDS in traces]
        values: set[Any] = {name}
        if tensor.is_meta:
            return frozenset()
        if name in _COMPARISONS:
            values = {one for one in args if isinstance(one, (bool, int, float))} or values
            for other in [one for one, traces in read if _Grade.IDS not in traces]:
                found = other.unique()
                a_length = name in _ORDERS and all(_is_whole(one) and one.numel() == self.rows for one, _ in ids)
                several = any(tensor.numel() > one.numel() for one, _ in ids)
                if len(found) <= 2:
                    values = set(found.tolist())
                elif several and not a_length:
                    return None
                else:
                    # Each is asked once; or a length, which may be told.
                    values = {("places", self._number())} if not a_length else {_LENGTH}
        return frozenset(
            Question(
                names,
                self._copied.get(_memory(one), (self._place, -1)),
                value,
                self.distinct.get(names) or len(one.unique()),
            )
            for one, names in ids
            for value in values
        )


def _is_whole(tensor: Tensor) -> bool:
    """Return whether `tensor` holds several numbers, all of its memory, and not a row of it alone."""
    return tensor.numel() > 1 and tensor.numel() * tensor.element_size() >= _size(tensor)


def _as_number(tensor: Tensor, traces: Traces) -> Traces:
    """Return the traces of a single number of a whole batch: one that steers, as a length does, tells of no row.

    A real number may be any of the rows, or a sum of them with weights of somebody's choice.
    """
    steers = tensor.dtype is torch.bool or not (_Grade.REAL in traces or tensor.is_floating_point())
    carried = _Grade.IDS in traces or _Grade.REAL in traces
    if not (steers and carried) or _Grade.FEATURES in traces:
        return traces
    return {_Grade.MASK: frozenset().union(*traces.values())}


def _memory(tensor: Tensor) -> int:
    """Return what tells the memory of `tensor` from any other; less than zero where it has no storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return -id(tensor)


def _size(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return 0


@cache
def _name_and_written(func: Any) -> tuple[str, tuple[tuple[int, str], ...]]:
    """Return the name of an operation, and the place and the name of every argument that it writes into."""
    arguments = enumerate(func._schema.arguments)
    return func._schema.name.partition("::")[2], tuple(
        (place, one.name) for place, one in arguments if one.alias_info is not None and one.alias_info.is_write
    )
