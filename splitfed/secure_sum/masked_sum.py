"""A secure sum by pairwise masks, step by step: keys and shares, masked uploads, shares that unmask their sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from splitfed.secure_sum.base import Carrier
from splitfed.secure_sum.keys import Setup
from splitfed.secure_sum.member import Member
from splitfed.secure_sum.server import unmask_sum

if TYPE_CHECKING:
    from splitfed.secure_sum.plan import SecureSum

Rows = dict[int, dict[int, bytes]]


class MaskedSummation:
    """One sum of the members in `names`, number -> party, whose keys come from `setup`."""

    def __init__(self, plan: SecureSum, names: Mapping[int, str], setup: Setup, carrier: Carrier) -> None:
        self._plan, self._names, self._carrier = plan, dict(names), carrier
        self._threshold = plan.required_members(len(names))
        self._members = {number: Member(number, tuple(names), self._threshold, setup) for number in names}
        self._rows: Rows = {number: setup.row(number, member.others) for number, member in self._members.items()}

    def open(self) -> None:
        """Hand out the keys, and pass the shares round."""
        carrier = self._carrier
        for number, member in self._members.items():
            arrived = carrier.from_server("keys", number, _stack_texts(self._rows[number]))
            member.accept(_split_rows(arrived, member.others))
        sent = {
            number: _split_rows(carrier.to_server("shares", number, _stack_texts(member.shares())), member.others)
            for number, member in self._members.items()
        }
        for number, member in self._members.items():
            arrived = carrier.from_server(
                "shares", number, _stack_texts({other: sent[other][number] for other in member.others})
            )
            member.take(_split_rows(arrived, member.others))

    def close(self, uploads: Mapping[int, Mapping[str, Tensor]], weights: Mapping[int, float]) -> dict[str, Tensor]:
        """Return the mean of `uploads`, of the members that finished, weighted; the server sees nothing else."""
        self._plan.check_weights(weights.values())
        masked = {}
        for number, tensors in uploads.items():
            sealed = self._members[number].mask_values(self._plan.encode(tensors, weights[number], self._names[number]))
            arrived = self._carrier.to_server("masked", number, torch.from_numpy(sealed.view(np.int64)))
            masked[number] = arrived.numpy().view(np.uint64)
        revealed = {}
        for number in uploads:
            survivors = self._carrier.from_server("survivors", number, torch.tensor(list(uploads)))
            answer = self._members[number].reveal(survivors.tolist())
            arrived = self._carrier.to_server("unmasking", number, _stack_texts(answer))
            revealed[number] = _split_rows(arrived, list(answer))
        total = unmask_sum(masked, revealed, self._rows, self._threshold)
        return self._plan.decode(total, next(iter(uploads.values())))


def _stack_texts(texts: Mapping[int, bytes]) -> Tensor:
    """Return texts of one length as (texts, bytes), uint8."""
    return torch.stack([torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts.values()])


def _split_rows(tensor: Tensor, members: Sequence[int]) -> dict[int, bytes]:
    return {member: row.numpy().tobytes() for member, row in zip(members, tensor, strict=True)}
