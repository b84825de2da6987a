"""What a study's folder holds, read back: finished runs grouped by setting, and the runs that did not finish."""

from __future__ import annotations

import itertools
import math
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from splitfed.attacks.scoring.label_metrics import EXCESS
from splitfed.core import digests
from splitfed.core.errors import InvalidInput
from splitfed.core.grouping import group_pairs
from splitfed.stats.intervals import mean_interval
from splitfed.study.config.grid import expand
from splitfed.study.config.schema import parse_study, read_toml
from splitfed.study.report.metrics import METRICS, SHARE, UNBOUNDED
from splitfed.study.results import (
    FILE,
    UNNAMED,
    RunResult,
    Score,
    StrengthMeasure,
    result_from_json,
)
from splitfed.study.trust import CHECKED, find_link_out
from splitfed.training.folder import RunFolder

T = TypeVar("T")
K = TypeVar("K")
Json = dict[str, Any]
Summary = Mapping[str, Any]

NO_DEFENSE = "none"
NO_METHOD = "no method"
IN_PLAIN = "in plain"
LAYERS: Mapping[str, str] = {"schedule": "", "method": NO_METHOD, "computation": IN_PLAIN}
"""What a setting has on its topology, by its name in a `RunResult` -> what is said where it has none."""
CHECK_AGAIN = "delete it and go on with --resume: the study is checked again"
LEAST_SEEDS = 3
"""From how many seeds on an interval is taken over them."""
NAMED = 5
"""Runs without a result that a sentence names."""


@dataclass(frozen=True)
class Estimate:
    """The mean of `n` seeds with its 95 % interval `over` "seeds", "victims" or "rows"; None, over "nothing": without.

    Only an interval over seeds speaks of other trainings.
    """

    mean: float
    low: float | None
    high: float | None
    n: int
    over: str


@dataclass(frozen=True)
class Setting:
    """All runs that differ in nothing but the seed; `runs` are their results, in the order of their seeds.

    `training_attack`: who hijacked the training, "" for an honest one. `place`: the topology, of `LAYERS` those of
    which the study has several, and the training attack: what a figure tells apart by its markers.
    `strength`: of the defense, as `measure` counts it; None for no defense, and for one that has no such parameter.
    `variant`: what of [training] a search chose, also part of the place.
    """

    topology: str
    defense: str
    family: str
    strength: float | None
    guarantee: str
    runs: tuple[RunResult, ...]
    schedule: str = ""
    place: str = ""
    training_attack: str = ""
    method: str = NO_METHOD
    measure: StrengthMeasure = UNNAMED
    computation: str = IN_PLAIN
    variant: str = ""

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that finished."""
        return tuple(run.seed for run in self.runs)


@dataclass(frozen=True)
class Study:
    """A study's folder as read: `unfinished` are (run id, reason), and so are `refused`, which were left out."""

    folder: Path
    name: str
    config: str
    environment: Mapping[str, Any]
    settings: tuple[Setting, ...]
    unfinished: tuple[tuple[str, str], ...]
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def runs(self) -> tuple[RunResult, ...]:
        """Every finished run."""
        return tuple(run for setting in self.settings for run in setting.runs)


def read_study(folder: Path, *, trust: bool = False, only: Collection[str] = ()) -> Study:
    """Read the study in `folder`; raises `InvalidInput` where none is, or where no run has finished.

    `only`: names of the runs that are read, of a search, whose other runs nobody waits for; none: all of them.
    Links that lead out of the folder are refused without `trust`: whoever made it could have other files shown.
    """
    check_report_links(folder, trust)
    path = folder / "config.toml"
    if not (folder / "runs").is_dir():
        raise InvalidInput(f"folder {str(folder)!r} holds no study: it has no runs/ in it")
    config = read_toml(path, digests.STUDY_CONFIG) if path.is_file() else {}
    refused = dict(read_refused(folder))
    results, unfinished = _read_results(folder, config, refused, only)
    if not results:
        said = _list_unfinished(unfinished, 0)
        raise InvalidInput(f"study {str(folder)!r} has no finished run to report on: {said}; finish it first")
    check_same_data(results)
    environment = _read_json(folder / "environment.json", "delete it to go on without it")
    name = escape_invisible(str(config.get("study", {}).get("name") or folder.name))
    text = escape_invisible(path.read_text("utf-8").rpartition(digests.COMMENT)[0]) if path.is_file() else ""
    left_out = tuple((escape_invisible(run), escape_invisible(reason)) for run, reason in refused.items())
    return Study(folder, name, text, environment, _group_settings(results), tuple(unfinished), left_out)


