"""A secure sum over an engine's link: each exchange between clients and the aggregation server is a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from splitfed.core.messages import Message, Stamp
from splitfed.engines.base import FED

if TYPE_CHECKING:
    from splitfed.secure_sum.base import SecureSumPlan

Deliver = Callable[[Message], Message]


class SecureSummation:
    """One sum in round `epoch`; `names`: replica -> party, of all that may take part.

    `deliver` sends a message; call `open` before the clients train, and `close` after. `purpose` distinguishes several
    sums of one role in one round, which must not use the same masks.
    """

    def __init__(
        self,
        plan: SecureSumPlan,
        role: str,
        names: Mapping[int, str],
        epoch: int,
        seed: int,
        deliver: Deliver,
        *purpose: str,
    ) -> None:
        self._role, self._names, self._epoch, self._deliver = role, dict(names), epoch, deliver
        self._sum = plan.start(names, seed, (role, epoch, *purpose), self)

    def open(self) -> SecureSummation:
        """Exchange keys and shares before the clients train."""
        self._sum.open()
        return self

    def close(self, uploads: Mapping[int, Mapping[str, Tensor]], weights: Mapping[int, float]) -> dict[str, Tensor]:
        """Return the weighted mean of `uploads`, replica -> tensors of those that finished."""
        return self._sum.close(uploads, weights)

    def from_server(self, kind: str, member: int, tensor: Tensor) -> Tensor:
        """Deliver `tensor` from the aggregation server to a replica's party."""
        return self._carry(kind, FED, self._names[member], member, tensor)

    def to_server(self, kind: str, member: int, tensor: Tensor) -> Tensor:
        """Deliver `tensor` from a replica's party to the aggregation server."""
        return self._carry(kind, self._names[member], FED, member, tensor)

    def _carry(self, kind: str, sender: str, receiver: str, replica: int, tensor: Tensor) -> Tensor:
        stamp = Stamp("train", replica, self._epoch, 0)
        return self._deliver(Message(sender, receiver, kind, f"sum->{self._role}", {kind: tensor}, stamp)).tensors[kind]
