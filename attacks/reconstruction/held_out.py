"""Rows that an adversary holds out of its own to judge what it has tried, put behind the victims without a mark.

Source: hold-out and K-fold cross-validation, Stone, "Cross-validatory choice and assessment of statistical
predictions", Journal of the Royal Statistical Society B 36, 1974.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from splitfed.attacks.base import Knowledge, Releases, unwrap
from splitfed.attacks.networks.query_passes import query_passes, query_shuffled
from splitfed.attacks.scoring.reconstruction_metrics import PSNR_CAP, psnr
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import View

JUDGING = 120
"""Releases that judge at least: fewer rows are asked for several times, where defenses are random."""
MOST_FOLDS = 10
"""Folds at most, however small the share that is held out in each: every one is a training of each member."""


@dataclass(frozen=True)
class Fold:
    """A part of the rows held out, as many as `count`.

    `view`: what arrived of the victims, and behind it what arrives of these rows; `own`: the latter alone; `knowledge`:
    what the adversary knows, its auxiliary rows less these.
    """

    view: View
    own: View
    knowledge: Knowledge
    count: int


@dataclass(frozen=True)
class HeldOut:
    """Auxiliary rows that were held out: at once, or in `folds`, each while the others were not.

    `x`: `count` rows (*shape), several times one after the other where they were asked for as often.
    `view`: what arrived of the victims, and behind it what arrives of `x` when it is queried; `own`: the latter alone;
    `knowledge`: what the adversary knows. Without folds its auxiliary rows are less `x`; with folds `x` is all of them,
    and what learns from them is judged by `cross_predict` alone.
    """

    x: Tensor
    count: int
    view: View
    own: View
    knowledge: Knowledge
    folds: tuple[Fold, ...] = ()

    @property
    def exact(self) -> float:
        """The mean squared error from which on rows count as recovered: that of `PSNR_CAP` in their range."""
        low, high = self.knowledge.value_range or (float(self.x.min()), float(self.x.max()))
        return (high - low) ** 2 * 10 ** (-PSNR_CAP / 10)

    @property
    def fewest(self) -> int:
        """The number of auxiliary rows that are left to learn from, of the fold with the fewest."""
        known = [fold.knowledge for fold in self.folds] or [self.knowledge]
        return min(len(unwrap(one.auxiliary)) for one in known)

    def cross_predict(self, predict: Callable[[View, Knowledge], Tensor]) -> Tensor:
        """Return what `predict` makes of victims and rows held out, (victims + count, *shape), each learnt without it.

        `predict` is asked once in every fold, from rows that are not in it; of victims the first fold's are returned.
        """
        if not self.folds:
            return predict(self.view, self.knowledge)
        found = [predict(fold.view, fold.knowledge) for fold in self.folds]
        further = zip(found[1:], self.folds[1:], strict=True)
        return torch.cat([found[0], *(predictions[-fold.count :] for predictions, fold in further)])

    def first(self, most: int) -> tuple[View, Knowledge]:
        """Return what arrives of the first `most` rows held out, without the victims, and what is known without them.

        In folds they are of the first fold.
        """
        part = self.folds[0] if self.folds else self
        own = [m._replace(tensors={name: z[:most] for name, z in m.tensors.items()}) for m in part.own.messages]
        return View(part.own.party, tuple(own), part.own.segments), part.knowledge

    def split(self, predictions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the victims' rows of `predictions`, and those of the rows held out."""
        return predictions[: -len(self.x)], predictions[-len(self.x) :]

    def error(self, predictions: Tensor) -> float:
        """Return the mean squared error of `predictions` of the first rows held out; infinity if one is not finite."""
        if not bool(predictions.isfinite().all()):
            return math.inf
        return float((predictions - self.x[: len(predictions)].cpu()).square().mean())

    def losses(self, predictions: Tensor) -> Tensor:
        """Return what `predictions` of the first rows held out miss in each, (n,), in the measure that scores them.

        Of images of a known range that is the negative PSNR, else the mean squared error.
        """
        truth, span = self.x[: len(predictions)].cpu(), self.knowledge.value_range
        if span is None or len(self.knowledge.shape) != 3:
            return (predictions - truth).double().square().flatten(1).mean(1)
        return -psnr(truth.double(), predictions.double(), span[1] - span[0])


