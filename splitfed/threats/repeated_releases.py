"""Repeated releases of the same row: their mean, the conditions for it, and their description in results.

A client that sends a row several times (epochs, repeated queries) draws the noise of a random defense anew every time.
The mean of R releases has the noise's variance divided by R. So an adversary attacks the mean, and queries the mean of
R releases of its own rows, so that its decoder learns at that noise level. For Gaussian noise the mean is a sufficient
statistic: it loses no information.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from splitfed.attacks.base import Attack, Needs, Phase
from splitfed.core.errors import InvalidInput, check_count
from splitfed.core.messages import View
from splitfed.core.random import derive
from splitfed.core.secure_computation import SecureComputation

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class RepeatedReleases:
    """How often every victim's row was released to the adversary (`count` > 1), and the privacy cost.

    `equal`: whether all releases of a row were the same numbers. `trained_on_one`: whether the attack's networks were
    trained in the run, on single releases. `epsilon` at `delta`: cost of all releases of a row together, and `each`
    that of one; None if a crossing value has no guarantee. `steps`: whether the releases were steps of training, so
    that the adversary has the mean of the returned messages.
    """

    count: int
    equal: bool = False
    trained_on_one: bool = False
    epsilon: float | None = None
    each: float | None = None
    delta: float | None = None
    steps: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values by name."""
        return dict(vars(self))

    def __str__(self) -> str:
        """Return one clause: the number of releases, and their consequence for the attack."""
        if self.steps:
            return f"{self.count} steps of training with each row"
        said = f"{self.count} releases of each row"
        if self.equal:
            return f"{said}, all equal, as no random defense acts on them, so they reveal no more than one"
        if self.epsilon is not None and self.each is not None and self.delta is not None:
            together = f"epsilon {self.epsilon:.4g} at delta {self.delta:.1g} together"
            said = f"{said}, which cost it {together} ({self.each:.4g} each)"
        return f"{said}; its networks were trained on single ones" if self.trained_on_one else said


def mean_release(values: Iterable[Mapping[_Key, Tensor]], releases: int) -> tuple[dict[_Key, Tensor], bool]:
    """Return the mean of `values` by key, and whether all were bit-identical; `values` has one mapping a release.

    Sums are in float64; the mean has the dtype of the release, at least float32. A value that is equal in all releases
    is returned unchanged. Raises `InvalidInput` if a release differs from the first in names, shapes or dtypes, or if
    whole numbers differ.
    """
    left = iter(values)
    first, sums = dict(next(left)), dict[_Key, Tensor]()
    for before, found in enumerate(left, start=1):
        if _layout(found) != _layout(first):
            raise InvalidInput(
                f"releases={releases} takes the mean of what arrives, and release {before + 1} of the same rows "
                "differs from the first one in names, shapes or types"
            )
        for key, z in found.items():
            if key not in sums and torch.equal(z, first[key]):
                continue
            if not z.is_floating_point():
                raise InvalidInput(
                    f"releases={releases} takes the mean of what arrives, and {_name(key)!r} arrives as "
                    f"{z.dtype}, different in every release: whole numbers that differ have no meaningful mean"
                )
            if key not in sums:
                sums[key] = first[key].double() * before
            sums[key] += z
    means = {key: (z / releases).to(torch.promote_types(first[key].dtype, torch.float32)) for key, z in sums.items()}
    return {**first, **means}, not sums


def mean_view(views: Iterable[View], releases: int) -> tuple[View, bool]:
    """Return the first of `views` with its tensors replaced by their means over all views, and whether all were equal.

    `views`: what a party received of the same rows, one view for each of the `releases` passes.
    """
    left = iter(views)
    first = next(left)
    values = (
        {
            (i, m.sender, m.receiver, m.kind, m.edge, name): z
            for i, m in enumerate(view.messages)
            for name, z in m.tensors.items()
        }
        for view in chain([first], left)
    )
    mean, equal = mean_release(values, releases)
    tensors: list[dict[str, Tensor]] = [{} for _ in first.messages]
    for (i, *_, name), z in mean.items():
        tensors[i][name] = z
    messages = tuple(m._replace(tensors=t) for m, t in zip(first.messages, tensors, strict=True))
    return View(first.party, messages, first.segments), equal


def release_seed(seed: int, *purpose: str | int, release: int) -> int:
    """Return the seed of pass `release`, counted from 0, for `purpose`; pass 0 has the seed of a single release."""
    return derive(seed, *purpose, *([release] if release else []))


def check_releases(name: str, attack: Attack, releases: int, secure: SecureComputation | None = None) -> None:
    """Raise `InvalidInput` unless `releases` is a count, and 1 if the attack called `name` cannot use several."""
    check_count("releases", releases, low=1)
    if releases == 1:
        return
    if secure is not None:
        reads = secure.refusals["releases"]
    elif attack.reads:
        reads = "what clients send for a method in training"
    elif attack.phase is not Phase.INFERENCE:
        reads = f"{attack.phase}"
    elif Needs.RELEASES not in attack.requires:
        reads = "no release"
    else:
        return
    raise InvalidInput(
        f"releases={releases} is not allowed; expected 1, as {name} reads {reads}: several releases of a row are for "
        "attacks on what is released at inference"
    )


def _layout(values: Mapping[_Key, Tensor]) -> dict[_Key, tuple[tuple[int, ...], torch.dtype]]:
    return {key: (tuple(z.shape), z.dtype) for key, z in values.items()}


def _name(key: Hashable) -> str:
    return str(key[-1] if isinstance(key, tuple) else key)
