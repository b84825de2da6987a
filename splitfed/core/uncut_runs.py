"""What the uncut model comes to in the batches of an equivalence test, run once for all cuts that are compared with it.

Every cut of a model is compared with the same run: of the same rows from the same weights, random numbers and Python
state. What it leaves behind at every batch is kept and given again. Nothing is kept of a run that fails, that is not
finite, that writes into weights in its forward pass, or after which Python state goes on changing: such a model is run
beside each of its cuts, so that what is told of it is what is told of one cut.

Held are, of the last run, the outputs, buffers and gradients of every batch and the state after it: of a small model up
to eight times its weights. Of a large one, whose weights are shared, it is the gradients of one batch, which is what
the comparison of one cut holds too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from splitfed.core.equivalence_batches import Batches, SideFailed, run_batch
from splitfed.core.equivalence_sides import Parties, Side, StepResult, Uncut, Values
from splitfed.core.topology import Original
from splitfed.core.weight_sharing import weight_sums


@dataclass(frozen=True)
class UncutRun:
    """One run: the `results` of its batches, outputs by place; `shared`: addresses of weights that were shared."""

    results: tuple[StepResult, ...]
    shared: frozenset[int]

    def stand_in(self, uncut: Uncut, original: Original) -> RecordedUncut:
        """Return what gives these results again, under the names of `original`, in place of running `uncut`."""
        return RecordedUncut(uncut, tuple(_named(result, original.outputs) for result in self.results))


class RecordedUncut:
    """The uncut side of a comparison that is not run again; only weights that both sides share are stepped on."""

    def __init__(self, uncut: Uncut, results: tuple[StepResult, ...]) -> None:
        self._uncut, self._results = uncut, results

    def run(self, stage: str, inputs: Values, targets: Values, step: int) -> StepResult:
        """Return what the batch of number `step` came to."""
        return self._results[step]

    def step_shared(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Step on the shared weights, as `Uncut.step_shared`."""
        self._uncut.step_shared(gradients)

    def modules(self) -> dict[str, nn.Module]:
        """Return the submodules, as `Uncut.modules`."""
        return self._uncut.modules()


class UncutRuns:
    """Keeps the last run of one model, for cuts of it that are all given the same rows."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._kept: UncutRun | None = None

    def find(
        self,
        original: Original,
        in_training: bool,
        batches: Batches,
        make_sides: Callable[[], tuple[Uncut, Parties]],
        going_on: Callable[[Callable[[], Side], Batches], list[str]],
    ) -> UncutRun | None:
        """Return the run that cuts of `original` are compared with, None where nothing of it may be kept.

        `make_sides`: puts the model back, and returns both sides. `going_on`: makes a side, runs more batches, and
        returns the Python state that goes on changing.
        """
        if not original.arguments or len(set(original.outputs)) < len(original.outputs):
            return None
        rows = tuple((name, id(batches.inputs[value])) for value, name in original.arguments.items())
        shapes = tuple(batches.shapes.get(value) for value in original.outputs)
        key = (id(original.model), rows, original.output, shapes, in_training, batches.stages)
        if key != self._key:
            # The last one is let go of before the next one is made.
            self._key, self._kept = key, None
            uncut, parties = make_sides()
            shared = parties.shared
            del parties
            results = _record(uncut, original, batches, shared)
            if results is not None and not going_on(partial(Uncut, original, in_training), batches):
                self._kept = UncutRun(results, shared)
        return self._kept


def _record(
    uncut: Uncut, original: Original, batches: Batches, shared: frozenset[int]
) -> tuple[StepResult, ...] | None:
    """Run all batches; None where one fails, is not finite, or writes into shared weights."""
    results, places = [], tuple(map(str, range(len(original.outputs))))
    sums = weight_sums(original.model) if shared else []
    for step in range(len(batches.stages)):
        try:
            result = run_batch(uncut, step, batches)
        except SideFailed:
            return None
        if result is None or (shared and sums != weight_sums(original.model)):
            return None
        results.append(_named(result, places))
        if shared and result.gradients:
            uncut.step_shared(result.gradients)
            sums = weight_sums(original.model)
    return tuple(results)


def _named(result: StepResult, names: tuple[str, ...]) -> StepResult:
    """Return `result` with its outputs, which are in the order of the model, under other names."""
    return replace(
        result,
        outputs=dict(zip(names, result.outputs.values(), strict=True)),
        attached=dict(zip(names, result.attached.values(), strict=True)),
    )
