"""Sending an aggregation server's weights to clients, and averaging theirs: shared by several methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.federated.objectives import trainable_names
from splitfed.federated.uploads import close_round, refuse_settings

if TYPE_CHECKING:
    from splitfed.aggregation.update_aggregation import UpdateAggregation
    from splitfed.core.topology import Topology
    from splitfed.federated.base import State
    from splitfed.federated.learner import Learner, LearnerIdentity


def initial_weights(topology: Topology, segments: Sequence[str]) -> dict[str, Tensor]:
    """Return the initial weights and buffers of `segments`, named as in `Learner.contents`."""
    return {
        f"{name}/{key}": tensor.clone()
        for name in segments
        for key, tensor in topology.segment(name).module.state_dict().items()
    }


def broadcast_current(
    learners: Sequence[Learner], segments: Sequence[str], number: int, known: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Send every learner the server's weights of `segments`: `known`, or the initial ones if empty; return them."""
    tensors = known or initial_weights(learners[0].topology, segments)
    for learner in learners:
        learner.adopt(learner.receive("weights", tensors, number))
    return tensors


def average_weights(
    settings: UpdateAggregation,
    learners: Sequence[Learner],
    shares: Mapping[int, float],
    segments: Sequence[str],
    before: Mapping[str, Tensor],
    number: int,
    state: State,
) -> dict[str, Tensor]:
    """Receive the contents of `segments` from every learner; return the aggregation server's weights by `settings`.

    `before`: its weights before the round; `shares`: replica -> share of the examples, the weights of the plain mean.
    """
    uploads = ((one, shares[one.replica], {"weights": one.contents(segments)}) for one in learners)
    return take_server_step(
        settings, learners[0], segments, before, close_round(settings, uploads, number, state)["weights"], state
    )


def take_server_step(
    settings: UpdateAggregation,
    learner: LearnerIdentity,
    segments: Sequence[str],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    state: State,
) -> dict[str, Tensor]:
    """Return the aggregation server's weights of `segments` after a round: `after`, or a server step from `before`.

    `after`: the aggregate of the round's uploads.
    """
    if settings.server_step is None:
        return dict(after)
    names = trainable_names(learner.topology, segments)
    return settings.move(before, after, names, state.setdefault("server_step", {}))


def check_aggregates(who: str, settings: UpdateAggregation, itself: bool) -> None:
    """Raise `InvalidInput` for aggregation settings if method `who` does not aggregate weights `itself`."""
    if not itself:
        refuse_settings(who, settings, dict.fromkeys(settings.settings(), f"{who} aggregates no weights here"))


def check_unbound(who: str, what: str, bound: str | None) -> None:
    """Raise `InvalidInput` if the schedule moves client segments as well; `bound`: how it does, None if not."""
    if bound is not None:
        raise InvalidInput(
            f"{who} averages {what} itself, and the schedule {bound}: take 'independent' for whole models, "
            "'splitfed_v3' for split ones"
        )


def check_alike(who: str, what: str, topologies: Sequence[Topology], segments: Sequence[Sequence[str]]) -> None:
    """Raise `InvalidInput` if the clients' `segments`, to be averaged, differ in names or shapes of their weights."""
    first = _layout(topologies[0], segments[0])
    for client, (topology, own) in enumerate(zip(topologies, segments, strict=True)):
        if topology is not topologies[0] and _layout(topology, own) != first:
            raise InvalidInput(
                f"{who} averages every client's {what}; that of client {client} has another architecture"
            )


def _layout(topology: Topology, segments: Sequence[str]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in initial_weights(topology, segments).items()}
