"""Outsiders: attacks in plain torch by somebody who did not read those of the house, against which these are held.

Frozen: an outsider that finds more than `strongest` is a fault of `strongest`, and is never weakened. Each gets what a
party of its threat model gets and no more: its base checks what it `requires`, as for every attack. Work is counted in
row passes, one row once forward and backward through a decoder or the client's segment, `passes` in all; closed forms,
and queries, which go forward alone, are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.attacks.base import Attack, Knowledge, Needs, Phase, Progress, Target, unwrap
from splitfed.core.messages import View

Send = Callable[[Tensor], Mapping[str, Tensor]]
Draw = Callable[[Tensor, torch.Generator], Tensor]


def beside(values: Mapping[str, Tensor]) -> Tensor:
    """Return all that was released of a row side by side, (rows, numbers)."""
    return torch.cat([value.flatten(1) for value in values.values()], 1)


def release(send: Send, x: Tensor, size: int, times: int = 1) -> Tensor:
    """Return what `send` makes of each row of `x`, `times` each, one after the other: (times * rows, numbers).

    `size` rows are sent at once, for some defenses go by the batch, and the victims came in one.
    """
    with torch.no_grad():
        sent = [torch.cat([beside(send(part)) for part in x.split(size)]) for _ in range(times)]
    return torch.stack(sent, 1).flatten(0, 1)


def ridge(z: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights and bias of a ridge regression from releases to rows, its penalty chosen on a fifth; float64."""
    z, x, held = z.double(), x.double(), max(1, len(z) // 5)

    def fit(first: int, penalty: float) -> tuple[Tensor, Tensor]:
        centred = z[first:] - z[first:].mean(0)
        moments = centred.T @ centred
        ridge = (penalty * float(moments.diagonal().mean()) + 1e-12) * torch.eye(len(moments), dtype=z.dtype)
        weights = torch.linalg.solve(moments + ridge, centred.T @ (x[first:] - x[first:].mean(0)))
        return weights, x[first:].mean(0) - z[first:].mean(0) @ weights

    def error(penalty: float) -> float:
        weights, bias = fit(held, penalty)
        return float((z[:held] @ weights + bias - x[:held]).square().mean())

    return fit(0, min((1e-8, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0), key=error))


@dataclass(frozen=True)
class LbfgsOutsider(Attack):
    """Rows whose release equals what was seen, by L-BFGS from a regression's rows; white box.

    `prior`: rows are searched as Gaussian with mean and covariance of the auxiliary ones, whose weight falls tenfold
    each stage. Otherwise stages only begin anew, without history. A few auxiliary rows are searched for beside the
    victims, and counted as they are; the stage at which these come out best is taken.
    """

    passes: int = 75_000
    prior: bool = False
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.AUXILIARY, Needs.RELEASES, Needs.UPSTREAM})

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        upstream = unwrap(knowledge.upstream)
        seen = beside(view.select(kind="activation").tensors(knowledge.device))
        rows = (known := unwrap(knowledge.auxiliary))[torch.randperm(len(known), generator=generator)]
        released = release(unwrap(knowledge.sample), rows, len(seen), 5).double()
        expected = release(upstream, rows, len(seen)).double().repeat_interleave(5, 0)
        judges = max(4, len(seen) // 5)
        z = torch.cat([released[: 5 * judges : 5], seen.double()])
        known, truth = rows[judges:].flatten(1).double(), rows[:judges].flatten(1).double()
        slopes, bias = ridge(released[5 * judges :], known.repeat_interleave(5, 0))
        low, high = knowledge.value_range or (-math.inf, math.inf)
        spread = float(released.var(0).mean()) + 1e-12
        noise = (released - expected).square().mean(0) / spread
        weights = [10.0**-k for k in range(1, 10) if 10.0**-k > 0.03 * float(noise.mean())] if self.prior else [0.0] * 4
        centre, basis = _gaussian(known) if self.prior else (0.0 * known[0], torch.eye(known.shape[1]).double())
        found = [(z @ slopes + bias).clamp(low, high)]
        for weight in weights:

            def errors(u: Tensor, weight: float = weight) -> Tensor:
                y = centre + u @ basis.T
                gap = beside(upstream(y.to(rows.dtype).view(len(y), *knowledge.shape))).double() - z
                outside = (y - y.clamp(low, high)).square().sum(1)
                doubt = 1 + (noise / weight if self.prior else 0.0 * noise)
                return (gap.square() / (spread * doubt)).sum(1) + weight * u.square().sum(1) + 10 * outside

            u = torch.linalg.solve(basis, (found[-1] - centre).T).T
            found.append(centre + minimize(errors, u, self.passes // len(weights)) @ basis.T)
        best = min(found, key=lambda one: float((one[:judges].clamp(low, high) - truth).square().mean()))
        return best[judges:].view(len(seen), *knowledge.shape).to(rows.dtype)


def _gaussian(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of `rows` and the symmetric root of their covariance, shrunk a little to a multiple of one."""
    centred = rows - rows.mean(0)
    covariance = centred.T @ centred / len(rows)
    covariance += 1e-3 * covariance.diagonal().mean() * torch.eye(len(covariance), dtype=rows.dtype)
    values, vectors = torch.linalg.eigh(covariance)
    return rows.mean(0), vectors * values.clamp_min(1e-12).sqrt() @ vectors.T


def minimize(errors: Callable[[Tensor], Tensor], start: Tensor, passes: int) -> Tensor:
    """Return the best that L-BFGS found of each row from `start`, until `passes` are used up or nothing moves."""
    u, left = start.clone().requires_grad_(), passes // len(start)
    best, least = start.clone(), torch.full((len(start),), math.inf, dtype=start.dtype)

    def closure() -> Tensor:
        nonlocal left
        if left == 0:
            raise StopIteration
        left -= 1
        optimizer.zero_grad()
        each = errors(u)
        each.sum().backward()
        better = each.detach() < least
        best[better], least[better] = u.detach()[better], each.detach()[better]
        return each.sum()

    before = math.inf
    while True:
        optimizer = torch.optim.LBFGS([u], 1, 10_000, 10**9, 0, 0, 30, "strong_wolfe")
        try:
            optimizer.step(closure)
        except StopIteration:
            return best
        if float(least.sum()) >= before:
            return best
        before = float(least.sum())
        with torch.no_grad():
            u.copy_(best)


class Residual(nn.Sequential):
    """Layers whose input is added to what they make of it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)  # type: ignore[no-any-return, no-untyped-call]


def convolutions(released: Tensor, shape: tuple[int, ...], width: int) -> nn.Sequential:
    """Return convolutions on a release's map, which grows to an image of `shape`; flat to flat."""
    maps = tuple(released.shape[1:]) if released.dim() == 4 else (released[0].numel(), 1, 1)
    first, second, third = (nn.Conv2d(n, width, 3, padding=1) for n in (maps[0], width, width))
    layers = [nn.Unflatten(1, maps), first, nn.ReLU(), Residual(second, nn.ReLU(), third), nn.ReLU()]
    side, channels = maps[-1], width
    while side < shape[-1]:
        narrower = max(channels // 2, 16)
        layers += [nn.Conv2d(channels, 4 * narrower, 3, padding=1), nn.PixelShuffle(2), nn.ReLU()]
        side, channels = 2 * side, narrower
    layers += [nn.Upsample(shape[1:], mode="bilinear"), nn.Conv2d(channels, shape[0], 3, padding=1), nn.Flatten()]
    return nn.Sequential(*layers)


def learn_inverse(
    view: View, knowledge: Knowledge, generator: torch.Generator, passes: int, network: nn.Module, draw: Draw
) -> Tensor:
    """Return the victims by a regression that `network` corrects, trained on rows drawn and defended anew.

    Adam, minibatches of 32, a rate that rises and falls; last layer of `network` at zero to begin with.
    """
    rows, queries = unwrap(knowledge.auxiliary), unwrap(knowledge.query)
    seen, size = beside(view.select(kind="activation").tensors(knowledge.device)), min(32, len(rows))
    released = release(queries, rows, len(seen), 5)
    middle, scale = released.mean(0), released.std(0).mean() + 1e-6
    weights, bias = (w.to(rows.dtype) for w in ridge(released, rows.flatten(1).repeat_interleave(5, 0)))
    unit = rows.flatten(1).std(0) if len(knowledge.shape) == 1 else torch.ones(())
    nn.init.zeros_([weight for weight in network.parameters() if weight.dim() > 1][-1])
    optimizer = torch.optim.AdamW(network.parameters(), 2e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=passes // size + 2)

    def invert(z: Tensor) -> Tensor:
        return z @ weights + bias + unit * network((z - middle) / scale)  # type: ignore[no-any-return]

    while passes >= size:
        x = draw(rows, generator)
        z = release(queries, x, len(seen))
        for batch in torch.randperm(len(x), generator=generator).split(size):
            if (passes := passes - len(batch)) < 0:
                break
            loss = (invert(z[batch]) - x[batch].flatten(1)).div(unit).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if len(batch) == size:
                schedule.step()
    with torch.no_grad():
        return invert(seen).view(len(seen), *knowledge.shape)


@dataclass(frozen=True)
class DecoderOutsider(Attack):
    """A wide convolutional decoder for images, trained on auxiliary rows that are queried anew each epoch; black box.

    `width`: channels. A quarter of the rows are moved by a pixel at most.
    """

    passes: int = 75_000
    width: int = 64
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.AUXILIARY, Needs.RELEASES, Needs.QUERIES})

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        (released,) = view.select(kind="activation").tensors(knowledge.device).values()
        network = convolutions(released, knowledge.shape, self.width)
        return learn_inverse(view, knowledge, generator, self.passes, network, _shift)


def _shift(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Return images of which a quarter moved by one pixel at most in each direction."""
    ways = torch.randint(-1, 2, (len(rows), 2), generator=generator)
    ways *= torch.rand(len(rows), 1, generator=generator) < 0.25
    return torch.stack([row.roll(way.tolist(), (-2, -1)) for row, way in zip(rows, ways, strict=True)])


@dataclass(frozen=True)
class TableOutsider(Attack):
    """A small perceptron for tables, trained on auxiliary rows and on Gaussian ones about them; black box."""

    passes: int = 75_000
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.AUXILIARY, Needs.RELEASES, Needs.QUERIES})

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        rows, width = unwrap(knowledge.auxiliary), beside(view.select(kind="activation").tensors()).shape[1]
        layers = [nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, rows.shape[1])]
        centre, root = (found.to(rows.dtype) for found in _gaussian(rows.double()))

        def draw(rows: Tensor, generator: torch.Generator) -> Tensor:
            chosen = rows[torch.randint(len(rows), (512,), generator=generator)]
            made = centre + 0.866 * (chosen - centre) + 0.5 * torch.randn(chosen.shape, generator=generator) @ root
            return torch.where(torch.rand(len(made), 1, generator=generator) < 0.5, chosen, made)

        return learn_inverse(view, knowledge, generator, self.passes, nn.Sequential(*layers), draw)


def fit_logistic(rows: Tensor, targets: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the logits (n, classes) of a logistic regression to soft `targets`, with half the squared weights."""
    centre, scale = rows.mean(0), rows.std(0, correction=0) + 1e-9
    weights = torch.zeros(rows.shape[1] + 1, targets.shape[1], dtype=rows.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def logits(new: Tensor) -> Tensor:
        return ((new - centre) / scale) @ weights[:-1] + weights[-1]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -(targets * logits(rows).log_softmax(1)).sum() + 0.5 * weights[:-1].square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return lambda new: logits(new).detach()


@dataclass(frozen=True)
class LabelOutsider(Attack):
    """Logistic regression from the adversary's own columns, or what arrived forward where it has none, to labels.

    `hints`: victims whose label it knows, of each class. `co_training`: a second regression, of gradients, learns from
    the first's opinion of all victims and teaches it in turn, six times; the logits of both are added up.
    """

    hints: int = 6
    co_training: bool = False
    target: ClassVar[Target] = Target.LABELS
    phase: ClassVar[Phase] = Phase.STEP
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.GRADIENTS, Needs.OWN_INPUTS})

    def asks(self, classes: int | None) -> Mapping[int, int]:
        return dict.fromkeys(range(classes or 0), self.hints)

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        own = beside(knowledge.own or view.select(kind="activation").tensors()).double()
        known = torch.cat(list(knowledge.hints.values()))
        classes = torch.cat([torch.full_like(rows, number) for number, rows in knowledge.hints.items()])
        truth = functional.one_hot(classes, unwrap(knowledge.classes)).double()
        first = second = fit_logistic(own[known], truth)(own)
        if not self.co_training:
            return first
        gradients = beside(view.select(kind="gradient").tensors()).double()
        log = (length := gradients.norm(dim=1, keepdim=True).clamp_min(1e-30)).log()
        parts = [torch.linalg.svd(x - x.mean(0), full_matrices=False) for x in (gradients, gradients / length)]
        told = torch.cat([*((u * s)[:, :8] for u, s, _ in parts), log, log.square()], 1)
        opinion = first.softmax(1)
        for _ in range(6):
            for rows in (told, own):
                opinion = opinion.clamp(0.02, 0.98)
                opinion[known] = truth
                first, second = fit_logistic(rows, opinion)(rows), first
                opinion = (first + second).softmax(1)
        return first + second
