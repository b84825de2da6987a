"""Contract of a local objective: terms that a method adds to a party's losses, corrections of its gradients.

The core knows no federated method: it calls the local objective of a party at two moments of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from splitfed.core.messages import Stamp


class LocalObjective(Protocol):
    """Belongs to one party, and knows what that party holds and what was sent to it; nothing else."""

    def terms(self, made: Mapping[str, Tensor], labels: Mapping[str, Tensor], stamp: Stamp) -> Mapping[str, Tensor]:
        """Return segment -> scalar to add to the loss that goes back through it.

        `made`: what the party's segments have returned in this step, value -> (batch, ...), each attached to its own
        segment alone: a term moves the segment under whose name it is returned, and no other. `labels`: those
        of the step by head, (batch,), which the party holds or has been sent for the loss.
        """

    def correct(self, modules: Mapping[str, nn.Module]) -> None:
        """Change the gradients in the weights of `modules` (segment -> module), just before the optimizer's step."""

    def state(self) -> dict[str, Any]:
        """Return the state: tensors and plain values."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`."""
