"""What stands on a report's page, as plain values for its template: pictures, figures, tables, topologies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from markupsafe import Markup

from splitfed.registry import EXTENSIONS, resolve
from splitfed.study.report.costs import crossovers, utility_over_time
from splitfed.study.report.data import LEAST_SEEDS, NO_DEFENSE, Json, Setting, Study, Summary, escape_invisible
from splitfed.study.report.exposure import topology_sections
from splitfed.study.report.figures.budget import plot_budget
from splitfed.study.report.figures.costs import plot_accuracy_over_time, plot_crossovers
from splitfed.study.report.figures.depth import DepthLine, depth_lines, plot_leakage_by_depth
from splitfed.study.report.figures.federated import plot_client_scores, prototype_pictures
from splitfed.study.report.figures.images import (
    SHOWN,
    Pair,
    brightness_range,
    feature_scores,
    image_strip,
    is_image,
    read_pairs,
)
from splitfed.study.report.figures.leakage import plot_roc_curves, plot_scores
from splitfed.study.report.figures.rounds import (
    plot_epsilon_by_round,
    plot_error_by_round,
    plot_training_curves,
    plot_utility_by_round,
)
from splitfed.study.report.figures.strength import families_without_strength, plot_leakage_by_strength
from splitfed.study.report.figures.style import SeriesStyles, scored_metrics
from splitfed.study.report.figures.tradeoff_front import plot_tradeoff
from splitfed.study.report.metrics import CLONES, METRICS, TARGETS
from splitfed.study.report.text import (
    baseline,
    beats_baseline,
    beside_baseline,
    format_score,
    format_utility,
    name_of,
    reversal_clause,
)


def page_content(study: Study, summary: Summary) -> Json:
    """Return everything the template shows, by name."""
    looks = SeriesStyles(summary)
    metric_targets = ((m, target) for target in TARGETS for m in _leading_metrics(summary, target))
    strengths = (
        plot_leakage_by_strength(summary, m, target, looks, f"strength{i}")
        for i, (m, target) in enumerate(metric_targets)
    )
    sections = [
        _reconstruction_section(study, summary, attack)
        for attack in summary["attacks"]
        if summary["targets"][attack] in ("inputs", "representatives")
    ]
    return {
        "summary": summary,
        "config": study.config,
        "environment": study.environment,
        "metrics": {m: METRICS[m] for m in summary["metrics"]},
        "over": _interval_note(summary),
        "targets": TARGETS,
        "pictures": sections,
        "shades": range(76) if any(page["features"] for page in sections) else (),
        "leaks": leak_sections(study, summary, looks),
        "stolen": stolen_model_rows(summary),
        **_attack_figures(study, summary, looks),
        "informed": [s for s in summary["settings"] if s["information"]],
        "depths": _depth_sections(study, summary),
        "strengths": [figure for figure in strengths if figure],
        "without_strength": families_without_strength(summary),
        "curves": plot_training_curves(summary, study.settings, looks, "curves"),
        **_client_section(summary, study.settings),
        **_further_sections(study, summary),
        "topologies": topology_sections(study, summary),
        "promises": [s for s in summary["settings"] if s["privacy"]],
        "epsilon_figure": plot_epsilon_by_round(study.settings, looks, "epsilon"),
        "predicted": any(s["predicted"] for s in summary["settings"]),
        "disagree": [
            name_of(summary, s) for s in summary["settings"] if s["predicted"] and not s["predicted"]["agrees"]
        ],
        "at_most": {
            name_of(summary, s): s["predicted"]["at_most"]
            for s in summary["settings"]
            if s["predicted"] and s["predicted"]["at_most"]
        },
        **_starting_states(summary),
        "parted": [s for s in summary["settings"] if s["participation"]],
        "over_time": _plot_over_time(summary, study.settings),
        "crossovers": [
            (summary["names"][topology], found, plot_crossovers([found], f"crossover{i}"))
            for i, (topology, found) in enumerate(crossovers(study.settings).items())
        ],
        "kinds": _message_kinds(summary),
        "most_bytes": max([1.0, *(sum(s["bytes_by_kind"].values()) for s in summary["settings"])]),
    }


def _further_sections(study: Study, summary: Summary) -> Json:
    """Return what rooms show of their own in a report, by name."""
    found: Json = {}
    for section in EXTENSIONS["report_sections"].values():
        found |= resolve(section)(study, summary)
    return found


def _attack_figures(study: Study, summary: Summary, looks: SeriesStyles) -> Json:
    """Return the figures that every attack has of its own, each with the attack's name: by kind of figure."""
    plots = {
        "tradeoffs": partial(plot_tradeoff, summary),
        "learning": partial(plot_error_by_round, study.settings),
        "budgets": partial(plot_budget, study.settings),
    }
    return {
        kind: [
            (summary["names"][attack], figure)
            for i, attack in enumerate(summary["attacks"])
            if (figure := plot(attack, looks, f"{kind}{i}"))
        ]
        for kind, plot in plots.items()
    }


