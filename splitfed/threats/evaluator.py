"""Questions put to a trained run: what an adversary receives, and what its attacks achieve."""

from __future__ import annotations

from collections.abc import Sequence

from splitfed.attacks.base import Attack, Knowledge, Needs, Phase, Progress, Target, check_rows, prepare_attack
from splitfed.attacks.scoring.class_metrics import check_scorable
from splitfed.attacks.training_time.training_attack import TrainingAttackState
from splitfed.core.errors import InvalidInput, check_count
from splitfed.core.messages import View
from splitfed.core.per_client_defenses import of_client
from splitfed.core.random import generator, read_seed
from splitfed.data.dataset import Dataset
from splitfed.engines.base import FED
from splitfed.registry import TABLES, load
from splitfed.threats.adaptation import unadapted
from splitfed.threats.attack_phase import AttackPhase, Case
from splitfed.threats.attack_requests import AttackRequest, Observation, threat_model_of, with_threat_model
from splitfed.threats.attack_result import AttackResult
from splitfed.threats.dry_run import AttackBegun, stop_at_first_use, stop_attack
from splitfed.threats.knowledge import KnowledgeGrants, curious, find_party
from splitfed.threats.recorded_training import RecordedUpdates, reads_training
from splitfed.threats.released_rows import STEP_ROWS, ReleasedRows
from splitfed.threats.repeated_releases import check_releases
from splitfed.threats.upload_attacks import MethodUploads


