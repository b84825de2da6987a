"""The findings of a study in plain sentences, each made from its numbers; no sentence says more than they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splitfed.study.report_data import METRICS, NO_DEFENSE
from splitfed.study.units import plural

Summary = Mapping[str, Any]


def headline(summary: Summary) -> list[str]:
    """Return the findings: what was run, what leaks undefended, what each topology's defenses change, and limits."""
    sentences = [_what(summary)]
    for where in summary["places"]:
        settings = [s for s in summary["settings"] if s["place"] == where and s["utility"]]
        place = f"{summary['names'][where]}: " if len(summary["places"]) > 1 else ""
        sentences += [f"{place}{said}" if place else said[:1].upper() + said[1:] for said in _found(summary, settings)]
    return [*sentences, *_limits(summary)]


def number(metric: str, value: float, *, unit: bool = True) -> str:
    """Write a score of `metric` with its unit."""
    known = METRICS[metric]
    return f"{value:.{known.digits}f}{known.unit if unit else ''}"


def utility(summary: Summary, value: float) -> str:
    """Write a utility: accuracies in percent, other metrics as they are."""
    return f"{100 * value:.1f} %" if summary["utility"]["metric"] == "accuracy" else f"{value:.3f}"


def strongest(setting: Mapping[str, Any], metric: str) -> str | None:
    """Return the label of the attack that leaks most in `setting` by `metric`; None where none was scored so."""
    sign = 1 if METRICS[metric].up else -1
    scored = {
        label: sign * attack["scores"][metric]["guess"]["mean"]
        for label, attack in setting["attacks"].items()
        if attack["scores"].get(metric, {}).get("guess")
    }
    return max(scored, key=lambda label: scored[label]) if scored else None


def beats_baseline(scores: Mapping[str, Any], metric: str) -> bool:
    """Tell whether the guess is better than the mean image, on these same victims, beyond its own interval."""
    guess, mean = scores["guess"], float(scores["mean_image"]["mean"])
    return _bound(guess, "low") > mean if METRICS[metric].up else _bound(guess, "high") < mean


def _bound(found: Mapping[str, Any], side: str) -> float:
    return float(found["mean"] if found[side] is None else found[side])


def _what(summary: Summary) -> str:
    what, seeds = summary["what"], sorted({seed for s in summary["settings"] for seed in s["seeds"]})
    parts = [
        f"{what['model']} on {what['data']}, {plural(what['clients'], 'client')}, "
        f"{plural(what['rounds'], 'round')} of the {_schedules(summary)}, split as "
        f"{' and '.join(summary['topologies'])}: {plural(summary['finished'], 'run')} finished over "
        f"{plural(len(summary['settings']), 'setting')} and {plural(len(seeds), 'seed')}."
    ]
    if summary["unfinished"]:
        parts.append(f"{plural(len(summary['unfinished']), 'run')} did not finish and count nowhere below.")
    return " ".join(parts)


def _schedules(summary: Summary) -> str:
    names = summary["schedules"]
    return f"{names[0]} schedule" if len(names) == 1 else f"schedules {', '.join(names[:-1])} and {names[-1]}"


def _found(summary: Summary, settings: list[Mapping[str, Any]]) -> list[str]:
    base = next((s for s in settings if s["family"] == NO_DEFENSE), None)
    if base is None:
        return ["no undefended run finished, so nothing can be said of what the defenses change."]
    metric = next((m for m in summary["metrics"] if strongest(base, m)), None)
    label = metric and strongest(base, metric)
    if not (metric and label):
        return ["no attack was scored, so nothing can be said about leakage."]
    scores = base["attacks"][label]["scores"][metric]
    baseline, named = scores["mean_image"], summary["names"][label]
    reached = f"{number(metric, scores['guess']['mean'])} {METRICS[metric].title}"
    reached += f" ({_mean(summary)} {number(metric, baseline['mean'])})" if baseline else ""
    before = f"undefended ({summary['utility']['metric']} {utility(summary, base['utility']['mean'])}), "
    if baseline and not beats_baseline(scores, metric):
        first = f"{before}the strongest attack, {named}, gets {reached}: not measurably better than that baseline."
    else:
        first = f"{before}{named} reconstructs at {reached}."
    others = [s for s in settings if s is not base and strongest(s, metric)]
    return [first, *_changes(summary, base, others, metric)]


