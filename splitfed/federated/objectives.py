"""What the local objectives of several methods share: one that does nothing yet, and the weights that a step moves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor, nn

from splitfed.core.topology import Topology, weights

if TYPE_CHECKING:
    from splitfed.core.messages import Stamp
    from splitfed.federated.learner import LearnerTraining

T = TypeVar("T", bound="NoObjective")


class NoObjective:
    """Adds nothing, corrects nothing; a local objective writes what it does otherwise.

    `kept`: the attributes that outlast a round, plain values and tables of tensors.
    """

    kept: ClassVar[tuple[str, ...]] = ()

    def terms(self, made: Mapping[str, Tensor], labels: Mapping[str, Tensor], stamp: Stamp) -> Mapping[str, Tensor]:
        """Nothing is added to a loss."""
        return {}

    def correct(self, modules: Mapping[str, nn.Module]) -> None:
        """Gradients stay as they are."""

    def state(self) -> dict[str, Any]:
        """Return what outlasts a round."""
        return {name: copy(getattr(self, name)) for name in self.kept}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`."""
        for name in self.kept:
            setattr(self, name, copy(state[name]))


@dataclass
class Proximal(NoObjective):
    """Pulls the weights of `segments` towards those in `anchor`, `weight` times the way in every gradient."""

    weight: float
    segments: tuple[str, ...]
    anchor: Mapping[str, Tensor] = field(default_factory=dict)

    def correct(self, modules: Mapping[str, nn.Module]) -> None:
        """Add the proximal term's gradient, `weight` * (w - anchor), to the gradient of every weight w in place."""
        for name, own, gradient in weights_with_gradients(modules, self.segments) if self.weight else ():
            gradient.add_(own.detach() - self.anchor[name], alpha=self.weight)


def weights_with_gradients(
    modules: Mapping[str, nn.Module], segments: Collection[str]
) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """Yield `segment/name`, weight and gradient of all in `segments` that have one; tied weights once."""
    seen: set[int] = set()
    for segment in segments:
        for name, weight in modules[segment].named_parameters():
            if weight.grad is not None and id(weight) not in seen:
                seen.add(id(weight))
                yield f"{segment}/{name}", weight, weight.grad


def trainable_names(topology: Topology, segments: Collection[str]) -> dict[str, str]:
    """Return `segment/name` of every weight in `segments` that learns -> its name in `weights_with_gradients`.

    They differ for weights that are tied to one before.
    """
    first: dict[int, str] = {}
    first_names = {}
    for segment in segments:
        for name, weight in topology.segment(segment).module.named_parameters(remove_duplicate=False):
            if weight.requires_grad:
                first_names[f"{segment}/{name}"] = first.setdefault(id(weight), f"{segment}/{name}")
    return first_names


def weight_names(topology: Topology, segments: Collection[str]) -> set[str]:
    """Return `segment/name` of every weight in `segments`, buffers left out."""
    return {f"{segment}/{name}" for segment in segments for name in weights(topology.segment(segment).module)}


def objective_of(learner: LearnerTraining, kind: type[T]) -> T | None:
    """Return the local objective of this `kind` at the client; None in a plan, where nothing is computed."""
    return next((objective for objective in learner.objectives.values() if isinstance(objective, kind)), None)
