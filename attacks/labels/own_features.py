"""Own features: a logistic regression from what the adversary holds itself to the labels that it knows.

Paper: none; after Fu, Zhang, Ji, Chen, Wu, Guo, Zhou, Liu, Wang, "Label inference attacks against vertical federated
learning", USENIX Security 2022, whose adversary has columns of its own and a few labels.

It reads its own columns and what its own segment makes of them, and nothing that it received. So it is the floor of
every attack on labels (`splitfed.threats.floors`): an attack that finds no more has learnt nothing from the others.
All columns are brought to deviation 1 over the rows that the adversary has. Known labels are those of known victims
(`hints`), and those of auxiliary rows where these are granted.

A segment that was trained with the others holds what their gradients have taught it, of the rows of training: that
counts as the adversary's own here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from splitfed.attacks.base import IN_TRAINING, Attack, Budgets, Knowledge, Needs, Progress, Target
from splitfed.attacks.labels.cut_gradients import check_classes
from splitfed.attacks.labels.label_attack import known_of_each
from splitfed.attacks.labels.logistic_regression import fit_logistic, standardise
from splitfed.core.errors import InvalidInput, require_count, require_number
from splitfed.core.messages import View
from splitfed.core.rows import flat_rows


@dataclass(frozen=True)
class OwnFeatures(Attack):
    """`hints`: known victims of each class (0: auxiliary rows alone); `penalty`: of half the squared weights."""

    target: ClassVar[Target] = Target.LABELS
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.OWN_INPUTS})
    uses: ClassVar[frozenset[Needs]] = frozenset({Needs.AUXILIARY_LABELS})
    adapts_to = IN_TRAINING
    budgets: ClassVar[Budgets] = {"fast": {"hints": 6}, "paper": {"hints": 6}}

    hints: int = field(default=6, metadata=require_count("own_features hints"))
    penalty: float = field(default=1.0, metadata=require_number("own_features penalty", low=0.0))

    def asks(self, classes: int | None) -> dict[int, int]:
        """Victims of every class, as many as `hints` each."""
        return known_of_each("own_features", classes, self.hints)

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the log probability of each class for each victim: (victims, classes)."""
        rows, labels, known = own_rows("own_features", view, knowledge)
        return fit_logistic(rows[known], labels, self.penalty)(rows[: victims_of(knowledge)])


def victims_of(knowledge: Knowledge) -> int:
    """Return how many victims the party has columns of."""
    return len(next(iter((knowledge.own or {}).values()), ()))


def own_rows(attack: str, view: View, knowledge: Knowledge) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the party holds of victims, and behind them of labelled auxiliary rows, standardised: (n, numbers).

    Also the labels that it knows, (known, classes) one-hot, and the positions (known,) of the rows that have them.
    Raises `InvalidInput`, naming the `attack`, without columns, or without a known row of every class.
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
    """Return the columns of a party, and what its segment makes of them where it reads nothing else: (n, numbers)."""
    found = [flat_rows(x.to(knowledge.device).double()) for x in own.values()]
    if len(own) == 1 and len(view.segments) == 1 and not view.select(kind="activation").messages:
        segment = copy.deepcopy(next(iter(view.segments.values()))).to(knowledge.device).eval()
        with torch.no_grad():
            made = segment(next(iter(own.values())).to(knowledge.device).clone())
        if isinstance(made, Tensor):
            found.append(flat_rows(made).double())
    return torch.cat(found, 1)
