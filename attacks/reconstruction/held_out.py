"""Rows that an adversary holds out of its own to judge what it has tried, put behind the victims without a mark."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from splitfed.attacks.base import Knowledge, Releases, unwrap
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import View


@dataclass(frozen=True)
class HeldOut:
    """Auxiliary rows `x` (count, *shape) that were held out.

    `view`: what arrived of the victims, and behind it what arrives of `x` when it is queried; `knowledge`: what the
    adversary knows, its auxiliary rows less `x`.
    """

    x: Tensor
    view: View
    knowledge: Knowledge

    def split(self, predictions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the victims' rows of `predictions`, and those of the rows held out."""
        return predictions[: -len(self.x)], predictions[-len(self.x) :]

    def error(self, predictions: Tensor) -> float:
        """Return the mean squared error of `predictions` on the rows held out."""
        return float((self.split(predictions)[1] - self.x.cpu()).square().mean())


def hold_out(name: str, view: View, knowledge: Knowledge, share: float, generator: torch.Generator) -> HeldOut:
    """Hold out `share` of the auxiliary rows, drawn by `generator`; `name` is the attack's, for what is refused."""
    auxiliary = unwrap(knowledge.auxiliary)
    order = torch.randperm(len(auxiliary), generator=generator).to(knowledge.device)
    count = round(share * len(order))
    if not 0 < count <= len(order) - 2:
        raise InvalidInput(
            f"{name} validation={share!r} keeps {count} of {len(order)} auxiliary rows; "
            "expected at least one, and two left to train on"
        )
    kept, left = (auxiliary[rows] for rows in (order[:count], order[count:]))
    both = _append_releases(view, unwrap(knowledge.query)(kept))
    return HeldOut(kept, both, replace(knowledge, auxiliary=left))


def _append_releases(view: View, released: Releases) -> View:
    """Return the activations of `view` with `released`, value -> (n, ...), behind them."""
    seen = view.select(kind="activation")
    places = {name: message for message in seen.messages for name in message.tensors}
    further = [m._replace(tensors={name: released[name]}) for name, m in places.items()]
    return View(view.party, (*seen.messages, *further), view.segments)
