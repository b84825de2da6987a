"""A run: one training with what it measured, ready to be evaluated, attacked and resumed; and what it calls back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from splitfed.attacks.base import Attack, Phase, Progress
from splitfed.attacks.search_space import Choice
from splitfed.core.argument_kinds import guard_class
from splitfed.core.errors import InvalidInput, check_names, unknown
from splitfed.core.grouping import nest
from splitfed.core.messages import View
from splitfed.core.random import derive
from splitfed.costs.clock import Clock
from splitfed.data.conversion import as_tensor, as_type, check_finite
from splitfed.data.dataset import Dataset, Federation
from splitfed.data.from_python import Array
from splitfed.engines.engine import Engine
from splitfed.planning.validation import Prepared
from splitfed.schedules.base import Schedule, State
from splitfed.threats.attack_durations import AttackDuration, plan_attack
from splitfed.threats.attack_requests import name_attacks
from splitfed.threats.attack_result import AttackResult, with_cost
from splitfed.threats.release_information import ReleaseInformation, measure_release
from splitfed.threats.repeated_releases import check_releases
from splitfed.threats.tuning import SHARE, PseudoVictims, Tuned, check_tunable, tune
from splitfed.training.evaluation import evaluate_across, evaluate_part
from splitfed.training.export import Model, export, state_of
from splitfed.training.folder import RunFolder
from splitfed.training.frames import history_frame
from splitfed.training.plots import RunPlots
from splitfed.training.run_state import RunState
from splitfed.training.run_summary import RunSummary, describe_run, summarize

if TYPE_CHECKING:
    import pandas as pd


class Callback:
    """Base of all callbacks: every hook does nothing unless it is overridden; what one raises ends the training.

    A run that is resumed repeats the round that a crash cut short: a callback may be told of the same round twice.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a method that is called like a hook and is none."""
        super().__init_subclass__(**options)
        hooks = [name for name in vars(Callback) if name.startswith("on_")]
        for name in vars(cls):
            if name.startswith("on_") and name not in hooks:
                raise unknown(f"hook of callback {cls.__name__}", name, hooks)

    @property
    def decides_by(self) -> str | None:
        """What the end of training depends on, in words, if `on_round_end` may end it; None if it never does."""
        return None

    @property
    def public(self) -> bool:
        """Whether the rows that it decides by are public, so that no promise is about them."""
        return False

    def check(self, prepared: Prepared) -> None:
        """Refuse, by `InvalidInput`, a run that it cannot serve, before anything is computed or written."""

    def on_start(self, run: Run) -> None:
        """Act before the first round that is trained now: the one after `run.history`, which a resumed run has."""

    def on_round_end(self, run: Run, metrics: Mapping[str, Any]) -> str | None:
        """Act after a round, before its checkpoint; return why training shall end here, in few words, or None.

        `metrics`: the entry of the round in `run.history`.
        """
        return None

    def on_evaluate(self, run: Run, part: str, scores: Mapping[str, Any]) -> None:
        """Act after "validation" or "test" rows were scored; `scores` as `Run.evaluate` returns them."""

    def on_attack_end(self, run: Run, result: AttackResult) -> None:
        """Act after an attack on the run has ended and was scored."""

    def on_checkpoint(self, run: Run, folder: Path) -> None:
        """Act after the checkpoint of a round was written into `folder`; never called without a folder."""

    def on_end(self, run: Run) -> None:
        """Act when no more rounds are trained now, also where training was broken off by an error."""

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs of it: plain values and tensors; kept in every checkpoint."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`, as `state` returned it."""


class PlannedTraining(Protocol):
    """How a run trains."""

    @property
    def rounds(self) -> int:
        """For how many rounds in all."""

    def continue_training(self, run: Run, rounds: int | None) -> None:
        """Train `rounds` more rounds (None: those that are left); see `Run.continue_training`."""


