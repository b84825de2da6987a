"""The findings of a study in plain sentences, each made from its numbers; no sentence says more than they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splitfed.attacks.scoring.label_metrics import EXCESS
from splitfed.attacks.threat_model import BLACK_BOX, WHITE_BOX
from splitfed.stats.utility import ConstantAnswer, below_constant
from splitfed.study.report.data import LEAST_SEEDS, NO_DEFENSE, NO_METHOD, Setting, Summary, interval_ends
from splitfed.study.report.metrics import FLOORS, LABEL_FLOORS, METRICS, TARGETS
from splitfed.study.report.units import count_noun

SHOWN = 3  # settings that a finding of the same kind names in a sentence of their own


def headline(summary: Summary) -> list[str]:
    """Return the findings: what was run, what leaks undefended, what each topology's defenses change, and limits."""
    sentences = [_study_sentence(summary), *_compare_methods(summary)]
    if not summary["attacks"] and len(summary["methods"]) > 1:
        # A study that compares methods says once that it says nothing of leakage.
        return [*sentences, "No attack was scored, so nothing can be said about leakage.", *_limitations(summary)]
    sentences += _useless_models(summary)
    for where in summary["places"]:
        settings = [s for s in summary["settings"] if s["place"] == where and s["utility"]]
        place = f"{summary['names'][where]}: " if len(summary["places"]) > 1 else ""
        sentences += [
            f"{place}{said}" if place else said[:1].upper() + said[1:] for said in _place_findings(summary, settings)
        ]
    return [*sentences, *_limitations(summary)]


def name_of(summary: Summary, setting: Mapping[str, Any] | Setting) -> str:
    """Name a setting for a row: its defense, and its place where there are several."""
    own = setting if isinstance(setting, Mapping) else {"defense": setting.defense, "place": setting.place}
    name = str(summary["names"][own["defense"]])
    if len(summary["places"]) == 1:
        return name
    place = str(summary["names"][own["place"]])
    # Where methods are compared and nothing is defended, that need not be said in every row.
    plain = len(summary["methods"]) > 1 and all(s["defense"] == NO_DEFENSE for s in summary["settings"])
    return place if plain else f"{name}, {place}"


def format_score(metric: str, value: float, *, unit: bool = True) -> str:
    """Write a score of `metric` with its unit."""
    known = METRICS[metric]
    return f"{value:.{known.digits}f}{known.unit if unit else ''}"


def format_utility(summary: Summary, value: float) -> str:
    """Write a utility: accuracies in percent, other metrics as they are."""
    return f"{100 * value:.1f} %" if summary["utility"]["metric"] == "accuracy" else f"{value:.3f}"


def strongest(setting: Mapping[str, Any], metric: str, target: str = "inputs") -> str | None:
    """Return the label of the attack that leaks most in `setting`, by the mean of `metric` over victims.

    `target`: what the attack predicts ("inputs", "labels", ...). None where no such attack was scored by `metric`.
    """
    scored = {
        label: METRICS[metric].leak(attack["scores"][metric]["attack"]["mean"])
        for label, attack in setting["attacks"].items()
        if attack["target"] == target and attack["scores"].get(metric, {}).get("attack")
    }
    return max(scored, key=lambda label: scored[label]) if scored else None


def baseline(attack: Mapping[str, Any], metric: str) -> Mapping[str, Any] | None:
    """Return the score on the same victims of a floor of labels, else of the first baseline of that target."""
    scores: Mapping[str, Any] = attack["scores"][metric]
    first = next(iter(TARGETS[attack["target"]].baselines))
    return next((scores[who] for who in LABEL_FLOORS if scores.get(who)), scores.get(first))


def beats_baseline(attack: Mapping[str, Any], metric: str, who: str = "attack") -> bool:
    """Return whether the prediction leaks more than its baseline, on these same victims, beyond its own interval.

    A prediction that is measurably the wrong way round leaks too. `who`: "attack", or a floor beside it. Beside a floor
    of labels the difference counts, paired over victims.
    """
    if excess := attack["scores"][metric].get(EXCESS):
        return interval_ends(excess)[0] > 0
    score, blind = attack["scores"][metric][who], baseline(attack, metric)
    assert blind is not None
    beaten, (low, high) = float(blind["mean"]), interval_ends(score)
    if METRICS[metric].up:
        return low > beaten or (METRICS[metric].centre is not None and high < beaten)
    return high < beaten


