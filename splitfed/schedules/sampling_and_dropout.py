"""Who takes part in a round: a sample of the clients, of whom some may drop out, and a quorum of those left."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from splitfed.aggregation.base import AggregationRule
from splitfed.aggregation.lookup import aggregation_of, secure_of
from splitfed.aggregation.participants import check_part, is_count, part_of
from splitfed.core.errors import InvalidInput, require_number
from splitfed.core.random import generator
from splitfed.core.topology import Topology
from splitfed.engines.base import FED, Placement, Source, Trainer
from splitfed.schedules.base import Round, Schedule, State, Training
from splitfed.secure_sum.base import SecureSumPlan

Epochs = list[tuple[int, list[Tensor]]]


@dataclass(frozen=True)
class ClientRound:
    """What one client does in a round: its (epoch, batches), cut short where it drops out.

    `planned`: how many batches each epoch would have had.
    """

    client: int
    epochs: Epochs
    finished: bool
    planned: tuple[int, ...]

    def completes(self, local: int) -> bool:
        """Return whether the client is there to the end of epoch `local` of the round."""
        return len(self.epochs[local][1]) == self.planned[local]


@dataclass(frozen=True, kw_only=True)
class Sampled(Schedule):
    """Base of the schedules that serve many clients.

    `clients_per_round`: how many take part, a whole number or a fraction in (0, 1] (None: all), drawn anew each
    round. `drop_out`: the chance, in [0, 1], that one of them leaves during the round, after a number of steps drawn
    at random; what it did until then happened and is counted, its segments go no further.
    """

    clients_per_round: int | float | None = None
    drop_out: float = field(default=0.0, metadata=require_number("drop_out", low=0.0, high=1.0))

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be."""
        super().__post_init__()
        check_part("clients_per_round", self.clients_per_round)

    def check(self, topology: Topology, clients: int) -> None:
        """Refuse to ask for more clients than there are."""
        if is_count(self.clients_per_round) and (self.clients_per_round or 0) > clients:
            raise InvalidInput(
                f"clients_per_round={self.clients_per_round} is not allowed; there are {clients} clients"
            )

    def clients_asked(self, clients: int) -> int:
        """Return how many of `clients` are asked each round."""
        return clients if self.clients_per_round is None else part_of(self.clients_per_round, clients)

    def turns(self, engine: Trainer, training: Training, number: int) -> list[ClientRound]:
        """Draw who takes part in round `number`, in the order of the clients, and what each of them does."""
        random = generator(training.seed, "participation", number)
        order = torch.randperm(engine.replicas, generator=random)[: self.clients_asked(engine.replicas)]
        chosen = sorted(order.tolist()) if self.clients_per_round is not None else range(engine.replicas)
        leaves = torch.rand(engine.replicas, 2, generator=random, dtype=torch.float64).tolist()
        rows = {client: engine.rows(client, "train") for client in chosen}
        return [self.turn(training, rows[client], number, client, leaves[client]) for client in chosen]

    def turn(self, training: Training, rows: int, number: int, client: int, drawn: Sequence[float]) -> ClientRound:
        """Return what `client`, who has `rows`, does in round `number`; `drawn`: two chances that say if it stays."""
        epochs = [(epoch, training.batches(rows, epoch, client)) for epoch in training.epochs(number)]
        return shorten_turn(client, epochs, drawn, self.drop_out)


