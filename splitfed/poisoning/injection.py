"""Applies poisonings to a run: changes the clients' data before training, and their uploads during it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from splitfed.core.errors import InvalidInput, check_kind
from splitfed.core.messages import Message
from splitfed.core.random import derive, generator
from splitfed.data.dataset import Federation
from splitfed.engines.observers import Observable
from splitfed.poisoning.base import HonestObserver, Poisoning, Tensors, check_free


def check_poisonings(given: Poisoning | Sequence[Poisoning]) -> tuple[Poisoning, ...]:
    """Return `given` as a tuple; raise `InvalidInput` for an element that is no poisoning."""
    found = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for one in found:
        check_kind("poisoning", one, Poisoning, "one of splitfed.poisoning, or a list of them")
    return found


def poison_data(data: Federation, poisonings: Sequence[Poisoning], seed: int) -> Federation:
    """Return `data` after all poisonings, applied in order; they are checked first."""
    for one in poisonings:
        one.check(data)
    for position, one in enumerate(poisonings):
        data = one.poison(data, derive(seed, "poison", position))
    return data


def enter(
    engine: Observable, data: Federation, poisonings: Sequence[Poisoning], seed: int, method: bool = False
) -> None:
    """Install at clients the poisonings of uploads, and call `enter` of all others.

    `method`: whether a federated method makes clients upload weights, if the schedule does not.
    """
    for one in poisonings:
        one.enter(engine, data)
    bending_uploads = [(i, one) for i, one in enumerate(poisonings) if one.needs_upload]
    averaged = engine.run_parties.placement.averaged or (engine.topology.data_roles if method else ())
    if bending_uploads and not averaged:
        who = type(bending_uploads[0][1]).__name__
        raise InvalidInput(f"{who} changes a client's upload; no client uploads weights under this schedule")
    for client in sorted({client for _, one in bending_uploads for client in one.clients}):
        client_poisonings = [(i, one) for i, one in bending_uploads if client in one.clients]
        for role in averaged:
            party = engine.party(client, role).name
            check_free(engine, party, "a poisoning of its uploads")
            engine.join(party, Bender(client_poisonings, derive(seed, "bend", client, role)))


class Bender(HonestObserver):
    """Changes the weights that one client uploads, given those it was sent in the round."""

    def __init__(self, poisonings: Sequence[tuple[int, Poisoning]], seed: int) -> None:
        self._poisonings, self._seed = list(poisonings), seed
        self._before: Tensors | None = None
        self._bent = 0

    def receive(self, message: Message) -> None:
        """Store the weights that the client is sent at the start of a round; ignore other messages."""
        if message.kind == "weights":
            self._before = message.tensors

    def send(self, message: Message) -> Message:
        """Return an upload changed by every poisoning in turn, or any other message unchanged."""
        if message.kind != "weights" or self._before is None:
            return message
        tensors = message.tensors
        for position, one in self._poisonings:
            tensors = one.upload(self._before, tensors, generator(self._seed, position, message.stamp.epoch))
        self._bent += 1
        self._before = None
        return message._replace(tensors=tensors)

    def metrics(self) -> dict[str, Any]:
        """Return {"bent": number of uploads changed since the last call}."""
        bent, self._bent = self._bent, 0
        return {"bent": bent}

    def state(self) -> dict[str, Any]:
        """Return an empty state, as the stored weights last only until the upload of the same round."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Discard the weights of an interrupted round."""
        self._before, self._bent = None, 0
