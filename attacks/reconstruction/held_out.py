"""Auxiliary rows held out to compare attacks, with their releases appended to the victims'.

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
"""Minimum number of test releases: fewer rows are queried several times if defenses are random."""
MOST_FOLDS = 10
"""Maximum number of folds; in each fold every member is trained once."""


@dataclass(frozen=True)
class Fold:
    """A fold of `count` held-out rows.

    `view`: the victims' releases followed by those of the held-out rows; `own`: the latter alone; `knowledge`: the
    adversary's knowledge, its auxiliary rows without the held-out ones.
    """

    view: View
    own: View
    knowledge: Knowledge
    count: int


@dataclass(frozen=True)
class HeldOut:
    """Held-out auxiliary rows: one fixed set, or all rows in `folds`, each held out while the others are learnt from.

    `x`: (count, *shape) held-out rows, repeated if queried several times. `view`: the victims' releases followed by
    those of `x`; `own`: the latter alone; `knowledge`: the adversary's. Without folds its auxiliary rows exclude `x`;
    with folds `x` is all of them, and attacks that learn from them are tested by `cross_predict` only.
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
        """Smallest number of auxiliary rows to learn from in any fold."""
        known = [fold.knowledge for fold in self.folds] or [self.knowledge]
        return min(len(unwrap(one.auxiliary)) for one in known)

    def cross_predict(self, predict: Callable[[View, Knowledge], Tensor]) -> Tensor:
        """Return predictions of victims and held-out rows, (victims + count, *shape), none learnt from its own row.

        `predict` is called once in every fold, with the other rows; of victims the first fold's predictions are
        returned.
        """
        if not self.folds:
            return predict(self.view, self.knowledge)
        found = [predict(fold.view, fold.knowledge) for fold in self.folds]
        further = zip(found[1:], self.folds[1:], strict=True)
        return torch.cat([found[0], *(predictions[-fold.count :] for predictions, fold in further)])

    def first(self, most: int) -> tuple[View, Knowledge]:
        """Return the releases of the first `most` held-out rows alone, and the knowledge without these rows.

        With folds they are rows of the first fold.
        """
        part = self.folds[0] if self.folds else self
        own = [m._replace(tensors={name: z[:most] for name, z in m.tensors.items()}) for m in part.own.messages]
        return View(part.own.party, tuple(own), part.own.segments), part.knowledge

    def split(self, predictions: Tensor) -> tuple[Tensor, Tensor]:
        """Return `predictions` of victims, and those of held-out rows."""
        return predictions[: -len(self.x)], predictions[-len(self.x) :]

    def error(self, predictions: Tensor) -> float:
        """Return the mean squared error of `predictions` of the first held-out rows; infinity if one is not finite."""
        if not bool(predictions.isfinite().all()):
            return math.inf
        return float((predictions - self.x[: len(predictions)].cpu()).square().mean())

    def losses(self, predictions: Tensor) -> Tensor:
        """Return the loss of each of the first held-out rows, (n,), in the scored metric.

        For images with a value range that is the negative PSNR in dB, else the mean squared error.
        """
        truth, span = self.x[: len(predictions)].cpu(), self.knowledge.value_range
        if span is None or len(self.knowledge.shape) != 3:
            return (predictions - truth).double().square().flatten(1).mean(1)
        return -psnr(truth.double(), predictions.double(), span[1] - span[0])


def hold_out(name: str, view: View, knowledge: Knowledge, share: float, generator: torch.Generator) -> HeldOut:
    """Hold out a random `share` of the auxiliary rows; raise `InvalidInput`, naming the attack `name`, for too few."""
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
    """Hold out all auxiliary rows in turn, about `share` of them in each of `count_folds` random folds.

    They are queried once, as victims are. Raises `InvalidInput`, naming the attack `name`, for too few rows.
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
    """Return releases of the rows x from repeated queries, until there are `JUDGING` releases of `count` rows.

    One query suffices if no defense is random or depends on the batch.
    """
    ask = partial(query_shuffled, unwrap(knowledge.query), generator=generator)
    return query_passes(ask, x, max(round(JUDGING / count), 1))


def _beside(query: Callable[[Tensor], Releases], others: Tensor) -> Callable[[Tensor], Releases]:
    """Return a `query` that passes `others` in the same batches, without returning their releases.

    A defense may depend on the batch, so held-out rows must be in batches like those of later queries.
    """

    def ask(x: Tensor) -> Releases:
        places = [torch.arange(len(rows), device=x.device) / len(rows) for rows in (x, others)]
        order = torch.cat(places).argsort(stable=True)
        released = query(torch.cat([x, others])[order])
        return {value: z[order.argsort()][: len(x)] for value, z in released.items()}

    return ask


def count_held_out(name: str, rows: int, share: float) -> int:
    """Return the number of held-out rows for a `share` of `rows`.

    Raises `InvalidInput` for none, or if under two are left.
    """
    count = round(share * rows)
    if not 0 < count <= rows - 2:
        raise InvalidInput(
            f"{name} validation={share!r} keeps {count} of {rows} auxiliary rows; "
            "expected at least one, and two left to train on"
        )
    return count


def count_folds(rows: int, share: float) -> int:
    """Return the number of folds with about `share` of `rows` in each: between 2 and `MOST_FOLDS`."""
    return min(max(round(1 / share), 2), MOST_FOLDS, rows)


def _with_releases(view: View, released: Releases) -> View:
    """Return the activations of `view` with their tensors replaced by `released`, value -> (n, ...)."""
    seen = view.select(kind="activation")
    places = {name: message for message in seen.messages for name in message.tensors}
    further = tuple(m._replace(tensors={name: released[name]}) for name, m in places.items())
    return View(view.party, further, view.segments)


def _append_releases(view: View, released: Releases) -> View:
    """Return the activations of `view` with `released`, value -> (n, ...), appended."""
    seen = view.select(kind="activation").messages
    return View(view.party, (*seen, *_with_releases(view, released).messages), view.segments)
