"""MixMatch: semi-supervised learning of classes from a few labelled and many unlabelled rows.

Paper: Berthelot, Carlini, Goodfellow, Papernot, Oliver, Raffel, "MixMatch: a holistic approach to semi-supervised
learning", NeurIPS 2019.

In every step the model predicts the unlabelled rows' classes, the prediction is sharpened, every row is mixed with the
row at its position in a random order, and the model learns from both kinds: cross-entropy on labels, squared error on
predictions, whose weight grows linearly from zero. What is returned is the running average of the model. Deviations,
those of Fu et al. (USENIX Security 2022), who use it on halves of images and on tables alike: rows are not augmented:
one prediction a row, one mixing strength a step. Labelled and unlabelled rows go through the model together, which
gives batch normalisation what the authors' interleaving gives it. Token ids cannot be mixed; the model's hidden
features of them are mixed instead, as in Chen, Yang, Yang, "MixText: linguistically-informed interpolation of hidden
space for semi-supervised text classification", ACL 2020.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.attacks.base import Progress
from splitfed.attacks.networks.gradient_descent import count_turns, draw_batches, take_step
from splitfed.core.random import stream

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class MixMatch:
    """How to learn: `iterations` of Adam at rate `lr` on `batch_size` rows of either kind.

    `temperature` sharpens predictions, `alpha` is that of the Beta distribution of the mixing strength, `weight` the
    final one of the unlabelled rows, `decay` that of the running average. Weights shrink by .02 `lr` of themselves in a
    step, as the authors' do.
    """

    iterations: int
    batch_size: int = 32
    lr: float = 2e-3
    temperature: float = 0.8
    alpha: float = 0.75
    weight: float = 50.0
    decay: float = 0.999

    def fit(
        self,
        model: Model,
        labelled: Tensor,
        labels: Tensor,
        unlabelled: Tensor,
        generator: torch.Generator,
        progress: Progress,
    ) -> Model:
        """Train `model`, rows to logits (rows, classes), in place; return its running average, in evaluation mode.

        labelled (n, *shape) with labels (n,) int64; unlabelled (m, *shape), m >= 1. The batch size is limited by the
        smaller of the two sets. For token ids `model` takes the order and strength of the mixture as further arguments.
        """
        weights: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(weights, lr=self.lr)
        average = copy.deepcopy(model).eval()
        size = min(self.batch_size, len(labelled), len(unlabelled))
        known, unknown = (
            endless_batches(len(labelled), size, generator),
            endless_batches(len(unlabelled), size, generator),
        )
        mixing = draw_mixing_weights(self.alpha, self.iterations, generator).tolist()
        model.train()
        progress(0, self.iterations)
        for iteration in count_turns(self.iterations, progress, 50):
            strength = mixing[iteration]
            rows, others = next(known), next(unknown)
            x = torch.cat([labelled[rows], unlabelled[others]])
            with torch.no_grad():
                predicted = model(unlabelled[others]).softmax(1)
            one_hot = functional.one_hot(labels[rows].long(), predicted.shape[1]).to(predicted)
            targets = torch.cat([one_hot, sharpen(predicted, self.temperature)])
            order = torch.randperm(len(x), generator=generator)
            logits = model(mix(x, order, strength)) if x.is_floating_point() else model(x, order, strength)
            loss = mixed_loss(logits, mix(targets, order, strength), size, self.weight * iteration / self.iterations)
            take_step(optimizer, loss)
            _update_average(average, model, self.decay)
            with torch.no_grad():
                torch._foreach_mul_(weights, 1 - 0.02 * self.lr)
        return average


def sharpen(p: Tensor, temperature: float) -> Tensor:
    """Return probabilities p (rows, classes) raised to 1 / `temperature` and normalised again."""
    raised = p ** (1 / temperature)
    return raised / raised.sum(1, keepdim=True)


def mix(rows: Tensor, order: Tensor, strength: float) -> Tensor:
    """Return strength * rows + (1 - strength) * rows[order], rows (n, ...)."""
    return strength * rows + (1 - strength) * rows[order.to(rows.device)]


def draw_mixing_weights(alpha: float, count: int, generator: torch.Generator) -> Tensor:
    """Draw l of Beta(alpha, alpha) and return max(l, 1 - l): (count,) in [.5, 1]."""
    # The distribution takes no generator.
    with stream(int(torch.randint(2**62, (), generator=generator))):
        drawn = torch.distributions.Beta(alpha, alpha).sample((count,))
    return torch.maximum(drawn, 1 - drawn)


def mixed_loss(logits: Tensor, targets: Tensor, labelled: int, weight: float) -> Tensor:
    """Return cross-entropy on the first `labelled` rows plus `weight` times the mean squared error on the others.

    logits and targets (soft classes): (rows, classes).
    """
    sure = -(logits[:labelled].log_softmax(1) * targets[:labelled]).sum(1).mean()
    return sure + weight * (logits[labelled:].softmax(1) - targets[labelled:]).square().mean()


def endless_batches(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield batches of `size` positions below `count` endlessly, reshuffled every pass.

    An incomplete batch is left out.
    """
    while True:
        yield from draw_batches(count, size, generator, least=size)


def _update_average(average: nn.Module, model: nn.Module, decay: float) -> None:
    """Move all real numbers of `average`, buffers too, towards those of `model`; take over whole numbers."""
    with torch.no_grad():
        for kept, new in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
            if kept.is_floating_point():
                kept.lerp_(new, 1 - decay)
            else:
                kept.copy_(new)
