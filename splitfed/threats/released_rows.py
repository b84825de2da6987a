"""Attacks on the rows of victims that pass through the parties, at inference or in a training step, once or repeatedly.

Attacks on labels in a training step may read recorded training too; the victims are then the rows of its steps.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

from splitfed.attacks.base import (
    Attack,
    Clone,
    NamesClasses,
    Needs,
    Outcome,
    Phase,
    StatesStepRows,
    Target,
    hints_of,
    label_set_of,
)
from splitfed.attacks.labels.known_labels import draw_hints
from splitfed.attacks.networks.image_parts import box
from splitfed.attacks.scoring.class_metrics import check_scorable
from splitfed.attacks.scoring.prediction_scores import score_clone, score_prediction
from splitfed.attacks.scoring.reconstruction_metrics import Scores
from splitfed.attacks.scoring.release_metrics import TrueReleases
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import View
from splitfed.core.random import derive, generator
from splitfed.core.rows import blocks
from splitfed.data.candidates import candidates, trained_rows
from splitfed.data.dataset import Dataset
from splitfed.engines.base import FED
from splitfed.threats.attack_phase import AttackPhase, Case, Scored
from splitfed.threats.attack_requests import AttackRequest, Observation
from splitfed.threats.computation_views import views_of
from splitfed.threats.floors import Floors, floors_below, predict_own_labels
from splitfed.threats.fresh_segments import head_after
from splitfed.threats.knowledge import KnowledgeGrants, check_client
from splitfed.threats.recorded_training import reads_steps, recorded_passes, recorded_view
from splitfed.threats.repeated_releases import RepeatedReleases, mean_view, release_seed
from splitfed.threats.segment_runner import SegmentRunner

STEP_ROWS = 64
"""Number of victims in a training step if the attack does not state it."""


class ReleasedRows(AttackPhase):
    """Passes the victims' rows through the parties of the client and collects what the adversary receives."""

    def __init__(self, grants: KnowledgeGrants) -> None:
        super().__init__(grants)
        self.floors = Floors()

    def observe(self, asked: Observation, phase: Phase, step_rows: int = STEP_ROWS) -> tuple[View, bool]:
        """Return the mean of what the party receives over all releases, and whether all releases were equal.

        `step_rows`: number of victims in one training step.
        """
        numbers = (release_seed(asked.seed, "victims", release=release) for release in range(asked.releases))
        passes = (self._receive(asked, number, phase, step_rows) for number in numbers)
        return mean_view(passes, asked.releases)

    def _receive(self, asked: Observation, number: int, phase: Phase, step_rows: int) -> View:
        """Pass the victims' rows through the parties once, with random draws by `number`.

        Return what the party received.
        """
        client, victims, newest = asked.client, asked.victims, self.grants.newest
        self.grants.lend(client, "victims", victims.x, victims if phase is Phase.STEP else None)
        with self.engine.record_party(asked.party) as recorder:
            if phase is Phase.STEP:
                self.engine.rehearse(client, "victims", number, newest(client), step_rows)
            else:
                self.engine.predict(client, "victims", "predict", number, borrow=newest(client))
        return recorder.view(copy.deepcopy(self.engine.modules_of_party(asked.party, client)))

    def reconstruct_floors(self, asked: Observation, view: View) -> dict[str, Tensor]:
        """Return the reconstruction of every floor from the releases in `view`: name -> (victims, *shape)."""
        party, client, seed = asked.party, asked.client, asked.seed
        if self.engine.topologies[client].computation is not None:
            return {}
        known = self.grants.knowledge(party, client, derive(seed, "queries", "linear_inverse"), asked.releases)
        return self.floors.predict(view, known, seed, party, client)

    def case(self, request: AttackRequest) -> Case:
        """Return the case for the victims' rows passed through the parties, or for the rows of recorded steps.

        Recorded steps are read up to the requested round.
        """
        self._check_unknown(request)
        attack, party, client, seed = request.attack, request.party, request.client, request.seed
        engine, topology, victims = self.engine, self.engine.topologies[client], request.victims
        views = views_of(topology)
        members: Tensor | None = None
        repeated: RepeatedReleases | None = None
        if attack.target is Target.MEMBERS:
            victims, members = candidates(self.data, victims, generator(seed, "candidates"))
        if request.number is not None and reads_steps(attack):
            victims, received, repeated = self.recorded_steps(party, client, request.number)
        else:
            passing = replace(request, victims=victims)
            received, equal = self.observe(passing, attack.phase, self._step_rows(attack, client))
            if request.releases > 1:
                inside = Needs.TRAINING_ATTACK in attack.requires
                repeated = RepeatedReleases(request.releases, equal, inside)
        hints = draw_hints(victims.y, hints_of(attack, self.grants.classes), generator(seed, "hints", request.name))
        stream = derive(seed, "queries", request.name)
        knowledge = replace(
            self.grants.knowledge(party, client, stream, request.releases, len(victims)),
            own=self.grants.own_inputs(party, client, victims.x),
            own_auxiliary=self.grants.own_inputs(party, client, self.data.auxiliary.x),
            head=head_after(topology, engine.parties[party].role, derive(seed, "head", request.name)),
            hints=hints,
            candidates=None if members is None else victims.x.to(engine.device),
            candidate_labels=None if members is None else victims.y.to(engine.device),
            **views.knowledge(engine, party, client),
        )
        view = views.select(received, attack, topology)
        return Case(view, knowledge, victims, members, hints, received, repeated)

    def recorded_steps(self, party: str, client: int, number: int) -> tuple[Dataset, View, RepeatedReleases | None]:
        """Return the client's training rows, the mean of what `party` received of them, and the repetitions.

        Steps are read up to round `number` (default: all rounds).
        """
        plan = self.grants.training
        rows = self.data.clients[client].train
        view = recorded_view(self.engine, party, client, plan.epochs(number)[-1])
        victims, passes = recorded_passes(view, lambda epoch: plan.batches(len(rows), epoch, client))
        mean, equal = mean_view(passes, len(passes))
        repeated = None if len(passes) == 1 else RepeatedReleases(len(passes), equal, steps=True)
        return rows.rows(victims), mean, repeated

    def score(self, request: AttackRequest, case: Case, outcome: Outcome) -> Scored:
        """Score the prediction beside the floors, and the model that the attack stole, if any."""
        attack, client, seed = request.attack, request.client, request.seed
        floors: Mapping[str, Tensor] | None = None
        if request.floors and attack.target is Target.INPUTS:
            floors = self.reconstruct_floors(request, case.view)
        elif request.floors and attack.target is Target.LABELS:
            floors = predict_own_labels(attack, case.view, case.knowledge)
        part = select_unknown(self.data.shape, case.knowledge.places, case.knowledge.own or {})
        truth, scores = score_prediction(
            attack.target,
            outcome.prediction,
            case.victims,
            self.data.auxiliary,
            generator(seed, "grade"),
            case.hints,
            label_set=label_set_of(attack),
            named=not isinstance(attack, NamesClasses) or attack.names_classes,
            members=case.members,
            trained=trained_rows(self.data) if attack.target is Target.REPRESENTATIVES else None,
            classifier=request.classifier,
            part=part,
            releases=self._true_releases(request, case, outcome) if attack.target is Target.RELEASES else None,
            floors=floors,
        )
        stolen = score_stolen_model(self.grants, outcome.clone, request.party, client, derive(seed, "stolen"))
        if floors is None or attack.target is not Target.INPUTS:
            return Scored(truth, scores, stolen)
        below = floors_below(attack, outcome.prediction, truth, floors, self.data.auxiliary.x, part)
        return Scored(truth, scores, stolen, below)

    def _check_unknown(self, request: AttackRequest) -> None:
        """Raise `InvalidInput` for a party that can read nothing, or that holds what the attack predicts."""
        attack, party, client = request.attack, request.party, request.client
        check_client(self.engine, client)
        views_of(self.engine.topologies[client]).check_readable(request.name, attack, self.engine, party, client)
        topology, role = self.engine.topologies[client], self.engine.parties[party].role
        if attack.target is Target.REPRESENTATIVES:
            check_scorable(self.data.auxiliary)
        if attack.target in (Target.INPUTS, Target.TOKENS):
            mine = {p.name for p in self.engine.run_parties.replicas[client].parties.values()}
            if party in mine and set(topology.inputs.values()) == {role}:
                raise InvalidInput(
                    f"party {party!r} owns the inputs of client {client}: there is nothing to reconstruct"
                )
        for head in topology.heads if attack.target is Target.LABELS and party != FED else ():
            if head.target == label_set_of(attack) and role in head.path:
                raise InvalidInput(f"party {party!r} is given the labels of {head.value!r}: it has none to predict")

    def _step_rows(self, attack: Attack, client: int) -> int:
        """Return the number of victims in one training step: as the attack states, else the batch size of the run."""
        if not isinstance(attack, StatesStepRows):
            return STEP_ROWS
        return attack.step_rows or self.grants.training.of_client(client).batch_size

    def _true_releases(self, request: AttackRequest, case: Case, outcome: Outcome) -> TrueReleases:
        """Return the encrypted values that the party received, for the scorer, and the releases of auxiliary rows."""
        assert case.received is not None
        views = views_of(self.engine.topologies[request.client])
        value, victims, precision = views.read_hidden(self.engine, case.received, case.knowledge)
        auxiliary = torch.zeros(0, victims.shape[1])
        if len(self.data.auxiliary):
            upstream = self.grants.trained_segments(request.client, self.engine.parties[request.party].role)
            with torch.no_grad():
                auxiliary = upstream(self.data.auxiliary.x.to(self.engine.device))[value].flatten(1).cpu()
        return TrueReleases(victims, auxiliary, precision, outcome.error_bound)


