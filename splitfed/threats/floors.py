"""Floors: what anybody with queries and auxiliary rows reconstructs in closed form, beside every reconstruction.

They are the attacks `linear_inverse` and `nearest` (with one row, and the mean of ten), on the victims' releases as
they arrived. Releases of auxiliary rows are asked for once for all of them, and what they reconstruct is kept for the
next attack on the same releases. They draw as `linear_inverse` does, so that it and its floor are one figure. A floor
needs releases in plain and auxiliary rows; where there are none, or too few, it is left out. The mean image and the row
of another victim, which need no release, are the scorer's own baselines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from splitfed.attacks.base import Attack, Knowledge, Needs, Releases, unwrap
from splitfed.attacks.networks.query_passes import query_passes
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import View
from splitfed.core.random import generator
from splitfed.registry import load

FLOORS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "linear_inverse": ("linear_inverse", {}),
    "nearest_1": ("nearest", {"neighbours": (1,)}),
    "nearest_10": ("nearest", {"neighbours": (10,)}),
}
"""Name beside the scores -> the attack and its parameters."""

MEAN = "mean_image"
QUERIES = 5
KEPT = 8
"""Sets of releases of which the floors are kept."""


class Floors:
    """Reconstructs by every floor, once for the same releases of the same victims."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, Tensor]] = {}

    def predict(self, view: View, knowledge: Knowledge, seed: int, *key: object) -> dict[str, Tensor]:
        """Return floor -> rows (victims, *shape) for the activations in `view`; `key`: what else they depend on.

        `seed`: of the attack that they stand beside.
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
    """Return those of `floors` that `attack`, which trains a decoder, is held to: what its adversary could compute.

    One without queries, or without auxiliary rows, is held to the mean image alone.
    """
    if not attack.trains_decoder:
        return {}
    able = {Needs.QUERIES, Needs.AUXILIARY} <= attack.requires
    return {name: rows for name, rows in floors.items() if able or name == MEAN}


def _reconstruct(view: View, knowledge: Knowledge, seed: int) -> dict[str, Tensor]:
    passes = query_passes(unwrap(knowledge.query), unwrap(knowledge.auxiliary), QUERIES)
    found = {}
    for name, (attack, parameters) in FLOORS.items():
        floor = load("attacks", attack)(queries=len(passes), **parameters)
        try:
            known = replace(knowledge, query=_replay(passes))
            found[name] = floor(view, known, generator(seed, "attack", attack)).prediction
        except InvalidInput:
            # Too few auxiliary rows, or releases that are not finite.
            continue
    return found


def _replay(passes: list[Releases]) -> Callable[[Tensor], Releases]:
    """Return what gives the `passes` in turn in place of a query."""
    left = iter(passes)
    return lambda x: next(left)


def _digest(view: View, auxiliary: Tensor, key: tuple[object, ...]) -> str:
    found = hashlib.sha256(repr(key).encode())
    for message in view.messages:
        for name, z in message.tensors.items():
            found.update(f"{message.edge} {name} {z.dtype} {tuple(z.shape)}".encode())
            found.update(_bytes(z))
    found.update(_bytes(auxiliary))
    return found.hexdigest()


def _bytes(z: Tensor) -> bytes:
    return z.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
