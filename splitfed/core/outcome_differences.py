"""What two outcomes of one batch differ in, bit for bit, and what to write instead.

Outputs, gradients, state and buffers after the step, modes, and the random generators; see `splitfed.core.equivalence`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from splitfed.core.equivalence_sides import StepResult
from splitfed.core.model_snapshot import drawn_packages
from splitfed.core.plain_values import same_tensors

# Of some summands in another order: units in the last place of the largest number of the tensor, cancellation included.
_REORDERED = 2.0**10
_MODES = {True: "training", False: "evaluation"}
_MODE = "a party switches modes itself: call .eval() on that submodule before the cut, not in train()"
RANDOM = "draw within a submodule that no cut lies in, such as nn.Dropout, or by a function of torch"
UNREPEATED = (
    f"{RANDOM}, and keep in a buffer what else changes from call to call (a clock, a context variable, what a thread "
    "or a file holds)"
)
_GRADIENT = (
    "hooks on weights, no_grad and functions with a backward of their own do not survive the cut: use detach(), or put "
    "that part into a submodule"
)
_ROUNDING = "sums of what comes back are taken in another order there: cut before or behind that operation"
_NO_GRADIENT = "freeze it by requires_grad_(False) instead of torch.no_grad() or set_grad_enabled() in forward"
_BUFFER = "change buffers in place by operations on tensors, in a submodule that stands on one side of the cut"
TRACE = (
    "what forward does there was not seen as operations (autocast, a branch, a number out of a tensor): write it as "
    "operations on tensors, or as a submodule"
)


class Difference(Exception):
    """What differs, what to write instead, and whether it shows in what comes out."""

    def __init__(self, what: str, advice: str, in_outputs: bool = False) -> None:
        super().__init__(what)
        self.advice = advice
        self.in_outputs = in_outputs


def check_same(uncut: StepResult, cut: StepResult, reordered: Collection[str]) -> None:
    """Raise the `Difference` between two outcomes that explains most, if there is one.

    `reordered`: the weights whose gradients may be rounded differently.
    """
    for name, mode in uncut.modes.items():
        if cut.modes.get(name, mode) != mode:
            raise Difference(f"submodule {name!r} is not in {_MODES[mode]} mode, as it is in the uncut model", _MODE)
    if packages := drawn_packages(uncut.generators, cut.generators):
        raise Difference(f"other random numbers are drawn from {packages[0]}", RANDOM)
    # A copy that does not change with the other explains what comes out.
    _check_buffers(uncut, cut, alone=False)
    for name, value in uncut.outputs.items():
        _check_output(name, value, cut.outputs[name])
    for name, attached in uncut.attached.items():
        if cut.attached.get(name, attached) != attached:
            raise Difference(f"output {name!r} has {'no' if attached else 'a'} gradient", _GRADIENT)
    for name, gradient in uncut.gradients.items():
        try:
            _check_gradient(name, gradient, cut.gradients.get(name), name in reordered)
        except Difference as differs:
            if not _vanish(gradient, cut.gradients.get(name), uncut.gradients.values()):
                raise
            raise Difference(f"{differs}, by the rounding of what is zero in exact numbers", _ROUNDING) from None
    for name in uncut.state:
        if name not in cut.state:
            raise Difference(f"the state has no {name!r}", TRACE)
    for name, value in cut.state.items():
        if name not in uncut.state:
            raise Difference(f"the state has {name!r} besides", TRACE)
        if not same_tensors(uncut.state[name], value):
            raise Difference(f"{name!r} is another after the step", _BUFFER)
    _check_buffers(uncut, cut, alone=True)


def _check_buffers(uncut: StepResult, cut: StepResult, alone: bool) -> None:
    """Compare buffers that one segment alone has if `alone`, else those of several, and plain tensors of several."""
    compared = {"buffer": (uncut.buffers, cut.copies), "attribute": (uncut.attributes, cut.attribute_copies)}
    for kind, (wanted, copies) in compared.items():
        holders = Counter(name for _, name, _ in copies)
        for segment, name, value in copies if kind == "buffer" or not alone else ():
            if name in wanted and (holders[name] == 1) == alone and not same_tensors(wanted[name], value):
                what = kind if alone else f"the copy of {kind}"
                raise Difference(f"{what} {name!r} in {segment!r} is another after the step", _BUFFER)


def _check_output(name: str, uncut: Tensor, cut: Tensor) -> None:
    for what, mine, wanted in (("type", cut.dtype, uncut.dtype), ("shape", tuple(cut.shape), tuple(uncut.shape))):
        if mine != wanted:
            raise Difference(f"output {name!r} has {what} {mine} in place of {wanted}", TRACE, in_outputs=True)
    if not same_tensors(uncut, cut):
        most = float((uncut.double() - cut.double())[uncut != cut].abs().max())
        raise Difference(f"output {name!r} differs by up to {most:.3g}", TRACE, in_outputs=True)


def _check_gradient(name: str, uncut: Tensor | None, cut: Tensor | None, reordered: bool) -> None:
    if uncut is None and cut is not None:
        raise Difference(f"weight {name!r} gets a gradient, and none in the uncut model", _NO_GRADIENT)
    if uncut is not None and cut is None:
        raise Difference(f"weight {name!r} gets no gradient, and one in the uncut model", _GRADIENT)
    if uncut is not None and cut is not None and not (same_tensors(uncut, cut) or (reordered and _close(uncut, cut))):
        if _close(uncut, cut):
            raise Difference(f"the gradient of weight {name!r} differs by rounding alone", _ROUNDING)
        raise Difference(f"the gradient of weight {name!r} differs", _GRADIENT)


def _vanish(one: Tensor | None, other: Tensor | None, gradients: Iterable[Tensor | None]) -> bool:
    """Return whether two gradients are as small as the rounding of the largest of `gradients`."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype or not one.numel():
        return False
    largest = max(float(found.abs().max()) for found in gradients if found is not None and found.numel())
    return max(float(one.abs().max()), float(other.abs().max())) <= torch.finfo(one.dtype).eps * largest


def _close(one: Tensor, other: Tensor) -> bool:
    """Return whether two gradients, both finite, are sums of the same summands in another order."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool((one - other).abs().max() <= _REORDERED * torch.finfo(one.dtype).eps * one.abs().max())
