"""Attacks by the aggregation server on what the clients of a federated method sent, as recorded in training."""

from __future__ import annotations

from dataclasses import replace

from splitfed.attacks.base import STEPS, Needs, Outcome, Target, UsesFurther
from splitfed.attacks.scoring.prediction_scores import score_prediction
from splitfed.attacks.uploads.exchanged_model import PublicScores
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import View
from splitfed.core.random import derive, generator
from splitfed.data.candidates import candidates
from splitfed.engines.base import FED
from splitfed.threats.attack_phase import AttackPhase, Case, Scored
from splitfed.threats.attack_requests import AttackRequest
from splitfed.threats.exchanged_models import exchanged_model, public_scores
from splitfed.threats.fresh_segments import FreshModel
from splitfed.threats.knowledge import check_client
from splitfed.threats.recorded_training import recorded_view
from splitfed.threats.segment_runner import SegmentRunner


class MethodUploads(AttackPhase):
    """Attacks on a client's uploads for the run's method; scored by the rows it trained on."""

    def case(self, request: AttackRequest) -> Case:
        """Return what the party received of the client up to the requested round (default: all rounds)."""
        self._check_sent(request)
        attack, party, client, number = request.attack, request.party, request.client, request.number
        seen = recorded_view(self.engine, party, client, number)
        view = View(party, tuple(m for m in seen.messages if m.kind not in STEPS), seen.segments)
        absent = f"client {client} sent {party!r} nothing that {request.name} reads, or it was not recorded"
        if any(m.receiver == party and m.kind in attack.reads for m in view.messages):
            absent = ""
        topology, device, feed = self.engine.topologies[client], self.engine.device, self.grants.feed(client)
        wanted = attack.requires | (attack.uses if isinstance(attack, UsesFurther) else set())
        everybody = self._messages_of_all(party, number)
        exchanged = (
            exchanged_model(topology, feed, view, everybody, device) if Needs.EXCHANGED_MODEL in wanted else None
        )
        fresh_seed = derive(request.seed, "fresh model")
        known = replace(
            self.grants.knowledge(party, client, derive(request.seed, "queries")),
            exchanged=exchanged,
            local=self.grants.local(party, client) if Needs.UPDATES in wanted else None,
            public_scores=self._public_scores(client, everybody) if Needs.PUBLIC_SCORES in wanted else None,
            fresh_model=FreshModel(topology, feed, fresh_seed, device) if Needs.FRESH_MODEL in wanted else None,
            extractor=self._extractor(client),
        )
        if attack.target is not Target.MEMBERS:
            return Case(view, known, self.data.clients[client].train, absent=absent, draws=(client,))
        shows = any(m.kind == "data" and m.receiver == party for m in view.messages)
        shown = self.data.clients[client].shown if shows else None
        drawn = generator(request.seed, "candidates")
        rows, members = candidates(self.data, self.data.victims, drawn, client, shown)
        known = replace(known, candidates=rows.x.to(device), candidate_labels=rows.y.to(device))
        return Case(view, known, rows, members, absent=absent, draws=(client,))

    def score(self, request: AttackRequest, case: Case, outcome: Outcome) -> Scored:
        """Score the prediction by the client's training rows."""
        trained, drawn = self.data.clients[request.client].train, generator(request.seed, "grade")
        target, auxiliary, members = request.attack.target, self.data.auxiliary, case.members
        found = score_prediction(
            target, outcome.prediction, case.victims, auxiliary, drawn, members=members, trained=trained
        )
        return Scored(*found)

    def _check_sent(self, request: AttackRequest) -> None:
        """Raise `InvalidInput` unless the party is a method's aggregation server and receives what the attack reads."""
        attack, client, method = request.attack, request.client, self.grants.method
        who = type(attack).__name__
        check_client(self.engine, client)
        # What a schedule averages are weights; all else is a method's.
        if request.party != FED or (method is None and "weights" not in attack.reads):
            raise InvalidInput(
                f"{who} needs {Needs.UPLOADS}; only the aggregation server of a run with a method gets that"
            )
        name = "the schedule" if method is None else type(method).__name__
        arrived = {f.kind for f in self.engine.traffic.flows if f.receiver == FED and f.phase == "train"}
        sent = arrived or self.grants.planned_kinds()
        if not sent.intersection(attack.reads):
            raise InvalidInput(
                f"{who} reads {', '.join(attack.reads)}; clients of {name} send {', '.join(sorted(sent)) or 'nothing'}"
            )
        traits = self.grants.traits(client)
        if Needs.EXTRACTOR in attack.requires and not (traits and traits.class_means):
            raise InvalidInput(f"{who} reads class means; clients of {name} send none")

    def _messages_of_all(self, party: str, number: int | None) -> View:
        """Return all messages between clients and server up to round `number`."""
        seen = self.engine.view(party).select(phase="train")
        return View(party, tuple(m for m in seen.messages if number is None or m.stamp.epoch <= number), {})

    def _public_scores(self, client: int, view: View) -> PublicScores | None:
        """Return the clients' scores of public rows; None if the method has none, or none were recorded."""
        traits = self.grants.traits(client)
        batch = None if traits is None else traits.public_batch
        return None if batch is None else public_scores(batch, view, client, self.engine.seed, self.engine.device)

    def _extractor(self, client: int) -> SegmentRunner | None:
        """Return the function from rows to the features whose class means clients send; None if they send none."""
        traits, topology = self.grants.traits(client), self.engine.topologies[client]
        if traits is None or not traits.class_means:
            return None
        modules, facts = self.engine.modules(client), self.engine.all_facts[client]
        return SegmentRunner(topology, facts, modules, self.grants.feed(client), values=traits.class_means)
