"""What a federated method is: what it sends and trains, by which it is checked, planned, promised and attacked."""

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
    """What a method is on one topology; the defaults are those of a method that does nothing."""

    turned_off: str | None = None
    """Why these parameters make the method do nothing at all, in a line; None where it does something."""

    at_most: str | None = None
    """Why a plan counts more than the method may send, in a line; None where it counts exactly that."""

    aggregates_weights: bool = False
    """The method itself exchanges the clients' weights, so that the schedule must not average them too."""

    aggregation: UpdateAggregation | None = None
    """How the aggregation server aggregates uploads; None where the method has a way of its own."""

    secure: SecureSumPlan | None = None
    """The secure sum that all goes through that clients upload for a method without weights; None where it is read."""

    role_federations: tuple[str, ...] = ()
    """The roles whose parties form a federation of their own, in groups of several parties; see `groups`.

    Empty where the method is called once for whole clients.
    """

    returns_weights: bool = False
    """Clients are sent "weights" before a round, and send such of the same names back after it."""

    plain_update: bool = True
    """A step from the weights that were sent moves a client along the gradient of its own loss alone.

    Then whoever gets the weights back can work that gradient out.
    """

    sends_gradients: bool = False
    """Clients take no step and send, as "weight gradient", the mean gradient of their rows' loss."""

    post_processing: bool = False
    """All that clients send is made of nothing but the gradients of the steps that the schedule asks for.

    Then a promise for those gradients (`dp_sgd`) holds for what is sent as well.
    """

    weighted_by_batch_size: bool = False
    """What is sent depends on how many rows each step had, which must then not be left to chance.

    Where it is, the number itself would tell of a row; and it is no weight of an expected size.
    """

    varying_shapes: frozenset[str] = frozenset()
    """The kinds of messages to the aggregation server of which the shapes, too, depend on the values that are learnt.

    No noise on the values hides that, so that nothing can be promised for them.
    """

    reads_labels: bool = False
    """The labels of a step are read beside the loss, as classes: they must then be the client's own."""

    accumulates: bool = False
    """What it adds to a client's training holds for a step over several batches as for one."""

    own_steps: bool = False
    """The method's `train` may take other steps than those that the schedule asks for."""

    trains_between_rounds: bool = False
    """Clients also learn in `query` or `aggregate`, before or after the schedule's round.

    Then the schedule must leave the segments that they hold then in their place.
    """

    private_segments: tuple[str, ...] = ()
    """The segments that never leave their client: neither averaged nor handed over."""

    broadcast_segments: tuple[str, ...] = ()
    """The client segments of which every client is sent the same weights before it first trains."""

    class_means: Mapping[str, str] = field(default_factory=dict)
    """Kind of message -> the value of whose means, over a client's rows of a class, its tensors are made.

    Of messages from clients to the aggregation server, with a tensor for each class under the name of the class: what
    they show of the rows is for attacks to find out.
    """

    message_values: Mapping[str, PrivateValues] = field(default_factory=dict)
    """Kind of message from clients to the aggregation server -> which private values it is made of.

    `LABELS` where labels are read by any other way than the gradient of the loss. A kind that is neither here nor in
    `splitfed.core.private_values` is taken to be made of features and labels.
    """

    message_events: Mapping[str, Event] = field(default_factory=dict)
    """Kind of message -> what one of a client costs in privacy, where the method itself makes it private.

    All that it holds is covered, and what it is made of learns from no private row.
    """

    public_batch: Callable[[int, int, Mapping[int, int], int], Tensor] | None = None
    """Which public rows the "soft labels" are of that a client sends in a round; None where it scores none of them.

    See `splitfed.federated.public_rows.PublicBatch`; known to all.
    """

    soft_labels: Mapping[str, float] = field(default_factory=dict)
    """Head -> the weight of a divergence from a teacher that is added to its loss and to nothing else.

    Cross-entropy with weight w, and a divergence with weight v from a teacher that is held fixed, have the gradient of
    cross-entropy with weight w + v against the mean of label and teacher: an update shows a gradient all the same.
    """

    hidden_gradients: tuple[str, ...] = ()
    """The values that exchanged segments hand to what never leaves a client, from where their gradient comes."""

    scored_values: tuple[str, ...] = ()
    """The values that `scores` computes with the weights that the client is scored with, and never others.

    Whoever scores the client's model has them at hand then, and the rows pass through it once: `Learner.compute`
    returns them whatever the client has been lent.
    """
