"""Weights that an aggregation server spreads among the clients and averages: what several methods share."""

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
    """Return the weights and buffers that `segments` start from, as `Learner.contents` names them: known to all."""
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
    """Let every learner send the contents of `segments`; return what the aggregation server holds then, by `settings`.

    `before`: what it held; `shares`: replica -> share of the examples. Without settings it is the mean, so weighted.
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
    """Refuse settings of an aggregation that method `who` does not do `itself`, but leaves to a schedule or nobody."""
    if not itself:
        refuse_settings(who, settings, dict.fromkeys(settings.settings(), f"{who} itself aggregates no weights here"))


def check_unbound(who: str, what: str, bound: str | None) -> None:
    """Refuse a schedule that is `bound` to client segments of one make: it moves `what` the method averages."""
    if bound is not None:
        raise InvalidInput(
            f"{who} averages {what} itself, and the schedule {bound}: take 'independent' for whole models, "
            "'splitfed_v3' for split ones"
        )


def check_alike(who: str, what: str, topologies: Sequence[Topology], segments: Sequence[Sequence[str]]) -> None:
    """Refuse clients whose `segments`, which are to be averaged, differ in the names or shapes of their weights."""
    first = _layout(topologies[0], segments[0])
    for client, (topology, own) in enumerate(zip(topologies, segments, strict=True)):
        if topology is not topologies[0] and _layout(topology, own) != first:
            raise InvalidInput(f"{who} averages every client's {what}; that of client {client} is of another make")


def _layout(topology: Topology, segments: Sequence[str]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in initial_weights(topology, segments).items()}
