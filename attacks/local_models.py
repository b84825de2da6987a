"""Models that an adversary runs on its own machine: trained copies, upstream functions, its training attack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from splitfed.attacks.threat_model import Target
from splitfed.core.messages import View

Releases = Mapping[str, Tensor]
"""Value -> what arrives of it, (rows, ...)."""


class Imitation(Protocol):
    """A model that the adversary trained as the run's was trained, on rows of its own choice."""

    def predict(self, x: Tensor) -> Tensor:
        """Return the copy's output for `x` (rows, *shape): (rows, outputs)."""


Imitate = Callable[[Tensor, Tensor, int | None, int | None, int], Imitation]
"""From rows, labels, epochs, batch size (None: as many as the run had) and seed to a trained copy."""


class DefenseStates(Protocol):
    """What defenses that an adversary imitates keep for themselves, such as a decoder that they train against."""

    def learn(self) -> None:
        """Let each take its own step, as after a training step of the party that has it."""

    def state_dict(self) -> dict[str, Any]:
        """Return copies of what they have learnt."""

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Go back to `states`."""


class Clone(Protocol):
    """The upstream function as the architecture says, with weights of the adversary's own making."""

    def __call__(self, x: Tensor) -> Releases:
        """Return what would arrive at the adversary for `x` (rows, *shape), with every defense at its mean."""

    def sample(self, x: Tensor, number: int | None = None) -> Releases:
        """Return the same with defenses that draw afresh; draw `number` is always the same one."""

    def in_training(
        self, x: Tensor, number: int | None = None, epoch: int | None = None
    ) -> tuple[Releases, Tensor, float]:
        """Return `sample(x, number)`, what the defenses add to the client's loss then, and the weight of its task.

        The term is a scalar whose gradient is right; its value is not where a defense gives its penalty by the gradient
        alone. `epoch`: of the run, for defenses that change over it; the run's last one where it is not given.
        """

    @property
    def defenses(self) -> DefenseStates:
        """Return what the imitated defenses keep and learn."""

    @property
    def least_rows(self) -> int:
        """Return the smallest batch that `in_training` can take."""

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """Return its segments by name."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return its weights."""


class TrainedAttack(Protocol):
    """State that the training attack `plan` has reached, which turns a view into a prediction."""

    @property
    def plan(self) -> object:
        """The attack whose state this is: a frozen value with its parameters."""

    def predict(self, view: View, target: Target) -> Tensor:
        """Return a prediction of `target`, a row a victim."""

    def copy(self) -> TrainedAttack:
        """Return the same state in memory of its own, for an attack that may change what it is given."""
