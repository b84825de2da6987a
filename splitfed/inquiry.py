"""Questions put to a trained run: what an adversary receives, what it may know, and what its attacks achieve."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from splitfed.attacks.base import Attack, Knowledge, Phase, Progress, Releases
from splitfed.attacks.grading import grade_of
from splitfed.attacks.metrics import Grade
from splitfed.data.dataset import Dataset
from splitfed.data.features import feed
from splitfed.data.federation import Federation
from splitfed.engines.base import Source
from splitfed.engines.local import LocalEngine
from splitfed.errors import InvalidInput, unknown
from splitfed.seeding import derive, generator
from splitfed.upstream import Upstream
from splitfed.view import View


@dataclass(frozen=True)
class AttackResult:
    """What one attack achieved: its `guess` beside the `truth`, (victims, ...), and the scores with baselines."""

    attack: str
    adversary: str
    guess: Tensor
    truth: Tensor
    grade: Grade
    seconds: float


class Inquiry:
    """Asks the parties of `engine`; `newest` says whose segments a client would use now."""

    def __init__(self, engine: LocalEngine, data: Federation, seed: int, newest: Callable[[int], Source]) -> None:
        self.engine = engine
        self.data = data
        self.seed = seed
        self._newest = newest

    def adversary(self, name: str | None) -> str:
        """Return the party called `name`, by default the first without data; refuse one that is not there."""
        party = name or self._curious()
        if party not in self.engine.parties:
            raise unknown("party", party, self.engine.parties)
        return party

    def victims(self, victims: Dataset | None) -> Dataset:
        """Return `victims`, by default the rows set aside; refuse to attack nobody."""
        chosen = self.data.victims if victims is None else victims
        if len(chosen) == 0:
            raise InvalidInput("there are no victims to attack: set some aside (victims=64)")
        return chosen

    def lend(self, client: int, part: str, x: Tensor, rows: Dataset | None = None) -> None:
        """Give the parties of `client` the rows `x` as their data called `part`, with the labels of `rows` if given."""
        if not 0 <= client < self.engine.lanes:
            raise InvalidInput(f"client={client} is not allowed; expected 0 to {self.engine.lanes - 1}")
        if tuple(x.shape[1:]) != self.data.shape:
            raise InvalidInput(f"x has rows of shape {tuple(x.shape[1:])}; this run was trained on {self.data.shape}")
        heads = self.engine.topologies[client].heads
        labels = {} if rows is None else {head.value: rows.label(head.target) for head in heads}
        self.engine.own(client, part, self._feed(client, x), labels)

    def observe(self, party: str, victims: Dataset, client: int, seed: int, phase: Phase = Phase.INFERENCE) -> View:
        """Put the victims' rows through the parties of `client` once; return what `party` received."""
        number = derive(seed, "victims")
        self.lend(client, "victims", victims.x, victims if phase is Phase.STEP else None)
        with self.engine.watching(party) as recorder:
            if phase is Phase.STEP:
                self.engine.rehearse(client, "victims", number, borrow=self._newest(client))
            else:
                self.engine.predict(client, "victims", "predict", number, borrow=self._newest(client))
        return recorder.view(copy.deepcopy(self.engine.held_by(party, client)))

    def attack(
        self,
        name: str,
        attack: Attack,
        party: str,
        victims: Dataset,
        client: int,
        seed: int,
        progress: Progress | None = None,
    ) -> AttackResult:
        """Let `party` run `attack` against `victims`, and score what it guesses."""
        view = self.observe(party, victims, client, seed, attack.phase)
        knowledge = self.knowledge(party, client, derive(seed, "queries", name))
        outcome = attack(view, knowledge, generator(seed, "attack", name), progress)
        truth, scores = grade_of(attack.target, outcome.guess, victims, self.data.auxiliary, generator(seed, "grade"))
        return AttackResult(name, party, outcome.guess, truth, scores, outcome.seconds)

    def knowledge(self, party: str, client: int, stream: int) -> Knowledge:
        """Return all that a threat model may grant `party`; an attack sees only what it requires."""
        engine = self.engine
        topology = engine.topologies[client]
        members = (engine.party(client, role) for role in topology.roles)
        upstream = Upstream(
            topology,
            engine.all_facts[client],
            engine.modules(client, self._newest(client)),
            engine.defenses,
            engine.parties[party].role,
            self.seed,
            {key: state for member in members for key, state in member.defense_states.items()},
        )
        auxiliary = self.data.auxiliary
        return Knowledge(
            self.data.shape,
            self.data.victims.value_range,
            auxiliary.x.to(engine.device),
            self._query(party, client, stream),
            lambda x: upstream(self._feed(client, x)),
            lambda x: upstream.sample(self._feed(client, x)),
            engine.device,
            classes=self.data.task.outputs if self.data.task.name == "classification" else 2,
            auxiliary_labels=auxiliary.y.to(engine.device),
        )

    def _curious(self) -> str:
        topology = self.engine.topology
        role = next((r for r in topology.roles if r not in topology.data_roles), None)
        if role is None:
            raise InvalidInput(f"topology {topology.name!r} has no party without data: name the adversary")
        return role

    def _feed(self, client: int, x: Tensor) -> dict[str, Tensor]:
        """Return what each input of the client's topology gets of `x`."""
        return feed(x, self.engine.topologies[client].inputs, self.data.victims.features)

    def _query(self, party: str, client: int, stream: int) -> Callable[[Tensor], Releases]:
        """Every call sends rows through the victims' own parties; defenses draw afresh each time."""
        calls = 0

        def query(x: Tensor) -> Releases:
            nonlocal calls
            calls += 1
            self.lend(client, "query", x)
            number = derive(stream, calls)
            with torch.no_grad(), self.engine.watching(party) as recorder:
                self.engine.predict(client, "query", "query", number, borrow=self._newest(client))
            return recorder.view().select(kind="activation").tensors(self.engine.device)

        return query
