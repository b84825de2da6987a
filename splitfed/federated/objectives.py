"""Base of the local objectives, the proximal term, and iteration over the weights that a training step changes."""

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
    """Base of local objectives that adds no loss term and changes no gradient; a subclass overrides what it needs.

    `kept`: the names of attributes that are saved with the run's state, plain values and tables of tensors.
    """

    kept: ClassVar[tuple[str, ...]] = ()

    def terms(self, made: Mapping[str, Tensor], labels: Mapping[str, Tensor], stamp: Stamp) -> Mapping[str, Tensor]:
        """Return no loss terms."""
        return {}

    def correct(self, modules: Mapping[str, nn.Module]) -> None:
        """Leave the gradients unchanged."""

    def state(self) -> dict[str, Any]:
        """Return the attributes named in `kept`."""
        return {name: copy(getattr(self, name)) for name in self.kept}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        for name in self.kept:
            setattr(self, name, copy(state[name]))


@dataclass
class Proximal(NoObjective):
    """Adds the gradient of a proximal term, `weight` * (w - anchor), for the weights w of `segments`."""

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
    """Yield `segment/name`, weight and gradient of every weight in `segments` with a gradient; tied weights once."""
    seen: set[int] = set()
    for segment in segments:
        for name, weight in modules[segment].named_parameters():
            if weight.grad is not None and id(weight) not in seen:
                seen.add(id(weight))
                yield f"{segment}/{name}", weight, weight.grad


def trainable_names(topology: Topology, segments: Collection[str]) -> dict[str, str]:
    """Return `segment/name` of every weight in `segments` that learns -> its name in `weights_with_gradients`.

    The two differ for a weight that is tied to an earlier one.
    """
    first: dict[int, str] = {}
    first_names = {}
    for segment in segments:
        for name, weight in topology.segment(segment).module.named_parameters(remove_duplicate=False):
            if weight.requires_grad:
                first_names[f"{segment}/{name}"] = first.setdefault(id(weight), f"{segment}/{name}")
    return first_names


def weight_names(topology: Topology, segments: Collection[str]) -> set[str]:
    """Return `segment/name` of every weight in `segments`, without buffers."""
    return {f"{segment}/{name}" for segment in segments for name in weights(topology.segment(segment).module)}


def objective_of(learner: LearnerTraining, kind: type[T]) -> T | None:
    """Return the local objective of this `kind` at the client; None in a plan, where nothing is computed."""
    return next((objective for objective in learner.objectives.values() if isinstance(objective, kind)), None)