def _leading_metrics(summary: Summary, target: str) -> list[str]:
    """Return the first two metrics of attacks on `target` in which more is more leakage."""
    mine = [a for a in summary["attacks"] if summary["targets"][a] == target]
    found = [m for m in summary["metrics"] if METRICS[m].up and any(m in scored_metrics(summary, a) for a in mine)]
    return TARGETS[target].order(found)[:2]


def _interval_note(summary: Summary) -> str:
    """Say what the intervals in the figures are taken over."""
    seeds = {len(s["seeds"]) for s in summary["settings"]}
    few = (
        "of the victims (bootstrap) and of the test rows (Wilson's for accuracy, else bootstrap), under these very "
        "trainings: they say nothing of other seeds"
    )
    if max(seeds) < LEAST_SEEDS:
        return f"Bars are 95 % intervals {few}."
    text = "Bars are 95 % Student intervals over seeds, taken on a scale on which they stay in the metric's range"
    return f"{text}; settings with fewer than three seeds: {few}." if min(seeds) < LEAST_SEEDS else f"{text}."


def _reconstruction_section(study: Study, summary: Summary, attack: str) -> Json:
    """Return originals and reconstructions of one seed: strips for images, R2 by feature for tables."""
    seed = _commonest_seed(study)
    found = read_pairs(study.settings, attack, seed)
    page: Json = {
        "attack": summary["names"][attack],
        "target": summary["targets"][attack],
        "seed": seed,
        "rows": [],
        "features": [],
        "left_out": 0,
        "names": [],
        "missing": [],
    }
    if not found:
        return page
    # One row of originals can stand above all others only where the victims are the same.
    truth = found[0].truth
    same = [p for p in found if p.prediction.shape == p.truth.shape and torch.equal(p.truth, truth)]
    # Nobody misses an attack on a hijacked training in an honest one, nor the other way round.
    asked = [s for s in study.settings if s.training_attack in {p.setting.training_attack for p in found}]
    page["missing"] = [name_of(summary, s) for s in asked if s not in [p.setting for p in same]]
    page["names"] = [name_of(summary, p.setting) for p in same]
    if is_image(truth):
        low, high = brightness_range(truth)
        page["original"] = image_strip(truth[:SHOWN], low, high)
        page["rows"] = [_picture_row(summary, pair, attack, seed, low, high) for pair in same]
    else:
        page["features"], page["left_out"] = feature_scores(same)
    return page


def _commonest_seed(study: Study) -> int:
    """Return the seed that most settings have, of several the least."""
    seeds = Counter(seed for s in study.settings for seed in s.seeds)
    return min(seeds, key=lambda seed: (-seeds[seed], seed))


def _depth_sections(study: Study, summary: Summary) -> list[Json]:
    """Return, for every attack on inputs where settings differ by cut, leakage by depth and pictures in that order."""
    pages: list[Json] = []
    for attack in [a for a in summary["attacks"] if summary["targets"][a] == "inputs"]:
        shown = TARGETS["inputs"].order(m for m in scored_metrics(summary, attack) if METRICS[m].up)[:2]
        if figure := plot_leakage_by_depth(summary, attack, shown, f"depth{len(pages)}"):
            grids = [_depth_pictures(study, summary, attack, line) for line in depth_lines(summary, attack)]
            shown_grids = [grid for grid in grids if grid["rows"]]
            pages.append({"attack": summary["names"][attack], "figure": figure, "grids": shown_grids})
    return pages


def _depth_pictures(study: Study, summary: Summary, attack: str, line: DepthLine) -> Json:
    """Return the pictures of the settings in `line`, from the shallowest cut to the deepest."""
    kept = {(s.place, s.defense): s for s in study.settings}
    ordered = tuple(kept[s["place"], s["defense"]] for s in line.settings)
    return {"line": line.name, **_reconstruction_section(replace(study, settings=ordered), summary, attack)}


def _picture_row(summary: Summary, pair: Pair, attack: str, seed: int, low: float, high: float) -> Json:
    run = next(r for r in pair.setting.runs if r.seed == seed)
    found = run.attack(attack)
    scored = [
        f"{METRICS[m].title} {format_score(m, score.mean)}"
        for m in ("psnr", "ssim", "accuracy")
        if found is not None and (score := found.scores.get(m, {}).get("attack")) and score.mean is not None
    ]
    utility = "-" if run.utility.test is None else format_utility(summary, run.utility.test)
    said = [", ".join(scored), f"{run.utility.metric} {utility}"]
    strip = image_strip(pair.prediction[:SHOWN], low, high)
    return {"name": name_of(summary, pair.setting), "strip": strip, "said": said}


def _client_section(summary: Summary, settings: Sequence[Setting]) -> Json:
    """Return what is told of several clients one by one: rows of a table and two figures; nothing for one client."""
    shown_settings = [s for s in summary["settings"] if s["clients"] or s["target"]]
    # What hijacked clients reach is no result of a method.
    named = [(name_of(summary, s), s) for s in settings if not s.training_attack]
    several = [(label, s) for label, s in named if any(run.utility.spread for run in s.runs)]
    metric = summary["utility"]["metric"]
    target = next((s["target"]["value"] for s in shown_settings if s["target"]), None)
    return {
        "clients": shown_settings,
        "client_scores": list(
            dict.fromkeys(name for s in shown_settings if s["clients"] for name in s["clients"]["method"])
        ),
        "across": any(s["clients"] and s["clients"]["across"] for s in shown_settings),
        "target": target,
        "prototypes": prototype_pictures(several),
        "by_round": plot_utility_by_round(named, metric, "byround", target) if shown_settings else "",
        "per_client": plot_client_scores(several, metric, "perclient"),
    }