def beside_baseline(summary: Summary, attack: Mapping[str, Any], metric: str) -> str:
    """Return what the baseline of `attack` reaches, and how much more that is, in brackets; nothing without one."""
    if (blind := baseline(attack, metric)) is None:
        return ""
    said = f"{baseline_name(summary, attack, metric)} {format_score(metric, blind['mean'])}"
    if excess := attack["scores"][metric].get(EXCESS):
        said += f", beyond it {format_score(metric, excess['mean'])}"
    return f" ({said})"


def leading_floor(setting: Mapping[str, Any], metric: str, target: str) -> tuple[str, Mapping[str, Any]] | None:
    """Return the floor that leaks as much as the strongest attack on `target`, or more, and the attack beside it.

    None where the strongest attack leads alone. An attack that is this floor itself is not behind it.
    """
    if (label := strongest(setting, metric, target)) is None:
        return None
    leak = METRICS[metric].leak
    # The strongest attack may have none beside it, as one that lives in training, and another one has.
    attacks = [setting["attacks"][label], *(a for a in setting["attacks"].values() if a["target"] == target)]
    floors = [(who, a) for a in attacks for who in FLOORS if a["scores"].get(metric, {}).get(who)]
    leaks = [leak(a["scores"][metric][who]["mean"]) for who, a in floors]
    reached = leak(attacks[0]["scores"][metric]["attack"]["mean"])
    if not leaks or max(leaks) < reached:
        return None
    found = floors[leaks.index(max(leaks))]
    return None if max(leaks) == reached and found[0].startswith(label.partition("(")[0]) else found


def _study_sentence(summary: Summary) -> str:
    what, seeds = summary["what"], sorted({seed for s in summary["settings"] for seed in s["seeds"]})
    lengths = what["lengths"]
    rounds = count_noun(lengths[0], "round") if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]} rounds"
    left_out = f" {count_noun(len(summary['unfinished']), 'run')} did not finish and count nowhere below."
    return (
        f"{what['model']} on {what['data']}, {count_noun(what['clients'], 'client')}, "
        f"{rounds} of the {_schedule_names(summary)}{_method_names(summary)}, split as "
        f"{' and '.join(summary['topologies'])}: {count_noun(summary['finished'], 'run')} finished over "
        f"{count_noun(len(summary['settings']), 'setting')} and {count_noun(len(seeds), 'seed')}."
        f"{left_out if summary['unfinished'] else ''}"
    )


def _schedule_names(summary: Summary) -> str:
    names = summary["schedules"]
    return f"{names[0]} schedule" if len(names) == 1 else f"schedules {', '.join(names[:-1])} and {names[-1]}"


def _method_names(summary: Summary) -> str:
    """Name the federated methods on the schedules, where there is any."""
    if not (there := [summary["names"][m] for m in summary["methods"] if m != NO_METHOD]):
        return ""
    told = there[0] if len(there) == 1 else f"{', '.join(there[:-1])} and {there[-1]}"
    return f" with {told}" + (", and without a method" if NO_METHOD in summary["methods"] else "")


def _compare_methods(summary: Summary) -> list[str]:
    """Set the utility of the methods side by side, each beside that of the same setting without one."""
    sentences = []
    keys = ("topology", "schedule", "defense", "training_attack")
    for setting in [s for s in summary["settings"] if s["method"] != NO_METHOD and s["utility"]]:
        same = (s for s in summary["settings"] if all(s[k] == setting[k] for k in keys))
        if (alone := next((s for s in same if s["method"] == NO_METHOD and s["utility"]), None)) is None:
            continue
        own, other = setting["utility"], alone["utility"]
        if own["low"] is None or other["low"] is None:
            doubt = " (no interval)"
        else:
            doubt = " (the intervals overlap)" if _intervals_overlap(own, other) else ""
        sentences.append(
            f"{name_of(summary, setting)}: {summary['utility']['metric']} {format_utility(summary, own['mean'])} "
            f"over all clients, {format_utility(summary, other['mean'])} without the method{doubt}."
        )
    return sentences


