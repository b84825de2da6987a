"""Privacy events: what a mechanism does, as frozen data; what it costs is worked out elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from splitfed.core.errors import check_fields, require_number


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

    RELEASES = "all releases at the cut"
    WEIGHTS = "weights"
    LABELS = "labels"
    MESSAGES = "what clients send to the fed server"


class _Checked:
    """A dataclass whose fields say what their values must be."""

    def __post_init__(self) -> None:
        """Refuse what its fields do not allow."""
        check_fields(self)


@dataclass(frozen=True)
class Gaussian(_Checked):
    """Gaussian noise of `noise_multiplier` standard deviations per unit of L2 sensitivity, > 0."""

    noise_multiplier: float = field(metadata=require_number("noise multiplier", low=0.0, open_low=True))


@dataclass(frozen=True)
class Laplace(_Checked):
    """Laplace noise of `noise_multiplier` times the L1 sensitivity, > 0: 1 / noise_multiplier is its epsilon."""

    noise_multiplier: float = field(metadata=require_number("noise multiplier", low=0.0, open_low=True))


@dataclass(frozen=True)
class Pure(_Checked):
    """A mechanism of which only its pure `epsilon` >= 0 is known."""

    epsilon: float = field(metadata=require_number("epsilon", low=0.0))


Mechanism = Gaussian | Laplace | Pure


@dataclass(frozen=True)
class Event(_Checked):
    """One use of `mechanism`: whom it protects, against which neighbours, and what.

    `sampling_rate`: the chance in (0, 1] that the unit takes part in it, drawn for every use independently (Poisson).
    """

    mechanism: Mechanism
    protects: Protects
    unit: Unit = Unit.EXAMPLE
    neighbours: Neighbours = Neighbours.REPLACE
    sampling_rate: float = field(
        default=1.0, metadata=require_number("sampling_rate", low=0.0, high=1.0, open_low=True)
    )
