"""A run: one training with what it measured, ready to be evaluated, attacked and resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from splitfed.attacks.base import Attack, Phase, Progress
from splitfed.attacks.search_space import Choice
from splitfed.core.argument_kinds import guard_class
from splitfed.core.errors import InvalidInput, check_count, check_names, unknown
from splitfed.core.grouping import nest
from splitfed.core.messages import View
from splitfed.core.random import derive
from splitfed.core.state_encoding import check_state
from splitfed.data.conversion import as_tensor, as_type, check_finite
from splitfed.data.dataset import Dataset
from splitfed.data.from_python import Array
from splitfed.engines.engine import Engine
from splitfed.planning.private import counted_ledger
from splitfed.planning.uploads import sent_kinds
from splitfed.privacy.ledger import Ledger
from splitfed.stats.utility import ConstantAnswer
from splitfed.threats.attack_durations import AttackDuration, plan_attack
from splitfed.threats.attack_requests import name_attacks
from splitfed.threats.attack_result import AttackResult, with_cost
from splitfed.threats.evaluator import Evaluator
from splitfed.threats.knowledge import KnowledgeGrants
from splitfed.threats.release_information import ReleaseInformation, measure_release
from splitfed.threats.repeated_releases import check_releases
from splitfed.threats.tuning import SHARE, PseudoVictims, Tuned, check_tunable, tune
from splitfed.training.best_round import BestRound
from splitfed.training.callbacks import callback_states, find_reasons_to_stop, load_callback_states
from splitfed.training.client_scores import find_first_reaching
from splitfed.training.evaluation import constant_answer, evaluate_across, evaluate_part
from splitfed.training.export import Model, export, state_of
from splitfed.training.folder import RunFolder
from splitfed.training.frames import history_frame
from splitfed.training.plots import RunPlots
from splitfed.training.round_trainer import RoundTrainer
from splitfed.training.run_plan import RunPlan
from splitfed.training.run_summary import RunSummary, describe_run, summarize

if TYPE_CHECKING:
    import pandas as pd


@guard_class
class Run:
    """The parties of `plan` on `engine`, the history of every round, and the means to train on and to question them.

    As far as `folder` has it, where it has one: before the next round.
    """

    def __init__(self, plan: RunPlan, engine: Engine, folder: RunFolder | None = None) -> None:
        self.plan, self.engine, self.folder = plan, engine, folder
        prepared, self.callbacks = plan.prepared, tuple(plan.logging.callbacks)
        self.data, self.schedule, self.method = prepared.data, prepared.schedule, prepared.method
        self.training, self.seed = prepared.training, prepared.training.seed
        self.history: list[dict[str, Any]] = []
        self.trainer = RoundTrainer(engine, prepared, plan.evaluation.speeds)
        self.learners, self.newest = self.trainer.learners, self.trainer.newest
        self.best = BestRound(self.trainer, self.history, plan.evaluation)
        known = engine, self.data, self.seed, self.newest, self.training, plan.rounds, self.schedule, self.method
        sent = partial(sent_kinds, prepared)
        self.evaluator = Evaluator(KnowledgeGrants(*known, sent, lambda: self.best.rounds or self.plan.rounds))
        self._calls, self._scorings = 0, 0
        if folder is not None:
            folder.restore(self)
        self.best.answer()

    def __repr__(self) -> str:
        """Tell in a line what was trained and how well it does, beside whoever always gives the same answer."""
        return describe_run(self.engine, self.data, self.history, self.best.entry)

    def _repr_html_(self) -> str:
        """Return the summary as a table for a notebook."""
        return self.summary()._repr_html_()

    def summary(self) -> RunSummary:
        """Return what was trained how, how well it does and what that cost; printed a line each."""
        promised = self.history and "epsilon" in self.history[-1]
        return summarize(self.plan, self.engine, self.history, self.best.entry, self.ledger if promised else None)

    def to_frame(self, clients: bool = False) -> pd.DataFrame:
        """Return the history as a pandas table, a row a round; with `clients` a row a scored round and client.

        Columns as in `splitfed.training.frames.round_row`.
        """
        return history_frame(self.history, clients)

    @property
    def plot(self) -> RunPlots:
        """Figures of the run: `run.plot.history()`, `run.plot.attacks(results)`, `run.plot.traffic()`."""
        return RunPlots(self.engine, self.data, self.history)

    def state_dict(self, client: int | None = None) -> dict[str, Tensor]:
        """Return the trained state of the model that `client` answers with now, under its original names: copies.

        `client`: from 0; None where all clients use the same weights. Raises `InvalidInput` where they do not.
        """
        return state_of(self.evaluator.grants, client)

    def export(self, model: Model, client: int | None = None) -> Model:
        """Load the trained state into `model`, the user's own uncut one, and return it; `client` as in `state_dict`.

        Names and shapes must be exactly those of the run: raises `InvalidInput`, and leaves `model` as it was.
        """
        return export(self.evaluator.grants, model, client)

    def continue_training(self, rounds: int | None = None) -> None:
        """Train `rounds` more rounds, >= 1 (default: those that are left of the plan), as if planned from the start.

        To the same weights as a run of that many rounds; what was scored as the last round stays in the history. A run
        with a folder goes on in it. Raises `InvalidInput` for a run that a callback has ended, and where the length was
        part of what was worked out: a noise for a target epsilon, a method that follows the rounds.
        """
        longer = self.plan_more(rounds)
        total = longer.rounds if rounds is None else len(self.history) + rounds
        with nullcontext() if self.folder is None else self.folder.alone():
            if longer is not self.plan and self.folder is not None:
                self.folder.lengthen(total)
            self.plan, self.evaluator.grants.rounds = longer, longer.rounds
            self.train_to(total)

    def plan_more(self, rounds: int | None) -> RunPlan:
        """Return the plan of this run with `rounds` more rounds: the one it has, where that is of as many.

        Raises `InvalidInput` as `continue_training` does.
        """
        if rounds is not None:
            check_count("rounds", rounds, low=1)
        total = len(self.history) + (rounds or 0)
        if self.stopped is not None:
            raise InvalidInput(f"the run has ended early ({self.stopped}); train it again without that callback")
        return self.plan if total <= self.plan.rounds else self.plan.lengthen(total)

    def detach_folder(self) -> None:
        """Keep what follows in memory alone: nothing more is written into the folder of the run."""
        self.folder = None

    def train_to(self, rounds: int) -> None:
        """Train until the run has had `rounds` rounds, the last of them scored; it ends early where a callback says so.

        To be called by who holds the folder: see `continue_training`.
        """
        self.best.go_on()
        with ExitStack() as ends:
            for callback in self.callbacks:
                callback.on_start(self)
                ends.callback(callback.on_end, self)
            if self.folder is not None:
                check_state(callback_states(self.callbacks), "the state of callbacks")
            for number in range(len(self.history), rounds):
                if self.stopped is not None:
                    break
                metrics = self._train_round(number, rounds)
                if self.folder is not None:
                    self.folder.check_there()
                self._end_round(metrics)
                if self.folder is not None:
                    path = self.folder.save(self, metrics)
                    for callback in self.callbacks:
                        callback.on_checkpoint(self, path)
                if self.plan.logging.progress is not None:
                    self.plan.logging.progress(number + 1, rounds, metrics)
            self.best.answer()

    def _train_round(self, number: int, rounds: int) -> dict[str, Any]:
        """Train round `number` of `rounds`, score what is due, and return what the history holds of it."""
        self.best.hold()
        metrics = self.trainer.train(number)
        if self.plan.evaluation.due(number, rounds):
            self._score(metrics, last=number + 1 == rounds)
        self._note_epsilon(metrics)
        self.history.append(metrics)
        for party in self.plan.adversaries.due(number, rounds):
            self._score_attack(metrics, party)
        return metrics

    def _end_round(self, metrics: dict[str, Any]) -> None:
        """Ask the callbacks whether training ends with this round; where it does, it is scored like any last one."""
        if not (reasons := find_reasons_to_stop(self.callbacks, self, metrics)):
            return
        metrics["stopped"] = "; ".join(reasons)
        if "test" not in metrics:
            self._score(metrics, last=True)
            self._note_epsilon(metrics)
        for party in self.plan.adversaries.evaluate_every:
            if party not in metrics.get("training_attack_scores", {}):
                self._score_attack(metrics, party)

    def _score(self, metrics: dict[str, Any], last: bool) -> None:
        metrics["validation"] = self.evaluate("validation", metrics["round"])
        # Of the round that the run answers for, at once: a second scoring would release every row again.
        interval = self.best.check_score(metrics) or last
        metrics["test"] = self.evaluate("test", metrics["round"], interval=interval)

    def _note_epsilon(self, metrics: dict[str, Any]) -> None:
        if "epsilon" in metrics:
            # Scoring releases rows too, so it is counted when that is done.
            ledger = self.ledger
            metrics["epsilon"] = ledger.epsilon
            metrics["epsilons"] = {total.protects: total.epsilon for total in ledger.totals}

    def _score_attack(self, metrics: dict[str, Any], party: str) -> None:
        metrics.setdefault("training_attack_scores", {})[party] = self.evaluate_training_attack(party)

    def evaluate(self, part: str, number: int | None = None, interval: bool = False) -> dict[str, Any]:
        """Score `part` ("validation" or "test") for each client and on the union of all.

        Each client's rows go through the segments it would use now. Defenses draw afresh at every call; `number` asks
        for the draw of a certain round. Clients without rows in the part have None. With several label sets the scores
        are those of the first head, and "heads" has the union's of each. "spread": how far several clients lie apart
        (`splitfed.training.client_scores.summarize_clients`). `interval` asks for that of the union over rows
        (`splitfed.stats.utility.over_rows`).
        """
        check_names("part", ("validation", "test"), part)
        if number is None:
            # Noise that was used once would cancel in the difference of two releases by different weights.
            number = derive(self.seed, "evaluate", len(self.history), self._scorings)
            self._scorings += 1
        crosswise = self.plan.evaluation.across_clients
        answer = evaluate_part(self.trainer, self.evaluator.grants, part, number, interval, crosswise)
        for callback in self.callbacks:
            callback.on_evaluate(self, part, answer)
        return answer

    def across(self, part: str, number: int) -> dict[str, list[float | None]]:
        """Score each client's model on its own rows of `part`, on all others', and on the union of both, by client.

        Backward and forward transfer and accuracy, where every client is a domain. `number`: as in `evaluate`.
        """
        return evaluate_across(self.trainer, self.evaluator.grants, part, number)

    def predict(self, x: Array, client: int = 0, number: int | None = None, head: str | None = None) -> Tensor:
        """Return the model's output for `x` (rows, ...), computed through the parties: (rows, outputs).

        x: finite numbers, a tensor or an array, taken as float32 as the data are, or whole ones for a run on those.
        Defenses draw afresh at every call; `number` asks for the draw of a certain call. A run that is loaded from its
        folder starts over with the draws of the first call. `head`: whose output, where
        there are several (default: the first).
        """
        values = [h.value for h in self.engine.topology.heads]
        head = values[0] if head is None else head
        check_names("head", values, head)
        rows = as_tensor("x", x, share=True)
        if not self.data.victims.discrete:
            rows = as_type("x", rows, "float32")
        check_finite("x", rows)
        self.evaluator.grants.lend(client, "predict", rows)
        if number is None:
            number, self._calls = self._calls, self._calls + 1
        prediction = self.engine.predict(client, "predict", "predict", number, borrow=self.newest(client), head=head)
        return prediction.outputs[head]

    def observe(
        self,
        adversary: str | None = None,
        *,
        victims: Dataset | None = None,
        client: int = 0,
        seed: int | None = None,
        phase: Phase = Phase.INFERENCE,
        releases: int = 1,
    ) -> View:
        """Put the victims' rows through the parties of `client`; return what `adversary` received.

        `phase`: `Phase.INFERENCE`, or `Phase.STEP` for a training step that moves no weight, so that gradients cross
        too. `releases`: how often they pass at inference; the view holds the mean. It holds copies of the adversary's
        own segments. Defaults as in `attack`.
        """
        return self.evaluator.observe(self.evaluator.observation(adversary, victims, client, seed, releases), phase)

    def plan_attack(
        self,
        attack: str | Attack,
        *,
        adversary: str | None = None,
        victims: Dataset | None = None,
        client: int = 0,
        seed: int | None = None,
        budget: str | None = None,
        releases: int = 1,
    ) -> AttackDuration | None:
        """Return about how long `attack` would take here, from a little of its work that is done and timed for this.

        A range, from no doubling of its work to all that it may make. None for an attack that does not say what its
        work is. Floors, oracles and scores are left out. The rest is as in `attack`, and so is what is refused.
        """
        ((name, ready),) = name_attacks(attack, budget)
        if ready.phase is Phase.TRAINING:
            return None
        (request,) = self.evaluator.requests(
            ((name, ready),), adversary, victims, client=client, seed=seed, releases=releases
        )
        return plan_attack(self.evaluator, request)

    def attack(
        self,
        attacks: Sequence[str | Attack] | str | Attack,
        *,
        adversary: str | None = None,
        victims: Dataset | None = None,
        client: int = 0,
        seed: int | None = None,
        progress: Progress | None = None,
        round: int | None = None,
        classifier: bool = False,
        budget: str | None = None,
        floors: bool = True,
        releases: int = 1,
    ) -> list[AttackResult]:
        """Let `adversary` (a party; default: the first without data) run `attacks` against `victims`.

        The victims' rows are put through the parties of `client`, and the adversary gets what arrived. They default to
        the rows set aside for this, which nobody trained on; `seed` defaults to the run's. Attacks on recorded training
        go against the rows of `client` in `round` (default: the newest that was recorded) instead, and their default
        adversary is the aggregation server. With a `round` attacks on labels that read gradients go against those rows
        too, by the mean of what was recorded of each over all its steps up to it.
        `classifier`: score reconstructions by the accuracy of a classifier of clean auxiliary rows as well. `budget`:
        of attacks, all given by name: "standard", "quick" (a quick look), "full"; None is the usual one of each.
        `floors`: score closed-form floors and oracles beside reconstructions, at the cost of five queries of all
        auxiliary rows and a few matrix products, and what the adversary's own data say beside labels; False leaves them
        out. `releases`: how often each victim's row is released, >= 1: random defenses draw anew in each, and the
        adversary gets the mean, of rows that it asks for too. Refused for attacks that read no release of inference.
        """
        requests = self.evaluator.requests(
            name_attacks(attacks, budget),
            adversary,
            victims,
            client=client,
            seed=seed,
            number=round,
            classifier=classifier,
            floors=floors,
            releases=releases,
            progress=progress,
        )
        results = []
        for request in requests:
            result = self.evaluator.attack(request)
            if result.repeated is not None:
                result = with_cost(result, self.engine, client, self.ledger.delta)
            results.append(result)
            for callback in self.callbacks:
                callback.on_attack_end(self, result)
        return results

    def measure_release(
        self,
        adversary: str | None = None,
        *,
        victims: Dataset | None = None,
        client: int = 0,
        seed: int | None = None,
        smoothing: float | None = None,
        releases: int = 1,
    ) -> ReleaseInformation:
        """Return what arrives at `adversary` tells of the victims' rows, without an attack.

        A bound on the error of every attack and mutual information where noise of a known density is added, usable
        information and invertibility. `smoothing`: None, or the deviation of Gaussian noise that the victims' rows
        contain, for which the bound is proven. `releases`: of each row, all of which are measured together; Fisher
        information adds up over them. The rest is as in `attack`.
        """
        asked = self.evaluator.observation(adversary, victims, client, seed, releases)
        return measure_release(self.evaluator, asked, smoothing)

    def evaluate_training_attack(self, party: str) -> dict[str, Any]:
        """Score what the attack at `party` knows of the victims: metric -> who -> the mean over them; changes nothing.

        A prediction that cannot be scored, as it is not finite for instance, is {"refused": why}.
        """
        plan = getattr(self.engine.training_attacks.get(party), "plan", None)
        if not isinstance(plan, Attack):
            raise unknown("party with a training attack", party, self.engine.training_attacks)
        try:
            # Asked in training, round after round: closed-form floors would cost more than the answer.
            (result,) = self.attack(plan, adversary=party, floors=False)
        except InvalidInput as error:
            return {"refused": str(error)}
        scores = ((who, *score) for who, metrics in result.scores.items() for score in metrics.items())
        return nest((metric, who, interval.mean) for who, metric, interval in scores)

    def tune(
        self,
        attack: str | Attack,
        space: Mapping[str, Choice] | None = None,
        *,
        trials: int = 20,
        seed: int | None = None,
        adversary: str | None = None,
        client: int = 0,
        share: float = SHARE,
        progress: Progress | None = None,
        releases: int = 1,
    ) -> Tuned:
        """Try `trials` settings of `attack` on auxiliary rows, and return the best or the one given; no victim is read.

        `space`: parameter -> a `Span` of numbers or a list of values (default: what the attack declares). `share` of
        the auxiliary rows stand in for victims, and the attack learns from the others. The rest is as in `attack`.
        """
        ((name, ready),) = name_attacks(attack)
        among = ready.space if space is None else space
        check_tunable(name, ready, among)
        check_releases(name, ready, releases)
        base = self.evaluator.seed(seed)
        bench = PseudoVictims(self.evaluator, ready, self.evaluator.adversary(adversary), client, base, share, releases)
        return tune(bench, ready, among, trials, base, progress)

    def applicable(self, adversary: str | None = None, client: int = 0) -> dict[str, str | None]:
        """Return for every registered attack None, or why `adversary` cannot run it; nothing is trained."""
        return self.evaluator.applicable(adversary, client)

    @property
    def utility(self) -> float:
        """The metric of the first head on the union of all clients' test rows, of the round `run.best.entry["round"]`.

        What it is called stands in `run.history[-1]["test"]["metric"]`. Raises `InvalidInput` without test rows.
        """
        score = self.best.entry["test"]["union"]
        if score is None:
            raise InvalidInput("the run has no test rows: keep some (test=0.2)")
        return float(score)

    @property
    def accuracy(self) -> float:
        """The `utility` of a task whose metric is accuracy, in [0, 1]; `InvalidInput` for every other task."""
        if (metric := self.best.entry["test"]["metric"]) != "accuracy":
            raise InvalidInput(f"the run has no accuracy: its task is scored by {metric!r}; ask for run.utility")
        return self.utility

    @property
    def constant(self) -> ConstantAnswer | None:
        """What always giving one answer, the best by all clients' training labels, scores on the same test rows.

        The most frequent class, or the mean; None where the task has no such answer, or without test rows.
        """
        return constant_answer(self.engine.topology, self.data)

    def rounds_to(self, target: float) -> int | None:
        """Return after how many rounds the union of the validation rows first scored `target` or better; None: never.

        A round that was not scored (`Evaluation.every`) does not count as having reached it.
        """
        found = find_first_reaching(self.history, target, self.data.task.higher_is_better)
        return None if found is None else int(found["round"]) + 1

    @property
    def stopped(self) -> str | None:
        """Why a callback has ended training before its planned rounds, in a line; None where none has."""
        return self.history[-1].get("stopped") if self.history else None

    @property
    def bytes(self) -> int:
        """Bytes that crossed in training: activations, gradients, labels, weights."""
        return self.engine.traffic.bytes("train")

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of the training rounds, evaluation left out."""
        return float(sum(entry["seconds"] for entry in self.history))

    @property
    def ledger(self) -> Ledger:
        """What every private mechanism was used for so far, in training and scoring, and what that costs together.

        Where a callback may end training early it states all planned rounds, whatever was trained of them.
        """
        counted = counted_ledger(self.engine, self.schedule, self.method, self.plan.evaluation.delta)
        return replace(self.plan.ledger, replaced=counted.replaced) if self.plan.deciders else counted

    @property
    def epsilon(self) -> float | None:
        """What all that crosses costs together at the ledger's delta; None where some of it has no promise.

        `str(run.ledger)` says what is promised of which part, and what crosses beside it.
        """
        return self.ledger.epsilon

    @property
    def method_state(self) -> dict[str, Any]:
        """What the federated method keeps from round to round, by its own names."""
        return self.trainer.method_state

    def state(self) -> dict[str, Any]:
        """Return the whole state by name: every party, recorder, counter, the schedule and the callbacks."""
        with self.best.newest():
            return self.trainer.state(callback_states(self.callbacks)) | self.best.state()

    def load_state(self, states: Mapping[str, Any]) -> None:
        """Go back to `states`, as `state` returned them."""
        load_callback_states(self.callbacks, self.trainer.load_state(states))
        self.best.load_state(states)
