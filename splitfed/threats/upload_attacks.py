"""What the clients of a federated method have sent, as the aggregation server that was recorded may attack it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from splitfed.attacks.base import STEPS, Attack, Knowledge, Needs, Target, UsesFurther
from splitfed.attacks.gradients.local_training import LocalTraining
from splitfed.attacks.scoring.prediction_scores import score_prediction
from splitfed.attacks.scoring.reconstruction_metrics import Scores
from splitfed.attacks.uploads.exchanged_model import PublicScores
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import View
from splitfed.core.random import derive, generator
from splitfed.data.candidates import candidates
from splitfed.data.dataset import Dataset
from splitfed.data.federation import Federation
from splitfed.engines.base import FED
from splitfed.engines.engine import Engine
from splitfed.federated.base import Method
from splitfed.threats.exchanged_models import FreshModel, exchanged_model, public_scores
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
    """Says what came from the clients of `engine`; `recorded` and what stands behind it are those of the evaluator.

    `method`: the run's; `sent`: the kinds of messages that its clients will send, where nothing has been sent yet.
    """

    engine: Engine
    data: Federation
    recorded: Callable[[str, int, int | None], View]
    knowledge: Callable[[str, int, int], Knowledge]
    feed: Callable[[int], Feed]
    local: Callable[[str, int], LocalTraining | None]
    method: Method | None = None
    sent: frozenset[str] = frozenset()

    def case(self, attack: Attack, party: str, client: int, seed: int, number: int | None = None) -> Case:
        """Return what `party` holds of `client` up to round `number` (default: all), or refuse in one line."""
        self._check(attack, party, client)
        seen = self.recorded(party, client, number)
        view = View(party, tuple(m for m in seen.messages if m.kind not in STEPS), seen.segments)
        readable = any(m.receiver == party and m.kind in attack.reads for m in view.messages)
        known = self.knowledge(party, client, derive(seed, "queries"))
        topology, facts, device = self.engine.topologies[client], self.engine.all_facts[client], self.engine.device
        feed, wanted = self.feed(client), attack.requires | (attack.uses if isinstance(attack, UsesFurther) else set())
        if Needs.EXCHANGED_MODEL in wanted:
            everybody = self._messages_of_all(party, number)
            known = replace(known, exchanged=exchanged_model(topology, feed, view, everybody, device))
        if Needs.UPDATES in wanted:
            known = replace(known, local=self.local(party, client))
        if Needs.PUBLIC_SCORES in wanted:
            known = replace(known, public_scores=self._public_scores(client, self._messages_of_all(party, number)))
        if Needs.FRESH_MODEL in wanted:
            known = replace(known, fresh_model=FreshModel(topology, feed, derive(seed, "fresh model"), device))
        if means := self._class_means(client):
            extractor = SegmentRunner(topology, facts, self.engine.modules(client), feed, values=means)
            known = replace(known, extractor=extractor)
        if attack.target is not Target.MEMBERS:
            return Case(view, known, readable)
        shows = any(m.kind == "data" and m.receiver == party for m in view.messages)
        shown = self.data.clients[client].shown if shows else None
        rows, members = candidates(self.data, self.data.victims, generator(seed, "candidates"), client, shown)
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
        # What a schedule averages are weights; all else is a method's.
        if party != FED or (self.method is None and "weights" not in attack.reads):
            raise InvalidInput(
                f"{who} needs {Needs.UPLOADS}; only the aggregation server of a run with a method gets that"
            )
        name = "the schedule" if self.method is None else type(self.method).__name__
        sent = self.sent or {f.kind for f in self.engine.traffic.flows if f.receiver == FED and f.phase == "train"}
        if not sent.intersection(attack.reads):
            raise InvalidInput(
                f"{who} reads {', '.join(attack.reads)}; clients of {name} send {', '.join(sorted(sent)) or 'nothing'}"
            )
        if Needs.EXTRACTOR in attack.requires and not self._class_means(client):
            raise InvalidInput(f"{who} reads class means; clients of {name} send none")

    def _messages_of_all(self, party: str, number: int | None) -> View:
        """Return what all clients have sent up to round `number`, and what they were sent."""
        seen = self.engine.view(party).select(phase="train")
        return View(party, tuple(m for m in seen.messages if number is None or m.stamp.epoch <= number), {})

    def _public_scores(self, client: int, view: View) -> PublicScores | None:
        """Return what the clients made of public rows; None where the method has none, or where none were recorded."""
        batch = None if self.method is None else self.method.traits(self.engine.topologies[client]).public_batch
        return None if batch is None else public_scores(batch, view, client, self.engine.seed, self.engine.device)

    def _class_means(self, client: int) -> Mapping[str, str]:
        return {} if self.method is None else self.method.traits(self.engine.topologies[client]).class_means
