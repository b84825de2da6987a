"""Replay: at inference a party of a vertical run sends its release of another row, to get that row's class predicted.

Paper: Qiu, Zhang, Ji, Li, Pu, Yang, Wang, "Hijack vertical federated learning models as one party", 2022 (replay
attack).

A party's release is a function of its own part of a row, so sending an old release again is the same as feeding that
part of the old row again; that is how it is done here. Only where defenses draw noise do the two differ: the noise of
the old release is drawn afresh.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from splitfed.core.errors import InvalidInput, check_names, require_count
from splitfed.data.dataset import Federation
from splitfed.poisoning.base import Poisoning, check_class


@dataclass(frozen=True, kw_only=True)
class Replay(Poisoning):
    """The party in the role `party` replays its part of training row `row` of the (one) client, of class `target`.

    A party knows the class of some rows; which one it replays is its choice. Training stays honest.
    """

    party: str
    row: int = field(metadata=require_count("replay row"))
    target: int

    def check(self, data: Federation) -> None:
        """Refuse a party without a part of the rows, a row that is not there or is of another class."""
        super().check(data)
        check_class("replay target", self.target, data)
        check_names("party of a replay:", data.features, self.party)
        rows = data.clients[self.clients[0]].train
        if self.row >= len(rows):
            raise InvalidInput(f"replay row={self.row} is not allowed; expected 0 to {len(rows) - 1}")
        label = int(rows.y[self.row])
        if label != self.target:
            raise InvalidInput(f"replay row {self.row} is of class {label}; expected one of class {self.target}")

    def trigger(self, x: Tensor, data: Federation) -> Tensor:
        """Return the rows x (n, ...) with the party's part replaced by that of its row."""
        positions = data.features[self.party].positions
        flat = x.flatten(1).clone()
        flat[:, positions] = data.clients[self.clients[0]].train.rows([self.row]).x.flatten()[positions]
        return flat.view_as(x)