def score_stolen_model(
    grants: KnowledgeGrants, clone: Clone | None, party: str, client: int, seed: int
) -> Scores | None:
    """Score the whole model with the upstream segments of `clone`, beside the trained and the fresh model."""
    rows, engine = grants.data.test_union(), grants.engine
    if not isinstance(clone, SegmentRunner) or grants.classes is None or len(rows) == 0:
        return None
    head = engine.topologies[client].heads[0]

    def predict(upstream: Mapping[str, nn.Module]) -> Tensor:
        whole = grants.trained_segments(client, None, replaced=upstream)
        with torch.no_grad():
            return torch.cat([whole(x.to(engine.device))[head.value].cpu() for x in blocks(rows.source, 256)])

    fresh = grants.architecture(party, client)(seed).modules
    outputs = {"clone": predict(clone.modules), "trained": predict({}), "fresh": predict(fresh)}
    return score_clone(outputs, rows.label(head.target), generator(seed, "bootstrap"))


@dataclass(frozen=True)
class UnknownFeatures:
    """Selects the numbers at `positions` (k,), in order, of flattened rows of `shape`.

    A rectangle of an image stays an image; anything else is a vector (k,).
    """

    shape: tuple[int, ...]
    positions: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return this part of every row of x (n, *shape): (n, k), or (n, channels, height, width)."""
        part = x.flatten(1)[:, self.positions.to(x.device)]
        rectangle = box(self.shape, self.positions) if len(self.shape) == 3 else None
        return part if rectangle is None else part.reshape(len(x), -1, rectangle.height, rectangle.width)


def select_unknown(
    shape: tuple[int, ...], places: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> UnknownFeatures | None:
    """Return the selection of all numbers of a row of `shape` that no input in `own` holds.

    None if it is the whole row.

    `places`: input -> (k,) the positions in a flattened row that it reads.
    """
    held = torch.zeros(prod(shape), dtype=torch.bool)
    for name in own:
        held[places[name]] = True
    return UnknownFeatures(shape, (~held).nonzero().flatten()) if bool(held.any()) else None
