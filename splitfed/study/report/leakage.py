"""Predicted labels and membership, and stolen models, for a report's page: sentences, tables and figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from splitfed.study.report.data import METRICS, NO_DEFENSE, TARGETS, Study
from splitfed.study.report.figures.images import read_pairs
from splitfed.study.report.figures.leakage import plot_roc_curves, plot_scores
from splitfed.study.report.figures.plots import scored_metrics
from splitfed.study.report.figures.style import SeriesStyles
from splitfed.study.report.text import baseline_name, beats_baseline, format_score, name_of, reversal_clause

Summary = Mapping[str, Any]
Json = dict[str, Any]


VICTIMS = {
    "labels": "the labels of {} victims",
    "members": "who of {} candidates was trained on",
    "shares": "how much of each of {} classes a client holds",
}


def leak_sections(study: Study, summary: Summary, looks: SeriesStyles) -> list[Json]:
    """Return, for every attack on labels, membership or class shares, what it achieved in words, rows and figures."""
    attacks = [a for a in summary["attacks"] if summary["targets"][a] in PREDICTED and scored_metrics(summary, a)]
    return [_leak_section(study, summary, attack, looks, i) for i, attack in enumerate(attacks)]


def stolen_model_rows(summary: Summary) -> list[Json]:
    """Return a row for every attack and setting in which upstream segments were stolen: name -> accuracy."""
    return [
        {"name": name_of(summary, s), "attack": summary["names"][label], **{who: attack["stolen"][who] for who in WHO}}
        for s in summary["settings"]
        for label, attack in s["attacks"].items()
        if attack["stolen"] and all(attack["stolen"][who] for who in WHO)
    ]


PREDICTED = ("labels", "members", "shares")
WHO = ("clone", "trained", "fresh")


def _leak_section(study: Study, summary: Summary, attack: str, looks: SeriesStyles, number_of_it: int) -> Json:
    target, metrics = summary["targets"][attack], scored_metrics(summary, attack)
    settings = [s for s in summary["settings"] if attack in s["attacks"]]
    name = f"leak{number_of_it}"
    page: Json = {
        "attack": summary["names"][attack],
        "title": TARGETS[target].title,
        "said": [_sentence(summary, s, attack, metrics) for s in settings if s["family"] == NO_DEFENSE],
        "figure": Markup(plot_scores(summary, settings, attack, metrics[:2], looks, name)),
        "roc": Markup(""),
        "seed": None,
    }
    if target == "members":
        seeds = Counter(seed for s in study.settings for seed in s.seeds)
        page["seed"] = min(seeds, key=lambda s: (-seeds[s], s))
        found = read_pairs(study.settings, attack, page["seed"])
        curves = [(name_of(summary, p.setting), p.setting.family, p.prediction, p.truth > 0.5) for p in found]
        page["roc"] = Markup(plot_roc_curves(curves, f"{name}roc")) if curves else Markup("")
    return page


def _sentence(summary: Summary, setting: Mapping[str, Any], attack: str, metrics: list[str]) -> str:
    """Tell what the attack gets in `setting`, by its first metric, and members also at a low false-positive rate."""
    found, target = setting["attacks"][attack], summary["targets"][attack]
    there = [m for m in metrics if (found["scores"].get(m) or {}).get("attack")]
    if not there:
        return ""
    scores, metric = found["scores"], there[0]
    blind = scores[metric].get(next(iter(TARGETS[target].baselines)))
    said = f"{name_of(summary, setting)}: {found['adversary']} predicts {VICTIMS[target].format(found['victims'])} at "
    said += f"{METRICS[metric].title} {format_score(metric, scores[metric]['attack']['mean'])}"
    said += f" ({baseline_name(summary, metric, target)} {format_score(metric, blind['mean'])})" if blind else ""
    if blind and not beats_baseline(found, metric):
        said += ", not measurably better than that baseline"
    elif turned := reversal_clause(found, metric):
        said += f"; it {turned}"
    # Of few outsiders a hundredth is nobody: then this is the share found with none accused.
    low = "tpr_at_fpr_1%"
    if low in there and scores[low].get("chance"):
        share, blindly_found = (100 * scores[low][who]["mean"] for who in ("attack", "chance"))
        said += f"; where at most one outsider in a hundred is accused, it finds {share:.1f} % of the members "
        said += f"(chance {blindly_found:.1f} %)"
    return f"{said[:1].upper()}{said[1:]}."
