"""A party's own data of rows: its columns, the outputs of its own segment on them, and the labels it knows."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from splitfed.attacks.base import Knowledge
from splitfed.attacks.labels.cut_gradients import check_classes
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
