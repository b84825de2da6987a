"""The rounds of a run: train one, score what is due, tell the callbacks, keep it; and more of them later."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from splitfed.core.defense import privacy_event
from splitfed.core.errors import InvalidInput, check_count
from splitfed.core.random import derive, stream
from splitfed.core.state_encoding import check_state
from splitfed.planning.validation import Prepared
from splitfed.schedules.base import Round
from splitfed.training.run import Run, callback_states
from splitfed.training.settings import Adversaries, Evaluation, Logging, is_due


@dataclass(frozen=True)
class RunPlan:
    """How a run trains: `prepared` for `rounds` rounds, and what is measured and kept of them.

    `prepare_for(rounds)`: returns the same prepared for another number of rounds, or refuses it.
    """

    prepared: Prepared
    rounds: int
    adversaries: Adversaries
    evaluation: Evaluation
    logging: Logging
    prepare_for: Callable[[int], Prepared]

    def continue_training(self, run: Run, rounds: int | None) -> None:
        """Train `rounds` more rounds (None: those that are left of the plan); see `Run.continue_training`."""
        total = check_longer(run, self, rounds)
        plan = replace(self, rounds=max(total, self.rounds))
        with nullcontext() if run.folder is None else run.folder.alone():
            if total > self.rounds and run.folder is not None:
                run.folder.lengthen(total)
            run.plan, run.evaluator.grants.rounds = plan, plan.rounds
            train_rounds(run, replace(plan, rounds=total))


def train_rounds(run: Run, plan: RunPlan) -> None:
    """Train the rounds of `plan` that the run has not had yet; it ends early where a callback says so."""
    with ExitStack() as ends:
        for callback in run.callbacks:
            callback.on_start(run)
            ends.callback(callback.on_end, run)
        if run.folder is not None:
            check_state(callback_states(run.callbacks), "the state of callbacks")
        for number in range(len(run.history), plan.rounds):
            if run.stopped is not None:
                break
            metrics = _train_round(run, plan, number)
            if run.folder is not None:
                run.folder.check_there()
            _end_round(run, plan, metrics)
            if run.folder is not None:
                path = run.folder.save(run, metrics)
                for callback in run.callbacks:
                    callback.on_checkpoint(run, path)
            if plan.logging.progress is not None:
                plan.logging.progress(number + 1, plan.rounds, metrics)


def check_longer(run: Run, plan: RunPlan, rounds: int | None) -> int:
    """Return how many rounds the run has in all after `rounds` more (None: those of its plan); refuse what cannot be.

    Refused: a run that was ended early, and one whose method or defenses were worked out for its length.
    """
    done = len(run.history)
    if rounds is not None:
        check_count("rounds", rounds, low=1)
    total = plan.rounds if rounds is None else done + rounds
    if run.stopped is not None:
        raise InvalidInput(f"the run has ended early ({run.stopped}); train it again without that callback")
    if total <= plan.rounds:
        return plan.rounds if rounds is None else total
    if run.committed is not None:
        raise InvalidInput(
            f"the privacy of this run is stated for {plan.rounds} rounds, as a callback could end it before; "
            "train it again with more"
        )
    then = plan.prepare_for(total)
    for now, later in zip((plan.prepared.method, *plan.prepared.defenses), (then.method, *then.defenses), strict=True):
        if repr(now) != repr(later):
            raise InvalidInput(
                f"{type(now).__name__} was worked out for {plan.rounds} rounds, and would be another one for {total}: "
                "train the run again with more"
            )
    return total


def _train_round(run: Run, plan: RunPlan, number: int) -> dict[str, Any]:
    """Train round `number`, score what is due, and return what the history holds of it."""
    engine, training = run.engine, plan.prepared.training
    started = time.perf_counter()
    if training.restart_optimizers:
        engine.restart_optimizers()
    # Passes forward draw from streams of their parties; backward, a loss or an optimizer draws from the default ones.
    with stream(derive(training.seed, "round", number), run.engine.device, everywhere=True):
        run.query(training, number)
        done = run.aggregate(run.schedule.round(run.trainer, training, number, run.schedule_state), number)
    engine.end_round()
    metrics = _round_metrics(run, done, number, time.perf_counter() - started)
    if plan.evaluation.due(number, plan.rounds):
        _score(run, metrics, last=number + 1 == plan.rounds)
    _note_epsilon(run, metrics)
    run.history.append(metrics)
    for party, every in plan.adversaries.evaluate_every.items():
        if is_due(every, number, plan.rounds):
            _score_attack(run, metrics, party)
    return metrics


def _end_round(run: Run, plan: RunPlan, metrics: dict[str, Any]) -> None:
    """Ask the callbacks whether training ends with this round; where it does, it is scored like any last one."""
    reasons = []
    for callback in run.callbacks:
        reason = callback.on_round_end(run, MappingProxyType(metrics))
        if reason is not None and callback.decides_by is None:
            raise InvalidInput(
                f"{type(callback).__name__} ends training ({reason}) and does not say by what: define decides_by"
            )
        reasons += [] if reason is None else [" ".join(str(reason).split())]
    if not reasons:
        return
    metrics["stopped"] = "; ".join(reasons)
    if "test" not in metrics:
        _score(run, metrics, last=True)
        _note_epsilon(run, metrics)
    for party in plan.adversaries.evaluate_every:
        if party not in metrics.get("training_attack_scores", {}):
            _score_attack(run, metrics, party)


def _score(run: Run, metrics: dict[str, Any], last: bool) -> None:
    for part in ("validation", "test"):
        # Once, in the last round, test rows are scored with an interval: a second scoring releases every row again.
        metrics[part] = run.evaluate(part, metrics["round"], interval=last and part == "test")


def _note_epsilon(run: Run, metrics: dict[str, Any]) -> None:
    if "epsilon" in metrics:
        # Scoring releases rows too, so it is counted when that is done.
        ledger = run.ledger
        metrics |= {"epsilon": ledger.epsilon, "epsilons": {total.protects: total.epsilon for total in ledger.totals}}


def _score_attack(run: Run, metrics: dict[str, Any], party: str) -> None:
    metrics.setdefault("training_attack_scores", {})[party] = run.evaluate_training_attack(party)


def _round_metrics(run: Run, done: Round, number: int, seconds: float) -> dict[str, Any]:
    """Return what round `number`, which took `seconds`, did, before anything is scored; epsilon is filled in later."""
    engine = run.engine
    metrics: dict[str, Any] = {
        "round": number,
        "loss": _mean(done.losses),
        "steps": len(done.losses),
        "clients": len(done.clients),
        "dropped": list(done.dropped),
        "averaged": done.averaged,
        "seconds": seconds,
        "bytes": engine.traffic.bytes(),
        "messages": engine.traffic.messages(),
    }
    if any(privacy_event(d) is not None for d in engine.defenses):
        metrics["epsilon"] = None
    if run.clock is not None:
        metrics["simulated_seconds"] = run.clock.now
    if engine.training_attacks:
        metrics["training_attacks"] = {name: attack.metrics() for name, attack in engine.training_attacks.items()}
    if engine.detectors:
        metrics["detectors"] = {name: detector.metrics() for name, detector in engine.detectors.items()}
    return metrics


def _mean(losses: Sequence[float]) -> float | None:
    """Return the mean; None without losses, and where one is not finite, which only a step of dp_sgd survives."""
    return sum(losses) / len(losses) if losses and all(map(math.isfinite, losses)) else None
