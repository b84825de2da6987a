"""Interfaces of models that an adversary runs on its own machine: trained copies, upstream clones, training attacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from splitfed.attacks.threat_model import Target
from splitfed.core.messages import View

Releases = Mapping[str, Tensor]
"""Name of a value -> its release, (rows, ...)."""


class Imitation(Protocol):
    """A model trained by the adversary on its own rows, in the way the run's model was trained."""

    def predict(self, x: Tensor) -> Tensor:
        """Return the copy's output for `x` (rows, *shape): (rows, outputs)."""


Imitate = Callable[[Tensor, Tensor, int | None, int | None, int], Imitation]
"""Maps rows, labels, epochs, batch size (None: that of the run) and seed to a trained copy."""


class DefenseStates(Protocol):
    """States of imitated defenses that learn, such as a decoder that a defense trains against."""

    def learn(self) -> None:
        """Let each defense take one step, as after a training step of its party."""

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the learned states."""

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore the learned states from `states`."""


class Clone(Protocol):
    """A copy of the upstream segments with weights of the adversary's own."""

    def __call__(self, x: Tensor) -> Releases:
        """Return the releases of `x` (rows, *shape) with every defense at its mean."""

    def sample(self, x: Tensor, number: int | None = None) -> Releases:
        """Return the releases of `x` with randomly drawn defenses; `number` fixes the draw, None draws afresh."""

    def in_training(
        self, x: Tensor, number: int | None = None, epoch: int | None = None
    ) -> tuple[Releases, Tensor, float]:
        """Return `sample(x, number)`, the defenses' penalty on the client's loss, and the factor of its task loss.

        The penalty is a scalar whose gradient is exact; its value is not where a defense defines its penalty by the
        gradient alone. `epoch`: of the run, for defenses that change over it; None: the run's last one.
        """

    @property
    def defenses(self) -> DefenseStates:
        """Return the states of the imitated defenses."""

    @property
    def least_rows(self) -> int:
        """Return the smallest batch that `in_training` accepts."""

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """Return the modules by the names of their segments."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the weights that may be trained."""


class TrainedAttack(Protocol):
    """State of the training attack `plan` after training, which predicts from a view."""

    @property
    def plan(self) -> object:
        """The attack that the state belongs to, a frozen value with its parameters."""

    def predict(self, view: View, target: Target) -> Tensor:
        """Return a prediction of `target` from `view`, one row a victim."""

    def copy(self) -> TrainedAttack:
        """Return a copy with tensors of its own."""
