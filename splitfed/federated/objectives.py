"""What the local objectives of several methods share: one that does nothing yet, and the weights that a step moves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from splitfed.core.messages import Stamp
from splitfed.core.topology import Topology, weights
from splitfed.federated.base import Learner

T = TypeVar("T", bound="NoObjective")


class NoObjective:
    """Adds nothing, corrects nothing, remembers nothing; a local objective writes what it does otherwise."""

    def terms(self, made: Mapping[str, Tensor], labels: Mapping[str, Tensor], stamp: Stamp) -> Mapping[str, Tensor]:
        """Nothing is added to a loss."""
        return {}

    def correct(self, modules: Mapping[str, nn.Module]) -> None:
        """Gradients stay as they are."""

    def state(self) -> dict[str, Any]:
        """Nothing outlasts a round."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`."""


def weights_with_gradients(
    modules: Mapping[str, nn.Module], segments: Collection[str]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield `segment/name` and the weight of all in `segments` that have a gradient; tied weights once."""
    seen: set[int] = set()
    for segment in segments:
        for name, weight in modules[segment].named_parameters():
            if weight.grad is not None and id(weight) not in seen:
                seen.add(id(weight))
                yield f"{segment}/{name}", weight


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


def objective_of(learner: Learner, kind: type[T]) -> T | None:
    """Return the local objective of this `kind` at the client; None in a plan, where nothing is computed."""
    return next((objective for objective in learner.objectives.values() if isinstance(objective, kind)), None)
