"""Questions put to a trained run: what an adversary receives, and what its attacks achieve."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitfed.attacks.base import (
    Attack,
    Clone,
    Knowledge,
    NamesClasses,
    Needs,
    Outcome,
    Phase,
    Progress,
    StatesStepRows,
    Target,
    check_rows,
    hints_of,
    label_set_of,
    prepare_attack,
)
from splitfed.attacks.gradients.local_training import check_one_step
from splitfed.attacks.labels.known_labels import draw_hints
from splitfed.attacks.scoring.assignment import assignment
from splitfed.attacks.scoring.class_metrics import check_scorable
from splitfed.attacks.scoring.prediction_scores import score_clone, score_prediction
from splitfed.attacks.scoring.reconstruction_metrics import Scores
from splitfed.attacks.scoring.release_metrics import TrueReleases
from splitfed.attacks.scoring.unknown_features import select_unknown
from splitfed.attacks.training_time.training_attack import TrainingAttackState
from splitfed.core.errors import InvalidInput, check_count
from splitfed.core.messages import WEIGHT_GRADIENT, View
from splitfed.core.per_client_defenses import of_client
from splitfed.core.random import derive, generator
from splitfed.core.rows import blocks
from splitfed.data.candidates import candidates, trained_rows
from splitfed.data.dataset import Dataset
from splitfed.data.federation import Federation
from splitfed.engines.base import FED, Source
from splitfed.engines.engine import Engine
from splitfed.registry import TABLES, load
from splitfed.threats.adaptation import unadapted
from splitfed.threats.attack_result import AttackResult as AttackResult
from splitfed.threats.computation_views import views_of
from splitfed.threats.dry_run import AttackBegun, stop_at_first_use, stop_attack
from splitfed.threats.floors import Floors, floors_below, predict_own_labels
from splitfed.threats.fresh_segments import head_after
from splitfed.threats.knowledge import Grants, check_client, curious, find_party
from splitfed.threats.recorded_training import check_updates, reads_steps, recorded_passes
from splitfed.threats.repeated_releases import RepeatedReleases, check_releases, mean_view, release_seed
from splitfed.threats.segment_runner import SegmentRunner
from splitfed.threats.upload_attacks import Uploads

STEP_ROWS = 64
"""Victims in a training step, where the attack does not say how many."""


class _Case(NamedTuple):
    """An attack about to begin: what the adversary gets, and what only the scorer knows.

    `received`: all that has arrived, of which the attack gets `view`. `repeated`: how often of a row, if several times.
    """

    victims: Dataset
    members: Tensor | None
    hints: Mapping[int, Tensor]
    view: View
    knowledge: Knowledge
    received: View
    repeated: RepeatedReleases | None


class Evaluator:
    """Runs and scores attacks on the parties of `engine`; `newest` says whose segments a client would use now.

    `grants`: what each party may know.
    """

    def __init__(self, engine: Engine, data: Federation, seed: int, newest: Callable[[int], Source]) -> None:
        self.engine, self.data, self.seed = engine, data, seed
        self.grants = Grants(engine, data, seed, newest)
        self.floors = Floors()
        self.uploads = Uploads(engine, data, self.recorded, self.grants.knowledge, self.grants.feed, self.grants.local)

    def adversary(self, name: str | None) -> str:
        """Return the party called `name`, by default the first without data; refuse one that is not there.

        A role that one party alone plays stands for it.
        """
        return find_party(self.engine, name or curious(self.engine.topology))

    def victims(self, victims: Dataset | None) -> Dataset:
        """Return `victims`, by default the rows set aside for attacks; raise `InvalidInput` if there are none."""
        chosen = self.data.victims if victims is None else victims
        if len(chosen) == 0:
            raise InvalidInput("there are no victims to attack: set some aside (victims=64)")
        return chosen

    def check_releases(self, name: str, attack: Attack, releases: int, client: int) -> None:
        """Refuse several releases of a row where `attack` called `name` has no use for them."""
        known = 0 <= client < self.engine.replicas
        check_releases(name, attack, releases, self.engine.topologies[client].computation if known else None)

    def observe(
        self,
        party: str,
        victims: Dataset,
        client: int,
        seed: int,
        phase: Phase = Phase.INFERENCE,
        step_rows: int = STEP_ROWS,
        releases: int = 1,
    ) -> View:
        """Put the victims' rows through the parties of `client`; return what `party` received.

        `step_rows`: how many of them pass in one training step. `releases`: how often they pass, each time with draws
        of its own; what is returned is the mean. More than one are refused in a training step.
        """
        check_count("releases", releases, low=1)
        if releases > 1 and phase is not Phase.INFERENCE:
            raise InvalidInput(f"releases={releases} is not allowed; expected 1 in {phase}")
        return self._observe(party, victims, client, seed, phase, step_rows, releases)[0]

    def _observe(
        self, party: str, victims: Dataset, client: int, seed: int, phase: Phase, step_rows: int, releases: int
    ) -> tuple[View, bool]:
        """Return the mean of what `party` receives in as many passes, and whether it was the same in all of them."""
        numbers = (release_seed(seed, "victims", release=release) for release in range(releases))
        passes = (self._receive(party, victims, client, number, phase, step_rows) for number in numbers)
        if releases == 1:
            return next(passes), False
        return mean_view(passes, releases)

    def _receive(self, party: str, victims: Dataset, client: int, number: int, phase: Phase, step_rows: int) -> View:
        """Put the victims' rows through the parties once, with the draws of `number`; return what `party` received."""
        self.grants.lend(client, "victims", victims.x, victims if phase is Phase.STEP else None)
        with self.engine.record_party(party) as recorder:
            if phase is Phase.STEP:
                self.engine.rehearse(client, "victims", number, self.grants.newest(client), step_rows)
            else:
                self.engine.predict(client, "victims", "predict", number, borrow=self.grants.newest(client))
        return recorder.view(copy.deepcopy(self.engine.modules_of_party(party, client)))

    def attack(
        self,
        name: str,
        attack: Attack,
        party: str,
        victims: Dataset,
        client: int,
        seed: int,
        progress: Progress | None = None,
        number: int | None = None,
        classifier: bool = False,
        floors: bool = True,
        releases: int = 1,
    ) -> AttackResult:
        """Let `party` run `attack` against `victims`, and score what it predicts.

        An attack on membership gets as many rows of training among the victims. An attack on recorded training goes
        against the rows that `client` trained on in `number`, a round (default: the newest that was recorded);
        `victims` play no part in it, nor in one on labels in a training step where `number` is given. `classifier`:
        whether a classifier of clean rows scores reconstructions too.
        `floors`: whether floors (of reconstructions from releases, of labels) and oracles are scored. `releases`: how
        often every victim's row is released; the attack gets the mean.
        """
        self.check_releases(name, attack, releases, client)
        check_rows(attack, self.data.victims.discrete, self.data.name, self.data.victims.unscaled)
        if classifier:
            check_scorable(self.data.auxiliary)
        if attack.reads:
            return self._attack_uploads(name, attack, party, client, seed, number, progress)
        if attack.phase is Phase.TRAINING:
            return self._attack_training(name, attack, party, client, seed, number, progress, classifier)
        number = number if reads_steps(attack) else None
        case = self._case(name, attack, party, victims, client, seed, releases, number)
        outcome = attack(case.view, case.knowledge, generator(seed, "attack", name), progress)
        beside = self._floors(attack, case, party, client, seed, releases) if floors else None
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
            classifier=classifier,
            part=part,
            releases=self._true_releases(case, outcome, party, client) if attack.target is Target.RELEASES else None,
            floors=beside,
        )
        stolen = self._score_stolen_model(outcome.clone, party, client, derive(seed, "stolen"))
        return AttackResult(
            *(name, party, outcome.prediction, truth, scores, outcome.seconds, outcome.clone, stolen),
            error_bound=outcome.error_bound,
            selection=outcome.selection,
            under_trained=()
            if beside is None or attack.target is not Target.INPUTS
            else floors_below(attack, outcome.prediction, truth, beside, self.data.auxiliary.x, part),
            unadapted=self._unadapted(outcome.member or attack, party, client),
            repeated=case.repeated,
        )

    def _floors(
        self, attack: Attack, case: _Case, party: str, client: int, seed: int, releases: int
    ) -> dict[str, Tensor] | None:
        """Return what stands beside the prediction of `attack`: floor -> a prediction as its own; None: it has none."""
        if attack.target is Target.INPUTS:
            return self.reconstruct_floors(case.view, party, client, seed, releases)
        if attack.target is Target.LABELS:
            return predict_own_labels(attack, case.view, case.knowledge)
        return None

    def reconstruct_floors(
        self, view: View, party: str, client: int, seed: int, releases: int = 1
    ) -> dict[str, Tensor]:
        """Return what every floor makes of the releases in `view`, means of `releases`: name -> (victims, *shape)."""
        if self.engine.topologies[client].computation is not None:
            return {}
        known = self.grants.knowledge(party, client, derive(seed, "queries", "linear_inverse"), releases)
        return self.floors.predict(view, known, seed, party, client)

    def _case(
        self,
        name: str,
        attack: Attack,
        party: str,
        victims: Dataset,
        client: int,
        seed: int,
        releases: int = 1,
        number: int | None = None,
    ) -> _Case:
        """Put the victims' rows through the parties, or refuse what could not be scored or is known already.

        `number`: in place of that the rows of training, and what was recorded of them up to this round.
        """
        check_client(self.engine, client)
        views = views_of(self.engine.topologies[client])
        views.check_readable(name, attack, self.engine, party, client)
        if attack.target is Target.REPRESENTATIVES:
            check_scorable(self.data.auxiliary)
        if attack.target in (Target.INPUTS, Target.TOKENS) and self._owns_all(party, client):
            raise InvalidInput(f"party {party!r} owns the inputs of client {client}: there is nothing to reconstruct")
        if attack.target is Target.LABELS:
            self._check_no_labels(party, client, label_set_of(attack))
        members: Tensor | None = None
        if attack.target is Target.MEMBERS:
            victims, members = candidates(self.data, victims, generator(seed, "candidates"))
        if number is not None:
            victims, received, repeated = self._recorded_steps(party, client, number)
        hints = draw_hints(victims.y, hints_of(attack, self.grants.classes), generator(seed, "hints", name))
        step_rows = self._step_rows(attack, client)
        if number is None:
            received, equal = self._observe(party, victims, client, seed, attack.phase, step_rows, releases)
            inside = Needs.TRAINING_ATTACK in attack.requires
            repeated = None if releases == 1 else RepeatedReleases(releases, equal, inside)
        knowledge = replace(
            self.grants.knowledge(party, client, derive(seed, "queries", name), releases, len(victims)),
            own=self.grants.own_inputs(party, client, victims.x),
            own_auxiliary=self.grants.own_inputs(party, client, self.data.auxiliary.x),
            head=head_after(
                self.engine.topologies[client], self.engine.parties[party].role, derive(seed, "head", name)
            ),
            hints=hints,
            candidates=None if members is None else victims.x.to(self.engine.device),
            candidate_labels=None if members is None else victims.y.to(self.engine.device),
            **views.knowledge(self.engine, party, client),
        )
        view = views.select(received, attack, self.engine.topologies[client])
        return _Case(victims, members, hints, view, knowledge, received, repeated)

    def _recorded_steps(self, party: str, client: int, number: int) -> tuple[Dataset, View, RepeatedReleases | None]:
        """Return the rows of `client` in steps up to round `number`, and the mean of what `party` received of them."""
        plan = self.grants.training
        assert plan is not None
        rows = self.data.clients[client].train
        view = self.recorded(party, client, plan.epochs(number)[-1])
        victims, passes = recorded_passes(view, lambda epoch: plan.batches(len(rows), epoch, client))
        mean, equal = mean_view(passes, len(passes))
        repeated = None if len(passes) == 1 else RepeatedReleases(len(passes), equal, steps=True)
        return rows.rows(victims), mean, repeated

    def prepare_attack(
        self, name: str, attack: Attack, party: str, victims: Dataset, client: int, seed: int, releases: int = 1
    ) -> tuple[View, Knowledge]:
        """Return what `attack` would be given after training, its view and what it knows; refuse as `attack` does."""
        self.check_releases(name, attack, releases, client)
        check_rows(attack, self.data.victims.discrete, self.data.name, self.data.victims.unscaled)
        case = self._case(name, attack, party, victims, client, seed, releases)
        return prepare_attack(attack, case.view, case.knowledge)

    def check_measurable(self, party: str, client: int) -> None:
        """Refuse to measure what `party` learns where rows are no numbers or its own, or what arrives is unreadable."""
        check_client(self.engine, client)
        if self.data.victims.discrete:
            raise InvalidInput(f"rows of {self.data.name} are whole numbers, such as token ids: no derivative is taken")
        if (secure := self.engine.topologies[client].computation) is not None:
            raise InvalidInput(f"party {party!r} {secure.refusals['derivatives']}")
        if self.grants.own_inputs(party, client, self.data.victims.x[:1]):
            raise InvalidInput(f"party {party!r} holds a part of the rows itself, and the rest may depend on it")

    def _step_rows(self, attack: Attack, client: int) -> int:
        """Return how many victims pass in one training step: as the attack says, or as many as the run trained on."""
        if not isinstance(attack, StatesStepRows):
            return STEP_ROWS
        training = self.grants.training
        return attack.step_rows or (STEP_ROWS if training is None else training.of_client(client).batch_size)

    def _true_releases(self, case: _Case, outcome: Outcome, party: str, client: int) -> TrueReleases:
        """Return what `party` received and could not read, and what auxiliary rows release, for the scorer."""
        views = views_of(self.engine.topologies[client])
        value, victims, precision = views.read_hidden(self.engine, case.received, case.knowledge)
        auxiliary = torch.zeros(0, victims.shape[1])
        if len(self.data.auxiliary):
            upstream = self.grants.trained_segments(client, self.engine.parties[party].role)
            with torch.no_grad():
                auxiliary = upstream(self.data.auxiliary.x.to(self.engine.device))[value].flatten(1).cpu()
        return TrueReleases(victims, auxiliary, precision, outcome.error_bound)

    def applicable(self, adversary: str | None = None, client: int = 0) -> dict[str, str | None]:
        """Return attack -> None if `adversary` can run it with its "fast" budget, else the reason; see `refusal`.

        By default the adversary is the one that `Run.attack` takes for the attack.
        """
        refusals = {}
        for name in TABLES["attacks"]:
            try:
                refusals[name] = self.refusal(name, load("attacks", name).with_budget("fast"), adversary, client)
            except InvalidInput as error:
                refusals[name] = str(error)
        return refusals

    def refusal(self, name: str, attack: Attack, adversary: str | None = None, client: int = 0) -> str | None:
        """Return why `attack` by `adversary` would be refused here, in a line, or None.

        The attack itself is asked: it begins, and is stopped at its first query, at the first use of a model and at
        its first report of progress. What it would refuse only after that is not found out.
        """
        past = attack.phase is Phase.TRAINING
        try:
            check_rows(attack, self.data.victims.discrete, self.data.name, self.data.victims.unscaled)
            party = self.adversary(adversary or (FED if past and FED in self.engine.parties else None))
            if attack.reads:
                self._begin_uploads(name, attack, party, client)
            elif past:
                self._begin_training(name, attack, party, client)
            else:
                case = self._case(name, attack, party, self.victims(None), client, self.seed)
                self._begin(name, attack, case.view, case.knowledge)
        except AttackBegun:
            return None
        except InvalidInput as error:
            return str(error)
        return None

    def _begin_training(self, name: str, attack: Attack, party: str, client: int) -> None:
        """Begin an attack on recorded training; before training, check only whether there will be a record to use."""
        if (local := self.grants.local(party, client)) is None:
            raise InvalidInput(
                f"{type(attack).__name__} needs {Needs.UPDATES}; only an aggregation server gets those, in a "
                "schedule that has one, such as 'splitfed_v1'"
            )
        check_updates(attack, self.engine, self.data, self.grants.method)
        view = self.recorded(party, client)
        check_one_step(local)
        if view.messages:
            self._begin(name, attack, view, replace(self.grants.knowledge(party, client, self.seed), local=local))

    def _begin_uploads(self, name: str, attack: Attack, party: str, client: int) -> None:
        """Begin an attack on what a method's clients send; before training, check only what will be sent."""
        case = self.uploads.case(attack, party, client, self.seed)
        if case.view.messages:
            self._begin(name, attack, case.view, case.knowledge)

    def _begin(self, name: str, attack: Attack, view: View, knowledge: Knowledge) -> None:
        """Begin an attack, which is stopped at the first thing that takes time."""
        attack(view, stop_at_first_use(knowledge), generator(self.seed, "attack", name), stop_attack)

    def _attack_uploads(
        self, name: str, attack: Attack, party: str, client: int, seed: int, number: int | None, progress: Any
    ) -> AttackResult:
        """Let the aggregation server `party` attack what `client` sent for the run's method, up to round `number`."""
        if attack.target is Target.REPRESENTATIVES:
            check_scorable(self.data.auxiliary)
        case = self.uploads.case(attack, party, client, seed, number)
        if not case.readable:
            raise InvalidInput(f"client {client} sent {party!r} nothing that {name} reads and that was recorded")
        outcome = attack(case.view, case.knowledge, generator(seed, "attack", name, client), progress)
        truth, scores = self.uploads.score(attack, outcome.prediction, case, client, generator(seed, "grade"))
        return AttackResult(
            *(name, party, outcome.prediction, truth, scores, outcome.seconds),
            unadapted=self._unadapted(attack, party, client),
        )

    def _unadapted(self, attack: Attack, party: str, client: int) -> tuple[str, ...]:
        """Return the defenses of `client` that `attack` does not adapt to; see `splitfed.threats.adaptation`."""
        omitted: tuple[str, ...] = ()
        state = self.engine.training_attacks.get(party)
        if Needs.TRAINING_ATTACK in attack.requires and isinstance(state, TrainingAttackState):
            # A network of another layout than the client's is trained without what only that determines.
            omitted = state.site.sender.omitted if state.site.knowledge.architecture is None else ()
        return unadapted(attack, of_client(self.engine.defenses, client), omitted)

    def _check_no_labels(self, party: str, client: int, label_set: str | None) -> None:
        role = self.engine.parties[party].role
        for head in self.engine.topologies[client].heads:
            if party != FED and head.target == label_set and role in head.path:
                raise InvalidInput(f"party {party!r} is given the labels of {head.value!r}: it has none to predict")

    def _owns_all(self, party: str, client: int) -> bool:
        mine = {p.name for p in self.engine.run_parties.replicas[client].parties.values()}
        roles = set(self.engine.topologies[client].inputs.values())
        return party in mine and roles == {self.engine.parties[party].role}

    def recorded(self, party: str, client: int, number: int | None = None) -> View:
        """Return what `party` recorded of `client` in training up to round `number` (default: all), its own copies."""
        if party not in self.engine.link.recorders:
            raise InvalidInput(f"{party!r} was not recorded in training: record=Recording(parties=({party!r},))")
        check_client(self.engine, client)
        if number is not None:
            check_count("round", number)
        seen = self.engine.view(party).select(phase="train")
        kept = [m for m in seen.messages if m.stamp.replica == client and (number is None or m.stamp.epoch <= number)]
        return View(party, tuple(kept), copy.deepcopy(dict(seen.segments)))

    def _attack_training(
        self,
        name: str,
        attack: Attack,
        party: str,
        client: int,
        seed: int,
        number: int | None,
        progress: Progress | None,
        classifier: bool,
    ) -> AttackResult:
        check_updates(attack, self.engine, self.data, self.grants.method)
        view = self.recorded(party, client, number)
        gradients = self.grants.method is not None and self.grants.method.traits(self.engine.topology).sends_gradients
        kind = WEIGHT_GRADIENT if gradients else "weights"
        uploads = [m.stamp.epoch for m in view.messages if m.kind == kind and m.receiver == party]
        if not uploads or number not in (None, uploads[-1]):
            when = "" if number is None else f" in round {number}"
            raise InvalidInput(
                f"client {client} sent {party!r} no weights{when} that were recorded: take a schedule or method by "
                "which that party averages weights (splitfed_v1, fedavg), with Recording(parties=(...))"
            )
        knowledge = replace(
            self.grants.knowledge(party, client, derive(seed, "queries", name)), local=self.grants.local(party, client)
        )
        outcome = attack(view, knowledge, generator(seed, "attack", name, client, uploads[-1]), progress)
        rows = torch.cat(self.grants.batches(client, uploads[-1])).unique()
        victims = self.data.clients[client].train.rows(rows)
        truth, scores = self._match_and_score(attack, outcome.prediction, victims, generator(seed, "grade"), classifier)
        if len(auxiliary := self.data.auxiliary):
            # Matching favours the prediction, so the rows of somebody blind are matched in the same way.
            blind_rows = torch.randint(len(auxiliary), (len(victims),), generator=generator(seed, "blind"))
            blind = self._match_and_score(attack, auxiliary.x[blind_rows], victims, generator(seed, "grade"), False)[1]
            scores["random_pairing"] = blind["attack"]
        return AttackResult(
            *(name, party, outcome.prediction, truth, scores, outcome.seconds),
            unadapted=self._unadapted(attack, party, client),
        )

    def _match_and_score(
        self, attack: Attack, prediction: Tensor, victims: Dataset, drawn: torch.Generator, classifier: bool
    ) -> tuple[Tensor, Scores]:
        """Match the rows of `victims` to the predictions, here where the truth is known, and score them."""
        ordered = victims.rows(assignment(victims.x, prediction))
        return score_prediction(attack.target, prediction, ordered, self.data.auxiliary, drawn, classifier=classifier)

    def _score_stolen_model(self, clone: Clone | None, party: str, client: int, seed: int) -> Scores | None:
        """Score the whole model with the upstream segments of `clone`, beside the trained and fresh ones."""
        rows, engine = self.data.test_union(), self.engine
        if not isinstance(clone, SegmentRunner) or self.grants.classes is None or len(rows) == 0:
            return None
        head = engine.topologies[client].heads[0]

        def predict(upstream: Mapping[str, nn.Module]) -> Tensor:
            whole = self.grants.trained_segments(client, None, replaced=upstream)
            with torch.no_grad():
                return torch.cat([whole(x.to(engine.device))[head.value].cpu() for x in blocks(rows.source, 256)])

        fresh = self.grants.architecture(party, client)(seed).modules
        outputs = {"clone": predict(clone.modules), "trained": predict({}), "fresh": predict(fresh)}
        return score_clone(outputs, rows.label(head.target), generator(seed, "bootstrap"))
