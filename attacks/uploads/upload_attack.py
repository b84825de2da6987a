"""Shared by the attacks on what clients of a federated method send: the newest of it, and what is named by class."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from splitfed.attacks.base import Releases
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, View


def newest(view: View, kinds: Sequence[str]) -> dict[str, Message]:
    """Return the newest message that came in, of each of `kinds` that is there."""
    return {m.kind: m for m in view.messages if m.receiver == view.party and m.kind in kinds}


def by_class(message: Message) -> dict[int, Tensor]:
    """Return the tensors that are named by classes, flattened: class -> (numbers,)."""
    named = {int(name): t.flatten() for name, t in message.tensors.items() if name.isdecimal()}
    return dict(sorted(named.items()))


def goals(who: str, view: View, embedded: Releases) -> tuple[str, list[int], Tensor]:
    """Return kind, classes (k,) and class means (k, numbers) of the first kind in `embedded` that a client sent.

    `embedded`: kind -> what it holds means of, for any rows. Raises `InvalidInput` where nothing named by class came.
    """
    for kind, message in newest(view, list(embedded)).items():
        named = by_class(message)
        if named:
            means = torch.stack(list(named.values()))
            if means.shape[1] == embedded[kind][0].numel():
                return kind, list(named), means
    raise InvalidInput(f"{who} needs a class mean that the client sent; {view.party!r} got none")
