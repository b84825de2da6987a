"""One run of a study as plain values: everything the runner needs, nothing it has to look up."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from splitfed.optim import Optim
from splitfed.view import Recording


@dataclass(frozen=True)
class Named:
    """An algorithm by name with all its parameters; `told` are those worth telling, in its label."""

    name: str
    parameters: Mapping[str, Any]
    told: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The name with its telling parameters, for people: `noise(scale=0.5, relative=true)`."""
        inner = ", ".join(f"{key}={written(value)}" for key, value in self.told.items())
        return f"{self.name}({inner})" if inner else self.name

    @property
    def slug(self) -> str:
        """The same for file names: `noise-0.5`; switches are left out."""
        values = [written(v) for v in self.told.values() if not isinstance(v, bool)]
        return slug("-".join([self.name, *values]))


@dataclass(frozen=True)
class Guarded:
    """A setting of defenses: its `parts` in the order they act, none for no defense.

    `strength` is the number that a plot of leakage against strength has on its axis.
    """

    where: str
    parts: tuple[Named, ...]
    strength: float
    guarantee: str

    @property
    def name(self) -> str:
        """The family: names of the parts joined by "+", or "none"."""
        return "+".join(part.name for part in self.parts) or "none"

    @property
    def label(self) -> str:
        """The parts' labels joined by " + ", or "none"."""
        return " + ".join(part.label for part in self.parts) or "none"

    @property
    def slug(self) -> str:
        """The same for file names."""
        return "+".join(part.slug for part in self.parts) or "none"


@dataclass(frozen=True)
class Placed:
    """A topology's builder with parameters; `where` is its place in the study."""

    where: str
    builder: Named


@dataclass(frozen=True)
class Source:
    """A data set by name with its loader's parameters, and how it is split over `clients`."""

    name: str
    parameters: Mapping[str, Any]
    clients: int
    split: Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """How a run trains, as the arguments of `splitfed.train`."""

    schedule: Named
    optimizer: Optim | Mapping[str, Optim]
    rounds: int
    batch_size: int
    local_epochs: int
    evaluate_every: int
    device: str
    record: Recording


@dataclass(frozen=True)
class Probe:
    """One attack to run: `key` names its file; the adversary defaults to the first party without data."""

    where: str
    key: str
    label: str
    attack: Named
    adversary: str | None


@dataclass(frozen=True)
class Cell:
    """One run: a point of the grid with a seed. `config` is the study that consists of this run alone."""

    id: str
    seed: int
    data: Source
    model: Named
    topology: Placed
    defense: Guarded
    training: Plan
    attacks: tuple[Probe, ...]
    config: Mapping[str, Any]


def written(value: Any) -> str:
    """Return a parameter's value as it stands in labels."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return "+".join(map(written, value))
    return str(value)


def slug(text: str, width: int = 80) -> str:
    """Return `text` as a file name, shortened with a hash where it is long."""
    clean = re.sub(r"[^A-Za-z0-9.+_-]+", "-", text).strip("-.") or "x"
    if len(clean) <= width:
        return clean
    return f"{clean[: width - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
