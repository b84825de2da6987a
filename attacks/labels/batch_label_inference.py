"""Batch label inference: optimizes labels and the other parties' logits until they reproduce a party's weight gradient.

Paper: Zou, Liu, Kang, Liu, He, Yi, Yang, Zhang, "Defending batch-level label inference and replacement attacks in
vertical federated learning", IEEE Transactions on Big Data 2022 (Liu et al., "Batch label inference and replacement
attacks in black-boxed vertical federated learning", 2021).

The party is assumed not to see the gradient of single examples, as where messages are encrypted: of the view it uses
only the gradient of its own weights, summed over a batch. With J the derivative of its logits by its weights, the
attack seeks h and l such that the product of J and softmax(H + h) - softmax(l) is that gradient; h, the others' logits,
and l, the labels, start at random and follow Adam (the authors: rate .05, 10 000 iterations). The product is linear, so
J J' is computed once a batch and no second derivative is needed.

If J has full rank, as when a batch has no more rows than the last layer has independent inputs, the difference is
unique, and its only negative entry is at the label. So the score of a class is softmax(l) - softmax(H + h); the authors
use softmax(l), which the difference does not determine. If a trained layer follows the cut, classes can be permuted
without changing any gradient and cannot be identified: such runs are refused as far as the width shows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from splitfed.attacks.base import Budgets, DefenseEffect, Knowledge, Needs, Progress, check_classes
from splitfed.attacks.labels.label_attack import LabelAttack
from splitfed.attacks.labels.own_data import OwnStep, own_steps
from splitfed.attacks.networks.gradient_descent import count_turns, take_step
from splitfed.core.errors import InvalidInput, require_count, require_number
from splitfed.core.messages import View
from splitfed.core.rows import flat_rows


@dataclass(frozen=True)
class BatchLabelInference(LabelAttack):
    """Optimizes labels by `iterations` of Adam at rate `lr`, from weight gradients of `batch_size` rows each."""

    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.GRADIENTS, Needs.OWN_INPUTS})
    adapts_to = frozenset[DefenseEffect]()
    budgets: ClassVar[Budgets] = {
        "quick": {"iterations": 1000, "lr": 0.05, "batch_size": 16},
        "full": {"iterations": 10_000, "lr": 0.05, "batch_size": 16},
    }

    iterations: int = field(default=1000, metadata=require_count("batch_label_inference iterations", low=1))
    lr: float = field(default=0.05, metadata=require_number("batch_label_inference lr", low=0.0, open_low=True))
    batch_size: int = field(default=16, metadata=require_count("batch_label_inference batch_size", low=1))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the scores softmax(l) - softmax(H + h): (victims, classes)."""
        classes = check_classes("batch_label_inference", knowledge.classes)
        module, steps = own_steps("batch_label_inference", view, knowledge)
        width = tuple(steps[0].gradient.shape[1:])
        if width != (classes,):
            raise InvalidInput(
                f"batch_label_inference needs logits of {classes} classes at the cut, summed without weights; "
                f"the released value has shape {width}"
            )
        if not any(p.requires_grad for p in module.parameters()):
            raise InvalidInput(f"batch_label_inference needs the weight gradient; {view.party} trains no weight")
        batches = [b for step in steps for b in _equations(module, step, self.batch_size)]
        inferred = self._solve(batches, classes, generator, progress)
        return torch.cat([one[: len(b.logits)] for one, b in zip(inferred, batches, strict=True)])

    def _solve(self, batches: list[_Equations], classes: int, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the scores of all batches at once, short ones padded: (batches, rows, classes)."""
        rows = max(len(b.logits) for b in batches)
        like = batches[0].gram
        gram = like.new_zeros(len(batches), rows * classes, rows * classes)
        wanted, logits = like.new_zeros(len(batches), rows * classes), like.new_zeros(len(batches), rows, classes)
        for i, b in enumerate(batches):
            gram[i, : len(b.gram), : len(b.gram)] = b.gram
            wanted[i, : len(b.wanted)] = b.wanted
            logits[i, : len(b.logits)] = b.logits
        draw = torch.randn(2, *logits.shape, generator=generator, device=generator.device).to(like)
        others, labels = (one.clone().requires_grad_() for one in draw)
        optimizer = torch.optim.Adam([others, labels], lr=self.lr)
        for _ in count_turns(self.iterations, progress, 100):
            difference = (logits + others).softmax(-1) - labels.softmax(-1)
            d = flat_rows(difference)
            # |J'd - v|^2 without its constant, for the gram J J' and J v.
            take_step(optimizer, ((gram @ d[..., None])[..., 0] * d - 2 * wanted * d).sum())
        scores: Tensor = labels.softmax(-1) - (logits + others).softmax(-1)
        return scores


@dataclass(frozen=True)
class _Equations:
    """One batch: own `logits` (rows, classes), and J J' and J v, v the weight gradient, both over the mean of J J'."""

    logits: Tensor
    gram: Tensor
    wanted: Tensor


def _equations(module: nn.Module, step: OwnStep, batch_size: int) -> list[_Equations]:
    """Return the equations given by the weight gradients of `batch_size` rows at a time.

    J is (rows * classes, weights).
    """
    weights = [p for p in module.parameters() if p.requires_grad]
    logits = module(step.inputs.clone())
    equations = []
    for rows in torch.arange(len(logits)).split(batch_size):
        jacobian = torch.stack([_derivative(one, weights) for one in logits[rows].flatten()])
        gradient = _derivative((logits[rows] * step.gradient[rows]).sum(), weights)
        size = jacobian.square().sum(1).mean().clamp_min(torch.finfo(jacobian.dtype).tiny)
        equations.append(
            _Equations(logits[rows].detach().double(), jacobian @ jacobian.T / size, jacobian @ gradient / size)
        )
    return equations


def _derivative(of: Tensor, weights: list[nn.Parameter]) -> Tensor:
    parts = torch.autograd.grad(of, weights, retain_graph=True, allow_unused=True)
    return torch.cat(
        [(torch.zeros_like(w) if g is None else g).flatten() for g, w in zip(parts, weights, strict=True)]
    ).double()