def _useless_models(summary: Summary) -> list[str]:
    """Name the settings whose model is no better than whoever gives the same answer to every row."""
    metric, up = summary["utility"]["metric"], summary["utility"]["higher_is_better"]
    sentences = []
    # What hijacked clients reach is said to be no result anyway.
    known = [s for s in summary["settings"] if s["constant"] and s["utility"] and not s["training_attack"]]
    for setting in known:
        constant = ConstantAnswer(**setting["constant"])
        if said := below_constant(metric, setting["utility"]["mean"], constant, up):
            name = name_of(summary, setting)
            sentences.append((name, f"{name}: {said}, so this model is of no use."))
    rest = ", ".join(name for name, _ in sentences[SHOWN:])
    more = [f"Of no use either, in the same way: {rest}."] if rest else []
    return [*(said for _, said in sentences[:SHOWN]), *more]


def _place_findings(summary: Summary, settings: list[Mapping[str, Any]]) -> list[str]:
    if (base := next((s for s in settings if s["family"] == NO_DEFENSE), None)) is None:
        return ["no undefended run has a result, so nothing can be said of what the defenses change."]
    scored_targets = [(target, m) for target in TARGETS if (m := _first_metric(summary, base, target))]
    if not scored_targets:
        return ["no attack was scored, so nothing can be said about leakage."]
    (target, metric), *further = scored_targets
    named_attacks = {strongest(base, m, t) for t, m in scored_targets if METRICS[m].centre is not None}
    utility = f"{summary['utility']['metric']} {format_utility(summary, base['utility']['mean'])}"
    others = [s for s in settings if s is not base and strongest(s, metric, target)]
    return [
        f"undefended ({utility}), {_attack_finding(summary, base, metric, target)}",
        *_defense_findings(summary, base, others, metric, target),
        *(f"undefended, {_attack_finding(summary, base, m, t)}" for t, m in further),
        *(
            f"undefended, {summary['names'][label]} {said}."
            for label, a in base["attacks"].items()
            if label not in named_attacks and (said := reversal_clause(a))
        ),
    ]


def _first_metric(summary: Summary, base: Mapping[str, Any], target: str) -> str | None:
    return next((m for m in TARGETS[target].order(summary["metrics"]) if strongest(base, m, target)), None)


def _attack_finding(summary: Summary, base: Mapping[str, Any], metric: str, target: str) -> str:
    """Tell what the strongest attack on `target` gets in `base`, beside its baseline."""
    label = strongest(base, metric, target) or ""
    attack, named = base["attacks"][label], summary["names"][label]
    blind = baseline(attack, metric)
    beside = beside_baseline(summary, attack, metric)
    reached = f"{format_score(metric, attack['scores'][metric]['attack']['mean'])} {METRICS[metric].title}{beside}"
    floor, beside_it = leading_floor(base, metric, target) or (None, attack)
    if blind and not beats_baseline(beside_it, metric, floor or "attack"):
        return f"{_strongest_attack(target)}, {named}, gets {reached}: not measurably better than that baseline."
    if floor is not None:
        scored = (attack["scores"][metric]["attack"], beside_it["scores"][metric][floor])
        own, best = (format_score(metric, one["mean"]) for one in scored)
        return (
            f"{_closed_form(floor)} {TARGETS[target].gets} {best} {METRICS[metric].title}{beside}, and "
            f"{_strongest_attack(target)}, {named}, gets no more: {own}."
        )
    if turned := reversal_clause(attack, metric):
        return f"{_strongest_attack(target)}, {named}, {turned}."
    # Reconstructions come from the server, as a rule; of other predictions it is news who makes them.
    whose = "" if target == "inputs" else f"{attack['adversary']} by "
    return f"{whose}{named} {TARGETS[target].gets} {reached}."


def reversal_clause(attack: Mapping[str, Any], metric: str = "auc") -> str:
    """Say so where an attack tells two kinds apart and names them the wrong way round: an AUC below .5 leaks too."""
    score, centre = (attack["scores"].get(metric) or {}).get("attack"), METRICS[metric].centre
    if score is None or centre is None or interval_ends(score)[1] >= centre:
        return ""
    title = METRICS[metric].title
    return (
        f"is reversed: it ranks the wrong way round ({title} {format_score(metric, score['mean'])}), and whoever turns "
        f"its predictions over has {title} {format_score(metric, METRICS[metric].leak(score['mean']))}"
    )


