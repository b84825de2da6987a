"""A secure sum over an engine's link: each exchange of a role's clients with the aggregation server is a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from splitfed.core.messages import Message, Stamp
from splitfed.engines.base import FED
from splitfed.secure_sum.keys import Setup
from splitfed.secure_sum.member import Member
from splitfed.secure_sum.plan import SecureSum
from splitfed.secure_sum.server import unmask_sum

Deliver = Callable[[Message], Message]
Rows = dict[int, dict[int, bytes]]


class SecureSummation:
    """One sum: `names` are the parties of the replicas that may take part in round `epoch`.

    `deliver` carries a message; the two halves of the protocol are `open`, before they train, and `close`.
    """

    def __init__(
        self, plan: SecureSum, role: str, names: Mapping[int, str], epoch: int, seed: int, deliver: Deliver
    ) -> None:
        self._plan, self._role, self._names, self._epoch = plan, role, dict(names), epoch
        self._deliver = deliver
        self._threshold = plan.required_members(len(names))
        setup = Setup(seed, role, epoch)
        self._members = {replica: Member(replica, tuple(names), self._threshold, setup) for replica in names}
        self._rows: Rows = {replica: setup.row(replica, member.others) for replica, member in self._members.items()}

    def open(self) -> SecureSummation:
        """Hand out the keys, and pass the shares round."""
        for replica, member in self._members.items():
            arrived = self._from_server("keys", replica, _stack_texts(self._rows[replica]))
            member.accept(_split_rows(arrived, member.others))
        sent = {
            replica: _split_rows(self._to_server("shares", replica, _stack_texts(member.shares())), member.others)
            for replica, member in self._members.items()
        }
        for replica, member in self._members.items():
            arrived = self._from_server(
                "shares", replica, _stack_texts({other: sent[other][replica] for other in member.others})
            )
            member.take(_split_rows(arrived, member.others))
        return self

    def close(self, uploads: Mapping[int, Mapping[str, Tensor]], weights: Mapping[int, float]) -> dict[str, Tensor]:
        """Return the mean of `uploads`, of the replicas that finished, weighted; the server sees nothing else."""
        self._plan.check_weights(weights.values())
        masked = {}
        for replica, tensors in uploads.items():
            sealed = self._members[replica].mask_values(
                self._plan.encode(tensors, weights[replica], self._names[replica])
            )
            arrived = self._to_server("masked", replica, torch.from_numpy(sealed.view(np.int64)))
            masked[replica] = arrived.numpy().view(np.uint64)
        revealed = {}
        for replica in uploads:
            survivors = self._from_server("survivors", replica, torch.tensor(list(uploads)))
            answer = self._members[replica].reveal(survivors.tolist())
            revealed[replica] = _split_rows(self._to_server("unmasking", replica, _stack_texts(answer)), list(answer))
        total = unmask_sum(masked, revealed, self._rows, self._threshold)
        return self._plan.decode(total, next(iter(uploads.values())))

    def _from_server(self, kind: str, replica: int, tensor: Tensor) -> Tensor:
        return self._carry(kind, FED, self._names[replica], replica, tensor)

    def _to_server(self, kind: str, replica: int, tensor: Tensor) -> Tensor:
        return self._carry(kind, self._names[replica], FED, replica, tensor)

    def _carry(self, kind: str, sender: str, receiver: str, replica: int, tensor: Tensor) -> Tensor:
        stamp = Stamp("train", replica, self._epoch, 0)
        return self._deliver(Message(sender, receiver, kind, f"sum->{self._role}", {kind: tensor}, stamp)).tensors[kind]


def _stack_texts(texts: Mapping[int, bytes]) -> Tensor:
    """Return texts of one length as (texts, bytes), uint8."""
    return torch.stack([torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts.values()])


def _split_rows(tensor: Tensor, members: Sequence[int]) -> dict[int, bytes]:
    return {member: row.numpy().tobytes() for member, row in zip(members, tensor, strict=True)}
