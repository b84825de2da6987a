"""Gradients accumulated over several batches, bit-identical to repeated backward passes of the uncut model.

The `grad` of a weight accumulates by itself. A weight that several segments of a party share needs more: in the uncut
model the parts of one batch are added to each other before they are added to earlier batches, and the order of sums
determines the last bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor, nn

from splitfed.core.party import Party


class TiedGradients:
    """Gradients, by batch, of weights that several segments of one of `parties` share."""

    def __init__(self, parties: Sequence[Party]) -> None:
        self._weights = [weight for party in parties for weight in tied_weights(party)]
        self._sums: list[Tensor | None] = [None] * len(self._weights)

    def add_batch(self) -> None:
        """Add the gradients of the current batch to those of earlier batches, and remove them from the weights."""
        for i, weight in enumerate(self._weights):
            gradient, before = weight.grad, self._sums[i]
            if gradient is not None:
                self._sums[i] = gradient if before is None else before.add_(gradient)
                weight.grad = None

    def put_back(self) -> None:
        """Set the accumulated sums as the gradients of the weights."""
        for weight, found in zip(self._weights, self._sums, strict=True):
            weight.grad = found


def tied_weights(party: Party) -> list[nn.Parameter]:
    """Return the weights of `party` that more than one of its segments uses."""
    found: dict[int, nn.Parameter] = {}
    uses: Counter[int] = Counter()
    for module in party.state.modules.values():
        own = {id(weight): weight for weight in module.parameters() if weight.requires_grad}
        found |= own
        uses.update(own.keys())
    return [weight for key, weight in found.items() if uses[key] > 1]


def group_batches(batches: Sequence[Tensor], accumulate: int) -> list[Sequence[Tensor]]:
    """Return `batches` in groups of `accumulate`, in order; the last group may be smaller."""
    return [batches[start : start + accumulate] for start in range(0, len(batches), accumulate)]
