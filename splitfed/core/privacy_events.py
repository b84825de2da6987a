"""Privacy events: what a mechanism does, as frozen data; what it costs is worked out elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from splitfed.core.errors import check_number


class Unit(StrEnum):
    """Who is protected: what may differ between two neighbouring data sets."""

    EXAMPLE = "example"
    CLIENT = "client"
    LABEL = "label"


class Neighbours(StrEnum):
    """How they differ."""

    REPLACE = "one replaced by another"
    ADD_REMOVE = "one added or taken away"
    SAME_CLASS = "one replaced by another of its class"


class Protects(StrEnum):
    """What is released with noise; everything else that crosses is not covered."""

    RELEASES = "each release at the cut"
    WEIGHTS = "weights"
    LABELS = "labels"
    MESSAGES = "what clients send to the fed server"


@dataclass(frozen=True)
class Gaussian:
    """Gaussian noise of `noise_multiplier` standard deviations per unit of L2 sensitivity, > 0."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        """Refuse a multiplier that is not positive."""
        check_number("noise multiplier", self.noise_multiplier, low=0.0, open_low=True)


@dataclass(frozen=True)
class Laplace:
    """Laplace noise of `noise_multiplier` times the L1 sensitivity, > 0: 1 / noise_multiplier is its epsilon."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        """Refuse a multiplier that is not positive."""
        check_number("noise multiplier", self.noise_multiplier, low=0.0, open_low=True)


@dataclass(frozen=True)
class Pure:
    """A mechanism of which only its pure `epsilon` >= 0 is known."""

    epsilon: float

    def __post_init__(self) -> None:
        """Refuse a negative epsilon."""
        check_number("epsilon", self.epsilon, low=0.0)


Mechanism = Gaussian | Laplace | Pure


@dataclass(frozen=True)
class Event:
    """One use of `mechanism`: whom it protects, against which neighbours, and what.

    `sampling_rate`: the chance in (0, 1] that the unit takes part in it, drawn for every use independently (Poisson).
    """

    mechanism: Mechanism
    protects: Protects
    unit: Unit = Unit.EXAMPLE
    neighbours: Neighbours = Neighbours.REPLACE
    sampling_rate: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a rate outside (0, 1]."""
        check_number("sampling_rate", self.sampling_rate, low=0.0, high=1.0, open_low=True)
