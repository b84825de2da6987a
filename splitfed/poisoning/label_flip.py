"""Label flip: clients train on wrong labels.

Paper: Tolpegin, Truex, Gursoy, Liu, "Data poisoning attacks against federated learning systems", ESORICS 2020 (rows of
one class called another); Biggio, Nelson, Laskov, "Support vector machines under adversarial label noise", ACML 2011
(labels flipped at random).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_kind, require_number
from splitfed.core.random import generator
from splitfed.data.dataset import Dataset, Federation
from splitfed.poisoning.base import Poisoning, check_class, replace_rows, replace_training_rows


@dataclass(frozen=True, kw_only=True)
class LabelFlip(Poisoning):
    """Relabels a `share` of the rows of class `source` (None: of all) as `target` (None: a random other class)."""

    source: int | None = None
    target: int | None = None
    share: float = field(default=1.0, metadata=require_number("label_flip share", low=0.0, high=1.0, open_low=True))

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for a share outside (0, 1], and for equal classes."""
        super().__post_init__()
        for name in ("source", "target"):
            if (given := getattr(self, name)) is not None:
                check_kind(f"label_flip {name}", given, int, "a class")
        if self.source is not None and self.source == self.target:
            raise InvalidInput(f"label_flip source and target are both {self.source}; expected different classes")

    def check(self, data: Federation) -> None:
        """Raise `InvalidInput` for classes that the task does not have."""
        super().check(data)
        check_class("label_flip source", 0 if self.source is None else self.source, data)
        check_class("label_flip target", 0 if self.target is None else self.target, data)

    def poison(self, data: Federation, seed: int) -> Federation:
        """Return `data` with flipped labels in the clients' training rows."""
        classes = data.task.outputs if data.task.name == "classification" else 2
        assert classes is not None

        def flip(client: int, rows: Dataset) -> Dataset:
            return replace_rows(rows, rows.x, self._flipped(rows.y, classes, generator(seed, "label_flip", client)))

        return replace_training_rows(data, self.clients, flip)

    def _flipped(self, y: Tensor, classes: int, drawn: torch.Generator) -> Tensor:
        among = torch.arange(len(y)) if self.source is None else (y == self.source).nonzero().flatten()
        count = round(self.share * len(among))
        chosen = among[torch.randperm(len(among), generator=drawn)[:count]]
        shift = torch.randint(1, classes, (count,), generator=drawn)
        flipped = y.clone()
        flipped[chosen] = (y[chosen] + shift) % classes if self.target is None else self.target
        return flipped
