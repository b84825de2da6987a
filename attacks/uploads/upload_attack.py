"""Shared by attacks on uploads of a federated method: newest messages, tensors named by class, a search for rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from splitfed.attacks.base import Progress, Releases
from splitfed.attacks.networks.gradient_descent import take_step
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, View


def newest(view: View, kinds: Sequence[str]) -> dict[str, Message]:
    """Return the newest received message of each of `kinds`, as far as there is one."""
    return {m.kind: m for m in view.messages if m.receiver == view.party and m.kind in kinds}


def by_class(message: Message) -> dict[int, Tensor]:
    """Return the tensors named by class numbers, flattened: class -> (numbers,)."""
    named = {int(name): t.flatten() for name, t in message.tensors.items() if name.isdecimal()}
    return dict(sorted(named.items()))


def goals(who: str, view: View, embedded: Releases) -> tuple[str, list[int], Tensor]:
    """Return kind, classes (k,) and class means (k, numbers) of the first kind in `embedded` that a client sent.

    `embedded`: kind -> features of any rows, which give the kinds. Raises `InvalidInput` if no class mean was sent.
    """
    for kind, message in newest(view, list(embedded)).items():
        named = by_class(message)
        if named:
            means = torch.stack(list(named.values()))
            if means.shape[1] == embedded[kind][0].numel():
                return kind, list(named), means
    raise InvalidInput(f"{who} needs a class mean that the client sent; {view.party!r} got none")


def descend_within(
    start: Tensor,
    loss: Callable[[Tensor], Tensor],
    value_range: tuple[float, float] | None,
    steps: int,
    lr: float,
    progress: Progress,
) -> Tensor:
    """Return rows (n, ...) after `steps` of Adam at rate `lr` from `start` down a scalar `loss`, kept in the range."""
    x = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([x], lr=lr)
    for step in range(steps):
        progress(step, steps)
        take_step(optimizer, loss(x))
        with torch.no_grad():
            x.clamp_(*(value_range or (-torch.inf, torch.inf)))
    return x.detach()
