"""Participation of clients in training: their steps, the number of steps of each row, and the newest epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Participation:
    """Step counts of one client, by row as well: with rounds counted in steps an epoch does not determine them."""

    def __init__(self) -> None:
        self.steps = 0
        self.newest = -1
        self._rows = torch.zeros(0, dtype=torch.int32)

    @property
    def most(self) -> int:
        """Largest number of training steps in which any single row took part."""
        return int(self._rows.max()) if len(self._rows) else 0

    def add(self, epoch: int, batches: Sequence[Tensor], part: str = "train") -> None:
        """Count one step for each of `batches` in `epoch`; rows are counted only for the part "train"."""
        if not batches:
            return
        self.steps += len(batches)
        if part != "train":
            # The caller numbers these, possibly by rounds, which do not exceed the epochs.
            self.newest = max(self.newest, epoch)
            return
        self.newest = epoch
        rows = torch.cat([batch.cpu() for batch in batches])
        missing = (int(rows.max()) + 1 if len(rows) else 0) - len(self._rows)
        if missing > 0:
            self._rows = torch.cat([self._rows, torch.zeros(missing, dtype=torch.int32)])
        self._rows.index_add_(0, rows, torch.ones(len(rows), dtype=torch.int32))

    def state(self) -> dict[str, Any]:
        """Return the counts."""
        return {"steps": self.steps, "newest": self.newest, "rows": self._rows.clone()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        self.steps, self.newest, self._rows = int(state["steps"]), int(state["newest"]), state["rows"].clone()
