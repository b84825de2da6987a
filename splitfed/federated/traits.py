"""Properties of a federated method, by which it is checked, planned, and attacked, and its privacy claims derived."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from splitfed.aggregation.update_aggregation import UpdateAggregation
    from splitfed.core.privacy_events import Event
    from splitfed.core.private_values import PrivateValues
    from splitfed.secure_sum.base import SecureSumPlan


@dataclass(frozen=True, kw_only=True)
class MethodTraits:
    """Properties of a method on one topology; the defaults are those of a method that does nothing."""

    turned_off: str | None = None
    """Why the method has no effect with these parameters, one line; None if it has one."""

    at_most: str | None = None
    """Why a plan is an upper bound of what the method sends, one line; None if it is exact."""

    aggregates_weights: bool = False
    """The method itself exchanges the clients' weights, so that the schedule must not average them too."""

    aggregation: UpdateAggregation | None = None
    """How the aggregation server aggregates uploads; None if the method does it in its own code."""

    secure: SecureSumPlan | None = None
    """The secure sum of all uploads of a method without weights; None if the server reads the uploads."""

    role_federations: tuple[str, ...] = ()
    """The roles whose parties form a federation of their own, in groups of several parties; see `groups`.

    Empty where the method is called once for whole clients.
    """

    returns_weights: bool = False
    """Clients receive "weights" before a round, and send tensors of the same names back after it."""

    plain_update: bool = True
    """A client's step from the received weights follows the gradient of its own loss only.

    The receiver of the new weights can then compute that gradient.
    """

    sends_gradients: bool = False
    """Clients take no step and send, as "weight gradient", the mean gradient of their rows' loss."""

    post_processing: bool = False
    """All that clients send is computed from the gradients of the schedule's steps alone.

    A privacy guarantee for those gradients (`dp_sgd`) then holds for what is sent as well.
    """

    weighted_by_batch_size: bool = False
    """The uploads depend on the number of rows of each step, which then must not be random.

    With random batch sizes the number itself would reveal whether a row was drawn.
    """

    varying_shapes: frozenset[str] = frozenset()
    """The kinds of messages to the aggregation server whose shapes depend on the trained values.

    Noise on the values does not hide shapes, so no privacy guarantee can be given for these messages.
    """

    reads_labels: bool = False
    """The method reads the labels of a step as classes, outside the loss, so the client must hold them."""

    accumulates: bool = False
    """The local objective is also correct if one optimizer step accumulates several batches."""

    own_steps: bool = False
    """The method's `train` may take other steps than those that the schedule sets."""

    trains_between_rounds: str = ""
    """Where clients train besides the schedule's round: in "query", before it, or in "aggregate", after it.

    The schedule must then leave client segments in place. A server's copies, one a client, are trained there too, from
    the merged segments, and merged again.
    """

    private_segments: tuple[str, ...] = ()
    """The segments that never leave their client: neither averaged nor handed over."""

    broadcast_segments: tuple[str, ...] = ()
    """The client segments that start from the same broadcast weights at every client."""

    class_means: Mapping[str, str] = field(default_factory=dict)
    """Kind of message to the aggregation server -> the value whose class means it holds.

    Such a message has one tensor for each class, under the name of the class: the mean of the value over the client's
    rows of that class. Attacks read it.
    """

    message_values: Mapping[str, PrivateValues] = field(default_factory=dict)
    """Kind of message to the aggregation server -> the private values that it is computed from.

    `LABELS` if labels enter otherwise than through the gradient of the loss. A kind that is neither here nor in
    `splitfed.core.private_values` is treated as computed from features and labels.
    """

    message_events: Mapping[str, Event] = field(default_factory=dict)
    """Kind of message -> the privacy event of one message, for messages that the method itself makes private.

    The event covers the whole message, and the model behind it is trained on no private row.
    """

    public_batch: Callable[[int, int, Mapping[int, int], int], Tensor] | None = None
    """The public rows that a client scores in a round for its "soft labels"; None if it scores none.

    See `splitfed.federated.public_rows.PublicBatch`; all parties can compute it.
    """

    soft_labels: Mapping[str, float] = field(default_factory=dict)
    """Head -> the weight of the divergence from a teacher that is added to its loss only.

    Cross-entropy with weight w plus a divergence with weight v from a detached teacher has the gradient of
    cross-entropy with weight w + v against the weighted mean of label and teacher, so an update still reveals a
    gradient.
    """

    hidden_gradients: tuple[str, ...] = ()
    """The values that averaged segments pass to private ones, so that their gradient comes from private segments."""

    scored_values: tuple[str, ...] = ()
    """The values that `scores` computes with the evaluated weights of the client, and with no others.

    They are kept from the scoring of the client's model, so that rows pass through it once: `Learner.compute` returns
    these values even inside `Learner.lend`.
    """