def _strongest_attack(target: str) -> str:
    return "the strongest attack" + {"inputs": "", "representatives": " on classes"}.get(target, f" on {target}")


def _closed_form(floor: str) -> str:
    return f"a closed form, {FLOORS[floor]},"


def _defense_findings(
    summary: Summary, base: Mapping[str, Any], others: list[Mapping[str, Any]], metric: str, target: str
) -> list[str]:
    """Tell the largest reduction and its price, the largest at a small price, and what reduces nothing."""

    def cost(setting: Mapping[str, Any]) -> float:
        lost = base["utility"]["mean"] - setting["utility"]["mean"]
        return float(lost if summary["utility"]["higher_is_better"] else -lost)

    def leak(setting: Mapping[str, Any]) -> float:
        # Of labels that leaks which the adversary's own data do not say.
        excess = setting["attacks"][strongest(setting, metric, target)]["scores"][metric].get(EXCESS)
        return excess["mean"] if excess else METRICS[metric].leak(_strongest_score(setting, metric, target)["mean"])

    def brings(setting: Mapping[str, Any]) -> str:
        label = strongest(setting, metric, target) or ""
        attack, names = setting["attacks"][label], summary["names"]
        score = _strongest_score(setting, metric, target)
        floor, beside_it = leading_floor(setting, metric, target) or (None, attack)
        strong = f"{_strongest_attack(target)} ({names[label]})"
        said = (
            f"with {names[setting['defense']]}, {strong if floor is None else _closed_form(floor)} gets "
            f"{format_score(metric, score['mean'])}{' (reversed)' if reversal_clause(attack, metric) else ''}"
            f"{beside_baseline(summary, attack, metric) if attack['scores'][metric].get(EXCESS) else ''}"
        )
        if floor is not None:
            said += f" and {strong} no more, {format_score(metric, attack['scores'][metric]['attack']['mean'])}"
        if baseline(attack, metric) and not beats_baseline(beside_it, metric, floor or "attack"):
            said += f" (not measurably better than the {baseline_name(summary, attack, metric)})"
        elif _intervals_overlap(score, _strongest_score(base, metric, target)):
            said += " (the intervals overlap)"
        return f"{said}." if base["training_attack"] else f"{said}, {_format_price(summary, cost(setting))}."

    helpful = sorted((s for s in others if leak(s) < leak(base)), key=leak)
    # A hijacked training has no utility worth a price.
    cheap = [s for s in helpful[1:] if cost(s) <= 0.01 < cost(helpful[0]) and not base["training_attack"]]
    useless = [s for s in others if leak(s) >= leak(base)]
    in_vain = {
        who: ", ".join(
            summary["names"][s["defense"]] for s in useless if bool(leading_floor(s, metric, target)) == by_floor
        )
        for by_floor, who in ((False, _strongest_attack(target)), (True, "a closed form"))
    }
    # What is called cheap is a choice, so the sentence says it.
    small = f"among the settings that lose at most {_format_difference(summary, 0.01)}, one lowers leakage most: "
    return [
        *(brings(s) for s in helpful[:1]),
        *(small + brings(s) for s in cheap[:1]),
        *(f"{who} does no worse than undefended against {names}." for who, names in in_vain.items() if names),
    ]


def baseline_name(summary: Summary, attack: Mapping[str, Any], metric: str) -> str:
    """Name the baseline of `attack`."""
    if named := [said for who, said in LABEL_FLOORS.items() if attack["scores"][metric].get(who)]:
        return named[0]
    match attack["target"]:
        case "shares":
            return "auxiliary rows' shares" if metric == "total_variation" else "chance"
        case "tokens":
            return "most frequent token"
        case "labels" | "members":
            # An AUC of labels is as blind for whoever always says the same.
            return "most frequent label" if metric == "accuracy" else "chance"
    return f"mean-{'image' if 'psnr' in summary['metrics'] else 'row'} baseline"


def _strongest_score(setting: Mapping[str, Any], metric: str, target: str) -> Mapping[str, Any]:
    """Return what the strongest attack or floor reached: a defense is worth what it does against that one."""
    attack = setting["attacks"][strongest(setting, metric, target)]
    who, beside = leading_floor(setting, metric, target) or ("attack", attack)
    found: Mapping[str, Any] = beside["scores"][metric][who]
    return found


