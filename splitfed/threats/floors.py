"""Floors: scores that an adversary reaches without the evaluated attack, by closed forms or from its own data alone.

Floors of reconstructions are the attacks `linear_inverse` and `nearest` (with one row, and with the mean of ten), which
any adversary with queries and auxiliary rows can compute on the victims' releases. Auxiliary rows are queried once for
all floors, and reconstructions are cached for the next attack on the same releases. The random draws are those of
`linear_inverse`, so that this attack and its floor have the same score. Without plain releases or enough auxiliary rows
these floors are left out. The mean image and the row of another victim, which need no release, are baselines of the
scorer.

The floor of predicted labels is the attack `own_features`, which gets the adversary's own columns, its own segments and
the labels that the attack knows (known victims and labelled auxiliary rows), but no message. A label attack leaks only
what it predicts beyond that floor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from splitfed.attacks.base import Attack, Knowledge, KnowsFewLabels, Needs, Releases, UsesFurther, label_set_of, unwrap
from splitfed.attacks.networks.query_passes import query_passes
from splitfed.attacks.scoring.reconstruction_metrics import mean_image, mse
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import View
from splitfed.core.random import generator
from splitfed.registry import load
from splitfed.stats.intervals import mean_interval

FLOORS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "linear_inverse": ("linear_inverse", {}),
    "nearest_1": ("nearest", {"neighbours": (1,)}),
    "nearest_10": ("nearest", {"neighbours": (10,)}),
}
"""Floor name -> registered attack and its parameters."""

LABELS = "own_features"
"""The floor of predicted labels, which is the registered attack of this name."""
MEAN = "mean_image"
QUERIES = 5
KEPT = 8
"""Number of sets of releases whose floors are cached."""
MARGIN = 0.2  # dB of the mean squared error: what a doubling of the training must gain to count
LEAST = 1e-6  # of the variance of the truth: below it a reconstruction is exact for every purpose


class Floors:
    """Computes every reconstruction floor, once for the same releases of the same victims."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, Tensor]] = {}

    def predict(self, view: View, knowledge: Knowledge, seed: int, *key: object) -> dict[str, Tensor]:
        """Return floor -> rows (victims, *shape), reconstructed from the activations in `view`.

        `seed`: seed of the attack that is scored beside them; `key`: what else the releases depend on, for the cache.
        """
        seen = view.select(kind="activation")
        if not seen.messages or knowledge.query is None or knowledge.auxiliary is None or not len(knowledge.auxiliary):
            return {}
        digest = _digest(seen, knowledge.auxiliary, (seed, *key))
        if digest not in self._kept:
            while len(self._kept) >= KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[digest] = _reconstruct(seen, knowledge, seed)
        return self._kept[digest]


def compared_floors(attack: Attack, floors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the `floors` that the trained decoder of `attack` is compared with: those its adversary could compute.

    Without queries or without auxiliary rows that is the mean image alone; without a trained decoder, none.
    """
    if not attack.trains_decoder:
        return {}
    able = {Needs.QUERIES, Needs.AUXILIARY} <= attack.requires
    return {name: rows for name, rows in floors.items() if able or name == MEAN}


def floors_below(
    attack: Attack,
    prediction: Tensor,
    truth: Tensor,
    floors: Mapping[str, Tensor],
    auxiliary: Tensor,
    part: Callable[[Tensor], Tensor] | None,
) -> tuple[str, ...]:
    """Return the names of the floors that score measurably better than the trained decoder of `attack`.

    `part`: selects the scored part of rows; None: all of a row.
    """
    blind = {MEAN: mean_image(auxiliary).expand(truth.shape)} if len(auxiliary) else {}
    held = compared_floors(attack, {**blind, **floors})
    shown = part or (lambda x: x)
    return floors_above(shown(truth), shown(prediction), {name: shown(rows) for name, rows in held.items()})


def predict_own_labels(attack: Attack, view: View, knowledge: Knowledge) -> dict[str, Tensor]:
    """Return the label predictions that use the adversary's own data alone: floor -> (victims, classes).

    Empty if the adversary has no columns of its own, or does not know a row of every class.
    """
    further = attack.uses if isinstance(attack, UsesFurther) else frozenset()
    name = label_set_of(attack)
    if name is not None:
        labels, classes = knowledge.attributes.get(name, (None, None))
        knowledge = replace(knowledge, auxiliary_labels=labels, classes=classes)
    if name is None and Needs.AUXILIARY_LABELS not in attack.requires | further:
        knowledge = replace(knowledge, auxiliary_labels=None)
    elif isinstance(attack, KnowsFewLabels):
        knowledge = _with_few_labels(knowledge, attack.labelled)
    floor: Attack = load("attacks", LABELS)()
    try:
        # Not one message: what arrived may depend on the labels.
        return {LABELS: floor(View(view.party, (), view.segments), knowledge, generator(0, "floors")).prediction}
    except InvalidInput:
        return {}


def _with_few_labels(knowledge: Knowledge, each: int) -> Knowledge:
    """Return `knowledge` with `each` auxiliary rows of a class, and no others that have a label."""
    labels = unwrap(knowledge.auxiliary_labels)
    kept = torch.cat([(labels == number).nonzero()[:each, 0] for number in labels.unique().tolist()])
    own = {value: rows[kept] for value, rows in (knowledge.own_auxiliary or {}).items()}
    return replace(knowledge, auxiliary_labels=labels[kept], own_auxiliary=own)


def _reconstruct(view: View, knowledge: Knowledge, seed: int) -> dict[str, Tensor]:
    passes = query_passes(unwrap(knowledge.query), unwrap(knowledge.auxiliary), QUERIES)
    reconstructions = {}
    for name, (attack, parameters) in FLOORS.items():
        floor = load("attacks", attack)(queries=len(passes), **parameters)
        try:
            known = replace(knowledge, query=_replay(passes))
            reconstructions[name] = floor(view, known, generator(seed, "attack", attack)).prediction
        except InvalidInput:
            # Too few auxiliary rows, or releases that are not finite.
            continue
    return reconstructions


def _replay(passes: list[Releases]) -> Callable[[Tensor], Releases]:
    """Return what gives the `passes` in turn in place of a query."""
    left = iter(passes)
    return lambda x: next(left)


def _digest(view: View, auxiliary: Tensor, key: tuple[object, ...]) -> str:
    digest = hashlib.sha256(repr(key).encode())
    for message in view.messages:
        for name, z in message.tensors.items():
            digest.update(f"{message.edge} {name} {z.dtype} {tuple(z.shape)}".encode())
            digest.update(_bytes(z))
    digest.update(_bytes(auxiliary))
    return digest.hexdigest()


def _bytes(z: Tensor) -> bytes:
    return z.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def floors_above(truth: Tensor, prediction: Tensor, floors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the names of the `floors` that reconstruct `truth` (n, ...) measurably better than `prediction` does.

    `floors`: name -> (n, ...). A floor is better if the mean squared error of the prediction exceeds its own by more
    than .2 dB, and the 95 % interval of the difference, paired over victims, is above 0. Empty for a single victim.
    """
    if len(truth) < 2:
        return ()
    own = mse(truth, prediction)
    least = LEAST * float((truth.double() - truth.double().mean(0)).square().mean())
    above = []
    for name, rows in floors.items():
        floor = mse(truth, rows)
        worse = float(own.mean()) > 10 ** (MARGIN / 10) * max(float(floor.mean()), least)
        if worse and mean_interval((own - floor).tolist()).low > 0:
            above.append(name)
    return tuple(above)
