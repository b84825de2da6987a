"""What clients have taken part in: their steps, how often each of their rows was trained on, and the newest epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Participation:
    """Counts of one client. An epoch alone does not tell how often a row was used: a round may be counted in steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.newest = -1
        self._rows = torch.zeros(0, dtype=torch.int32)

    @property
    def most(self) -> int:
        """How many steps the row was in that was in most."""
        return int(self._rows.max()) if len(self._rows) else 0

    def add(self, epoch: int, batches: Sequence[Tensor], part: str = "train") -> None:
        """Count a step a batch of `epoch`; rows of another part than "train" are not those that are counted."""
        if not batches:
            return
        self.steps += len(batches)
        if part != "train":
            # Numbered by whoever asks for them, in rounds it may be, which are no more than the epochs.
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
        """Go back to `state`."""
        self.steps, self.newest, self._rows = int(state["steps"]), int(state["newest"]), state["rows"].clone()
