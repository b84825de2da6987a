"""What the clients of a federated method have sent, as the aggregation server that was recorded may attack it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from splitfed.attacks.base import STEPS, Attack, Knowledge, Needs, Target
from splitfed.attacks.scoring.prediction_scores import score_prediction
from splitfed.attacks.scoring.reconstruction_metrics import Scores
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import View
from splitfed.core.random import derive, generator
from splitfed.data.candidates import candidates
from splitfed.data.dataset import Dataset
from splitfed.data.federation import Federation
from splitfed.engines.base import FED
from splitfed.engines.engine import Engine
from splitfed.federated.base import Method
from splitfed.threats.imitated_defenses import Feed
from splitfed.threats.knowledge import check_client
from splitfed.threats.segment_runner import SegmentRunner


class Case(NamedTuple):
    """An attack about to begin: what the aggregation server gets, and what only the scorer knows.

    `rows`, `members`: the candidates of an attack on membership, and which of them were trained on.
    """

    view: View
    knowledge: Knowledge
    readable: bool
    rows: Dataset | None = None
    members: Tensor | None = None


@dataclass
class Uploads:
    """Says what came from the clients of `engine`; `recorded`, `knowledge` and `feed` are those of the evaluator.

    `method`: the run's; `sent`: the kinds of messages that its clients will send, where nothing has been sent yet.
    """

    engine: Engine
    data: Federation
    recorded: Callable[[str, int, int | None], View]
    knowledge: Callable[[str, int, int], Knowledge]
    feed: Callable[[int], Feed]
    method: Method | None = None
    sent: frozenset[str] = frozenset()

    def case(self, attack: Attack, party: str, client: int, seed: int, number: int | None = None) -> Case:
        """Return what `party` holds of `client` up to round `number` (default: all), or refuse in one line."""
        self._check(attack, party, client)
        seen = self.recorded(party, client, number)
        view = View(party, tuple(m for m in seen.messages if m.kind not in STEPS), seen.segments)
        readable = any(m.receiver == party and m.kind in attack.reads for m in view.messages)
        known = self.knowledge(party, client, derive(seed, "queries"))
        if means := self._class_means(client):
            topology, facts = self.engine.topologies[client], self.engine.all_facts[client]
            extractor = SegmentRunner(topology, facts, self.engine.modules(client), self.feed(client), values=means)
            known = replace(known, extractor=extractor)
        if attack.target is not Target.MEMBERS:
            return Case(view, known, readable)
        rows, members = candidates(self.data, self.data.victims, generator(seed, "candidates"), client)
        device = self.engine.device
        known = replace(known, candidates=rows.x.to(device), candidate_labels=rows.y.to(device))
        return Case(view, known, readable, rows, members)

    def score(
        self, attack: Attack, prediction: Tensor, case: Case, client: int, drawn: torch.Generator
    ) -> tuple[Tensor, Scores]:
        """Return the truth that `prediction` is about, and its scores: those of the client's training rows."""
        trained = self.data.clients[client].train
        rows = trained if case.rows is None else case.rows
        return score_prediction(
            attack.target, prediction, rows, self.data.auxiliary, drawn, members=case.members, trained=trained
        )

    def _check(self, attack: Attack, party: str, client: int) -> None:
        """Refuse a party that is no method's aggregation server, and a method without uploads that the attack reads."""
        who = type(attack).__name__
        check_client(self.engine, client)
        if party != FED or self.method is None:
            raise InvalidInput(
                f"{who} needs {Needs.UPLOADS}; only the aggregation server of a run with a method gets that"
            )
        name = type(self.method).__name__
        sent = self.sent or {f.kind for f in self.engine.traffic.flows if f.receiver == FED and f.phase == "train"}
        if not sent.intersection(attack.reads):
            raise InvalidInput(
                f"{who} reads {', '.join(attack.reads)}; clients of {name} send {', '.join(sorted(sent)) or 'nothing'}"
            )
        if Needs.EXTRACTOR in attack.requires and not self._class_means(client):
            raise InvalidInput(f"{who} reads class means; clients of {name} send none")

    def _class_means(self, client: int) -> Mapping[str, str]:
        return {} if self.method is None else self.method.traits(self.engine.topologies[client]).class_means
