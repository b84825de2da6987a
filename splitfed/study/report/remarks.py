"""What a reader of scores must not miss: a useless model, predictions the wrong way round, under-trained ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splitfed.stats.utility import ConstantAnswer, below_constant
from splitfed.study.report.metrics import METRICS, TARGETS
from splitfed.threats.repeated_releases import RepeatedReleases

Json = Mapping[str, Any]


def remarks(found: Json) -> list[str]:
    """Return what is to be said beside the scores of the result `found`, in clauses; nothing of a run that failed."""
    if "utility" not in found:
        return []
    return [
        *_constant_answer_remark(found),
        *length_remarks(found),
        *start_warnings(found.get("starts_asked"), found.get("starts")),
        *(said for attack in found["attacks"] for said in attack_remarks(attack)),
    ]


def attack_remarks(attack: Json) -> list[str]:
    """Return what is to be said beside the scores of `attack`, as a result holds it, in clauses."""
    told = (reversals, under_training, missing_adaptation, repeated_releases)
    return [clause for of in told for clause in of(attack)]


def under_training(attack: Json) -> list[str]:
    """Return a clause where the decoder of `attack` is worse than floors, or where these were left out."""
    if attack.get("floors") is False:
        return [f"{attack['label']} stands beside no floor: they were left out"]
    if not (floors := attack.get("under_trained")):
        return []
    named = " and ".join(TARGETS["inputs"].baselines.get(who, who) for who in floors)
    verb = "reconstructs" if len(floors) == 1 else "reconstruct"
    return [f"{attack['label']} is under-trained: {named} {verb} better from the same knowledge"]


def missing_adaptation(attack: Json) -> list[str]:
    """Return a clause where `attack` does not adapt to defenses of the run; none of a result that does not say."""
    named = ", ".join(attack.get("unadapted", ()))
    return [f"{attack['label']} did not adapt to: {named}"] if named else []


def repeated_releases(attack: Json) -> list[str]:
    """Return a clause where `attack` was given several releases of each victim's row."""
    if not (found := attack.get("releases")):
        return []
    return [f"{attack['label']} had {RepeatedReleases(**found)}"]


def length_remarks(found: Json) -> list[str]:
    """Return what makes a run longer or shorter than others of its study, in clauses."""
    if found.get("stopped"):
        return [f"training ended after {found['rounds']} of {found['rounds_planned']} rounds: {found['stopped']}"]
    if found.get("rounds_at_first"):
        return [f"trained for {found['rounds']} rounds, at first for {found['rounds_at_first']}"]
    return []


def reversals(attack: Json) -> list[str]:
    """Return a clause for every metric in which `attack`, as a result holds it, is measurably the wrong way round."""
    clauses = []
    for metric, who in attack["scores"].items():
        details, score = METRICS.get(metric), who.get("attack")
        if details is None or details.centre is None or score is None:
            continue
        bound = score["mean"] if score.get("high") is None else score["high"]
        if bound is not None and bound < details.centre:
            clauses.append(
                f"{attack['label']} is reversed: {details.title} {score['mean']:.3g} leaks as much as "
                f"{details.leak(score['mean']):.3g} does"
            )
    return clauses


WEIGHTS = {
    "shared": "clients start from shared weights",
    "own": "clients start from weights of their own",
    "given": "clients start from the weights of the topologies they were given",
}


def describe_start(restart_optimizers: bool, starts: str) -> str:
    """Tell in a line what happens to optimizers between rounds, and from which weights clients start."""
    kept = "are restarted every round" if restart_optimizers else "keep their state from round to round"
    return f"optimizers {kept}; {WEIGHTS[starts]}"


def start_warnings(asked: str | None, starts: str | None) -> list[str]:
    """Return a clause where clients were to start from weights of their own, and all that they hold is broadcast."""
    if asked != "own" or starts != "shared":
        return []
    return ["starts = 'own' changes nothing: all that clients hold is sent to them before they first train"]


def _constant_answer_remark(found: Json) -> list[str]:
    utility = found["utility"]
    if found.get("training_attack") or not utility.get("constant") or utility["test"] is None:
        return []
    said = below_constant(
        utility["metric"], utility["test"], ConstantAnswer(**utility["constant"]), utility["higher_is_better"]
    )
    return [said] if said else []
