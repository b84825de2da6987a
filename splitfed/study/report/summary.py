"""A study in numbers: every setting's utility, leakage, cost and place on the Pareto front, as plain JSON."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from splitfed.core.errors import InvalidInput
from splitfed.core.grouping import group_pairs
from splitfed.study.config.run_spec import COMPUTATION, format_value
from splitfed.study.report.costs import costs_of, participation
from splitfed.study.report.data import (
    Json,
    Setting,
    Study,
    as_json,
    bounds_of,
    call_defense,
    estimate,
    estimate_scores,
    group_by,
    read_study,
    score,
    utility_of,
)
from splitfed.study.report.metrics import AMOUNT, CLONES, FLOORS, METRICS, SHARE, TARGETS, UNBOUNDED
from splitfed.study.report.privacy import privacy_of
from splitfed.study.report.remarks import describe_start, length_remarks, start_warnings
from splitfed.study.report.search_data import read_search_outcome, search_to_json
from splitfed.study.report.text import headline
from splitfed.study.results import AttackRecord, RunResult


def summarise(folder: Path) -> dict[str, Any]:
    """Return the study in `folder` as plain JSON: every setting with its estimates, the headline, what is missing.

    Of a search the settings are those on its front, and "search" has all trials.

    An estimate is {mean, low, high, n, over}: a 95 % interval over seeds, or over the victims' or test rows where there
    are fewer than three seeds; low and high are None, and `over` is "nothing", where there is neither.
    Raises `InvalidInput` where no run has finished.
    """
    outcome = read_search_outcome(folder)
    if outcome is None:
        return summary_of(read_study(folder))
    return {**summary_of(read_study(folder, only=outcome.runs)), "search": search_to_json(outcome)}


def summary_of(study: Study) -> dict[str, Any]:
    """Return the same for a study already read."""
    settings = [_summarise_setting(s) for s in study.settings]
    summary: dict[str, Any] = {
        "study": study.name,
        "topologies": list(dict.fromkeys(s.topology for s in study.settings)),
        "schedules": list(dict.fromkeys(s.schedule for s in study.settings)),
        "methods": list(dict.fromkeys(s.method for s in study.settings)),
        "places": list(dict.fromkeys(s.place for s in study.settings)),
        "attacks": _attack_labels(study.runs),
        "targets": {a.label: a.target for run in study.runs for a in run.attacks},
        "finished": len(study.runs),
        "unfinished": [{"id": run, "reason": reason} for run, reason in study.unfinished],
        "refused": [{"id": run, "reason": reason} for run, reason in study.refused],
        "not_granted": _attacks_not_granted(study.runs),
        "utility": {k: getattr(study.runs[0].utility, k) for k in ("metric", "higher_is_better")},
        "what": {k: getattr(study.runs[0], k) for k in ("model", "data", "clients", "schedule", "rounds")}
        | {"lengths": sorted({run.rounds for run in study.runs})},
        "clients_differ": list(study.runs[0].clients_differ),
        "other_lengths": [f"{run.id}: {said}" for run in study.runs for said in length_remarks(run)],
        "settings": settings,
    }
    summary["metrics"] = [
        m for m in METRICS if any(_attack_score(s, label, m) for s in settings for label in s["attacks"])
    ]
    _mark_fronts(summary)
    summary["names"] = {
        **_place_names(study.settings, short_names(summary["attacks"])),
        **short_names(summary["attacks"]),
        **short_names([s.defense for s in study.settings], alone=True),
    }
    summary["headline"] = headline(summary)
    return summary


def _place_names(settings: Sequence[Setting], attacks: Mapping[str, str]) -> dict[str, str]:
    """Return short names of topologies, schedules, methods, computations, and of the places that the study has."""
    keys = ("topology", "schedule", "method", "computation")
    names = {key: short_names([getattr(s, key) for s in settings]) for key in keys}
    own_places, *others = (len(found) > 1 for found in names.values())
    several = own_places or not any(others), *others
    pairs = {}
    for s in settings:
        own = [found[getattr(s, key)] for key, found in names.items()]
        inside = [f"{attacks.get(s.training_attack, s.training_attack)} inside"] if s.training_attack else []
        chosen = [s.variant] if s.variant else []
        pairs[s.place] = ", ".join([*itertools.compress(own, several), *chosen, *inside])
    return {label: name for found in (*names.values(), pairs) for label, name in found.items()}


def _summarise_setting(setting: Setting) -> dict[str, Any]:
    runs = setting.runs
    known = [r.dependence for r in runs if r.dependence]
    # A ratio of an inner product to its norms: between -1 and 1.
    dependence = as_json(estimate([d["u_distance_correlation_sqr"] for d in known], bounds=(-1.0, 1.0)))
    return {
        "topology": setting.topology,
        "cut_choice": runs[0].topology.cut_choice,
        "schedule": setting.schedule,
        "method": setting.method,
        COMPUTATION: setting.computation,
        "place": setting.place,
        "training_attack": setting.training_attack,
        "defense": setting.defense,
        "family": setting.family,
        "strength": setting.strength,
        "measure": setting.measure._asdict() | {"title": setting.measure.title},
        "guarantee": setting.guarantee,
        "seeds": list(setting.seeds),
        "utility": as_json(utility_of(runs)),
        "constant": _constant_answer(runs),
        "bytes": as_json(estimate([r.bytes for r in runs], bounds=AMOUNT)),
        "bytes_by_kind": _bytes_by_kind(runs),
        "messages": as_json(estimate([r.messages for r in runs], bounds=AMOUNT)),
        "seconds": as_json(estimate([r.seconds for r in runs], bounds=AMOUNT)),
        # A study claims dependence at a level only where every seed supports it, so the largest p value is told.
        "dependence": dependence and dependence | {"p_value": max(d["p_value"] for d in known)},
        "information": information_of(runs),
        "predicted": costs_of(runs),
        "privacy": privacy_of(runs),
        "participation": participation(runs),
        "clients": clients_of(runs),
        "target": target_of(runs),
        "begins": _describe_starts(runs),
        "turned_off": next((run.turned_off for run in runs if run.turned_off), None),
        "simulated_seconds": as_json(estimate([r.last.get("simulated_seconds") for r in runs], bounds=AMOUNT)),
        "attacks": {label: _summarise_attack(runs, label) for label in _attack_labels(runs)},
    }


def _describe_starts(runs: Sequence[RunResult]) -> str | None:
    """Tell what optimizers and weights begin with; None of runs that say nothing of it, as an older version's."""
    first = runs[0]
    if first.starts is None:
        return None
    said = describe_start(bool(first.restart_optimizers), first.starts)
    return "; ".join([said, *start_warnings(first.starts_asked, first.starts)])


