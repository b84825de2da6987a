"""What private values a message is made of, said by its kind: the rows' features, their labels, both or neither.

A kind tells of labels where it is made of them by any other way than the gradient of a loss. That way is known from
the topology: whatever is learnt depends on the labels of every head but those whose loss a defense keeps from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Flag


class PrivateValues(Flag):
    """Which values of a data owner's rows something depends on."""

    NONE = 0
    FEATURES = 1
    LABELS = 2
    BOTH = 3

    def __str__(self) -> str:
        """Return the values in words."""
        return {0: "neither", 1: "features", 2: "labels", 3: "features and labels"}[self.value]


FEATURES, LABELS, BOTH = PrivateValues.FEATURES, PrivateValues.LABELS, PrivateValues.BOTH

KINDS: Mapping[str, PrivateValues] = {
    "activation": FEATURES,
    "gradient": FEATURES,
    "label": LABELS,
    "norm": FEATURES,
    "weights": FEATURES,
    "weight gradient": FEATURES,
    "masked weights": FEATURES,
    "public context": PrivateValues.NONE,
}
"""Kind of message -> what it is made of, of those that need no federated method."""


def made_of(kind: str, own: Mapping[str, PrivateValues]) -> PrivateValues:
    """Return what a message of `kind` is made of; `own`: what a method says of its kinds. Of an unknown kind: both."""
    return own.get(kind, KINDS.get(kind, BOTH))


def made_of_sum(own: Mapping[str, PrivateValues]) -> PrivateValues:
    """Return what sums of a method's uploads are made of; `own`: what it says of its kinds, if anything."""
    together = PrivateValues.NONE
    for values in own.values():
        together |= values
    return together if own else BOTH