def read_refused(folder: Path) -> tuple[tuple[str, str], ...]:
    """Return name and reason of every run that the study in `folder` left out; raises `Damaged`."""
    path = folder / CHECKED
    if not path.is_file():
        return ()
    return tuple((str(name), str(reason)) for name, reason in digests.read(path, CHECK_AGAIN)["refused"])


def describe_unfinished(folder: Path) -> str:
    """Say which runs of the study in `folder` have no result, and why; "" where all have one, and of a search."""
    path = folder / "config.toml"
    config = read_toml(path, digests.STUDY_CONFIG) if path.is_file() else {}
    results, unfinished = ([], []) if "search" in config else _read_results(folder, config, dict(read_refused(folder)))
    return f"{str(folder)!r} is not finished: {_list_unfinished(unfinished, len(results))}" if unfinished else ""


def _list_unfinished(unfinished: Sequence[tuple[str, str]], finished: int) -> str:
    shown = [f"{name} ({reason.removeprefix('not finished: ')})" for name, reason in unfinished[:NAMED]]
    shown += [f"and {len(unfinished) - NAMED} more"] if len(unfinished) > NAMED else []
    names = ", ".join(shown) or "none was begun"
    return f"{finished} of {finished + len(unfinished)} runs have a result; without one: {names}"


def _read_results(
    folder: Path, config: Mapping[str, Any], refused: Mapping[str, str], only: Collection[str] = ()
) -> tuple[list[RunResult], list[tuple[str, str]]]:
    """Return the results in `folder`, and names and reasons of the runs that have none."""
    runs = folder / "runs"
    results, unfinished = [], []
    run_names = [p.name for p in runs.iterdir() if p.is_dir()]
    for name in sorted(only or {*run_names, *(set(_planned_runs(config, folder)) - refused.keys())}):
        document = _read_json(runs / name / FILE, digests.REMEASURE)
        if document.get("id", name) not in (name, escape_invisible(name)):
            why = f"it is the result of another run, {document['id']!r}"
            raise digests.Damaged(runs / name / FILE, digests.REMEASURE, why)
        found = result_from_json(document, runs / name) if document else None
        if found is not None and found.failed is None:
            results.append(found)
        else:
            unfinished.append((escape_invisible(name), _unfinished_reason(runs / name, found)))
    return results, unfinished


def check_report_links(folder: Path, trust: bool) -> None:
    """Refuse, unless `trust`, a folder with a link that leads out of it."""
    if not trust and (link := find_link_out(folder)) is not None:
        raise InvalidInput(
            f"{str(folder)!r} holds a link that leads out of it, {link!r}, which a report does not follow; "
            "put what it leads to in its place, or remove it"
        )


def estimate(
    values: Sequence[float | None],
    scores: Sequence[Mapping[str, Any] | None] = (),
    bounds: tuple[float, float] = UNBOUNDED,
    over: str = "victims",
) -> Estimate | None:
    """Return the mean of one value a seed, with Student's interval over three seeds or more, within `bounds`.

    Two seeds have one degree of freedom, whose interval is 9 times their distance wide and says nothing: with fewer
    than three, the bounds are the means of the seeds' own over `over`, where all `scores` (a mapping a seed with low
    and high) have them. Values that are missing or not finite are left out; None when nothing is left.
    """
    pairs = itertools.zip_longest(values, scores[: len(values)])
    finite_values = [(float(v), s) for v, s in pairs if v is not None and math.isfinite(v)]
    if not finite_values:
        return None
    numbers, n = [v for v, _ in finite_values], len(finite_values)
    if n >= LEAST_SEEDS:
        low, high = bounds
        # A result of somebody else's metric may lie where ours cannot.
        metric_bounds = {"low": low, "high": high} if all(low <= v <= high for v in numbers) else {}
        found = mean_interval(numbers, **metric_bounds)
        return Estimate(found.mean, found.low, found.high, n, "seeds")
    own = [s for _, s in finite_values if s and s.get("low") is not None and s.get("high") is not None]
    if len(own) < n:
        return Estimate(fmean(numbers), None, None, n, "nothing")
    # Seeds share rows, so their errors need not cancel: the mean of bounds is never too narrow for the mean.
    return Estimate(fmean(numbers), fmean(s["low"] for s in own), fmean(s["high"] for s in own), n, over)


