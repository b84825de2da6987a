"""Gradient replacement: a vertical party without labels trains its triggered rows on a target class row's gradient.

Paper: Liu, Zou, Kang, Liu, He, Yi, Yang, "Batch label inference and replacement attacks in black-boxed vertical
federated learning", 2021 (gradient-replacement attack).

The party knows one training row of the target class. It adds a trigger to its own part of some rows, and instead of the
gradient of a triggered row it uses `gain` times the newest gradient of the known row. Messages are unchanged. Rows are
identified by the party's own part of them.

As in the paper it works best where the releases are logits that are summed: no layer behind them can learn to ignore
the party. Measured on digits in two halves, with a hundredth of the rows triggered: the success rate rose from .01 to
.81 there at a cost of .05 in accuracy, and stayed under .3 behind a trained layer. Triggering more rows costs more
accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_names, require_count, require_number
from splitfed.core.messages import Message
from splitfed.core.party import Party
from splitfed.core.random import generator
from splitfed.data.dataset import Dataset, Federation
from splitfed.engines.observers import Observable
from splitfed.poisoning.base import (
    HonestObserver,
    Poisoning,
    check_class,
    check_free,
    check_known_row,
    check_value,
    replace_rows,
    replace_training_rows,
)


@dataclass(frozen=True, kw_only=True)
class GradientReplacement(Poisoning):
    """The role `party` knows that training row `row` is of class `target`, and triggers a `share` of the other rows.

    The trigger sets the last `size` numbers of the party's part to `value`.
    """

    party: str
    row: int = field(metadata=require_count("gradient_replacement row"))
    target: int
    share: float = field(
        default=0.01, metadata=require_number("gradient_replacement share", low=0.0, high=1.0, open_low=True)
    )
    size: int = field(default=4, metadata=require_count("gradient_replacement size", low=1))
    value: float = field(default=1.0, metadata=require_number("gradient_replacement value"))
    gain: float = field(default=1.0, metadata=require_number("gradient_replacement gain", low=0.0, open_low=True))

    def check(self, data: Federation) -> None:
        """Raise `InvalidInput` for a party without a part of the rows, a large trigger, or a row of another class."""
        super().check(data)
        check_class("gradient_replacement target", self.target, data)
        check_names("party of a gradient replacement:", data.features, self.party)
        room = math.prod(data.features[self.party].shape)
        if self.size > room:
            raise InvalidInput(f"gradient_replacement size={self.size} is not allowed; the part has {room} numbers")
        check_value("gradient_replacement value", self.value, data)
        for client in self.clients:
            check_known_row("gradient_replacement", self.row, self.target, data.clients[client].train.y)

    def trigger(self, x: Tensor, data: Federation) -> Tensor:
        """Return a copy of the rows x (n, ...) with the trigger in the party's part."""
        flat = x.flatten(1).clone()
        flat[:, data.features[self.party].positions[-self.size :]] = self.value
        return flat.view_as(x)

    def poison(self, data: Federation, seed: int) -> Federation:
        """Return `data` with the trigger in the party's part of some training rows; labels are unchanged."""

        def mark(client: int, rows: Dataset) -> Dataset:
            count = max(1, round(self.share * len(rows)))
            order = torch.randperm(len(rows), generator=generator(seed, "gradient_replacement", client))
            chosen = order[order != self.row][:count]
            x = rows.x.clone()
            x[chosen] = self.trigger(rows.x[chosen], data)
            return replace_rows(rows, x, rows.y)

        return replace_training_rows(data, self.clients, mark)

    def enter(self, engine: Observable, data: Federation) -> None:
        """Replace gradients where the party receives them; raise `InvalidInput` for a party that receives none."""
        topology = engine.topology
        back = [e for e in topology.crossings if e.name not in topology.forward_only]
        if self.party not in {topology.role_of(e.source) for e in back}:
            raise InvalidInput(f"GradientReplacement changes returned gradients; {self.party!r} receives none")
        for client in self.clients:
            party = engine.party(client, self.party)
            check_free(engine, party.name, "a gradient replacement")
            known = data.features[self.party].select(data.clients[client].train.rows([self.row]).x)
            reader = _Reader(self, party, known.flatten().to(engine.device))
            engine.join(party.name, reader)
            engine.link.readers[party.name] = reader.read


class _Reader(HonestObserver):
    """Replaces the gradients of triggered rows, as one party reads them, by that of the known row."""

    def __init__(self, plan: GradientReplacement, party: Party, known: Tensor) -> None:
        self._plan, self._party, self._known = plan, party, known
        self._newest: dict[str, Tensor] = {}
        self._replaced = 0

    def read(self, message: Message) -> Message:
        """Return the message as the party uses it."""
        if message.kind != "gradient" or message.stamp.phase != "train":
            return message
        own = self._party.inputs(message.stamp.replica)[self._plan.party].flatten(1)
        known = (own == self._known).all(1)
        marked = (own[:, -self._plan.size :] == self._plan.value).all(1) & ~known
        tensors = {}
        for name, g in message.tensors.items():
            if bool(known.any()):
                self._newest[name] = g[known][0].clone()
            tensors[name] = g
            if name in self._newest and bool(marked.any()):
                tensors[name] = g.clone()
                tensors[name][marked] = self._plan.gain * self._newest[name]
                self._replaced += int(marked.sum())
        return message._replace(tensors=tensors)

    def metrics(self) -> dict[str, Any]:
        """Return the number of replaced row gradients in the round."""
        replaced, self._replaced = self._replaced, 0
        return {"replaced": replaced}

    def state(self) -> dict[str, Any]:
        """Return the newest gradient of the known row."""
        return {"newest": dict(self._newest)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state`."""
        self._newest = {n: t.to(self._known.device) for n, t in state["newest"].items()}
