"""A party's own data of rows, for label attacks: columns and known labels, and its segment's outputs and gradients."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.attacks.base import Knowledge, check_classes
from splitfed.attacks.labels.logistic_regression import standardise
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import View
from splitfed.core.rows import flat_rows


def victims_of(knowledge: Knowledge) -> int:
    """Return the number of victims whose columns the party holds."""
    return len(next(iter((knowledge.own or {}).values()), ()))


def own_rows(attack: str, view: View, knowledge: Knowledge) -> tuple[Tensor, Tensor, Tensor]:
    """Return the party's standardised features of victims, followed by labelled auxiliary rows: (n, numbers).

    Also the known labels, (known, classes) one-hot, and the positions (known,) of their rows. Raises `InvalidInput`,
    naming the `attack`, without columns, or without a known row of every class.
    """
    classes = check_classes(attack, knowledge.classes)
    if not knowledge.own:
        raise InvalidInput(f"{attack} is for a party with inputs of its own; {view.party} has none")
    parts = [_columns(view, knowledge.own, knowledge)]
    labels = [torch.full((len(rows),), number) for number, rows in knowledge.hints.items()]
    known = [rows.cpu() for rows in knowledge.hints.values()]
    if knowledge.auxiliary_labels is not None and knowledge.own_auxiliary:
        parts.append(_columns(view, knowledge.own_auxiliary, knowledge))
        labels.append(knowledge.auxiliary_labels.long().cpu())
        known.append(torch.arange(len(parts[1])) + len(parts[0]))
    told = torch.cat(labels) if labels else torch.zeros(0, dtype=torch.int64)
    if len(told.unique()) < classes:
        raise InvalidInput(f"{attack} needs a known row of each of {classes} classes")
    rows = standardise(torch.cat(parts))
    return rows, functional.one_hot(told, classes).to(rows), torch.cat(known).to(rows.device)


def _columns(view: View, own: Mapping[str, Tensor], knowledge: Knowledge) -> Tensor:
    """Return the party's columns, and its segment's outputs on them if it reads nothing else: (n, numbers)."""
    found = [flat_rows(x.to(knowledge.device).double()) for x in own.values()]
    if len(own) == 1 and len(view.segments) == 1 and not view.select(kind="activation").messages:
        segment = copy.deepcopy(next(iter(view.segments.values()))).to(knowledge.device).eval()
        with torch.no_grad():
            made = segment(next(iter(own.values())).to(knowledge.device).clone())
        if isinstance(made, Tensor):
            found.append(flat_rows(made).double())
    return torch.cat(found, 1)


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
