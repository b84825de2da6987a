"""A secure sum by pairwise masks: its fixed-point encoding, its range and threshold, and its steps.

A client sends its tensors times its weight in the mean (its number of examples), as whole numbers modulo 2^64 with
`bits` fractional bits, followed by the weight itself; so the server learns the weighted sum and the sum of the weights,
and divides. Rounding changes a client's number by half a unit at most, hence the mean of n clients by no more than n /
(2 W 2^bits) for weights that add up to W: 2^-(bits + 1) or less. Integer tensors (counts of batches) are summed without
scaling and their mean is rounded, where the plain mean keeps the largest: a sum cannot give a maximum.

The steps of a sum: keys and shares are exchanged; clients upload masked numbers; the server adds them up and removes
the remaining masks by means of shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.secure_sum.base import Carrier, Flow, Residues, SecureSumPlan, restore
from splitfed.secure_sum.keys import SIZE, Setup, as_bytes, as_number, mask, pad, reconstruct, xor_bytes
from splitfed.secure_sum.member import Member

Rows = dict[int, dict[int, bytes]]

COUNT = 2**31
"""The largest whole number that an upload may hold."""


@dataclass(frozen=True, kw_only=True)
class SecureSum(SecureSumPlan):
    """Parameters of a secure sum of fixed-point numbers by pairwise masks; see `SecureSumPlan`."""

    sums: ClassVar[frozenset[str]] = frozenset(("masked",))
    overhead: ClassVar[frozenset[str]] = frozenset(("keys", "shares", "survivors", "unmasking"))

    def check_weights(self, weights: Iterable[float]) -> None:
        """Raise `InvalidInput` for weights that are not whole numbers >= 1, or whose sum could exceed 64 bits."""
        weight_list = list(weights)
        super().check_weights(weight_list)
        unit = self.limit * 2.0**self.bits
        if max(weight_list) * unit > 2**53 or sum(weight_list) * max(unit, COUNT) >= 2**63:
            raise InvalidInput(
                f"secure bits={self.bits} and limit={self.limit:g} do not fit weights of {int(max(weight_list))} at "
                f"most and {int(sum(weight_list))} in all; expected max * limit * 2^bits <= 2^53 and "
                "sum * limit * 2^bits < 2^63"
            )

    def start(
        self, names: Mapping[int, str], seed: int, purpose: Sequence[str | int], carrier: Carrier
    ) -> MaskedSummation:
        """Return one sum by masks, with keys from the trusted set-up of `seed` and `purpose`."""
        return MaskedSummation(self, names, Setup(seed, *purpose), carrier)

    def setup_flows(self, members: Sequence[int], name: Callable[[int], str], server: str) -> Iterator[Flow]:
        """Yield the messages before the clients train: rows of keys, and shares sent through the server."""
        others = len(members) - 1
        for member in members:
            yield "keys", server, name(member), SIZE * others
            yield "shares", name(member), server, 2 * SIZE * others
            yield "shares", server, name(member), 2 * SIZE * others

    def upload_flows(
        self, members: Sequence[int], survivors: Sequence[int], numbers: int, name: Callable[[int], str], server: str
    ) -> Iterator[Flow]:
        """Yield the masked numbers of `survivors`, the list of survivors, and the shares that unmask their sum."""
        for member in survivors:
            yield "masked", name(member), server, 8 * (numbers + 1)
            yield "survivors", server, name(member), 8 * len(survivors)
            yield "unmasking", name(member), server, SIZE * len(members)

    def encode(self, tensors: Mapping[str, Tensor], weight: float, sender: str) -> Residues:
        """Return `tensors`, flattened and joined, times `weight`, then `weight`: (numbers + 1,) modulo 2^64."""
        self.check_weights([weight])
        parts = []
        for name, tensor in tensors.items():
            flat = tensor.detach().cpu().flatten()
            bound = self.limit if flat.is_floating_point() else COUNT
            size = float(flat.double().abs().max()) if len(flat) else 0.0
            if not size <= bound:
                raise InvalidInput(
                    f"{sender}'s {name!r} reaches {size:g}, beyond the range of the secure sum; secure "
                    f"limit={bound:g} must be larger"
                )
            if flat.is_floating_point():
                parts.append(torch.round(flat.double() * (weight * 2.0**self.bits)).long())
            else:
                parts.append(flat.long() * int(weight))
        parts.append(torch.tensor([int(weight)]))
        return torch.cat(parts).numpy().view(np.uint64)

    def decode(self, total: Residues, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean encoded in `total`, a sum of encoded uploads, with the names, shapes and types of `like`."""
        sums = torch.from_numpy(total.view(np.int64).copy())
        weight = float(sums[-1])
        return restore(sums[:-1].double(), like, weight * 2.0**self.bits, weight)


class MaskedSummation:
    """One sum of the members in `names`, number -> party, whose keys come from `setup`."""

    def __init__(self, plan: SecureSum, names: Mapping[int, str], setup: Setup, carrier: Carrier) -> None:
        self._plan, self._names, self._carrier = plan, dict(names), carrier
        self._threshold = plan.required_members(len(names))
        self._members = {number: Member(number, tuple(names), self._threshold, setup) for number in names}
        self._rows: Rows = {number: setup.row(number, member.others) for number, member in self._members.items()}

    def open(self) -> None:
        """Distribute the keys, and exchange the shares through the server."""
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
        """Return the weighted mean of `uploads`, member -> tensors of those that finished.

        The server sees no single upload.
        """
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
    """Return byte strings of the same length as (texts, bytes), uint8."""
    return torch.stack([torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts.values()])


def _split_rows(tensor: Tensor, members: Sequence[int]) -> dict[int, bytes]:
    return {member: row.numpy().tobytes() for member, row in zip(members, tensor, strict=True)}


def unmask_sum(masked: Mapping[int, Residues], revealed: Rows, rows: Rows, threshold: int) -> Residues:
    """Return the unmasked sum of the uploads in `masked`, modulo 2^64.

    `revealed`: member -> its revealed share of every member; `rows`: the public row of every member. Raises
    `InvalidInput` if fewer than `threshold` members reveal shares.
    """
    if len(revealed) < threshold:
        raise InvalidInput(
            f"{len(revealed)} clients remain in a secure sum that needs {threshold}: the sum cannot be recovered"
        )
    count = len(next(iter(masked.values())))
    total = np.zeros(count, dtype=np.uint64)
    for upload in masked.values():
        total += upload
    for member in rows:
        shares = {holder: as_number(found[member]) for holder, found in revealed.items()}
        secret = as_bytes(reconstruct(shares, threshold))
        if member in masked:
            total -= mask(secret, count)
            continue
        for survivor in masked:
            common = mask(xor_bytes(rows[member][survivor], pad(secret, survivor)), count)
            # What the survivor did with it is undone.
            total = total - common if survivor < member else total + common
    return total