class Evaluator:
    """Runs and scores attacks on the parties of a run, each of which may know what `grants` says."""

    def __init__(self, grants: KnowledgeGrants) -> None:
        self.grants, self.engine, self.data = grants, grants.engine, grants.data
        self.released = ReleasedRows(grants)
        self._updates, self._uploads = RecordedUpdates(grants), MethodUploads(grants)

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

    def seed(self, seed: int | None) -> int:
        """Return `seed`, by default that of the run."""
        return self.grants.seed if seed is None else read_seed(seed)

    def observation(
        self,
        adversary: str | None = None,
        victims: Dataset | None = None,
        client: int = 0,
        seed: int | None = None,
        releases: int = 1,
    ) -> Observation:
        """Return what `adversary` is asked about `victims`; parameters and their defaults as of `Run.attack`."""
        party, rows = self.adversary(adversary), self.victims(victims)
        return Observation(party=party, victims=rows, client=client, seed=self.seed(seed), releases=releases)

    def requests(
        self,
        attacks: Sequence[tuple[str, Attack]],
        adversary: str | None = None,
        victims: Dataset | None = None,
        *,
        client: int = 0,
        seed: int | None = None,
        number: int | None = None,
        classifier: bool = False,
        floors: bool = True,
        releases: int = 1,
        progress: Progress | None = None,
    ) -> tuple[AttackRequest, ...]:
        """Check `attacks`, name and attack of each, together; parameters and their defaults as of `Run.attack`."""
        past = [attack.phase is Phase.TRAINING for _, attack in attacks]
        trained = [one.phase is Phase.TRAINING or (number is not None and reads_training(one)) for _, one in attacks]
        if number is not None:
            check_count("round", number, high=max(self.grants.rounds - 1, 0))
            if not any(trained):
                raise InvalidInput(
                    f"round={number} is not allowed: {attacks[0][0]} is on no recorded training; leave it out"
                )
        if any(trained) and victims is not None:
            who = type(attacks[trained.index(True)][1]).__name__
            raise InvalidInput(f"{who} goes against training rows: name no victims")
        usual = FED if all(past) and FED in self.engine.parties else None
        party = self.adversary(adversary or usual)
        truth = self.data.victims if all(trained) else self.victims(victims)
        for name, attack in attacks:
            self._check(name, attack, client, releases, classifier)
        return tuple(
            AttackRequest(
                party=party,
                victims=truth,
                client=client,
                seed=self.seed(seed),
                releases=releases,
                name=name,
                attack=with_threat_model(attack, self.engine, party),
                number=number,
                classifier=classifier,
                floors=floors,
                progress=progress,
            )
            for name, attack in attacks
        )

    def _check(self, name: str, attack: Attack, client: int, releases: int, classifier: bool) -> None:
        """Refuse several releases where `attack` has no use for them, and what no data set like this can score."""
        known = 0 <= client < self.engine.replicas
        check_releases(name, attack, releases, self.engine.topologies[client].computation if known else None)
        check_rows(attack, self.data.victims.discrete, self.data.name, self.data.victims.unscaled)
        if classifier or (attack.reads and attack.target is Target.REPRESENTATIVES):
            check_scorable(self.data.auxiliary)

    def observe(self, asked: Observation, phase: Phase = Phase.INFERENCE, step_rows: int = STEP_ROWS) -> View:
        """Put the victims' rows through the parties of the client; return what the party received.

        `step_rows`: how many of them pass in one training step. Several releases have draws of their own each, and what
        is returned is their mean; they are refused in a training step.
        """
        check_count("releases", asked.releases, low=1)
        if asked.releases > 1 and phase is not Phase.INFERENCE:
            raise InvalidInput(f"releases={asked.releases} is not allowed; expected 1 in {phase}")
        return self.released.observe(asked, phase, step_rows)[0]

    def attack(self, request: AttackRequest) -> AttackResult:
        """Let the party run the attack against the victims, and score what it predicts.

        An attack on membership gets as many rows of training among the victims. An attack on recorded training goes
        against the rows that the client trained on in the round; the victims play no part in it, nor in one on labels
        in a training step where a round is given.
        """
        attack, name = request.attack, request.name
        phase = self._phase(attack)
        case = phase.case(request)
        if case.absent:
            raise InvalidInput(case.absent)
        drawn = generator(request.seed, "attack", name, *case.draws)
        outcome = attack(case.view, case.knowledge, drawn, request.progress)
        truth, scores, stolen, under_trained = phase.score(request, case, outcome)
        return AttackResult(
            *(name, request.party, outcome.prediction, truth, scores, outcome.seconds, outcome.clone, stolen),
            quick=attack.quick,
            error_bound=outcome.error_bound,
            selection=outcome.selection,
            under_trained=under_trained,
            unadapted=self._unadapted(outcome.member or attack, request.party, request.client),
            repeated=case.repeated,
            threat_model=threat_model_of(attack),
        )

    def case(self, request: AttackRequest) -> Case:
        """Return what the attack would be given, and what only the scorer knows; refuse as `attack` does."""
        return self._phase(request.attack).case(request)

    def prepare_attack(self, request: AttackRequest) -> tuple[View, Knowledge]:
        """Return the view and the knowledge that the attack would be shown; refuse as `attack` does."""
        case = self.case(request)
        return prepare_attack(request.attack, case.view, case.knowledge)

    def _phase(self, attack: Attack) -> AttackPhase:
        if attack.reads:
            return self._uploads
        return self._updates if attack.phase is Phase.TRAINING else self.released

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
        its first report of progress. What it would refuse only after that is not found out. Before training, when
        nothing has been recorded, only what there will be is checked.
        """
        try:
            (request,) = self.requests([(name, attack)], adversary, client=client)
            phase = self._phase(attack)
            phase.check(request)
            case = phase.case(request)
            if case.view.messages or not case.absent:
                drawn = generator(request.seed, "attack", name)
                request.attack(case.view, stop_at_first_use(case.knowledge), drawn, stop_attack)
        except AttackBegun:
            return None
        except InvalidInput as error:
            return str(error)
        return None

    def _unadapted(self, attack: Attack, party: str, client: int) -> tuple[str, ...]:
        """Return the defenses of `client` that `attack` does not adapt to; see `splitfed.threats.adaptation`."""
        omitted: tuple[str, ...] = ()
        state = self.engine.training_attacks.get(party)
        if Needs.TRAINING_ATTACK in attack.requires and isinstance(state, TrainingAttackState):
            # A network of another layout than the client's is trained without what only that determines.
            omitted = state.site.sender.omitted if state.site.knowledge.architecture is None else ()
        return unadapted(attack, of_client(self.engine.defenses, client), omitted)
