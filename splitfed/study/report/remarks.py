"""What a reader of scores must not miss: a useless model, predictions the wrong way round, under-trained ones."""

from __future__ import annotations

from splitfed.stats.utility import ConstantAnswer, below_constant
from splitfed.study.report.metrics import METRICS, TARGETS
from splitfed.study.results import AttackRecord, RunResult


def remarks(found: RunResult) -> list[str]:
    """Return what is to be said beside the scores of the result `found`, in clauses; nothing of a run that failed."""
    if found.failed is not None:
        return []
    return [
        *_constant_answer_remark(found),
        *length_remarks(found),
        *start_warnings(found.starts_asked, found.starts),
        *(said for attack in found.attacks for said in attack_remarks(attack)),
    ]


def attack_remarks(attack: AttackRecord) -> list[str]:
    """Return what is to be said beside the scores of `attack`, in clauses."""
    adaptation = [f"{attack.label} did not adapt to: {', '.join(attack.unadapted)}"] if attack.unadapted else []
    repeated = [] if attack.releases is None else [f"{attack.label} had {attack.releases}"]
    return [*reversals(attack), *under_training(attack), *adaptation, *repeated]


def score_details(attack: AttackRecord) -> list[str]:
    """Return for every metric the interval of the attack's score, and what baselines, floors and oracles score."""
    names, told = TARGETS[attack.target].baselines, []
    for metric, by in attack.scores.items():
        own = by.get("attack")
        ends = [f"95 % {own.low:.3g} to {own.high:.3g} (victims)"] if own and None not in (own.low, own.high) else []
        others = [f"{names[who]} {one.mean:.3g}" for who, one in by.items() if who in names and one.mean is not None]
        told += [f"  {metric}: {'; '.join([*ends, *filter(None, [', '.join(others)])])}"] if ends or others else []
    return told


def under_training(attack: AttackRecord) -> list[str]:
    """Return a clause where the decoder of `attack` is worse than floors, or where these were left out."""
    if not attack.floors:
        return [f"{attack.label} stands beside no floor: they were left out"]
    if not (floors := attack.under_trained):
        return []
    named = " and ".join(TARGETS["inputs"].baselines.get(who, who) for who in floors)
    verb = "reconstructs" if len(floors) == 1 else "reconstruct"
    return [f"{attack.label} is under-trained: {named} {verb} better from the same knowledge"]


def length_remarks(found: RunResult) -> list[str]:
    """Return which round a run answers for, where that is chosen, and what makes it longer or shorter, in clauses."""
    chosen = f"chosen by the best {found.utility.metric} of validation rows"
    said = [] if found.kept_round is None else [f"the model is that of round {found.kept_round}, {chosen}"]
    if found.stopped:
        said.append(f"training ended after {found.rounds} of {found.rounds_planned} rounds: {found.stopped}")
    elif found.rounds_at_first:
        said.append(f"trained for {found.rounds} rounds, at first for {found.rounds_at_first}")
    return said


def reversals(attack: AttackRecord) -> list[str]:
    """Return a clause for every metric in which `attack` is measurably the wrong way round."""
    clauses = []
    for metric, who in attack.scores.items():
        details, score = METRICS.get(metric), who.get("attack")
        if details is None or details.centre is None or score is None or score.mean is None:
            continue
        if (score.mean if score.high is None else score.high) < details.centre:
            clauses.append(
                f"{attack.label} is reversed: {details.title} {score.mean:.3g} leaks as much as "
                f"{details.leak(score.mean):.3g} does"
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


def _constant_answer_remark(found: RunResult) -> list[str]:
    utility = found.utility
    if found.training_attack or not utility.constant or utility.test is None:
        return []
    constant = ConstantAnswer(**utility.constant)
    said = below_constant(utility.metric, utility.test, constant, utility.higher_is_better)
    return [said] if said else []
