"""Evaluates attacks on a trained run: what an adversary receives, and how its attacks score."""

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
    """Runs and scores attacks on the parties of a run; `grants` decides what each party may know."""

    def __init__(self, grants: KnowledgeGrants) -> None:
        self.grants, self.engine, self.data = grants, grants.engine, grants.data
        self.released = ReleasedRows(grants)
        self._updates, self._uploads = RecordedUpdates(grants), MethodUploads(grants)

    def adversary(self, name: str | None) -> str:
        """Return the party called `name`, by default the first without data; raise `InvalidInput` if there is none.

        The name of a role is accepted if only one party plays it.
        """
        return find_party(self.engine, name or curious(self.engine.topology))

    def victims(self, victims: Dataset | None) -> Dataset:
        """Return `victims`, by default the rows of the data set aside for attacks; raise `InvalidInput` without any."""
        chosen = self.data.victims if victims is None else victims
        if len(chosen) == 0:
            raise InvalidInput("there are no victims to attack: set some aside (victims=64)")
        return chosen

    def seed(self, seed: int | None) -> int:
        """Return `seed` (default: the seed of the run)."""
        return self.grants.seed if seed is None else read_seed(seed)

    def observation(
        self,
        adversary: str | None = None,
        victims: Dataset | None = None,
        client: int = 0,
        seed: int | None = None,
        releases: int = 1,
    ) -> Observation:
        """Return a checked request for what `adversary` receives of `victims`; parameters are those of `Run.attack`."""
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
        """Return one checked request for each (name, attack) of `attacks`; parameters are those of `Run.attack`."""
        past = [attack.phase is Phase.TRAINING for _, attack in attacks]
        trained = [one.phase is Phase.TRAINING or (number is not None and reads_training(one)) for _, one in attacks]
        if number is not None:
            check_count("round", number, high=max(self.grants.rounds - 1, 0))
            if not any(trained):
                raise InvalidInput(
                    f"round={number} is not allowed: {attacks[0][0]} does not read recorded training; leave it out"
                )
        if any(trained) and victims is not None:
            who = type(attacks[trained.index(True)][1]).__name__
            raise InvalidInput(f"{who} targets the client's training rows: leave victims out")
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
        """Raise `InvalidInput` for several releases that `attack` cannot use, and for rows that cannot be scored."""
        known = 0 <= client < self.engine.replicas
        check_releases(name, attack, releases, self.engine.topologies[client].computation if known else None)
        check_rows(attack, self.data.victims.discrete, self.data.name, self.data.victims.unscaled)
        if classifier or (attack.reads and attack.target is Target.REPRESENTATIVES):
            check_scorable(self.data.auxiliary)

    def observe(self, asked: Observation, phase: Phase = Phase.INFERENCE, step_rows: int = STEP_ROWS) -> View:
        """Pass the victims' rows through the parties of the client and return what the observing party received.

        `step_rows`: number of victims in one training step. With several releases, each has its own random draws, and
        the view holds their mean. Raises `InvalidInput` for several releases in a training step.
        """
        check_count("releases", asked.releases, low=1)
        if asked.releases > 1 and phase is not Phase.INFERENCE:
            raise InvalidInput(f"releases={asked.releases} is not allowed; expected 1 in {phase}")
        return self.released.observe(asked, phase, step_rows)[0]

    def attack(self, request: AttackRequest) -> AttackResult:
        """Run the attack of the requesting party on the victims, and return its scored result.

        For a membership attack an equal number of training rows is added to the victims. An attack on recorded training
        targets the rows that the client trained on in the requested round instead of the victims; so does an attack on
        labels in a training step if a round is given.
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
        """Return the inputs and ground truth of the attack; raises `InvalidInput` as `attack` does."""
        return self._phase(request.attack).case(request)

    def prepare_attack(self, request: AttackRequest) -> tuple[View, Knowledge]:
        """Return the view and the knowledge that the attack would be given; raises `InvalidInput` as `attack` does."""
        case = self.case(request)
        return prepare_attack(request.attack, case.view, case.knowledge)

    def _phase(self, attack: Attack) -> AttackPhase:
        if attack.reads:
            return self._uploads
        return self._updates if attack.phase is Phase.TRAINING else self.released

    def applicable(self, adversary: str | None = None, client: int = 0) -> dict[str, str | None]:
        """Return attack name -> None if `adversary` can run it with its budget "quick", else the reason (`refusal`).

        By default each attack gets the adversary that `Run.attack` would choose for it.
        """
        refusals = {}
        for name in TABLES["attacks"]:
            try:
                refusals[name] = self.refusal(name, load("attacks", name).with_budget("quick"), adversary, client)
            except InvalidInput as error:
                refusals[name] = str(error)
        return refusals

    def refusal(self, name: str, attack: Attack, adversary: str | None = None, client: int = 0) -> str | None:
        """Return in one line why `attack` by `adversary` would be refused, or None.

        The attack is started in a dry run and stopped at its first query, model evaluation or progress report; errors
        that it would raise later are not detected. Before training, when no message has been recorded, only static
        conditions are checked.
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
        """Return the client's defenses that `attack` does not adapt to, by name; see `splitfed.threats.adaptation`."""
        omitted: tuple[str, ...] = ()
        state = self.engine.training_attacks.get(party)
        if Needs.TRAINING_ATTACK in attack.requires and isinstance(state, TrainingAttackState):
            # A network of another layout than the client's is trained without what only that determines.
            omitted = state.site.sender.omitted if state.site.knowledge.architecture is None else ()
        return unadapted(attack, of_client(self.engine.defenses, client), omitted)