def _starting_states(summary: Summary) -> Json:
    """Return what optimizers and weights begin with: `begins` where it is the same everywhere, else by setting."""
    told = [(name_of(summary, s), s["begins"]) for s in summary["settings"] if s["begins"]]
    said = {text for _, text in told}
    return {"begins": None if len(said) > 1 else next(iter(said), ""), "beginnings": told}


def _message_kinds(summary: Summary) -> list[str]:
    """Return the kinds of messages that were counted or predicted."""
    told = [*summary["settings"], *(s["predicted"] for s in summary["settings"] if s["predicted"])]
    return sorted({kind for one in told for kind in one["bytes_by_kind"]})


def _plot_over_time(summary: Summary, settings: Sequence[Setting]) -> Markup:
    """Plot utility against simulated time for every setting that has a clock; nothing where none has."""
    found = [(name_of(summary, s), lines) for s in settings if (lines := utility_over_time(s)) is not None]
    if not found:
        return Markup("")
    curves = [(name, *mean) for name, (mean, _) in found]
    seeds = [each if len(each) > 1 else [] for _, (_, each) in found]
    return plot_accuracy_over_time(curves, summary["utility"]["metric"], "overtime", seeds)


def reproduction(study: Study) -> Json:
    """Return the `files` of its folder that do the study again, and the `commands`.

    Those under code/ are the user's own Python files, as they were imported; a study's file looks for them beside it.
    """
    given = "study.toml" if (study.folder / "study.toml").is_file() else "config.toml"
    code = sorted(path for path in (study.folder / "code").rglob("*.py") if path.is_file())
    return {
        "files": [given, *(escape_invisible(path.relative_to(study.folder).as_posix()) for path in code)],
        "commands": [f"splitfed run {given} --folder again", "splitfed report again"],
    }


VICTIMS = {
    "tokens": "the tokens of {} victims",
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
        {
            "name": name_of(summary, s),
            "attack": summary["names"][label],
            **{who: attack["stolen"][who] for who in CLONES},
        }
        for s in summary["settings"]
        for label, attack in s["attacks"].items()
        if attack["stolen"] and all(attack["stolen"][who] for who in CLONES)
    ]


PREDICTED = ("tokens", "labels", "members", "shares")


def _leak_section(study: Study, summary: Summary, attack: str, looks: SeriesStyles, number_of_it: int) -> Json:
    target, metrics = summary["targets"][attack], scored_metrics(summary, attack)
    settings = [s for s in summary["settings"] if attack in s["attacks"]]
    name = f"leak{number_of_it}"
    page: Json = {
        "attack": summary["names"][attack],
        "title": TARGETS[target].title,
        "said": [_sentence(summary, s, attack, metrics) for s in settings if s["family"] == NO_DEFENSE],
        "figure": plot_scores(summary, settings, attack, metrics[:2], looks, name),
        "roc": Markup(""),
        "seed": None,
    }
    if target == "members":
        page["seed"] = _commonest_seed(study)
        found = read_pairs(study.settings, attack, page["seed"])
        curves = [(name_of(summary, p.setting), p.setting.family, p.prediction, p.truth > 0.5) for p in found]
        page["roc"] = plot_roc_curves(curves, f"{name}roc")
    return page


def _sentence(summary: Summary, setting: Mapping[str, Any], attack: str, metrics: list[str]) -> str:
    """Tell what the attack gets in `setting`, by its first metric, and members also at a low false-positive rate."""
    found, target = setting["attacks"][attack], summary["targets"][attack]
    if not (there := [m for m in metrics if (found["scores"].get(m) or {}).get("attack")]):
        return ""
    scores, metric = found["scores"], there[0]
    blind, beside = baseline(found, metric), beside_baseline(summary, found, metric)
    said = (
        f"{name_of(summary, setting)}: {found['adversary']} predicts {VICTIMS[target].format(found['victims'])} at "
        f"{METRICS[metric].title} {format_score(metric, scores[metric]['attack']['mean'])}{beside}"
    )
    if blind and not beats_baseline(found, metric):
        said += ", not measurably better than that baseline"
    elif turned := reversal_clause(found, metric):
        said += f"; it {turned}"
    # Of few outsiders a hundredth is nobody: then this is the share found with none accused.
    low = "tpr_at_fpr_1%"
    if low in there and scores[low].get("chance"):
        share, blindly_found = (100 * scores[low][who]["mean"] for who in ("attack", "chance"))
        said += (
            f"; where at most one outsider in a hundred is accused, it finds {share:.1f} % of the members "
            f"(chance {blindly_found:.1f} %)"
        )
    return f"{said[:1].upper()}{said[1:]}."
