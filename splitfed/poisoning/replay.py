"""Replay: at inference a party of a vertical run sends its release of another row, so that its class is predicted.

Paper: Qiu, Zhang, Ji, Li, Pu, Yang, Wang, "Hijack vertical federated learning models as one party", 2022 (replay
attack).

A party's release is a function of its own part of a row, so sending an old release again is the same as computing it
again from the old row's part, which is done here. The two differ only if defenses draw noise, which is drawn afresh
here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from splitfed.core.errors import check_names, require_count
from splitfed.data.dataset import Federation
from splitfed.poisoning.base import Poisoning, check_class, check_known_row


@dataclass(frozen=True, kw_only=True)
class Replay(Poisoning):
    """The role `party` replays its part of training row `row`, of class `target`, of the (one) client.

    The party knows the class of that row. Training is honest.
    """

    party: str
    row: int = field(metadata=require_count("replay row"))
    target: int

    def check(self, data: Federation) -> None:
        """Raise `InvalidInput` for a party without a part of the rows, or a row that is missing or of another class."""
        super().check(data)
        check_class("replay target", self.target, data)
        check_names("party of a replay:", data.features, self.party)
        check_known_row("replay", self.row, self.target, data.clients[self.clients[0]].train.y)

    def trigger(self, x: Tensor, data: Federation) -> Tensor:
        """Return the rows x (n, ...) with the party's part replaced by that of its row."""
        positions = data.features[self.party].positions
        flat = x.flatten(1).clone()
        flat[:, positions] = data.clients[self.clients[0]].train.rows([self.row]).x.flatten()[positions]
        return flat.view_as(x)
