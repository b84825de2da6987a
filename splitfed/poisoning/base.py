"""The contract of a poisoning: a frozen value that bends what some clients train on, or what they send.

For studies of robustness: how far misbehaving clients can move a model, with the same run without them beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_count, check_fields
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
        """Refuse parameters that are not what their fields require, and clients that are none or named twice."""
        check_fields(self)
        if not isinstance(self.clients, tuple) or not self.clients or len(set(self.clients)) < len(self.clients):
            raise InvalidInput(f"clients={self.clients!r} is not allowed; expected a tuple of different clients")
        for client in self.clients:
            check_count("client", client)

    @property
    def needs_upload(self) -> bool:
        """Whether it bends an upload: then there must be one."""
        return type(self).upload is not Poisoning.upload

    def check(self, data: Federation) -> None:
        """Refuse clients that are not there."""
        for client in self.clients:
            if client >= len(data.clients):
                raise InvalidInput(
                    f"{type(self).__name__} is for client {client}; expected 0 to {len(data.clients) - 1}"
                )

    def poison(self, data: Federation, seed: int) -> Federation:
        """Return `data` with the training rows of the clients bent; test rows stay as they are."""
        return data

    def enter(self, engine: Observable, data: Federation) -> None:
        """Change `engine` before training, for misbehaviour that neither `poison` nor `upload` can express."""

    def upload(self, before: Tensors, after: Tensors, random: torch.Generator) -> Tensors:
        """Return what a client sends in place of `after`, its weights and buffers, having been sent `before`."""
        return after


class HonestObserver:
    """Stands inside a party whose messages it leaves as they are; a poisoning changes what the party makes of them."""

    def receive(self, message: Message) -> None:
        """Do nothing: what arrives is honest."""

    def send(self, message: Message) -> Message:
        """Return the message: what the party sends is honest."""
        return message

    def step_ended(self) -> None:
        """Do nothing."""


def replace_training_rows(
    data: Federation, clients: tuple[int, ...], change: Callable[[int, Dataset], Dataset]
) -> Federation:
    """Return `data` with `change(client, rows)` in place of the training rows of `clients`."""
    changed = [
        replace(client, train=change(number, client.train)) if number in clients else client
        for number, client in enumerate(data.clients)
    ]
    return replace(data, clients=tuple(changed))


def change_update(before: Tensors, after: Tensors, bend: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return before + bend(after - before) of every real tensor; whole numbers (counts of batches) stay `after`'s."""
    return {
        name: before[name] + bend(tensor - before[name]) if tensor.is_floating_point() and name in before else tensor
        for name, tensor in after.items()
    }


def replace_rows(rows: Dataset, x: Tensor, y: Tensor) -> Dataset:
    """Return a data set like `rows`, with the same name, task and features, whose inputs are `x` and labels `y`.

    Shapes must be those of `rows`; raises `InvalidInput` where the values are none that the task allows.
    """
    return replace(rows, source=as_rows_by_index(x), y=y)


def check_value(name: str, value: float, data: Federation) -> None:
    """Refuse a value of a trigger that is no id in the rows of `data`, where these are whole numbers."""
    if not data.victims.discrete:
        return
    most = max(int(few.max()) for client in data.clients for few in blocks(client.train.source))
    if value != round(value) or not 0 <= value <= most:
        raise InvalidInput(f"{name}={value:g} is not allowed; {data.name} has ids, whole numbers from 0 to {most}")


def check_class(name: str, value: int, data: Federation) -> None:
    """Refuse a class that the task of `data` does not have, and a task without classes."""
    task = data.task
    classes = {"classification": task.outputs, "binary": 2}.get(task.name)
    if classes is None:
        raise InvalidInput(f"{name}={value} names a class; the task {task.name!r} has none")
    if not 0 <= value < classes:
        raise InvalidInput(f"{name}={value} is not allowed; expected a class in [0, {classes - 1}]")
