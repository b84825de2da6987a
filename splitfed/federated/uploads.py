"""Uploads of a method's clients, as the aggregation server receives and aggregates them: in the clear or summed.

Under a secure sum every exchange of the protocol is a message of its own, sent by the same learners: with masks, keys
and shares before the clients train, and masked numbers and shares that unmask the sum after it; with CKKS, keys,
ciphertexts and the mean, all after training. Several kinds of messages are joined into one vector of numbers. In a plan
the same messages are sent without their contents.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from splitfed.aggregation.lookup import secure_of
from splitfed.aggregation.running_mean import RunningMean
from splitfed.aggregation.update_aggregation import UpdateAggregation
from splitfed.core.errors import InvalidInput
from splitfed.core.grouping import nest
from splitfed.core.topology import member
from splitfed.engines.base import FED
from splitfed.engines.secure_summation import SecureSummation
from splitfed.federated.base import Method, State
from splitfed.secure_sum.base import SecureSumPlan

if TYPE_CHECKING:
    from splitfed.core.messages import Message
    from splitfed.federated.learner import Learner, LearnerIdentity, LearnerMessages, LearnerWeights
    from splitfed.secure_sum.base import Flow

Upload = Mapping[str, Mapping[str, Tensor]]
"""Kind of message -> the tensors in it."""

ASKED = "asked"


class SummedUploads(Method):
    """Base of methods in which one kind of message to the server is averaged, in the clear or by a secure sum.

    `secure`: the secure sum, as schedules take it; each subclass declares this field among its own.
    """

    secure: bool | str | Mapping[str, Any] | SecureSumPlan

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for parameters out of range, and for a `secure` that describes no secure sum."""
        super().__post_init__()
        object.__setattr__(self, "secure", secure_of(self.secure))

    @property
    def settings(self) -> UpdateAggregation:
        """The settings by which the messages are aggregated."""
        return UpdateAggregation(secure=self.secure)


def open_round(settings: UpdateAggregation, learners: Sequence[Learner], number: int, state: State) -> None:
    """Exchange what a secure sum of these clients' uploads in round `number` needs; without one, do nothing."""
    if settings.sum is None:
        return
    state[ASKED] = [learner.replica for learner in learners]
    if _is_planned(learners[0]):
        _count(learners, settings.sum.setup_flows(state[ASKED], str, FED), number)
    else:
        _summing(settings.sum, learners[0], state[ASKED], _Carrier(learners, number)).open()


def close_round(
    settings: UpdateAggregation,
    uploads: Iterable[tuple[Learner, float, Upload]],
    number: int,
    state: State,
    weighted: bool = True,
) -> dict[str, dict[str, Tensor]]:
    """Have every client send its upload; return the aggregate, kind -> name -> tensor.

    `uploads`: each client with its share, which add up to one. The rule sees all kinds of one client as one vector.
    `weighted`: whether shares are those of the clients' rows, by which a secure sum multiplies.
    """
    if settings.sum is not None:
        found = [(learner, _join(upload)) for learner, _, upload in uploads]
        return _split(_sum(settings.sum, found, number, state[ASKED], weighted))
    gathering = settings.start()
    for learner, share, upload in uploads:
        gathering.add(_join({kind: learner.send(kind, tensors, number) for kind, tensors in upload.items()}), share)
    return _split(gathering.value())


def _sum(
    plan: SecureSumPlan,
    uploads: Sequence[tuple[Learner, Mapping[str, Tensor]]],
    number: int,
    asked: Sequence[int],
    weighted: bool,
) -> dict[str, Tensor]:
    """Return the mean of the uploads by a secure sum, for which the clients `asked` have agreed on keys."""
    learners, (first, tensors) = [learner for learner, _ in uploads], uploads[0]
    weights = {one.replica: float(one.rows()) if weighted else 1.0 for one in learners}
    if _is_planned(first):
        plan.check_weights(weights.values())
        numbers = sum(tensor.numel() for tensor in tensors.values())
        _count(learners, plan.upload_flows(asked, [one.replica for one in learners], numbers, str, FED), number)
        return _planned_mean([(upload, weights[one.replica]) for one, upload in uploads])
    carrier = _Carrier(learners, number)
    with_keys = _summing(plan, first, asked, carrier.paused()).open()
    carrier.live = True
    return with_keys.close({learner.replica: upload for learner, upload in uploads}, weights)


def refuse_settings(who: str, settings: UpdateAggregation, reasons: Mapping[str, str]) -> None:
    """Raise `InvalidInput` for every setting in `reasons`: setting -> why method `who` refuses it."""
    for name, value in settings.settings().items():
        if name in reasons:
            raise InvalidInput(f"{who} aggregation {name}={value!r} is not allowed: {reasons[name]}")


class _Carrier:
    """Carrier of a secure sum that sends by the learners; if not `live`, tensors pass without being sent again."""

    def __init__(self, learners: Sequence[LearnerMessages], number: int) -> None:
        self.live, self.number = True, number
        self._learners = {learner.replica: learner for learner in learners}

    def paused(self) -> _Carrier:
        """Return a copy of this carrier that is not live."""
        self.live = False
        return self

    def __call__(self, message: Message) -> Message:
        if not self.live:
            return message
        learner = self._learners[message.stamp.replica]
        carry = learner.receive if message.sender == FED else learner.send
        return message._replace(tensors=carry(message.kind, message.tensors, self.number))


def _summing(plan: SecureSumPlan, learner: LearnerIdentity, asked: Sequence[int], carrier: _Carrier) -> SecureSummation:
    role = learner.roles[0]
    names = {replica: member(role, replica) for replica in asked}
    # A schedule may sum weights of the same role in the same round.
    return SecureSummation(plan, role, names, carrier.number, learner.seed, carrier, "method")


def _count(learners: Sequence[LearnerMessages], flows: Iterable[Flow], number: int) -> None:
    """Send messages of these sizes, whose parties are named by their replicas."""
    by_replica = {str(learner.replica): learner for learner in learners}
    for kind, sender, receiver, size in flows:
        empty = {kind: torch.empty(size, dtype=torch.uint8, device="meta")}
        if sender == FED:
            by_replica[receiver].receive(kind, empty, number)
        else:
            by_replica[sender].send(kind, empty, number)


def _is_planned(learner: LearnerWeights) -> bool:
    segments = [segment.name for segment in learner.topology.segments]
    return any(tensor.is_meta for tensor in learner.contents(segments, copies=False).values())


def _planned_mean(uploads: Sequence[tuple[Mapping[str, Tensor], float]]) -> dict[str, Tensor]:
    """Return the mean as far as a plan knows it: values that follow from labels and rows, otherwise shapes."""
    mean, total = RunningMean(), sum(weight for _, weight in uploads)
    for tensors, weight in uploads if not any(tensor.is_meta for tensor in uploads[0][0].values()) else ():
        mean.add(tensors, weight / total)
    return mean.value() or dict(uploads[0][0])


def _join(upload: Upload) -> dict[str, Tensor]:
    return {f"{kind}: {name}": tensor for kind, tensors in upload.items() for name, tensor in tensors.items()}


def _split(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    parts = ((joined.partition(": "), tensor) for joined, tensor in tensors.items())
    # A kind without trainable values holds no tensor.

    return defaultdict(dict, nest((kind, name, tensor) for (kind, _, name), tensor in parts))
