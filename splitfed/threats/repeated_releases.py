"""Several releases of the same row: their mean, what they are refused for, and how a result describes them.

A client that sends a row several times (epochs, repeated queries) draws the noise of a random defense anew every time.
The mean of R releases has the noise's variance divided by R, so an adversary attacks the mean, and asks for the mean of
as many releases of its own rows, from which its decoder learns at that noise. For Gaussian noise the mean is a
sufficient statistic: nothing is lost by it.
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
    """How often every victim's row was released to the adversary: `count` > 1.

    `equal`: whether all releases of a row were the same numbers. `trained_on_one`: whether the attack's networks were
    trained in the run, on single releases. `epsilon` at `delta`: what all releases of a row cost it together, and
    `each` what one does; None where something crosses without a promise. `steps`: whether they were steps of
    training, of which the adversary has the mean of what came back.
    """

    count: int
    equal: bool = False
    trained_on_one: bool = False
    epsilon: float | None = None
    each: float | None = None
    delta: float | None = None
    steps: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return dict(vars(self))

    def __str__(self) -> str:
        """Tell in a clause how many releases there were, and what that means."""
        if self.steps:
            return f"{self.count} steps of training with each row"
        said = f"{self.count} releases of each row"
        if self.equal:
            return f"{said}, all equal, as nothing random stands on the way, so they tell no more than one"
        if self.epsilon is not None and self.each is not None and self.delta is not None:
            together = f"epsilon {self.epsilon:.4g} at delta {self.delta:.1g} together"
            said = f"{said}, which cost it {together} ({self.each:.4g} each)"
        return f"{said}; its networks were trained on single ones" if self.trained_on_one else said


def mean_release(values: Iterable[Mapping[_Key, Tensor]], releases: int) -> tuple[dict[_Key, Tensor], bool]:
    """Return the mean of `values`, one of each of several `releases`, by key, and whether they were equal to the bit.

    Sums are in float64; the mean has the type of what was released, at least float32. What is the same in all of them
    is returned as it is. Raises `InvalidInput` where one differs from the first in names, shapes, or whole numbers.
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
                    f"{z.dtype}, different in every release: the mean of such numbers means nothing"
                )
            if key not in sums:
                sums[key] = first[key].double() * before
            sums[key] += z
    means = {key: (z / releases).to(torch.promote_types(first[key].dtype, torch.float32)) for key, z in sums.items()}
    return {**first, **means}, not sums


def mean_view(views: Iterable[View], releases: int) -> tuple[View, bool]:
    """Return the first of `views` with the mean over all of them in its messages, and whether they were all equal.

    `views`: what a party received of the same rows in each of `releases` passes.
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
    """Return the number of pass `release`, from 0, for `purpose`: that of a single release, then one for each."""
    return derive(seed, *purpose, *([release] if release else []))


def check_releases(name: str, attack: Attack, releases: int, secure: SecureComputation | None = None) -> None:
    """Refuse a number of releases that is none, and more than one where `attack` called `name` has no use for it."""
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
