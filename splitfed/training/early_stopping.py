"""Early stopping: training ends when the validation rows have scored no better for a number of scored rounds.

Paper: Prechelt, "Early stopping - but when?", Neural Networks: Tricks of the Trade 1998, the criterion UP; here by the
task's metric on the union of all clients' validation rows. The weights are those of the last round, not of the best.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from splitfed.core.errors import InvalidInput, check_fields, require_count, require_number
from splitfed.planning.validation import Prepared
from splitfed.training.callbacks import Callback
from splitfed.training.run import Run


@dataclass(frozen=True)
class EarlyStopping(Callback):
    """End training after `patience` scored rounds in a row without a validation score better by more than `least`.

    `patience`: >= 1. `least`: >= 0, in units of the metric. `public`: whether the validation rows are public, without
    which it is refused beside a privacy promise. It has no state: it reads the run's history, which is resumed.
    """

    patience: int = field(default=5, metadata=require_count("patience", low=1))
    least: float = field(default=0.0, metadata=require_number("least", low=0.0))
    public: bool = False

    def __post_init__(self) -> None:
        """Refuse numbers out of their range, and a switch that is none."""
        check_fields(self)
        if not isinstance(self.public, bool):
            raise InvalidInput(f"public={self.public!r} is not allowed; expected True or False")

    @property
    def decides_by(self) -> str:
        """The scores of validation rows."""
        return "the scores of validation rows"

    def check(self, prepared: Prepared) -> None:
        """Refuse a run without validation rows."""
        if not any(len(client.validation) for client in prepared.data.clients):
            raise InvalidInput("EarlyStopping needs validation rows, and no client has one: keep some (validation=0.1)")

    def on_round_end(self, run: Run, metrics: Mapping[str, Any]) -> str | None:
        """Return why training ends, where the last `patience` scored rounds brought nothing better."""
        if "validation" not in metrics:
            return None
        task = run.engine.topology.scored[0].task
        sign = -1.0 if task is not None and not task.higher_is_better else 1.0
        best, waited = None, 0
        for entry in run.history:
            if (score := (entry.get("validation") or {}).get("union")) is None:
                continue
            # A score that is no number is never better.
            better = best is None or sign * score > sign * best + self.least
            best, waited = (score, 0) if better else (best, waited + 1)
        if waited < self.patience:
            return None
        return f"validation {metrics['validation']['metric']} no better than {best:.4g} for {waited} scored rounds"
