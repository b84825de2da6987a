"""UnSplit labels: predicts the label whose gradient, through a clone of the head, is nearest to the received one.

Paper: Erdogan, Kupcu, Cicek, "UnSplit: Data-oblivious model inversion, model stealing, and label inference attacks
against split learning", WPES 2022 (label inference).

For each example and class: the gradient at the cut that the clone would return if that were the label; the class with
the least mean squared error to the received gradient wins. The authors compare weight gradients of the head, one
example a batch, with a clone of random weights. A server receives no weight gradients of the head: what arrives is the
gradient at the cut, which depends on the head's weights. So the clone, of known architecture and fresh weights, is
fitted: Adam lowers the (soft) least error over classes, over all victims at once, with one factor for the weight of the
loss. To the squared error we add one minus the cosine: gradients of examples that a trained model classifies correctly
are short and would hardly count. Batches may have any size, as each row of a mean loss is divided by the known number
of rows.

Gradients at the cut alone do not identify the classes: swapping two of the head's outputs together with their labels
changes no message. The attack therefore needs `hints`, known victims of each class. A head of one layer is fitted
within seconds; the more hidden layers it has, the more hints and iterations a trained one takes.

The rate of `full` is the authors'; the other constants are ours. They were checked on Fashion-MNIST, on which this
attack is not reported: behind a head of one layer, untrained or trained, rates of .005 to .05, 100 iterations or 300,
and hint weights of 1 to 100 all predict every label correctly there, so the choice was not made by its outcome. That
does not hold in general: on MNIST, behind the trained last layer of another network, `quick` misses some (the table
`unsplit_labels`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.attacks.base import Budgets, DefenseEffect, Knowledge, Needs, Progress, check_classes, unwrap
from splitfed.attacks.labels.label_attack import LabelAttack
from splitfed.attacks.labels.own_data import own_steps
from splitfed.attacks.networks.gradient_descent import count_turns, take_step
from splitfed.core.errors import InvalidInput, require_count, require_number
from splitfed.core.messages import View
from splitfed.core.rows import flat_rows

_TOLD = 10.0  # the weight of the hints, which alone say what a class is called


@dataclass(frozen=True)
class UnsplitLabels(LabelAttack):
    """Fits a clone of the head by `iterations` of Adam at rate `lr`; `hints`: known victims of each class."""

    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.GRADIENTS, Needs.OWN_INPUTS, Needs.HEAD})
    adapts_to = frozenset({DefenseEffect.TASK_WEIGHT})
    budgets: ClassVar[Budgets] = {
        "quick": {"iterations": 300, "lr": 0.02, "hints": 1},
        "full": {"iterations": 5000, "lr": 0.001, "hints": 1},
    }

    iterations: int = field(default=300, metadata=require_count("unsplit_labels iterations", low=1))
    lr: float = field(default=0.02, metadata=require_number("unsplit_labels lr", low=0.0, open_low=True))
    hints: int = field(default=1, metadata=require_count("unsplit_labels hints", low=1))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the negated errors, their squared part relative to the gradients' mean square: (victims, classes)."""
        classes = check_classes("unsplit_labels", knowledge.classes)
        if set(knowledge.hints) != set(range(classes)):
            raise InvalidInput(
                f"unsplit_labels needs a known victim of each of {classes} classes to identify the classes"
            )
        module, steps = own_steps("unsplit_labels", view, knowledge)
        with torch.no_grad():
            sent = torch.cat([module(step.inputs) for step in steps])
        received = flat_rows(torch.cat([step.gradient for step in steps]))
        received = received / received.square().mean().sqrt().clamp_min(torch.finfo(received.dtype).tiny)
        clone = _Clone(unwrap(knowledge.head)(), classes).to(knowledge.device).eval()
        optimizer = torch.optim.Adam(clone.parameters(), lr=self.lr)
        hints = [(c, row) for c, rows in knowledge.hints.items() for row in rows.tolist()]
        labels, rows = torch.tensor(hints, device=sent.device).T
        for iteration in count_turns(self.iterations, progress, 50):
            errors = _errors(clone(sent), received)
            # Early on every class has a say; in the end the nearest one alone.
            heat = max(0.5 * (1 - 1.25 * iteration / self.iterations), 0.01)
            nearest = -heat * torch.logsumexp(-errors / heat, 1)
            take_step(optimizer, nearest.mean() + _TOLD * errors[rows, labels].mean())
        return -_errors(clone(sent), received)


def _errors(predicted: Tensor, received: Tensor) -> Tensor:
    """Return how far the gradients of each class (n, classes, numbers) are from the `received` (n, numbers)."""
    squared = (predicted - received[:, None]).square().mean(2)
    return squared + 1 - functional.cosine_similarity(predicted, received[:, None], dim=2, eps=1e-12)


class _Clone(nn.Module):
    """Maps released values (n, ...) to their gradients for every possible label, (n, classes, numbers)."""

    def __init__(self, head: nn.Module, classes: int) -> None:
        super().__init__()
        self.head = head
        self.classes = classes
        self.factor = nn.Parameter(torch.zeros(()))

    def forward(self, sent: Tensor) -> Tensor:
        leaf = sent.detach().requires_grad_()
        logits = self.head(leaf)
        width = tuple(logits.shape[1:])
        if width == (1,) and self.classes == 2:
            logits = torch.cat([torch.zeros_like(logits), logits], 1)
        elif width != (self.classes,):
            raise InvalidInput(f"unsplit_labels needs a head with logits of {self.classes} classes; it has {width}")
        labels = [logits.new_full((len(logits),), number).long() for number in range(self.classes)]
        losses = [functional.cross_entropy(logits, y, reduction="sum") for y in labels]
        gradients = [flat_rows(torch.autograd.grad(loss, leaf, create_graph=True)[0]) for loss in losses]
        return torch.stack(gradients, 1) * self.factor.exp()
