"""Update shares: estimates the share of each class among a client's rows from its change of the exchanged weights.

Paper: after Wainakh et al., "User-level label leakage from gradients in federated learning", PETS 2022 (LLG*: the last
layer's gradient is a sum over rows, similar within a class and estimated from auxiliary rows).

The adversary is the aggregation server of a run that was recorded, with auxiliary rows and their labels. For a model
with scores, the change of the last layer in a round is near minus a rate times the sum of the gradients of the client's
rows. Those of a class are approximated by the mean gradient of auxiliary rows of the class, half way between the
weights sent and returned. Non-negative least squares fits the change by these mean gradients; the coefficients are the
shares up to a factor. For features (an adapter, a base) the loss is not known. There the shares are estimated by how
far the client's training moves the features of auxiliary rows of each class, relative to all classes, in excess of the
other clients (ours; no paper). All rounds have the same weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splitfed.attacks.base import (
    Attack,
    DefenseEffect,
    Knowledge,
    Needs,
    Phase,
    Progress,
    Target,
    check_classes,
    unwrap,
)
from splitfed.attacks.membership.confidence import log_probabilities
from splitfed.attacks.uploads.exchanged_model import ExchangedModel, ExchangedRound, midpoint
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import View

MOST = 64
"""Maximum number of auxiliary rows of a class whose gradients are averaged."""


@dataclass(frozen=True)
class UpdateShares(Attack):
    """Estimates class shares from weight updates; has no parameters."""

    target = Target.SHARES
    phase = Phase.TRAINING
    reads = ("weights", "update", "weight gradient")
    requires = frozenset({Needs.UPLOADS, Needs.EXCHANGED_MODEL, Needs.AUXILIARY, Needs.AUXILIARY_LABELS})
    adapts_to = frozenset[DefenseEffect]()

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return shares of sum 1: (classes,)."""
        classes = check_classes("update_shares", knowledge.classes)
        exchanged = unwrap(knowledge.exchanged)
        x, y = unwrap(knowledge.auxiliary), unwrap(knowledge.auxiliary_labels).view(-1).long()
        if not exchanged.scores:
            return _excess(exchanged, x, y, classes)
        total = torch.zeros(classes, dtype=torch.float64)
        for number, one in enumerate(exchanged.rounds):
            progress(number, len(exchanged.rounds))
            total += _shares(resolve(*_slopes(exchanged, one, x, y, classes)))
        return total / total.sum()


def _shares(found: Tensor) -> Tensor:
    """Return non-negative numbers, (classes,), normalised to sum 1; equal shares if all are zero."""
    return found / found.sum() if float(found.sum()) > 0 else torch.full_like(found, 1 / len(found))


def _excess(exchanged: ExchangedModel, x: Tensor, y: Tensor, classes: int) -> Tensor:
    """Return the excess of the client's movement of each class's features over the others', as shares: (classes,)."""
    if not exchanged.others:
        raise InvalidInput("update_shares compares a client's features with other clients', and none were recorded")
    own, *others = (_movements(exchanged, rounds, x, y, classes) for rounds in (exchanged.rounds, *exchanged.others))
    return _shares((own - torch.stack(others).mean(0)).clamp_min(0))


@torch.no_grad()
def _movements(
    exchanged: ExchangedModel, rounds: Sequence[ExchangedRound], x: Tensor, y: Tensor, classes: int
) -> Tensor:
    """Return the mean movement of the features of each class by a client's rounds, relative to all: (classes,)."""
    total = torch.zeros(classes, dtype=torch.float64)
    present = y.unique().tolist()
    for one in rounds:
        moved = (exchanged.run(x, one.after) - exchanged.run(x, one.before)).flatten(1).double().norm(dim=1)
        for label in present:
            total[label] += float(moved[y == label].mean())
    return total / total.sum().clamp_min(1e-300)


def resolve(change: Tensor, slopes: Tensor) -> Tensor:
    """Return non-negative coefficients (classes,) of the least squares fit of `change` (d,) by `slopes` (classes, d).

    Both in float64, in units of the norm of the change.
    """
    from scipy.optimize import nnls

    size = float(change.norm())
    if size == 0:
        return torch.zeros(len(slopes), dtype=torch.float64)
    lengths = slopes.norm(dim=1).clamp_min(1e-300)
    # The Gram matrix is small; its root carries all that least squares reads of the slopes.
    basis, directions = torch.linalg.qr(slopes.T)
    found, _ = nnls((directions / float(lengths.max())).numpy(), (basis.T @ change / size).numpy())
    return torch.from_numpy(found)


def _slopes(
    exchanged: ExchangedModel, one: ExchangedRound, x: Tensor, y: Tensor, classes: int
) -> tuple[Tensor, Tensor]:
    """Return the change of the last layer's weights, (d,), and their mean gradient for each class, (classes, d)."""
    middle = midpoint(one)
    names = [name for name in exchanged.last_layer() if name in one.before]
    change = torch.cat([(one.before[n].double() - one.after[n].double()).flatten() for n in names])
    weights = {name: middle[name].clone().requires_grad_() for name in names}
    tensors = {**middle, **weights}
    slopes = torch.zeros(classes, len(change), dtype=torch.float64)
    for label in y.unique().tolist():
        rows = x[y == label][:MOST]
        loss = -log_probabilities(exchanged.run(rows, tensors))[:, label].mean()
        found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        slopes[label] = torch.cat(
            [
                (torch.zeros_like(w) if g is None else g).double().flatten()
                for w, g in zip(weights.values(), found, strict=True)
            ]
        ).cpu()
    return change.cpu(), slopes
