"""Backdoor: clients train on rows with a trigger and a wrong label, so that the trigger determines the class.

Paper: Gu, Dolan-Gavitt, Garg, "BadNets: identifying vulnerabilities in the machine learning model supply chain", 2017;
Bagdasaryan et al., "How to backdoor federated learning", AISTATS 2020, for clients (combine it with `Scaling`).

The trigger is a square in the lower right corner of an image, or the last numbers of any other row, set to one value.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, require_count, require_number
from splitfed.core.random import generator
from splitfed.data.dataset import Dataset, Federation
from splitfed.poisoning.base import Poisoning, check_class, check_value, replace_rows, replace_training_rows


@dataclass(frozen=True, kw_only=True)
class Backdoor(Poisoning):
    """Adds a trigger and the class `target` to a `share` of the rows.

    `size` pixels a side (or numbers) are set to `value`.
    """

    target: int = 0
    share: float = field(default=0.5, metadata=require_number("backdoor share", low=0.0, high=1.0, open_low=True))
    size: int = field(default=2, metadata=require_count("backdoor size", low=1))
    value: float = field(default=1.0, metadata=require_number("backdoor value"))

    def check(self, data: Federation) -> None:
        """Raise `InvalidInput` for an unknown class, and a trigger larger than a row or outside the value range."""
        super().check(data)
        check_class("backdoor target", self.target, data)
        room = min(data.shape[1:]) if len(data.shape) == 3 else data.shape[-1]
        if self.size > room:
            raise InvalidInput(
                f"backdoor size={self.size} is not allowed; rows of shape {data.shape} have room for {room}"
            )
        check_value("backdoor value", self.value, data)

    def trigger(self, x: Tensor, data: Federation) -> Tensor:
        """Return a copy of the rows x (n, ...) with the trigger."""
        marked = x.clone()
        if x.dim() == 4:
            marked[..., -self.size :, -self.size :] = self.value
        else:
            marked[..., -self.size :] = self.value
        return marked

    def poison(self, data: Federation, seed: int) -> Federation:
        """Return `data` with triggered rows of class `target` in the clients' training data."""

        def mark(client: int, rows: Dataset) -> Dataset:
            count = max(1, round(self.share * len(rows)))
            chosen = torch.randperm(len(rows), generator=generator(seed, "backdoor", client))[:count]
            x, y = rows.x.clone(), rows.y.clone()
            x[chosen], y[chosen] = self.trigger(rows.x[chosen], data), self.target
            return replace_rows(rows, x, y)

        return replace_training_rows(data, self.clients, mark)
