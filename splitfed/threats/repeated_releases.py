"""Several releases of the same row: their mean, what they are refused for, and how a result describes them.

A client that sends a row several times (epochs, repeated queries) draws the noise of a random defense anew every time.
The mean of R releases has the noise's variance divided by R, so an adversary attacks the mean, and asks for the mean of
as many releases of its own rows, from which its decoder learns at that noise. For Gaussian noise the mean is a
sufficient statistic: nothing is lost by it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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


class ReleaseMean(Generic[_Key]):
    """The mean of `releases` sets of tensors by key; the first one itself where all are equal.

    Sums are in float64; the mean has the type of what was released, at least float32.
    """

    def __init__(self, releases: int) -> None:
        self._releases = releases
        self._first: dict[_Key, Tensor] = {}
        self._sums: dict[_Key, Tensor] = {}
        self._differing: set[_Key] = set()
        self._count = 0

    def add(self, values: Mapping[_Key, Tensor]) -> None:
        """Add one release; raises `InvalidInput` where it differs from the first in names, shapes, or whole numbers."""
        self._count += 1
        if self._count == 1:
            self._first = dict(values)
            return
        if _layout(values) != _layout(self._first):
            raise InvalidInput(
                f"releases={self._releases} takes the mean of what arrives, and release {self._count} of the same rows "
                "differs from the first one in names, shapes or types"
            )
        for key, z in values.items():
            first = self._first[key]
            if key not in self._differing and torch.equal(z, first):
                continue
            if not z.is_floating_point():
                raise InvalidInput(
                    f"releases={self._releases} takes the mean of what arrives, and {_name(key)!r} arrives as "
                    f"{z.dtype}, different in every release: the mean of such numbers means nothing"
                )
            if key not in self._differing:
                self._differing.add(key)
                self._sums[key] = first.double() * (self._count - 1)
            self._sums[key] += z

    @property
    def equal(self) -> bool:
        """Whether all releases so far were the same to the bit."""
        return not self._differing

    def mean(self) -> dict[_Key, Tensor]:
        """Return the mean of what was added, by key."""
        found = dict(self._first)
        for key, total in self._sums.items():
            kind = torch.promote_types(self._first[key].dtype, torch.float32)
            found[key] = (total / self._count).to(kind)
        return found


def mean_view(views: Iterable[View], releases: int) -> tuple[View, bool]:
    """Return the first of `views` with the mean over all of them in its messages, and whether they were all equal.

    `views`: what a party received of the same rows in each of `releases` passes.
    """
    mean, first = ReleaseMean[tuple[int, str, str, str, str, str]](releases), None
    for view in views:
        first = first or view
        mean.add(
            {
                (i, m.sender, m.receiver, m.kind, m.edge, name): z
                for i, m in enumerate(view.messages)
                for name, z in m.tensors.items()
            }
        )
    assert first is not None
    tensors: list[dict[str, Tensor]] = [{} for _ in first.messages]
    for (i, *_, name), z in mean.mean().items():
        tensors[i][name] = z
    messages = tuple(m._replace(tensors=t) for m, t in zip(first.messages, tensors, strict=True))
    return View(first.party, messages, first.segments), mean.equal


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
