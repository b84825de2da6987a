"""Stops a step before any weight is touched if its loss or a weight's gradient is not finite, and names the cause.

Looking at every message of every step would cost more than the rest of a cut. What is not finite in a message
shows in the loss or in the gradients that it makes; only then are the messages of the step gone through, in the order
they crossed. An infinite value that a receiver squashes to a finite loss and finite gradients (a sigmoid, say) is not
noticed in training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from splitfed.core.errors import NonFinite
from splitfed.core.messages import Message


class FiniteCheck:
    """Remembers the messages that have `crossed` in one step, oldest first, until it is closed."""

    def __init__(self) -> None:
        self.crossed: list[Message] = []

    def close(self, values: Mapping[str, float], sums: Mapping[str, float]) -> None:
        """End the step; raise `NonFinite` that names the first message, else the head or the party.

        `values`: the loss (or the sum of the outputs) of each head. `sums`: the sum of all gradients of each party.
        """
        if math.isfinite(sum(values.values()) + sum(sums.values())):
            return
        for message in self.crossed:
            for name, tensor in message.tensors.items():
                if not bool(torch.isfinite(tensor).all()):
                    raise NonFinite(
                        f"{message.kind} {name!r} from {message.sender!r} to {message.receiver!r} on edge "
                        f"{message.edge!r} is not finite"
                    )
        for head, value in values.items():
            if not math.isfinite(value):
                raise NonFinite(f"the loss or output on {head!r} is not finite ({value})")
        for party, value in sums.items():
            if not math.isfinite(value):
                raise NonFinite(f"a gradient within {party!r} is not finite, or its gradients add up to infinity")
