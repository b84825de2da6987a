"""Stops a step at the first message, loss or penalty that is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from splitfed.errors import NonFinite
from splitfed.view import Message


class Watch:
    """Looks at every message of a step once, as it crosses, and keeps none of them.

    On the CPU at once, while the tensor is still in the cache; on a GPU the answers are fetched together at the
    end of the step, so that it is waited for only once.
    """

    def __init__(self) -> None:
        self._late: list[tuple[str, Tensor]] = []

    def see(self, message: Message) -> None:
        """Raise `NonFinite` that names the message if it holds a value that is not finite."""
        for name, tensor in message.tensors.items():
            if tensor.device.type != "cpu":
                self._late.append((_named(message, name), torch.isfinite(tensor).all()))
            # A sum is finite only if every element is, and costs a twentieth of a test of each; one that merely
            # overflows is told apart by that test.
            elif not math.isfinite(float(tensor.sum())) and not bool(torch.isfinite(tensor).all()):
                raise NonFinite(f"{_named(message, name)} is not finite")

    def close(self, values: Mapping[str, float], penalties: Mapping[str, float]) -> None:
        """End the step: raise `NonFinite` for what a GPU answers, for a head's value or a party's penalty."""
        if self._late and not bool(torch.stack([fine for _, fine in self._late]).all()):
            named = next(name for name, fine in self._late if not bool(fine))
            raise NonFinite(f"{named} is not finite")
        for party, penalty in penalties.items():
            if not math.isfinite(penalty):
                raise NonFinite(f"the penalty of a defense of {party!r} is not finite ({penalty})")
        for name, value in values.items():
            if not math.isfinite(value):
                raise NonFinite(f"the loss or output on {name!r} is not finite ({value})")


def _named(message: Message, name: str) -> str:
    return f"{message.kind} {name!r} from {message.sender!r} to {message.receiver!r} on edge {message.edge!r}"