def _changes(summary: Summary, base: Mapping[str, Any], others: list[Mapping[str, Any]], metric: str) -> list[str]:
    """Tell the largest reduction and its price, the largest at a small price, and what reduces nothing."""

    def cost(setting: Mapping[str, Any]) -> float:
        lost = base["utility"]["mean"] - setting["utility"]["mean"]
        return float(lost if summary["utility"]["higher_is_better"] else -lost)

    def leak(setting: Mapping[str, Any]) -> float:
        return float((1 if METRICS[metric].up else -1) * _worst(setting, metric)["mean"])

    def brings(setting: Mapping[str, Any]) -> str:
        label = strongest(setting, metric) or ""
        scores = setting["attacks"][label]["scores"][metric]
        names = summary["names"]
        said = f"with {names[setting['defense']]}, the strongest attack ({names[label]}) gets "
        said += number(metric, scores["guess"]["mean"])
        if scores["mean_image"] and not beats_baseline(scores, metric):
            said += f" (not measurably better than the {_mean(summary)})"
        elif _overlap(scores["guess"], _worst(base, metric)):
            said += " (the intervals overlap)"
        return f"{said}, {_price(summary, cost(setting))}."

    helpful = sorted((s for s in others if leak(s) < leak(base)), key=leak)
    cheap = [s for s in helpful[1:] if cost(s) <= 0.01 < cost(helpful[0])]
    useless = [summary["names"][s["defense"]] for s in others if leak(s) >= leak(base)]
    sentences = [brings(s) for s in helpful[:1]]
    # What is called cheap is a choice, so the sentence says it.
    small = f"among the settings that lose at most {_amount(summary, 0.01)}, one lowers leakage most: "
    sentences += [small + brings(s) for s in cheap[:1]]
    if useless:
        sentences.append(f"the strongest attack does no worse than undefended against {', '.join(useless)}.")
    return sentences


def _mean(summary: Summary) -> str:
    return f"mean-{'image' if 'psnr' in summary['metrics'] else 'row'} baseline"


def _worst(setting: Mapping[str, Any], metric: str) -> Mapping[str, Any]:
    """Return what the strongest attack reached: a defense is worth what it does against that one."""
    found: Mapping[str, Any] = setting["attacks"][strongest(setting, metric)]["scores"][metric]["guess"]
    return found


def _overlap(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return _bound(one, "low") <= _bound(other, "high") and _bound(other, "low") <= _bound(one, "high")


def _price(summary: Summary, cost: float) -> str:
    if cost == 0:
        return f"with no change in {summary['utility']['metric']}"
    return f"at a cost of {_amount(summary, cost)}" if cost > 0 else f"with a gain of {_amount(summary, cost)}"


def _amount(summary: Summary, difference: float) -> str:
    """Write a difference in utility, without its sign."""
    metric = summary["utility"]["metric"]
    return (
        f"{100 * abs(difference):.1f} points of {metric}" if metric == "accuracy" else f"{abs(difference):.3f} {metric}"
    )


def _limits(summary: Summary) -> list[str]:
    sentences = []
    if all(len(s["seeds"]) == 1 for s in summary["settings"]):
        sentences.append(
            "One seed a setting: intervals are over victims, and differences between trainings are not measured."
        )
    defended = [s for s in summary["settings"] if s["family"] != NO_DEFENSE]
    if defended and all(s["guarantee"] == "no formal guarantee" for s in defended):
        sentences.append(
            "None of these defenses carries a formal guarantee: a stronger attack than those run here may see more."
        )
    return sentences
