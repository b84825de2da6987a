"""Shared by attacks that train clients of their own: a round of local training from the weights that a client was sent.

What the protocol says of local training is kept to: the segments and their loss, the optimizer with its options and its
clipping of a step's gradient, the sizes of the batches, whether a gradient is sent in place of weights. What only the
client has is not: its optimizer's state from earlier rounds (every copy's begins anew), what a method adds to its loss
(a teacher's divergence, whose weight goes to the labels; a proximal term; a correction), and the run's defenses. Where
what is exchanged ends in features, every copy has a linear head of its own behind them, drawn anew, which learns too.
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
    """Trains clients of the adversary's own for a round of `local`, for the attack `who`.

    `exchanged`: the model, of which the rounds are not read; `classes`: how many a head of one's own tells apart.
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
        """Return what a client with rows x (n, *shape) of labels y (n,) would send back, as `segment/name` -> tensor.

        `before`: what it was sent.
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
        """Return `before` moved along the mean gradient of all rows, as the adversary moves it along the client's."""
        for weight in named.values():
            weight.grad = None
        batches = list(draw_passes(self._local, len(x), generator))
        count = sum(len(rows) for rows in batches)
        for rows in batches:
            (loss(x[rows.to(x.device)], y[rows.to(y.device)]) * (len(rows) / count)).backward()
        gradient = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in named.items() if n in before}
        return move_along({**before, **self._contents(before)}, gradient)

    def _contents(self, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights and buffers as they are, of those that are exchanged."""
        found = {f"{s}/{n}": t for s, m in self._modules.items() for n, t in m.state_dict().items()}
        return {name: t.detach().clone() for name, t in found.items() if name in before}

    def _fresh_head(self, x: Tensor, generator: torch.Generator) -> nn.Linear:
        """Return a linear layer from the features of rows x to classes, drawn anew."""
        with torch.no_grad():
            features = self._exchanged.run(x, {}).flatten(1)
        with stream(int(torch.randint(2**62, (), generator=generator))):
            return nn.Linear(features.shape[1], self._classes).to(features)

    def _loss(self, head: nn.Linear | None) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the mean loss of rows: the protocol's on scores of classes, cross-entropy behind a head of one's own.

        A loss on scores that the protocol does not name is cross-entropy too.
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
    """Yield row numbers in the sizes of a client's batches, as many passes over `rows` as it makes over its own.

    Every pass is in an order of its own. A last batch that is smaller than all of the client's is left out.
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
    """Return the optimizer of the protocol; refuse one that cannot be made from what is known of it."""
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
