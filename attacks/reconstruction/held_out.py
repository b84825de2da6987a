"""Rows that an adversary holds out of its own to judge what it has tried, put behind the victims without a mark.

Source: hold-out and K-fold cross-validation, Stone, "Cross-validatory choice and assessment of statistical
predictions", Journal of the Royal Statistical Society B 36, 1974.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from splitfed.attacks.base import Knowledge, Releases, unwrap
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import View

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
    """Auxiliary rows `x` (count, *shape) that were held out: at once, or in `folds`, each while the others were not.

    `view`: what arrived of the victims, and behind it what arrives of `x` when it is queried; `own`: the latter alone;
    `knowledge`: what the adversary knows. Without folds its auxiliary rows are less `x`; with folds `x` is all of them,
    and what learns from them is judged by `cross_predict` alone.
    """

    x: Tensor
    view: View
    own: View
    knowledge: Knowledge
    folds: tuple[Fold, ...] = ()

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

    def cross_search(self, predict: Callable[[View, Knowledge], Tensor]) -> Tensor:
        """Return what `predict` makes of the rows held out alone, (count, *shape), as `cross_predict` asks."""
        parts = self.folds or (self,)
        return torch.cat([predict(part.own, part.knowledge) for part in parts])

    def split(self, predictions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the victims' rows of `predictions`, and those of the rows held out."""
        return predictions[: -len(self.x)], predictions[-len(self.x) :]

    def error(self, predictions: Tensor) -> float:
        """Return the mean squared error of `predictions` of the rows held out; infinity where one is not finite."""
        return float((predictions - self.x.cpu()).square().mean()) if bool(predictions.isfinite().all()) else math.inf


def hold_out(name: str, view: View, knowledge: Knowledge, share: float, generator: torch.Generator) -> HeldOut:
    """Hold out `share` of the auxiliary rows, drawn by `generator`; `name` is the attack's, for what is refused."""
    auxiliary = unwrap(knowledge.auxiliary)
    order = torch.randperm(len(auxiliary), generator=generator).to(knowledge.device)
    count = count_held_out(name, len(order), share)
    kept, left = (auxiliary[rows] for rows in (order[:count], order[count:]))
    released = unwrap(knowledge.query)(kept)
    known = replace(knowledge, auxiliary=left)
    return HeldOut(kept, _append_releases(view, released), _with_releases(view, released), known)


def hold_out_in_folds(name: str, view: View, knowledge: Knowledge, share: float, generator: torch.Generator) -> HeldOut:
    """Hold out all auxiliary rows, about `share` of them in each of `count_folds` folds, drawn by `generator`.

    They are queried once, as victims are. `name` is the attack's, for what is refused.
    """
    auxiliary = unwrap(knowledge.auxiliary)
    count_held_out(name, len(auxiliary), share)
    order = torch.randperm(len(auxiliary), generator=generator).to(knowledge.device)
    rows = auxiliary[order]
    released = unwrap(knowledge.query)(rows)
    folds = []
    for held in torch.arange(len(rows), device=rows.device).tensor_split(count_folds(len(rows), share)):
        left = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        left[held] = False
        part, known = {value: z[held] for value, z in released.items()}, replace(knowledge, auxiliary=rows[left])
        folds.append(Fold(_append_releases(view, part), _with_releases(view, part), known, len(held)))
    return HeldOut(rows, _append_releases(view, released), _with_releases(view, released), knowledge, tuple(folds))


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
