"""Shared by attacks that imitate clients: one round of local training from the weights that a client was sent.

The copies follow the protocol of local training: the segments and their loss, the optimizer with its options and its
clipping of a step's gradient, the batch sizes, and whether a gradient is sent instead of weights. They lack what only
the client has: its optimizer's state from earlier rounds (each copy's starts empty), a method's additions to its loss
(a teacher's divergence, whose weight goes to the labels; a proximal term; a correction), and the run's defenses. If the
exchanged model ends in features, every copy has a trainable linear head of its own, drawn afresh.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import cycle

import torch
from torch import Tensor, nn

from splitfed.attacks.gradients.local_training import LocalTraining
from splitfed.attacks.membership.confidence import losses
from splitfed.attacks.networks.frozen_copy import run_segments
from splitfed.attacks.uploads.exchanged_model import ExchangedModel, move_along
from splitfed.core.errors import InvalidInput
from splitfed.core.optimizer_arguments import find_optimizer
from splitfed.core.optimizers import Optim
from splitfed.core.payload import copy_modules
from splitfed.core.random import stream


class ClientCopies:
    """Trains imitated clients for one round of `local`, for the attack `who`.

    `exchanged`: the model, whose rounds are not read; `classes`: number of classes of an own head.
    """

    def __init__(self, who: str, exchanged: ExchangedModel, local: LocalTraining, classes: int) -> None:
        self._exchanged, self._local, self._classes = exchanged, local, classes
        self._optim = _optimizer(who, local)
        # Those of the protocol say what of them stays in evaluation mode; the exchanged ones are on the device.
        modes = {s.name: s.module for s in local.segments}
        self._modules = copy_modules({s.name: s.module for s in exchanged.segments})
        for name, module in self._modules.items():
            module.train()
            for own, given in zip(module.modules(), modes.get(name, module).modules(), strict=True):
                own.training = given.training or not modes.get(name, module).training
        self._segments = tuple(replace(s, module=self._modules[s.name], original=None) for s in exchanged.segments)
        self._start = {f"{s}/{n}": t.clone() for s, m in self._modules.items() for n, t in m.state_dict().items()}

    def train(
        self,
        before: Mapping[str, Tensor],
        x: Tensor,
        y: Tensor,
        generator: torch.Generator,
    ) -> dict[str, Tensor]:
        """Return the message of a client with rows x (n, *shape) of labels y (n,), as `segment/name` -> tensor.

        `before`: the weights it was sent.
        """
        for name, module in self._modules.items():
            own = {n: f"{name}/{n}" for n in module.state_dict()}
            module.load_state_dict({n: before.get(full, self._start[full]).clone() for n, full in own.items()})
        named = {f"{s}/{n}": p for s, m in self._modules.items() for n, p in m.named_parameters() if p.requires_grad}
        head = None if self._exchanged.scores else self._fresh_head(x[:1], generator)
        loss = self._loss(head)
        if self._local.sends_gradients:
            return self._gradient_sent(before, named, loss, x, y, generator)
        optimizer, _ = self._optim.build([*named.items(), *([] if head is None else head.named_parameters())])
        batches = list(draw_passes(self._local, len(x), generator))
        for start in range(0, len(batches), self._local.accumulate):
            group = batches[start : start + self._local.accumulate]
            optimizer.zero_grad(set_to_none=True)
            for rows in group:
                (loss(x[rows.to(x.device)], y[rows.to(y.device)]) / len(group)).backward()
            optimizer.step()
        return self._contents(before)

    def _gradient_sent(
        self,
        before: Mapping[str, Tensor],
        named: Mapping[str, Tensor],
        loss: Callable[[Tensor, Tensor], Tensor],
        x: Tensor,
        y: Tensor,
        generator: torch.Generator,
    ) -> dict[str, Tensor]:
        """Return `before` moved along the mean gradient of all rows, in the same way as for the client's gradient."""
        for weight in named.values():
            weight.grad = None
        batches = list(draw_passes(self._local, len(x), generator))
        count = sum(len(rows) for rows in batches)
        for rows in batches:
            (loss(x[rows.to(x.device)], y[rows.to(y.device)]) * (len(rows) / count)).backward()
        gradient = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in named.items() if n in before}
        return move_along({**before, **self._contents(before)}, gradient)

    def _contents(self, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the current weights and buffers that are exchanged."""
        found = {f"{s}/{n}": t for s, m in self._modules.items() for n, t in m.state_dict().items()}
        return {name: t.detach().clone() for name, t in found.items() if name in before}

    def _fresh_head(self, x: Tensor, generator: torch.Generator) -> nn.Linear:
        """Return a linear layer from the features of rows x to classes, drawn afresh."""
        with torch.no_grad():
            features = self._exchanged.run(x, {}).flatten(1)
        with stream(int(torch.randint(2**62, (), generator=generator))):
            return nn.Linear(features.shape[1], self._classes).to(features)

    def _loss(self, head: nn.Linear | None) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the mean loss of rows: that of the protocol on scores, cross-entropy behind an own head.

        If the protocol names no loss on scores, it is cross-entropy too.
        """
        out = self._exchanged.out
        known = next((h for h in self._local.heads if h.value == out and h.target is None), None)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            made = run_segments(self._segments, self._modules, self._exchanged.feed(x))[out]
            if head is not None:
                return losses(head(made.flatten(1)), y).mean()
            if known is not None and known.task is not None:
                return known.weight * known.task.loss(made, y)
            return losses(made, y).mean()

        return loss


def draw_passes(local: LocalTraining, rows: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield row positions in the client's batch sizes, with as many passes over `rows` as it makes over its own.

    Every pass has an order of its own. A last batch smaller than all of the client's is left out.
    """
    sizes = local.batches
    left = round(sum(sizes) * rows / (local.rows or rows))
    order, place = torch.cat([torch.randperm(rows, generator=generator) for _ in range(-(-left // rows))]), 0
    for size in cycle(sizes):
        taken = min(size, rows, left - place)
        if place and taken < min(rows, *sizes):
            return
        yield order[place : place + taken]
        place += taken


def _optimizer(who: str, local: LocalTraining) -> Optim:
    """Return the optimizer of the protocol; raise `InvalidInput` if it cannot be built from what is known."""
    whose = f"{who} trains copies of the client"
    if ":" in local.optimizer:
        raise InvalidInput(f"{whose}: optimizer {local.optimizer} is not allowed; expected one of torch.optim")
    if local.options.get("groups"):
        raise InvalidInput(f"{whose}: groups={local.options['groups']} of its optimizer is not allowed; expected none")
    if "initial_lr" in local.options:
        raise InvalidInput(
            f"{whose}: its learning rate changes between rounds (a scheduler), so a round's is not known"
        )
    arguments = inspect.signature(find_optimizer(local.optimizer)).parameters
    options = {name: value for name, value in local.options.items() if name in arguments}
    return Optim(local.optimizer, options, clip_norm=local.options.get("clip_norm"))