def as_json(found: Estimate | None) -> dict[str, Any] | None:
    """Return an estimate as plain values, None for none."""
    return None if found is None else vars(found).copy()


def utility_of(runs: Sequence[RunResult]) -> Estimate | None:
    """Return the mean test utility, in the task's metric, of `runs` that differ in their seed alone, with an interval.

    The interval is over seeds; with fewer than three of them it is over test rows. None where no run has a utility.
    """
    return estimate([r.utility.test for r in runs], [r.utility.interval for r in runs], bounds_of(runs), "rows")


def bounds_of(runs: Sequence[RunResult]) -> tuple[float, float]:
    """Return what the utility of `runs` cannot leave."""
    told = runs[0].utility
    low, high = told.bounds or (SHARE if told.metric == "accuracy" else (None, None))
    return -math.inf if low is None else float(low), math.inf if high is None else float(high)


def score(runs: Sequence[RunResult], attack: str, metric: str, who: str = "attack") -> Estimate | None:
    """Return what the attack labelled `attack` scored over `runs`; `who`: attack, mean_image or random_pairing."""
    asked = [found for run in runs if (found := run.attack(attack)) is not None]
    scores = [by[who] for one in asked if who in (by := one.scores.get(metric, {}))]
    # A difference of two scores may lie below what a score cannot leave.
    return estimate_scores(scores, UNBOUNDED if who == EXCESS else METRICS[metric].bounds)


def estimate_scores(scores: Sequence[Score], bounds: tuple[float, float] = UNBOUNDED) -> Estimate | None:
    """Return the mean of one score a seed, with an interval over seeds, or over their victims."""
    return estimate([one.mean for one in scores], [vars(one) for one in scores], bounds)


def call_defense(label: str) -> str:
    """Return the label of a defense for people: "undefended" for "none", which results and studies have."""
    return "undefended" if label == NO_DEFENSE else label


