"""Class shares: estimates the share of each class among a client's rows from its uploads for a federated method.

Paper: after Wainakh et al., "User-level label leakage from gradients in federated learning", PETS 2022, who count a
client's labels from its gradient; here uploads between steps are read.

The adversary is the aggregation server of a run that was recorded. It uses the first of these that was sent: numbers of
rows by class (`3/rows` of FedProto, "label counts" of FedGen), which are exact; the classes that means were sent for,
which are taken as equally frequent; scores of public rows, whose mean is biased towards the classes that the client was
trained on. Nothing is learnt, and there are no parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from splitfed.attacks.base import Attack, DefenseEffect, Knowledge, Needs, Phase, Progress, Target, check_classes
from splitfed.attacks.uploads.upload_attack import by_class, newest
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, View


@dataclass(frozen=True)
class ClassShares(Attack):
    """Estimates class shares without training; has no parameters."""

    target = Target.SHARES
    phase = Phase.TRAINING
    reads = ("prototype", "label counts", "soft labels")
    requires = frozenset({Needs.UPLOADS})
    adapts_to = frozenset[DefenseEffect]()

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return shares of sum 1: (classes,)."""
        classes = check_classes("class_shares", knowledge.classes)
        messages = newest(view, self.reads)
        for read in (_shares_of_counts, _shares_of_names, _shares_of_scores):
            for message in messages.values():
                shares = read(message, classes)
                if shares is not None:
                    return shares / shares.sum()
        raise InvalidInput(
            f"class_shares found no counts, names or scores of classes among the client's messages to {view.party!r}"
        )


def _shares_of_counts(message: Message, classes: int) -> Tensor | None:
    """Return the numbers of rows by class, (classes,), if they were sent, else None."""
    whole = message.tensors.get("rows")
    if whole is not None and tuple(whole.shape) == (classes,):
        return _positive(whole)
    shares = torch.zeros(classes, dtype=torch.float64)
    for label in by_class(message):
        rows = message.tensors.get(f"{label}/rows")
        if rows is None or label >= classes:
            return None
        shares[label] = float(rows)
    return _positive(shares)


def _shares_of_names(message: Message, classes: int) -> Tensor | None:
    """Return equal shares, (classes,), of the classes named in the message, else None."""
    labels = [label for label in by_class(message) if label < classes]
    shares = torch.zeros(classes, dtype=torch.float64)
    shares[labels] = 1.0
    return _positive(shares)


def _shares_of_scores(message: Message, classes: int) -> Tensor | None:
    """Return the mean probability of each class, (classes,), over scored rows, else None."""
    for scores in message.tensors.values():
        if scores.dim() == 2 and scores.shape[1] == classes and len(scores):
            known = scores.double().cpu()
            told = bool((known >= 0).all()) and torch.allclose(known.sum(1), torch.ones(len(known)).double(), atol=1e-3)
            return _positive((known if told else known.softmax(1)).mean(0))
    return None


def _positive(shares: Tensor) -> Tensor | None:
    known = shares.double().cpu().clamp_min(0)
    return known if float(known.sum()) > 0 else None
