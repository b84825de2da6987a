"""Inputs and returned gradients of a party's own segment in the victims' training steps."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from splitfed.attacks.base import Knowledge
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import View


@dataclass(frozen=True)
class OwnStep:
    """One batch: the inputs of the party's segment, (rows, ...), and the returned gradient of its output.

    `gradient`: (rows, ...), of each row's own loss rather than of the batch's mean.
    """

    inputs: Tensor
    gradient: Tensor


def own_steps(attack: str, view: View, knowledge: Knowledge) -> tuple[nn.Module, list[OwnStep]]:
    """Return a copy of the party's segment, in the mode of the steps but without dropout, and its steps in order.

    Raises `InvalidInput` unless the party holds one segment that reads one value, own or received, and sends one value,
    for which a gradient comes back.
    """
    if len(view.segments) != 1:
        raise InvalidInput(f"{attack} is for a party with one segment; {view.party} holds {sorted(view.segments)}")
    module = copy.deepcopy(next(iter(view.segments.values()))).to(knowledge.device)
    for part in module.modules():
        if isinstance(part, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout):
            part.eval()
    backs = [_single_value(attack, "a gradient for", view, m.tensors) for m in view.select(kind="gradient").messages]
    inputs = _inputs(attack, view, knowledge, [len(g) for g in backs])
    steps = [
        OwnStep(x.to(knowledge.device), g.to(knowledge.device) * len(g)) for x, g in zip(inputs, backs, strict=True)
    ]
    with torch.no_grad():
        left, back = module(steps[0].inputs.clone()), steps[0].gradient
    if not isinstance(left, Tensor) or left.shape != back.shape:
        raise InvalidInput(f"{attack} needs the gradient of the whole output of the segment of {view.party}")
    return module, steps


def _inputs(attack: str, view: View, knowledge: Knowledge, sizes: list[int]) -> Sequence[Tensor]:
    received = view.select(kind="activation").messages
    own = knowledge.own or {}
    if bool(received) == bool(own):
        raise InvalidInput(f"{attack} needs a segment that reads one value; {view.party} reads several or none")
    if received:
        found = [_single_value(attack, "", view, m.tensors) for m in received]
        if [len(z) for z in found] != sizes:
            raise InvalidInput(f"{attack} needs a gradient for every release; {view.party} receives fewer or more")
        return found
    rows = _single_value(attack, "", view, own)
    if len(rows) != sum(sizes):
        raise InvalidInput(
            f"{attack} needs one gradient for every row; {view.party} receives {sum(sizes)} for {len(rows)} rows, as "
            "from several parties"
        )
    parts: Sequence[Tensor] = rows.split(sizes)
    return parts


def _single_value(attack: str, what: str, view: View, tensors: Mapping[str, Tensor]) -> Tensor:
    if len(tensors) != 1:
        kind = f"{what} one value".strip()
        raise InvalidInput(f"{attack} reads {kind}; {view.party} has {sorted(tensors)}")
    return next(iter(tensors.values()))
