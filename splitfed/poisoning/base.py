"""The contract of a poisoning: a frozen value that changes the training data or the uploads of some clients.

For studies of robustness: how far misbehaving clients can change a model, compared with the same run without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_count, check_fields, check_number
from splitfed.core.messages import Message
from splitfed.core.rows import as_rows_by_index, blocks
from splitfed.data.dataset import Dataset, Federation
from splitfed.engines.observers import Observable

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Poisoning:
    """Base of all poisonings: `clients` misbehave, the others are honest. Every method is optional."""

    clients: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for invalid parameters, and for an empty or repeating list of clients."""
        check_fields(self)
        if not isinstance(self.clients, tuple) or not self.clients or len(set(self.clients)) < len(self.clients):
            raise InvalidInput(f"clients={self.clients!r} is not allowed; expected a tuple of different clients")
        for client in self.clients:
            check_count("client", client)

    @property
    def needs_upload(self) -> bool:
        """Whether the poisoning changes uploads, so that clients must send some."""
        return type(self).upload is not Poisoning.upload

    def check(self, data: Federation) -> None:
        """Raise `InvalidInput` for client numbers that `data` does not have."""
        for client in self.clients:
            if client >= len(data.clients):
                raise InvalidInput(
                    f"{type(self).__name__} is for client {client}; expected 0 to {len(data.clients) - 1}"
                )

    def poison(self, data: Federation, seed: int) -> Federation:
        """Return `data` with poisoned training rows of the clients; test rows are unchanged."""
        return data

    def enter(self, engine: Observable, data: Federation) -> None:
        """Change `engine` before training, for misbehaviour that neither `poison` nor `upload` can express."""

    def upload(self, before: Tensors, after: Tensors, random: torch.Generator) -> Tensors:
        """Return the poisoned upload of a client that was sent `before` and trained to `after`, weights and buffers."""
        return after


class HonestObserver:
    """Base of observers at a party that leave its messages unchanged; a poisoning changes how the party uses them."""

    def receive(self, message: Message) -> None:
        """Do nothing."""

    def send(self, message: Message) -> Message:
        """Return the message unchanged."""
        return message

    def step_ended(self) -> None:
        """Do nothing."""


def replace_training_rows(
    data: Federation, clients: tuple[int, ...], change: Callable[[int, Dataset], Dataset]
) -> Federation:
    """Return `data` with the training rows of `clients` replaced by `change(client, rows)`."""
    changed = [
        replace(client, train=change(number, client.train)) if number in clients else client
        for number, client in enumerate(data.clients)
    ]
    return replace(data, clients=tuple(changed))


def change_update(before: Tensors, after: Tensors, bend: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return before + bend(after - before) for every real tensor; whole numbers (batch counts) are those of `after`."""
    return {
        name: before[name] + bend(tensor - before[name]) if tensor.is_floating_point() and name in before else tensor
        for name, tensor in after.items()
    }


def replace_rows(rows: Dataset, x: Tensor, y: Tensor) -> Dataset:
    """Return a data set with the name, task and features of `rows`, inputs `x` and labels `y`.

    Shapes must be those of `rows`. Raises `InvalidInput` for labels that the task does not allow.
    """
    return replace(rows, source=as_rows_by_index(x), y=y)


def check_value(name: str, value: float, data: Federation) -> None:
    """Raise `InvalidInput` for a trigger value outside the value range of `data`, or that is no id if rows are ids."""
    if (bounds := data.victims.value_range) is not None:
        check_number(name, value, low=bounds[0], high=bounds[1])
    if not data.victims.discrete:
        return
    most = max(int(few.max()) for client in data.clients for few in blocks(client.train.source))
    if value != round(value) or not 0 <= value <= most:
        raise InvalidInput(f"{name}={value:g} is not allowed; {data.name} has ids, whole numbers from 0 to {most}")


def check_known_row(who: str, row: int, target: int, y: Tensor) -> None:
    """Raise `InvalidInput` for the poisoning `who` if `y` (n,) has no label at `row`, or another one than `target`."""
    if row >= len(y):
        raise InvalidInput(f"{who} row={row} is not allowed; expected 0 to {len(y) - 1}")
    if int(y[row]) != target:
        raise InvalidInput(f"{who} row {row} is of class {int(y[row])}; expected one of class {target}")


def check_free(engine: Observable, party: str, what: str) -> None:
    """Raise `InvalidInput` if a training attack or poisoning is at `party` already, so that `what` cannot be added."""
    if party in engine.training_attacks:
        raise InvalidInput(f"{party!r} has a training attack or poisoning already; {what} cannot be added")


def check_class(name: str, value: int, data: Federation) -> None:
    """Raise `InvalidInput` for a class that the task of `data` does not have, and for a task without classes."""
    task = data.task
    classes = {"classification": task.outputs, "binary": 2}.get(task.name)
    if classes is None:
        raise InvalidInput(f"{name}={value} names a class; the task {task.name!r} has none")
    if not 0 <= value < classes:
        raise InvalidInput(f"{name}={value} is not allowed; expected a class in [0, {classes - 1}]")
