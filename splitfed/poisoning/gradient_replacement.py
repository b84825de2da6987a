"""Gradient replacement: a vertical party without labels trains its triggered rows on a target class row's gradient.

Paper: Liu, Zou, Kang, Liu, He, Yi, Yang, "Batch label inference and replacement attacks in black-boxed vertical
federated learning", 2021 (gradient-replacement attack).

The party knows one training row of the target class. It marks some rows in its own part with a trigger, and where it
receives the gradient of a marked row it uses `gain` times the newest one it received for the row that it knows. What
arrives, and what others see, stays as it is. Rows are told apart by the party's own part of them.

As in the paper it works best where the releases are logits that are summed: nothing behind them can learn to distrust
the party. Measured on digits in two halves, a hundredth of the rows marked: the trigger's success rose from .01 to .81
there at a cost of .05 in accuracy, and stayed under .3 behind a trained layer. Marking more rows costs more accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_names, check_number, require_count, require_number
from splitfed.core.messages import Message
from splitfed.core.party import Party
from splitfed.core.random import generator
from splitfed.data.dataset import Dataset, Federation
from splitfed.engines.observers import Observable
from splitfed.poisoning.base import (
    HonestObserver,
    Poisoning,
    check_class,
    check_value,
    replace_rows,
    replace_training_rows,
)


@dataclass(frozen=True, kw_only=True)
class GradientReplacement(Poisoning):
    """The role `party` knows that training row `row` is of class `target`, and marks a `share` of the other rows.

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
        """Refuse a party without a part of the rows, a trigger larger than that, and a row of another class."""
        super().check(data)
        check_class("gradient_replacement target", self.target, data)
        check_names("party of a gradient replacement:", data.features, self.party)
        room = math.prod(data.features[self.party].shape)
        if self.size > room:
            raise InvalidInput(f"gradient_replacement size={self.size} is not allowed; the part has {room} numbers")
        bounds = data.victims.value_range
        if bounds is not None:
            check_number("gradient_replacement value", self.value, low=bounds[0], high=bounds[1])
        check_value("gradient_replacement value", self.value, data)
        for client in self.clients:
            y = data.clients[client].train.y
            if self.row >= len(y):
                raise InvalidInput(f"gradient_replacement row={self.row} is not allowed; expected 0 to {len(y) - 1}")
            if int(y[self.row]) != self.target:
                raise InvalidInput(
                    f"gradient_replacement row {self.row} is of class {int(y[self.row])}; expected {self.target}"
                )

    def trigger(self, x: Tensor, data: Federation) -> Tensor:
        """Return a copy of the rows x (n, ...) with the party's part marked."""
        flat = x.flatten(1).clone()
        flat[:, data.features[self.party].positions[-self.size :]] = self.value
        return flat.view_as(x)

    def poison(self, data: Federation, seed: int) -> Federation:
        """Mark rows of the clients' training data in the party's part; labels, which it does not hold, stay."""

        def mark(client: int, rows: Dataset) -> Dataset:
            count = max(1, round(self.share * len(rows)))
            order = torch.randperm(len(rows), generator=generator(seed, "gradient_replacement", client))
            chosen = order[order != self.row][:count]
            x = rows.x.clone()
            x[chosen] = self.trigger(rows.x[chosen], data)
            return replace_rows(rows, x, rows.y)

        return replace_training_rows(data, self.clients, mark)

    def enter(self, engine: Observable, data: Federation) -> None:
        """Stand where the party receives; refuse one that gets no gradient back."""
        topology = engine.topology
        back = [e for e in topology.crossings if e.name not in topology.forward_only]
        if self.party not in {topology.role_of(e.source) for e in back}:
            raise InvalidInput(f"GradientReplacement bends gradients that come back; {self.party!r} receives none")
        for client in self.clients:
            party = engine.party(client, self.party)
            if party.name in engine.training_attacks:
                raise InvalidInput(f"{party.name!r} has somebody inside already; a gradient replacement cannot join")
            known = data.features[self.party].select(data.clients[client].train.rows([self.row]).x)
            reader = _Reader(self, party, known.flatten().to(engine.device))
            engine.join(party.name, reader)
            engine.link.readers[party.name] = reader.read


class _Reader(HonestObserver):
    """Reads what one party receives, and puts the known row's gradient in the place of the marked rows'."""

    def __init__(self, plan: GradientReplacement, party: Party, known: Tensor) -> None:
        self._plan, self._party, self._known = plan, party, known
        self._newest: dict[str, Tensor] = {}
        self._replaced = 0

    def read(self, message: Message) -> Message:
        """Return the message that the party uses."""
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
        """Return how many rows' gradients were replaced in the round."""
        replaced, self._replaced = self._replaced, 0
        return {"replaced": replaced}

    def state(self) -> dict[str, Any]:
        """Return the newest gradient of the known row."""
        return {"newest": dict(self._newest)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`."""
        self._newest = {n: t.to(self._known.device) for n, t in state["newest"].items()}