@dataclass(frozen=True, kw_only=True)
class Averaged(Sampled):
    """Base of the schedules that average: `quorum` clients, a number or a fraction of those asked, must finish.

    Where fewer do, nothing is averaged and the averages stay what they were; what a segment that all share has learnt
    by then, it keeps. `aggregation`: how the servers make one of several: the name of an aggregation rule, a table with
    the name and its parameters, or an `AggregationRule`. `secure`: whether the aggregation server is to learn the sum
    of the uploads alone: true or "masks", "ckks", a table with such a name and parameters, or a `SecureSumPlan`; fewer
    clients than its threshold are as fewer than the quorum.
    """

    quorum: int | float = 1
    aggregation: str | Mapping[str, Any] | AggregationRule = "mean"
    secure: bool | str | Mapping[str, Any] | SecureSumPlan = False
    # Whether the aggregation server averages the clients' segments.
    averages_clients = False

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be, and an unknown aggregation rule; names and tables become values."""
        super().__post_init__()
        check_part("quorum", self.quorum)
        object.__setattr__(self, "aggregation", aggregation_of(self.aggregation))
        object.__setattr__(self, "secure", secure_of(self.secure))

    def check(self, topology: Topology, clients: int) -> None:
        """Refuse a quorum that can never be met, and a rule that cannot aggregate so few or has nothing to act on."""
        super().check(topology, clients)
        asked = self.clients_asked(clients)
        if is_count(self.quorum) and self.quorum > asked:
            raise InvalidInput(f"quorum={self.quorum} is not allowed; {asked} clients take part in a round")
        rule, summed = aggregation_of(self.aggregation), secure_of(self.secure)
        place = self.placement(topology)
        if rule.by_itself and not (place.averaged or place.copied):
            raise InvalidInput(f"aggregation={rule!r} has nothing to act on: no weights are averaged here")
        if rule.by_itself:
            rule.check(asked if self.drop_out == 0 else part_of(self.quorum, asked))
        if not summed:
            return
        if rule.by_itself:
            raise InvalidInput(f"aggregation={rule!r} reads every upload, of which secure shows the sum only: take one")
        if not place.averaged:
            raise InvalidInput("secure has nothing to act on: no client uploads weights here")
        summed.check(asked)

    def newest(self, client: int, state: State) -> Source:
        """Everybody uses what the aggregation server averaged, where it averages client segments."""
        return FED if self.averages_clients else client

    def binds(self, clients: int) -> str | None:
        """Averaged segments must be of one make."""
        return "averages client segments" if self.averages_clients and clients > 1 else None

    def fusing(self, placement: Placement) -> Placement:
        """Return `placement` with how it aggregates."""
        return replace(placement, aggregation=aggregation_of(self.aggregation), secure=secure_of(self.secure) or None)

    def enough(self, turns: Sequence[ClientRound]) -> bool:
        """Return whether as many clients as the quorum, or a secure sum, asks for have finished."""
        summed = secure_of(self.secure)
        needed = summed.required_members(len(turns)) if summed else 0
        return sum(turn.finished for turn in turns) >= max(part_of(self.quorum, len(turns)), needed)


def train_in_parallel(schedule: Averaged, engine: Trainer, training: Training, number: int, by_examples: bool) -> Round:
    """Return round `number` of clients that train at once, with a copy each of what is shared; all is averaged then."""
    turns = schedule.turns(engine, training, number)
    clients = list_clients(turns)
    engine.download(clients, number)
    engine.branch(clients)
    losses = engine.train_at_once({turn.client: turn.epochs for turn in turns})
    if averaged := schedule.enough(turns):
        weights = examples(engine, turns, by_examples)
        engine.upload(weights, number)
        engine.merge(weights)
    return Round([loss for found in losses.values() for loss in found], clients, dropped_clients(turns), averaged)


def examples(engine: Trainer, turns: Sequence[ClientRound], counted: bool = True) -> Mapping[int, float]:
    """Return the number of training rows of every client that finished; 1 for each where they are not `counted`."""
    return {
        turn.client: float(engine.rows(turn.client, "train")) if counted else 1.0 for turn in turns if turn.finished
    }


def dropped_clients(turns: Sequence[ClientRound]) -> tuple[int, ...]:
    """Return the clients that did not finish."""
    return tuple(turn.client for turn in turns if not turn.finished)


def list_clients(turns: Sequence[ClientRound]) -> tuple[int, ...]:
    """Return all clients that were asked."""
    return tuple(turn.client for turn in turns)


def shorten_turn(client: int, epochs: Epochs, drawn: Sequence[float], chance: float) -> ClientRound:
    """Return the turn of these `epochs`, cut short if the client drops out, which has probability `chance` a round."""
    planned = tuple(len(steps) for _, steps in epochs)
    if drawn[0] >= chance:
        return ClientRound(client, epochs, True, planned)
    steps_left = math.floor(drawn[1] * sum(planned))
    taken_epochs: Epochs = []
    for epoch, steps in epochs:
        taken_epochs.append((epoch, steps[:steps_left]))
        steps_left -= len(taken_epochs[-1][1])
    return ClientRound(client, taken_epochs, False, planned)
