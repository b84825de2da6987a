"""Values of a recorded pass, each followed from the segment that makes it to those that read it: what crosses a cut.

What one segment makes and a later one reads is a crossing value of the pass's way, under a name of its own; memory that
is overwritten across a cut is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.forward_path import CrossingForm, CrossingValue, ForwardPath, OperationOutput
from splitfed.core.meta_pass import LIKE
from splitfed.core.replay_passes import (
    Operation,
)

UNSEEN = (
    "it is computed before forward, made by what torch shows to nobody (functions of TorchScript or torch.func, a "
    "class of tensors of your own), or kept in an object; give functions as they were before they were compiled, and "
    "compute such a tensor within one submodule that returns a plain one"
)
"""Why nobody knows where a tensor comes from, and what to write instead."""


class CrossingValues:
    """Follows every tensor of a recorded pass from where it is made to where it is read."""

    def __init__(
        self,
        way: ForwardPath,
        operations: Sequence[Operation],
        inputs: Mapping[int, str],
        tensors: Sequence[Tensor],
        batches: Mapping[OperationOutput, int | None],
    ) -> None:
        self._way, self._operations, self._inputs = way, operations, inputs
        self._tensors, self._batches = tensors, batches
        self._results = {index for operation in operations for index in operation.results}
        self._made: dict[int, OperationOutput] = {}
        self._holder: dict[int, int] = {}
        self._names: dict[tuple[OperationOutput, int], str] = {}
        self._forms: dict[str, CrossingForm] = {}
        self._last: dict[tuple[OperationOutput, int | None], OperationOutput] = {}
        self._weights: dict[int, set[str]] = {}
        self._readers: dict[int, dict[int, int]] = {}

    def keep_names(self, earlier: Sequence[ForwardPath]) -> None:
        """Take the names of what is the same in `earlier` ways."""
        for way in earlier:
            shared = self._way.shared_with(way)
            self._names |= {key: name for key, name in way.labels.items() if key[0].operation < shared}
            self._forms = {**way.forms, **self._forms}

    def follow(self, results: Mapping[str, int | None]) -> None:
        """Fill the way with what crosses, and with its outputs: `results`, name -> index of the tensor."""
        for number, operation in enumerate(self._operations):
            segment = self._way.segment(number)
            if number in self._way.constants:
                self._note_made(number, operation, None)
                continue
            # Of a tensor like which another is made, the shape alone is read.
            for index in () if operation.name in LIKE and len(operation.reads) == 1 else operation.reads:
                self._read(index, segment, operation)
            for index in operation.writes:
                self._write(index, segment, number, operation)
            self._note_made(number, operation, segment)
            if number in self._way.told:
                self._tell(number, segment, operation)
        for key, found in results.items():
            if found is None or found not in self._made:
                raise InvalidInput(
                    "a model that returns one of its inputs, weights or buffers, what no operation on tensors is seen "
                    f"to make (vmap), or what a hook takes out of a submodule ({key!r} here), cannot be cut; name the "
                    "output that is used by output=, or return what an operation makes of it"
                )
            made, holder = self._made[found], self._holder.get(found)
            if holder is None:
                raise InvalidInput("a model that returns a constant cannot be cut")
            if (made, holder) not in self._names and not key.isdecimal():
                self._names[made, holder] = key
            name = self._name(made, holder, found)
            # What is returned twice is one value.
            self._way.results = (*self._way.results, name)
            self._way.outputs[name] = CrossingValue(name, holder, made)
            for received in self._way.received:
                if name in received:
                    # What the model returns is sent as it is.
                    received[name] = self._way.outputs[name]
        self._way.labels = self._names

    def _tell(self, number: int, segment: int, operation: Operation) -> None:
        """Let all later segments read what question `number` asks, so that everybody asks it."""
        if operation.state:
            raise InvalidInput(
                f"{operation.name!r} takes a number out of {min(operation.state)!r}, a weight or buffer that later "
                "parties do not hold, and goes on by it: ask it a question that is true or false by an operation "
                "(if scale > 3, in place of scale.item()), or keep it as a plain number"
            )
        for later in range(segment + 1, len(self._way.received)):
            for index in operation.reads:
                self._read(index, later, None)

    def _note_made(self, number: int, operation: Operation, segment: int | None) -> None:
        """Note where tensors come from; `segment` is None for constants, which everybody makes."""
        weights = set(operation.state).union(*(self._weights.get(i, set()) for i in operation.reads))
        for place, index in enumerate(operation.results):
            if index is not None and index not in self._made and index not in self._inputs:
                self._made[index] = OperationOutput(number, place)
                if segment is not None:
                    self._holder[index] = segment
            if index in self._made:
                self._last[self._made[index], segment] = OperationOutput(number, place)
            if index is not None:
                self._weights.setdefault(index, set()).update(weights)

    def _read(self, index: int, segment: int, operation: Operation | None) -> None:
        """Note that `operation` of `segment` reads a tensor; None: for its numbers alone, to which no gradient goes."""
        if index in self._inputs:
            self._way.raw[segment][self._inputs[index]] = None
            return
        source = self._holder.get(index)
        if source is None:
            if operation is not None and index not in self._made and self._tensors[index].grad_fn is not None:
                raise InvalidInput(f"{operation.name!r} reads a tensor of which it is not seen what made it: {UNSEEN}")
            return
        name = self._name(self._made[index], source, index) if source != segment else None
        counts = self._readers.setdefault(index, {})
        if operation is not None:
            counts[segment] = counts.get(segment, 0) + (2 if operation.deep else 1)
        if name is not None:
            if self._tensors[index].is_inference():
                raise InvalidInput(f"value {name!r} is made in inference mode, and crosses a cut: use torch.no_grad()")
            made = self._made[index]
            self._way.received[segment][name] = CrossingValue(name, source, made, self._batches.get(made, 0))
            self._way.reads[name] = counts
            self._way.upstream[name] = self._weights.get(index, set())

    def _write(self, index: int, segment: int, number: int, operation: Operation) -> None:
        """Let `segment` hold what it overwrites; refuse where another name of that memory is read across a cut."""
        readers = [n for n, o in enumerate(self._operations) if index in o.reads and o.name not in LIKE]
        behind = any(n > number and self._way.segment(n) != segment for n in readers)
        # What everybody makes of a constant would be made of what it has become.
        before = index not in self._holder and any(self._way.segment(n) < segment for n in readers)
        if behind and (before or index in self._inputs or index not in self._made):
            raise self._overwritten(operation, index)
        memory = self._tensors[index].untyped_storage().data_ptr()
        for other, tensor in enumerate(self._tensors):
            known = other in self._made or other in self._inputs or other not in self._results
            if other == index or not known or not memory or tensor.untyped_storage().data_ptr() != memory:
                continue
            later = [n for n, o in enumerate(self._operations) if n > number and other in o.reads]
            apart = self._holder.get(other) != segment or self._holder.get(index) != segment
            if any(self._way.segment(n) != segment or apart for n in later):
                raise self._overwritten(operation, other)
        if index in self._made:
            self._holder[index] = segment

    def _overwritten(self, operation: Operation, index: int) -> InvalidInput:
        if index not in self._results and index not in self._inputs:
            return InvalidInput(
                f"{operation.name!r} changes in place a tensor that is kept beside the state, such as an attribute, "
                "and read on another side of a cut, which has a copy of its own: keep it in a buffer that one side "
                "reads"
            )
        return InvalidInput(
            f"{operation.name!r} overwrites in place what is read after a cut under another name, or as it was before: "
            "the cut would change the model; make that operation not in place"
        )

    def _name(self, made: OperationOutput, source: int, index: int) -> str:
        """Return the name of a tensor that `source` hands on: of what returned it, with a number where that is taken.

        Of several operations it is the last one: dropout returns what it is given, but in training. A name that has
        another form in another way is taken too.
        """
        tensor, batch = self._tensors[index], self._batches.get(made, 0)
        shape = tuple(size for dimension, size in enumerate(tensor.shape) if dimension != batch)
        form = CrossingForm(shape, tensor.dtype, tensor.requires_grad)
        if (made, source) not in self._names:
            last = self._last.get((made, source), made)
            base = self._operations[last.operation].name.strip("_").replace(".", "_")
            base += f"_{last.place}" if len(self._operations[last.operation].results) > 1 else ""
            name, number = base, 1
            while (
                name in self._names.values()
                or name in self._inputs.values()
                or self._forms.get(name, form)[:2] != form[:2]
            ):
                name, number = f"{base}_{number}", number + 1
            self._names[made, source] = name
        name = self._names[made, source]
        self._way.forms[name] = form
        return name