def hold_out(name: str, view: View, knowledge: Knowledge, share: float, generator: torch.Generator) -> HeldOut:
    """Hold out `share` of the auxiliary rows, drawn by `generator`; `name` is the attack's, for what is refused."""
    auxiliary = unwrap(knowledge.auxiliary)
    order = torch.randperm(len(auxiliary), generator=generator).to(knowledge.device)
    count = count_held_out(name, len(order), share)
    kept, left = (auxiliary[rows] for rows in (order[:count], order[count:]))
    passes = _draws(knowledge, auxiliary, count, generator)
    released = {value: torch.cat([every[value][order[:count]] for every in passes]) for value in passes[0]}
    x = kept.repeat(len(passes), *[1] * (kept.dim() - 1))
    known = replace(knowledge, auxiliary=left, query=_beside(unwrap(knowledge.query), kept))
    return HeldOut(x, count, _append_releases(view, released), _with_releases(view, released), known)


def hold_out_in_folds(name: str, view: View, knowledge: Knowledge, share: float, generator: torch.Generator) -> HeldOut:
    """Hold out all auxiliary rows, about `share` of them in each of `count_folds` folds, drawn by `generator`.

    They are queried once, as victims are. `name` is the attack's, for what is refused.
    """
    auxiliary = unwrap(knowledge.auxiliary)
    count_held_out(name, len(auxiliary), share)
    order = torch.randperm(len(auxiliary), generator=generator).to(knowledge.device)
    rows = auxiliary[order]
    released = query_shuffled(unwrap(knowledge.query), rows, generator)
    folds = []
    for held in torch.arange(len(rows), device=rows.device).tensor_split(count_folds(len(rows), share)):
        left = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        left[held] = False
        query = _beside(unwrap(knowledge.query), rows[held])
        part, known = {v: z[held] for v, z in released.items()}, replace(knowledge, auxiliary=rows[left], query=query)
        folds.append(Fold(_append_releases(view, part), _with_releases(view, part), known, len(held)))
    return HeldOut(
        rows, len(rows), _append_releases(view, released), _with_releases(view, released), knowledge, tuple(folds)
    )


def _draws(knowledge: Knowledge, x: Tensor, count: int, generator: torch.Generator) -> list[Releases]:
    """Return what arrives of the rows x when they are asked for: often enough that `count` of them are `JUDGING`.

    Once is enough where no defense draws and none goes by the batch.
    """
    ask = partial(query_shuffled, unwrap(knowledge.query), generator=generator)
    return query_passes(ask, x, max(round(JUDGING / count), 1))


def _beside(query: Callable[[Tensor], Releases], others: Tensor) -> Callable[[Tensor], Releases]:
    """Return `query` as rows are asked for beside `others`, whose releases are not told.

    A defense may go by the batch: an unusual row among those held out is in batches then as it will be later.
    """

    def ask(x: Tensor) -> Releases:
        places = [torch.arange(len(rows), device=x.device) / len(rows) for rows in (x, others)]
        order = torch.cat(places).argsort(stable=True)
        released = query(torch.cat([x, others])[order])
        return {value: z[order.argsort()][: len(x)] for value, z in released.items()}

    return ask


def count_held_out(name: str, rows: int, share: float) -> int:
    """Return how many of `rows` auxiliary rows a `share` is; refuse none, and one that leaves fewer than two."""
    count = round(share * rows)
    if not 0 < count <= rows - 2:
        raise InvalidInput(
            f"{name} validation={share!r} keeps {count} of {rows} auxiliary rows; "
            "expected at least one, and two left to train on"
        )
    return count


def count_folds(rows: int, share: float) -> int:
    """Return in how many folds about `share` of `rows` are held out in turn: 2 at least and `MOST_FOLDS` at most."""
    return min(max(round(1 / share), 2), MOST_FOLDS, rows)


def _with_releases(view: View, released: Releases) -> View:
    """Return the activations of `view` with `released`, value -> (n, ...), in place of what was released."""
    seen = view.select(kind="activation")
    places = {name: message for message in seen.messages for name in message.tensors}
    further = tuple(m._replace(tensors={name: released[name]}) for name, m in places.items())
    return View(view.party, further, view.segments)


def _append_releases(view: View, released: Releases) -> View:
    """Return the activations of `view` with `released`, value -> (n, ...), behind them."""
    seen = view.select(kind="activation").messages
    return View(view.party, (*seen, *_with_releases(view, released).messages), view.segments)