def group_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return key -> the `items` that have it; keys, and the items of each, in the order in which they come."""
    return group_pairs((key(item), item) for item in items)


def by_round(history: Sequence[Mapping[str, Any]], read: Callable[[Mapping[str, Any]], T | None]) -> dict[int, T]:
    """Return round (from 1) -> what `read` finds in its entry, for the rounds in which it finds something."""
    return {int(entry["round"]) + 1: value for entry in history if (value := read(entry)) is not None}


def shared_rounds(each: Sequence[Mapping[int, Any]]) -> list[int]:
    """Return the rounds that all of `each` have."""
    return [r for r in each[0] if all(r in one for one in each)] if each else []


def scored_utility(entry: Mapping[str, Any]) -> float | None:
    """Return the utility after a round, on the validation rows where there are any, else on the test rows."""
    scores = [(entry.get(part) or {}).get("union") for part in ("validation", "test")]
    return next((float(score) for score in scores if score is not None), None)


def interval_ends(found: Mapping[str, Any]) -> tuple[float, float]:
    """Return the interval of an estimate; its mean twice where it has none."""
    low, high = (found["mean"] if found[side] is None else found[side] for side in ("low", "high"))
    return float(low), float(high)


def _group_settings(results: Sequence[RunResult]) -> tuple[Setting, ...]:
    """Group by all that a result says of its setting; without a method first, undefended first, then by strength."""
    groups = group_by(results, lambda r: (*r.labels.values(), r.variant, r.model, r.data, r.clients))
    several = {name for name in LAYERS if len({getattr(r, name) for r in results}) > 1}
    settings = []
    for members in groups.values():
        first, about = members[0], members[0].defense
        layers = _layers_of(first)
        own = [first.topology.label, *(label for name, label in layers.items() if name in several)]
        inside = f"{first.training_attack} inside" if first.training_attack else ""
        settings.append(
            Setting(
                topology=first.topology.label,
                defense=about.label,
                family=about.name,
                strength=about.strength,
                guarantee=about.guarantee,
                runs=tuple(sorted(members, key=lambda r: r.seed)),
                **layers,
                place=", ".join(filter(None, [*own, first.variant, inside])),
                training_attack=first.training_attack or "",
                measure=about.measure,
                variant=first.variant,
            )
        )
    return tuple(sorted(settings, key=_sort_key))


def _sort_key(setting: Setting) -> tuple[Any, ...]:
    """Sort by place, what has no method, is in plain and has no defense first."""
    above = setting.method != NO_METHOD, setting.computation != IN_PLAIN
    where = (setting.topology, setting.schedule, *above, setting.place)
    stronger = -math.inf if setting.strength is None else setting.strength * (1 if setting.measure.rises else -1)
    return (*where, setting.family != NO_DEFENSE, setting.family, setting.measure.name, stronger)


def _layers_of(result: RunResult) -> dict[str, str]:
    """Return the labels of `LAYERS` that a result has."""
    found = {name: getattr(result, name) for name in LAYERS}
    return {name: LAYERS[name] if label == "none" else label for name, label in found.items()}


def _planned_runs(config: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the runs that the study in `folder` asks for; none where its config is not there or no study any more."""
    source = "config.toml"
    if "search" in config:  # whose runs are not known before
        return []
    try:
        return [cell.id for cell in expand(parse_study(config, source), source, folder).cells]
    except InvalidInput:
        return []


def check_same_data(results: Collection[RunResult]) -> None:
    """Refuse runs that were trained on data of more than one digest: no mean over them says anything."""
    first = {run.data_digest: run.id for run in reversed(list(results)) if run.data_digest}
    if len(first) > 1:
        one, other = list(first.values())[-1], next(iter(first.values()))
        raise InvalidInput(
            f"runs {one!r} and {other!r} were trained on different data (their digests differ), and are not averaged; "
            "delete the runs on the data that are not meant, and go on with --resume"
        )


def _unfinished_reason(place: Path, found: RunResult | None) -> str:
    """Return why the run in `place` has no result: the line it left behind, or how far it came."""
    if found is not None:
        return f"failed: {found.failed}"
    if not place.is_dir():
        return "not begun"
    try:
        rounds = len(RunFolder(place).metrics())
    except digests.Damaged as error:
        return f"not finished: {error}"
    return f"not finished: {rounds} round{'' if rounds == 1 else 's'} trained so far"


def _read_json(path: Path, advice: str) -> dict[str, Any]:
    """Return the object in the file at `path`, an empty one where there is none; raises `Damaged` with `advice`.

    Whatever is read here ends up before somebody's eyes, so its texts are made visible.
    """
    found: dict[str, Any] = make_visible(digests.read(path, advice)) if path.is_file() else {}
    return found


_ALLOWED = frozenset("\n\r\t\u200c\u200d")  # joiners belong to the spelling of words and to emoji
_HIDDEN = ("Cc", "Cf", "Cs")


def make_visible(value: Any) -> Any:
    """Return plain data with every text in it, keys too, as `escape_invisible` shows it."""
    match value:
        case str():
            return escape_invisible(value)
        case dict():
            return {escape_invisible(str(key)): make_visible(item) for key, item in value.items()}
    return [make_visible(item) for item in value] if isinstance(value, list) else value


def escape_invisible(text: str) -> str:
    """Return `text` with control characters, marks of writing direction and lone surrogates as `\\u202e`.

    An SVG file with one of them could not be read, and a mark of direction lets a name read as another one.
    """
    return text if text.isascii() and text.isprintable() else "".join(map(_escape_character, text))


def _escape_character(sign: str) -> str:
    hidden = unicodedata.category(sign) in _HIDDEN or ord(sign) & 0xFFFE == 0xFFFE
    return f"\\u{ord(sign):04x}" if hidden and sign not in _ALLOWED else sign
