"""What an aggregation server knows of a client's local training: the protocol without the data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from splitfed.core.errors import InvalidInput
from splitfed.core.payload import copy_modules
from splitfed.core.topology import Head, Segment, Topology


@dataclass(frozen=True)
class LocalTraining:
    """The agreed protocol of local training between download and upload.

    `segments`: those that a client, or the parties of a group together, compute from raw rows alone, in order;
    `feed(x)`: their inputs for rows x. `heads`: the losses on these segments (labels are not known). `released`:
    outputs of these segments that get a gradient back, which an aggregation server never sees. `optimizer`: name in
    `torch.optim`, or an import path; `options`: its arguments, with "initial_lr" if the rate changes between rounds.
    `batches`: number of rows in each batch of a round.
    `sends_gradients`: whether the client takes no step and sends the gradient of all its rows. `clip`: L2 norm to which
    per-row gradients are clipped before averaging; None: no clipping. `soft_labels`: heads whose labels are mixed with
    a teacher's outputs, which the adversary never sees. `rows`: number of different rows in a round; None: unknown.
    `accumulate`: number of batches over whose mean loss the optimizer takes a step.
    """

    segments: tuple[Segment, ...]
    feed: Callable[[Tensor], Mapping[str, Tensor]]
    heads: tuple[Head, ...]
    released: tuple[str, ...]
    optimizer: str
    options: Mapping[str, Any]
    batches: tuple[int, ...]
    sends_gradients: bool = False
    clip: float | None = None
    soft_labels: frozenset[str] = frozenset()
    rows: int | None = None
    accumulate: int = 1

    def copy(self) -> LocalTraining:
        """Return the protocol with copies of its modules, which may be trained."""
        modules = copy_modules({s.name: s.module for s in self.segments})
        return replace(self, segments=tuple(replace(s, module=modules[s.name]) for s in self.segments))


def local_training(
    topology: Topology,
    roles: Collection[str],
    feed: Callable[[Tensor], Mapping[str, Tensor]],
    optimizer: str,
    options: Mapping[str, Any],
    batches: Sequence[int],
    sends_gradients: bool = False,
    private: Collection[str] = (),
    soft_labels: Mapping[str, float] | None = None,
    hidden: Collection[str] = (),
) -> LocalTraining | None:
    """Return the known protocol of a client's parties in `roles`; None if they do not hold the whole raw row.

    All of these train with `optimizer`; `feed`: see `LocalTraining`. `private`: segments that never leave a client; a
    model of these alone does not appear in an update. `soft_labels`: head -> weight of a divergence beside its loss;
    `hidden`: values whose gradient comes from a part that never leaves a client (see `splitfed.federated.traits`).
    """
    softened = soft_labels or {}
    if not set(topology.inputs.values()).issubset(roles):
        return None
    available = set(topology.inputs)
    segments = []
    for segment in (one for one in topology.segments if one.role in roles):
        if available.issuperset(segment.inputs):
            segments.append(segment)
            available.update(segment.outputs)
    if hidden:
        makers = topology.makers(tuple(hidden))
        segments = [segment for segment in segments if segment.name in makers]
        available = {*topology.inputs, *(value for segment in segments for value in segment.outputs)}
    own = (head for head in topology.heads if head.value in available and head.role in roles)
    heads = tuple(head for head in own if not set(topology.makers((head.value,))).issubset(private))
    computed = {segment.name for segment in segments}
    back = [e for e in topology.crossings if e.name not in topology.forward_only and e.target not in computed]
    released = tuple(dict.fromkeys([*hidden, *(v for e in back for v in e.values if v in available)]))
    heads = tuple(replace(head, weight=head.weight + softened.get(head.value, 0.0)) for head in heads)
    seen = topology.makers((*(head.value for head in heads), *released)) if private else {s.name for s in segments}
    return LocalTraining(
        tuple(segment for segment in segments if segment.name in seen),
        feed,
        heads,
        released,
        optimizer,
        dict(options),
        tuple(batches),
        sends_gradients,
        soft_labels=frozenset(head.value for head in heads if softened.get(head.value)),
    )


def check_hard_labels(who: str, local: LocalTraining) -> None:
    """Raise `InvalidInput` for the attack `who` if labels are mixed with a teacher's outputs, which hides the class."""
    if local.soft_labels:
        raise InvalidInput(
            f"{who} derives hard classes from an update; at {min(local.soft_labels)!r} labels are mixed with outputs "
            "of a model that never leaves the client: use Dlg"
        )


def check_one_step(local: LocalTraining) -> None:
    """Raise `InvalidInput` if a client's update does not determine a gradient, as after several steps.

    The optimizer must be SGD without options that change the direction of a step.
    """
    if local.sends_gradients:
        normed = [s.name for s in local.segments if any(isinstance(m, _BatchNorm) for m in s.module.modules())]
        if normed and len(local.batches) > 1:
            raise InvalidInput(
                f"segment {normed[0]!r} has batch norm, and the client sends the mean gradient of {len(local.batches)} "
                "batches: that of no batch; batch_size at least its rows"
            )
        return
    if len(local.batches) != 1:
        raise InvalidInput(
            f"the client takes {len(local.batches)} steps a round; its update is a gradient only after one: "
            "batch_size at least its rows, and local_epochs=1"
        )
    if local.optimizer != "SGD":
        raise InvalidInput(f"optimizer {local.optimizer!r} is not allowed here; the update is a gradient only with SGD")
    for option in ("nesterov", "dampening", "maximize", "clip_norm", "groups"):
        if local.options.get(option):
            raise InvalidInput(f"{option}={local.options[option]!r} of SGD is not allowed here; expected it to be off")
    if "initial_lr" in local.options:
        raise InvalidInput("the learning rate changes between rounds (a scheduler), so the step's is not known")
