"""What was recorded in training: of every row what the adversary received in each epoch, and which updates are none.

A row comes back in every epoch, with gradients by other weights and with new draws of a random defense. A defense that
adds to gradients protects a label as far as their mean over all of these does, so label attacks may be asked of what
was recorded in training, where the adversary knows which rows were in which step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from splitfed.attacks.base import Attack, Needs, Phase, Target
from splitfed.core.errors import InvalidInput
from splitfed.core.grouping import group_pairs
from splitfed.core.messages import Message, Stamp, View
from splitfed.data.federation import Federation
from splitfed.engines.engine import Engine
from splitfed.federated.base import Method

Batches = Callable[[int], Sequence[Tensor]]
"""Epoch -> the rows of every step in it."""


def reads_steps(attack: Attack) -> bool:
    """Return whether `attack` may go against recorded steps: it predicts labels from what comes back in a step."""
    return attack.target is Target.LABELS and attack.phase is Phase.STEP


def reads_training(attack: Attack) -> bool:
    """Return whether `attack` may go against recorded training, and so may be asked of one of its rounds."""
    return attack.phase is Phase.TRAINING or reads_steps(attack)


class _Piece(NamedTuple):
    """What came back in a step for `rows` (n,): `values` (n, ...), and which time it was for each of them, (n,)."""

    rows: Tensor
    times: Tensor
    values: Tensor


def recorded_passes(view: View, batches: Batches) -> tuple[Tensor, list[View]]:
    """Return rows of training (victims,) and what the party of `view` received of them: a view a pass, the newest last.

    `view`: what was recorded in training, of one client. Rows are those that took as many steps as half of all rows or
    more, and as many passes are returned. A gradient is of the mean loss over all `victims`, as if they had been one
    step. Raises `InvalidInput` where no step was recorded, or where steps have other rows than `batches` says.
    """
    steps = group_pairs(
        ((m.stamp.epoch, m.stamp.step), m)
        for m in view.messages
        if m.receiver == view.party and m.kind in ("activation", "gradient")
    )
    if not steps:
        raise InvalidInput(f"no training step was recorded of {view.party!r}")
    epochs = group_pairs((epoch, step) for epoch, step in sorted(steps))
    counts = torch.zeros(1 + max(int(rows.max()) for e in epochs for rows in batches(e)), dtype=torch.int64)
    pieces: dict[tuple[str, str, str, str], list[_Piece]] = {}
    for epoch, numbers in epochs.items():
        planned = batches(epoch)
        if len(planned) != len(numbers):
            raise InvalidInput(
                f"{len(numbers)} steps of epoch {epoch} were recorded of {view.party!r}, and its client takes "
                f"{len(planned)}: whose rows they were is not known"
            )
        for step, rows in zip(numbers, planned, strict=True):
            for message in steps[epoch, step]:
                _add(pieces, message, rows, counts[rows])
            counts[rows] += 1
    passes = int(counts[counts > 0].median())
    victims = (counts >= passes).nonzero()[:, 0]
    return victims, _passes(view, pieces, victims, counts, passes)


def _add(pieces: dict[tuple[str, str, str, str], list[_Piece]], message: Message, rows: Tensor, times: Tensor) -> None:
    for name, z in message.tensors.items():
        if name in message.dataless:
            continue
        if len(z) != len(rows):
            raise InvalidInput(
                f"{name!r} arrived for {len(z)} rows in a step of {len(rows)}: whose they were is not known"
            )
        key = (message.sender, message.kind, message.edge, name)
        values = z * len(z) if message.kind == "gradient" else z
        pieces.setdefault(key, []).append(_Piece(rows, times, values))


def _passes(
    view: View, pieces: dict[tuple[str, str, str, str], list[_Piece]], victims: Tensor, counts: Tensor, passes: int
) -> list[View]:
    """Return the newest `passes` of what arrived for each of the `victims`, one view each."""
    place = torch.full((len(counts),), -1)
    place[victims] = torch.arange(len(victims))
    tensors: dict[tuple[str, str, str, str], Tensor] = {}
    for key, parts in pieces.items():
        found = parts[0].values.new_zeros(passes, len(victims), *parts[0].values.shape[1:])
        for rows, times, values in parts:
            number = times - counts[rows] + passes
            kept = (place[rows] >= 0) & (number >= 0)
            found[number[kept], place[rows[kept]]] = values[kept]
        tensors[key] = found / len(victims) if key[1] == "gradient" else found
    return [
        View(
            view.party,
            tuple(
                Message(sender, view.party, kind, edge, {name: z[number]}, Stamp("train", 0, number, 0))
                for (sender, kind, edge, name), z in tensors.items()
            ),
            view.segments,
        )
        for number in range(passes)
    ]


def check_updates(attack: Attack, engine: Engine, data: Federation, method: Method | None) -> None:
    """Refuse an `attack` on what clients send in training where that is not the update of weights that it reads."""
    if any(client.train.source.couples for client in data.clients):
        raise InvalidInput(
            f"{type(attack).__name__} is scored by the rows that a client trained on, and these were mixed with "
            "one another (mixup): there is no such row to find"
        )
    placement = engine.run_parties.placement
    traits = None if method is None else method.traits(engine.topology)
    aggregation = None if traits is None else traits.aggregation
    if placement.secure is not None or (aggregation is not None and aggregation.sum is not None):
        raise InvalidInput(
            f"{type(attack).__name__} needs {Needs.UPDATES}; under a secure sum the aggregation server learns the "
            "sum of all clients' uploads alone"
        )
    if traits is None:
        return
    needs, who = f"{type(attack).__name__} needs {Needs.UPDATES};", type(method).__name__
    if traits.own_steps:
        raise InvalidInput(f"{needs} clients of {who} take steps of the method's own, and their update is no gradient")
    if not (placement.fused or traits.sends_gradients or traits.returns_weights):
        raise InvalidInput(f"{needs} clients of {who} send no weights to be held against those they were sent")
    if not (traits.plain_update or traits.soft_labels or traits.hidden_gradients):
        raise InvalidInput(f"{needs} what {who} may add to a client's gradient is in its update too")