def _constant_answer(runs: Sequence[RunResult]) -> dict[str, Any] | None:
    """Return what always giving one answer scores, {score, name}, the mean over seeds; None where there is none."""
    known = [run.utility.constant for run in runs if run.utility.constant]
    if len(known) < len(runs):
        return None
    return {"score": sum(c["score"] for c in known) / len(known), "name": known[0]["name"]}


def _attacks_not_granted(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Return each attack that runs in plain did not grant, why, and how many of them."""
    told = [(one["attack"], one["why"]) for run in runs if run.computation == "none" for one in run.refused]
    return [{"attack": attack, "why": why, "runs": count} for (attack, why), count in Counter(told).items()]


def _attack_labels(runs: Sequence[RunResult]) -> list[str]:
    return list(dict.fromkeys(a.label for run in runs for a in run.attacks))


def _summarise_attack(runs: Sequence[RunResult], label: str) -> dict[str, Any]:
    found = [a for run in runs for a in run.attacks if a.label == label]
    first, who = found[0], ("attack", *TARGETS[found[0].target].baselines)
    metrics = [m for m in METRICS if any(m in a.scores for a in found)]
    stolen = [a.stolen.get("accuracy", {}) for a in found if a.stolen is not None]
    return {
        "adversary": first.adversary,
        "threat_model": first.threat_model,
        "seconds": as_json(estimate([a.seconds for a in found], bounds=AMOUNT)),
        "victims": first.victims,
        "depth": first.depth,
        "target": first.target,
        "scores": {m: {w: as_json(score(runs, label, m, w)) for w in who} for m in metrics},
        "stolen": {w: as_json(estimate_scores([one[w] for one in stolen if w in one], SHARE)) for w in CLONES}
        if stolen
        else None,
        "tuned": [chosen for a in found if (chosen := _format_tuned_parameters(a))],
        "quick": any(a.quick for a in found),
        "selection": _summarise_selection([a.selection for a in found if a.selection]),
        "releases": list(dict.fromkeys(str(a.releases) for a in found if a.releases is not None)),
        "under_trained": list(dict.fromkeys(who for a in found for who in a.under_trained)),
        "unadapted": list(dict.fromkeys(name for a in found for name in a.unadapted)),
        "front": [],
    }


def _summarise_selection(found: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return which members were chosen over seeds, and the most that a last doubling of work gained if too much."""
    if not found:
        return None
    gains = [one["gain"] for one in found if one["converged"] is False]
    # A gain without end is kept as None.
    most = None if None in gains else max(gains, default=0.0)
    unit = {"mse": " dB", "auc": " of AUC", "accuracy": " of accuracy"}[found[0]["metric"]]
    members = list(dict.fromkeys(one["member"] for one in found))
    criterion = found[0].get("criterion", "on held-out rows")
    return {"members": members, "criterion": criterion, "converged": not gains, "gain": most, "unit": unit}


def _format_tuned_parameters(attack: AttackRecord) -> str:
    """Write the parameters that tuning on auxiliary rows chose; nothing where nobody tuned."""
    chosen = (attack.tuned or {}).get("parameters", {})
    return ", ".join(f"{name}={format_value(value)}" for name, value in chosen.items())


def _bytes_by_kind(runs: Sequence[RunResult]) -> dict[str, float]:
    kinds = dict.fromkeys(kind for run in runs for kind in run.bytes_by_kind)
    return {kind: sum(r.bytes_by_kind.get(kind, 0) for r in runs) / len(runs) for kind in kinds}


def _attack_score(setting: Mapping[str, Any], label: str, metric: str) -> Any:
    """Return what the attack reached in `metric`, or None."""
    return (setting["attacks"].get(label, {}).get("scores", {}).get(metric) or {}).get("attack")


def _mark_fronts(summary: Mapping[str, Any]) -> None:
    """Write, at each attack of a setting, the metrics in which the setting is on the Pareto front."""
    sign = 1.0 if summary["utility"]["higher_is_better"] else -1.0
    for label in summary["attacks"]:
        for metric in summary["metrics"]:
            # What a hijacked training is good for is no utility to weigh leakage against.
            useful = (s for s in summary["settings"] if s["utility"] and not s["training_attack"])
            there = [s for s in useful if _attack_score(s, label, metric)]
            points = [
                (sign * s["utility"]["mean"], METRICS[metric].leak(_attack_score(s, label, metric)["mean"]))
                for s in there
            ]
            for position in pareto_front(points):
                there[position]["attacks"][label]["front"].append(metric)


def pareto_front(points: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """Return the positions of the `points` (utility, leakage) on the front, by rising leakage, then position.

    More utility is better, less leakage is better. A point is on the front unless some other point has at least
    its utility and at most its leakage, and is strictly better in one of the two; equal points stay together.
    Raises `InvalidInput` for a coordinate that is not a number.
    """
    for position, point in enumerate(points):
        if any(math.isnan(value) for value in point):
            raise InvalidInput(f"point {position} is {point}; expected two numbers")
    front = [
        position
        for position, (utility, leakage) in enumerate(points)
        if not any(
            other >= utility and less <= leakage and (other > utility or less < leakage) for other, less in points
        )
    ]
    return tuple(sorted(front, key=lambda position: (points[position][1], position)))


_LABEL = re.compile(r"(\w+)\((.*)\)")


def short_names(labels: Sequence[str], *, alone: bool = False) -> dict[str, str]:
    """Return label -> short name, all different; `noise(scale=0.5, kind=gaussian)` may become `noise(scale=0.5)`.

    A parameter that has the same value in all labels of the same name is left out, unless it is true or false: a switch
    changes what the other parameters mean. "none" is "undefended". The only label of its name keeps all its parameters
    if `alone`.
    """
    names: dict[str, str] = {}
    for name, members in group_by(dict.fromkeys(labels), lambda label: _LABEL.sub(r"\1", label)).items():
        name = call_defense(name)
        parameters = [(found[2].split(", ") if (found := _LABEL.fullmatch(label)) else []) for label in members]
        shared = set() if alone and len(members) == 1 else set(parameters[0]).intersection(*parameters[1:])
        for label, own in zip(members, parameters, strict=True):
            telling = ", ".join(p for p in own if p not in shared or p.endswith(("=true", "=false")))
            names[label] = f"{name}({telling})" if telling else name
    return names if len(set(names.values())) == len(names) else {label: label for label in names}


SPREAD = ("mean", "min", "max", "std", "worst_decile")


def clients_of(runs: Sequence[RunResult]) -> Json | None:
    """Return what `runs`, that differ in their seed alone, say of several clients, as estimates; None with one client.

    `spread`: mean, min, max, std and worst_decile of the clients' test scores on their own rows; `method`: further
    scores of the method, the mean over clients; `across`: the same of every client's model on its own rows, on the
    others' and on all.
    """
    spreads = [run.utility.spread for run in runs]
    if not any(spreads):
        return None
    known, bounds = [one or {} for one in spreads], bounds_of(runs)
    return {
        "spread": {
            key: as_json(estimate([one.get(key) for one in known], bounds=AMOUNT if key == "std" else bounds))
            for key in SPREAD
        },
        "method": _mean_scores([run.utility.method or {} for run in runs], bounds),
        "across": _mean_scores([run.utility.across or {} for run in runs], bounds),
    }


def target_of(runs: Sequence[RunResult]) -> Json | None:
    """Return how many of `runs` reached the study's target, after how many rounds and bytes; None without a target."""
    if not (targets := [run.target for run in runs if run.target]):
        return None
    reached = [one for one in targets if one["rounds"] is not None]
    return {
        "value": targets[0]["value"],
        "reached": len(reached),
        "of": len(targets),
        "rounds": as_json(estimate([one["rounds"] for one in reached], bounds=AMOUNT)),
        "bytes": as_json(estimate([one["bytes"] for one in reached], bounds=AMOUNT)),
    }


def _mean_scores(further: Sequence[Mapping[str, Any]], bounds: tuple[float, float]) -> Json:
    names = dict.fromkeys(name for one in further for name in one)
    each = {name: [(one.get(name) or {}).get("mean") for one in further] for name in names}
    return {name: as_json(estimate(values, bounds=bounds)) for name, values in each.items()}


INFORMATION = ("dfil", "least_mse", "mutual_lower", "mutual_upper", "usable", "invertibility", "cka")
"""Measures, in the order of the table."""
INFORMATION_BOUNDS = {"invertibility": (-float("inf"), 1.0), "cka": (-1.0, 1.0), "dfil": AMOUNT, "least_mse": AMOUNT}


def information_of(runs: Sequence[RunResult]) -> dict[str, Any] | None:
    """Return measure -> estimate over `runs`, which differ in their seed alone; None where no run was measured.

    With them `best_mse`, the least error of the attacks on inputs in each run, `floor_mse`, that of the floors beside
    them where it is less, and whether one of them is below `least_mse`, `beaten`, as it may be where rows are not as
    the bound has assumed; `why` there is no bound; `empty`: whether dFIL
    alone bounds nothing; and the largest `p_value` of the CKA.
    """
    known = [run.information for run in runs if run.information]
    if not known:
        return None
    values = group_pairs((key, one[key]) for one in known for key in INFORMATION if one.get(key) is not None)
    found: dict[str, Any] = {
        key: as_json(estimate(values.get(key, []), bounds=INFORMATION_BOUNDS.get(key, UNBOUNDED)))
        for key in INFORMATION
    }
    best, floor = (as_json(estimate(_least_errors(runs, who), bounds=AMOUNT)) for who in (("attack",), tuple(FLOORS)))
    least = [one["mean"] for one in (best, floor) if one is not None]
    p_values = [one["cka_p_value"] for one in known if one.get("cka_p_value") is not None]
    return {
        **found,
        "best_mse": best,
        "floor_mse": floor if floor is not None and best is not None and floor["mean"] < best["mean"] else None,
        "beaten": bool(least) and found["least_mse"] is not None and min(least) < found["least_mse"]["mean"],
        "p_value": max(p_values, default=None),
        "saturated": any(one.get("saturated") for one in known),
        "empty": any(one.get("empty") for one in known),
        "why": next((one["why"] for one in known if one.get("why")), ""),
    }


def _least_errors(runs: Sequence[RunResult], who: Sequence[str]) -> list[float]:
    """Return the least mean squared error of `who` among the attacks on inputs, of each run that has one."""
    reached = [
        [
            score.mean
            for attack in run.attacks
            if attack.target == "inputs"
            for one in who
            if (score := attack.scores.get("mse", {}).get(one)) and score.mean is not None
        ]
        for run in runs
    ]
    return [min(errors) for errors in reached if errors]
