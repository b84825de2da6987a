"""Participation in a round: a random sample of the clients, some of which may drop out, and a quorum of the rest."""

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
    """Batches that one client trains in a round, as (epoch, batches); fewer than planned if the client drops out.

    `planned`: the number of batches of each epoch without dropout.
    """

    client: int
    epochs: Epochs
    finished: bool
    planned: tuple[int, ...]

    def completes(self, local: int) -> bool:
        """Return whether the client finishes epoch `local` of the round, counted from 0."""
        return len(self.epochs[local][1]) == self.planned[local]


@dataclass(frozen=True, kw_only=True)
class Sampled(Schedule):
    """Base of the schedules that train many clients.

    `clients_per_round`: how many take part, a whole number or a fraction in (0, 1] (None: all), drawn anew each round.
    `drop_out`: the probability, in [0, 1], that a selected client leaves during the round, after a random number of
    steps; the steps before that are trained and counted, but its segments are not passed on.
    """

    clients_per_round: int | float | None = None
    drop_out: float = field(default=0.0, metadata=require_number("drop_out", low=0.0, high=1.0))

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for parameters out of range."""
        super().__post_init__()
        check_part("clients_per_round", self.clients_per_round)

    def check(self, topology: Topology, clients: int) -> None:
        """Raise `InvalidInput` for more clients per round than there are."""
        if is_count(self.clients_per_round) and (self.clients_per_round or 0) > clients:
            raise InvalidInput(
                f"clients_per_round={self.clients_per_round} is not allowed; there are {clients} clients"
            )

    def clients_asked(self, clients: int) -> int:
        """Return how many of `clients` clients are selected in a round."""
        return clients if self.clients_per_round is None else part_of(self.clients_per_round, clients)

    def turns(self, engine: Trainer, training: Training, number: int) -> list[ClientRound]:
        """Return the batches of each client drawn for round `number`, in the order of the clients."""
        random = generator(training.seed, "participation", number)
        order = torch.randperm(engine.replicas, generator=random)[: self.clients_asked(engine.replicas)]
        chosen = sorted(order.tolist()) if self.clients_per_round is not None else range(engine.replicas)
        leaves = torch.rand(engine.replicas, 2, generator=random, dtype=torch.float64).tolist()
        rows = {client: engine.rows(client, "train") for client in chosen}
        return [self.turn(training, rows[client], number, client, leaves[client]) for client in chosen]

    def turn(self, training: Training, rows: int, number: int, client: int, drawn: Sequence[float]) -> ClientRound:
        """Return the batches that `client`, with `rows` rows, trains in round `number`.

        `drawn`: two numbers in [0, 1) that decide whether and when it drops out.
        """
        epochs = [(epoch, training.batches(rows, epoch, client)) for epoch in training.epochs(number)]
        return shorten_turn(client, epochs, drawn, self.drop_out)


@dataclass(frozen=True, kw_only=True)
class Averaged(Sampled):
    """Base of the schedules that average: `quorum` clients, a number or a fraction of those selected, must finish.

    If fewer finish, nothing is averaged and the averages do not change; a shared segment keeps the steps trained so
    far. `aggregation`: how the servers combine several copies: the name of an aggregation rule, a table with the name
    and its parameters, or an `AggregationRule`. `secure`: whether the aggregation server learns the sum of the uploads
    only: true or "masks", "ckks", a table with such a name and parameters, or a `SecureSumPlan`; fewer clients than its
    threshold are treated as fewer than the quorum.
    """

    quorum: int | float = 1
    aggregation: str | Mapping[str, Any] | AggregationRule = "mean"
    secure: bool | str | Mapping[str, Any] | SecureSumPlan = False
    # Whether the aggregation server averages the clients' segments.
    averages_clients = False

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for parameters out of range and unknown names; convert names and tables into values."""
        super().__post_init__()
        check_part("quorum", self.quorum)
        object.__setattr__(self, "aggregation", aggregation_of(self.aggregation))
        object.__setattr__(self, "secure", secure_of(self.secure))

    def check(self, topology: Topology, clients: int) -> None:
        """Raise `InvalidInput` for an unreachable quorum, too few clients for the rule, or settings without effect."""
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
            raise InvalidInput(
                f"aggregation={rule!r} reads every upload, but secure shows the server their sum only: set one"
            )
        if not place.averaged:
            raise InvalidInput("secure has nothing to act on: no client uploads weights here")
        summed.check(asked)

    def newest(self, client: int, state: State) -> Source:
        """Return the aggregation server if it averages client segments, otherwise the client itself."""
        return FED if self.averages_clients else client

    def binds(self, clients: int) -> str | None:
        """Return the reason if client segments of several clients are averaged, otherwise None."""
        return "averages client segments" if self.averages_clients and clients > 1 else None

    def fusing(self, placement: Placement) -> Placement:
        """Return `placement` with the aggregation rule and the secure sum of this schedule."""
        return replace(placement, aggregation=aggregation_of(self.aggregation), secure=secure_of(self.secure) or None)

    def enough(self, turns: Sequence[ClientRound]) -> bool:
        """Return whether as many clients have finished as the quorum and a secure sum need."""
        summed = secure_of(self.secure)
        needed = summed.required_members(len(turns)) if summed else 0
        return sum(turn.finished for turn in turns) >= max(part_of(self.quorum, len(turns)), needed)


def train_in_parallel(schedule: Averaged, engine: Trainer, training: Training, number: int, by_examples: bool) -> Round:
    """Train the clients of round `number` in parallel, each with copies of the shared segments, then average all."""
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
    """Return client -> number of its training rows, of the clients that finished; 1 for each unless `counted`."""
    return {
        turn.client: float(engine.rows(turn.client, "train")) if counted else 1.0 for turn in turns if turn.finished
    }


def dropped_clients(turns: Sequence[ClientRound]) -> tuple[int, ...]:
    """Return the clients that did not finish the round."""
    return tuple(turn.client for turn in turns if not turn.finished)


def list_clients(turns: Sequence[ClientRound]) -> tuple[int, ...]:
    """Return all clients that were selected for the round."""
    return tuple(turn.client for turn in turns)


def shorten_turn(client: int, epochs: Epochs, drawn: Sequence[float], chance: float) -> ClientRound:
    """Return the turn of these `epochs`, cut short if the client drops out, with probability `chance` in a round."""
    planned = tuple(len(steps) for _, steps in epochs)
    if drawn[0] >= chance:
        return ClientRound(client, epochs, True, planned)
    steps_left = math.floor(drawn[1] * sum(planned))
    taken_epochs: Epochs = []
    for epoch, steps in epochs:
        taken_epochs.append((epoch, steps[:steps_left]))
        steps_left -= len(taken_epochs[-1][1])
    return ClientRound(client, taken_epochs, False, planned)