def _intervals_overlap(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    (low, high), (other_low, other_high) = interval_ends(one), interval_ends(other)
    return low <= other_high and other_low <= high


def _format_price(summary: Summary, cost: float) -> str:
    if cost == 0:
        return f"with no change in {summary['utility']['metric']}"
    return f"{'at a cost' if cost > 0 else 'with a gain'} of {_format_difference(summary, cost)}"


def _format_difference(summary: Summary, difference: float) -> str:
    """Write a difference in utility, without its sign."""
    metric = summary["utility"]["metric"]
    return (
        f"{100 * abs(difference):.1f} points of {metric}" if metric == "accuracy" else f"{abs(difference):.3f} {metric}"
    )


def _limitations(summary: Summary) -> list[str]:
    sentences = [
        f"{summary['names'].get(label, label)} is active: it replaces the gradients that clients get, so it has "
        f"trainings of its own; their {summary['utility']['metric']} is that of hijacked clients, and cannot be "
        "compared with honest ones."
        for label in dict.fromkeys(s["training_attack"] for s in summary["settings"] if s["training_attack"])
    ]
    found = [a for s in summary["settings"] for a in s["attacks"].items()]
    if low := dict.fromkeys(summary["names"][label] for label, attack in found if attack["under_trained"]):
        sentences.append(
            f"Under-trained, in the settings marked so: {', '.join(low)}. A closed form with the same knowledge "
            "reconstructs better, so these figures say less than an attacker would learn."
        )
    missed = [(summary["names"][label], attack["unadapted"]) for label, attack in found if attack["unadapted"]]
    if blind := dict.fromkeys(f"{name} to {', '.join(defenses)}" for name, defenses in missed):
        sentences.append(
            f"Attacks that did not adapt, marked † in the table: {'; '.join(blind)}. "
            "An attacker who knows the defense may see more, so these figures do not judge it."
        )
    shown = [(attack["threat_model"], summary["names"][label]) for label, attack in found if attack["threat_model"]]
    if white := dict.fromkeys(name for model, name in shown if model == WHITE_BOX):
        black = dict.fromkeys(name for model, name in shown if model == BLACK_BOX)
        sentences.append(
            f"White box, with weights that the client trained: {', '.join(white)}."
            + (f" Black box, without them: {', '.join(black)}." if black else "")
        )
    if quick := dict.fromkeys(summary["names"][label] for label, attack in found if attack["quick"]):
        sentences.append(f"A quick look (budget quick), where more work may find more: {', '.join(quick)}.")
    repeated = (f"{summary['names'][label]} had {said}" for label, attack in found for said in attack["releases"])
    if several := dict.fromkeys(repeated):
        sentences.append(f"{'. '.join(several)}. An adversary who gets one release of a row learns less.")
    if unfinished := _not_converged(summary):
        sentences.append(f"Not converged, so a lower bound of what leaks: {'; '.join(unfinished)}.")
    few = {len(s["seeds"]) for s in summary["settings"]}
    if max(few) < LEAST_SEEDS:
        seeds = "One seed a setting" if few == {1} else "Fewer than three seeds a setting"
        sentences.append(
            f"{seeds}: intervals are over victims and test rows, and differences between trainings are not measured."
        )
    defended = [s for s in summary["settings"] if s["family"] != NO_DEFENSE]
    if defended and all(s["guarantee"] == "no formal guarantee" for s in defended):
        sentences.append(
            "None of these defenses carries a formal guarantee: a stronger attack than those run here may see more."
        )
    return sentences


def _not_converged(summary: Summary) -> list[str]:
    """Return for every attack whose last doubling of work still gained something in some setting, in how many."""
    chosen = [
        (label, attack["selection"])
        for s in summary["settings"]
        for label, attack in s["attacks"].items()
        if attack.get("selection")
    ]
    return [
        f"{summary['names'][label]} in {len(some)} of {sum(name == label for name, _ in chosen)} settings"
        for label in dict.fromkeys(label for label, _ in chosen)
        if (some := [one for name, one in chosen if name == label and not one["converged"]])
    ]