@guard_class
class Run(RunState):
    """The parties after training, the history of every round, and the means to question them."""

    def __init__(
        self,
        engine: Engine,
        data: Federation,
        schedule: Schedule,
        schedule_state: State,
        seed: int,
        folder: RunFolder | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(engine, data, schedule, schedule_state, seed, folder, clock)
        self.callbacks: tuple[Callback, ...] = ()
        self.plan: PlannedTraining | None = None
        self._calls, self._scorings = 0, 0

    def __repr__(self) -> str:
        """Tell in a line what was trained and how well it does, beside whoever always gives the same answer."""
        return describe_run(self)

    def _repr_html_(self) -> str:
        """Return the summary as a table for a notebook."""
        return self.summary()._repr_html_()

    def summary(self) -> RunSummary:
        """Return what was trained how, how well it does and what that cost; printed a line each."""
        return summarize(self)

    def to_frame(self, clients: bool = False) -> pd.DataFrame:
        """Return the history as a pandas table, a row a round; with `clients` a row a scored round and client.

        Columns as in `splitfed.training.frames.round_row`.
        """
        return history_frame(self.history, clients)

    @property
    def plot(self) -> RunPlots:
        """Figures of the run: `run.plot.history()`, `run.plot.attacks(results)`, `run.plot.traffic()`."""
        return RunPlots(self)

    def state_dict(self, client: int | None = None) -> dict[str, Tensor]:
        """Return the whole model's trained state under its original names, as `client` would use it now: copies.

        `client`: from 0; None where all clients use the same weights. Raises `InvalidInput` where they do not.
        """
        return state_of(self, client)

    def export(self, model: Model, client: int | None = None) -> Model:
        """Load the trained state into `model`, the user's own uncut one, and return it; `client` as in `state_dict`.

        Names and shapes must be exactly those of the run: raises `InvalidInput`, and leaves `model` as it was.
        """
        return export(self, model, client)

    def continue_training(self, rounds: int | None = None) -> None:
        """Train `rounds` more rounds, >= 1 (default: those that are left of the plan), as if planned from the start.

        To the same weights as a run of that many rounds; what was scored as the last round stays in the history. A run
        with a folder goes on in it. Raises `InvalidInput` for a run that a callback has ended, and where the length was
        part of what was worked out: a noise for a target epsilon, a method that follows the rounds.
        """
        if self.plan is None:
            raise InvalidInput("this run was not made by splitfed.train: there is no plan to go on with")
        self.plan.continue_training(self, rounds)

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
        answer = evaluate_part(self, part, number, interval)
        for callback in self.callbacks:
            callback.on_evaluate(self, part, answer)
        return answer

    def across(self, part: str, number: int) -> dict[str, list[float | None]]:
        """Score each client's model on its own rows of `part`, on all others', and on the union of both, by client.

        Backward and forward transfer and accuracy, where every client is a domain. `number`: as in `evaluate`.
        """
        return evaluate_across(self, part, number)

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
        of attacks, all given by name: "default", "fast" (a quick look), "paper"; None is the usual one of each.
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

    def state(self) -> dict[str, Any]:
        """Return the whole state by name: every party, recorder, counter and the schedule."""
        engine = self.engine.state()
        parties: dict[str, Any] = {f"party-{name}": state for name, state in engine.pop("parties").items()}
        clock = {} if self.clock is None else {"clock": self.clock.state()}
        method = {} if self.method is None else {"method": self.method_state}
        callbacks = {"callbacks": states} if (states := callback_states(self.callbacks)) else {}
        return {**parties, "run": {**engine, **clock, **method, **callbacks, "schedule": self.schedule_state}}

    def load_state(self, states: Mapping[str, Any]) -> None:
        """Go back to `states`, as `state` returned them."""
        check_names("state", states, "run")
        shared = dict(states["run"])
        self.schedule_state = shared.pop("schedule")
        load_callback_states(self.callbacks, shared.pop("callbacks", {}))
        if self.clock is not None:
            self.clock.load_state(shared.pop("clock"))
        self._method.load_state({} if self.method is None else shared.pop("method"))
        parties = {n.removeprefix("party-"): s for n, s in states.items() if n.startswith("party-")}
        self.engine.load_state({"parties": parties, **shared})


def callback_states(callbacks: Sequence[Callback]) -> dict[str, dict[str, Any]]:
    """Return the states of all callbacks that have one, by class and number."""
    return {name: state for name, one in _numbered(callbacks).items() if (state := one.state())}


def load_callback_states(callbacks: Sequence[Callback], states: Mapping[str, Mapping[str, Any]]) -> None:
    """Give every callback its state back; one that was not there before keeps what it has."""
    for name, one in _numbered(callbacks).items():
        if name in states:
            one.load_state(states[name])


def _numbered(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Return every callback by its class, and its number among those of its class."""
    found: dict[str, Callback] = {}
    for one in callbacks:
        name = type(one).__qualname__
        found[f"{name} {sum(key.rpartition(' ')[0] == name for key in found)}"] = one
    return found
