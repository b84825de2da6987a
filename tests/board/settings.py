"""From entries to what the board shows of a setting: means over seeds with intervals, floors, ceilings and costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from splitfed.attacks.scoring.label_metrics import EXCESS
from splitfed.stats.intervals import mean_interval
from splitfed.study.report.data import NO_DEFENSE, Estimate
from splitfed.study.report.metrics import FLOORS, LABEL_FLOORS, METRICS
from tests.board.entries import Entries
from tests.board.studies import BoardRun, BoardStudy

TARGETS = {"inputs": "rows", "labels": "labels", "members": "membership"}
"""What attacks predict -> what the board calls the column."""
BLIND = ("mean_image", *LABEL_FLOORS, "majority")
"""What reads nothing: the mean of the adversary's own rows, its own columns, the most frequent class."""
LEAST_RANGE = 1e-6
"""A ceiling that is no farther above its floor leaves no share to speak of."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Leak:
    """What the strongest attack on a target came to: its `score` in `metric`, and how it was reached.

    It is the most that the attack, or a closed form that is scored beside it, recovered.
    `floor`: what the blind baseline scores; `ceiling`: the same without a defense. `kept`: the share of the way
    from floor to ceiling that is left, None where the ceiling is at the floor or not known yet. `members`: who made the
    prediction, by seeds. `converged`: whether more work would not have helped, in every seed; None where that was not
    asked. `excess`: of labels how far the score is beyond the adversary's own data alone, which is then the floor; None
    where that was not scored. `open`: how many attacks of runs that have ended are still to be asked. `why`: in place
    of all that, why there is no score.
    """

    metric: str = ""
    score: Estimate | None = None
    floor: float | None = None
    ceiling: float | None = None
    kept: Estimate | None = None
    members: Mapping[str, int] = field(default_factory=dict)
    converged: bool | None = None
    excess: float | None = None
    open: int = 0
    why: str = ""


@dataclass(frozen=True)
class Setting:
    """A `defense` (its `label` in full) at a place (topology and cut) of a study: `seeds` done of those `wanted`.

    `utility` and what it `lost` against no defense, paired by seed (above 0: worse), in the unit of `metric`;
    `seconds` of a processor for training and `bytes` on the wire, with their ratios to no defense. `why`: in place of
    all that, why there is nothing: "to do", "refused: ..." or "failed: ...".
    """

    place: str
    defense: str
    label: str
    wanted: int
    seeds: int = 0
    metric: str = ""
    utility: Estimate | None = None
    lost: Estimate | None = None
    leaks: Mapping[str, Leak] = field(default_factory=dict)
    epsilon: float | None = None
    protects: str = ""
    seconds: float | None = None
    bytes: float | None = None
    slower: float | None = None
    larger: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Summary:
    """All settings of a study, in the order of its file; `done`: how many runs have ended and been asked everything."""

    study: BoardStudy
    settings: tuple[Setting, ...]
    done: int = 0
    versions: tuple[Mapping[str, str], ...] = ()
    dates: tuple[str, ...] = ()

    @property
    def places(self) -> tuple[str, ...]:
        """Its topologies with their cuts."""
        return tuple(dict.fromkeys(setting.place for setting in self.settings))

    @property
    def defenses(self) -> tuple[str, ...]:
        """Its defenses, by their short names."""
        return tuple(dict.fromkeys(setting.defense for setting in self.settings))

    def at(self, place: str) -> list[Setting]:
        """Return the settings of one place."""
        return [setting for setting in self.settings if setting.place == place]


def summarize(study: BoardStudy, entries: Entries) -> Summary:
    """Return the summary of what is known of `study`."""
    undefended = (run for run in study.runs if run.cell.defense.label == NO_DEFENSE)
    bare = {
        (run.place, run.cell.seed): entry
        for run in undefended
        if (entry := entries.get(run.key)) is not None and "utility" in entry
    }
    groups: dict[tuple[str, str], list[BoardRun]] = {}
    for run in sorted(study.runs, key=lambda run: _file_order(study, run)):
        groups.setdefault((run.place, run.cell.defense.label), []).append(run)
    found = [entry for run in study.runs if (entry := entries.get(run.key)) is not None]
    told = [one["versions"] for e in found for one in (e, *e.get("attacks", {}).values()) if "versions" in one]
    return Summary(
        study,
        tuple(_summarize(study, runs, entries, bare) for runs in groups.values()),
        sum(not study.open_questions(entry) for entry in found),
        tuple({str(sorted(one.items())): one for one in told}.values()),
        tuple(sorted({entry["date"] for entry in found})),
    )


def _file_order(study: BoardStudy, run: BoardRun) -> int:
    return [cell.id for cell in study.grid.cells].index(run.cell.id)


def _summarize(
    study: BoardStudy, runs: Sequence[BoardRun], entries: Entries, bare: Mapping[tuple[str, int], Json]
) -> Setting:
    place = runs[0].place
    about = (place, runs[0].defense, runs[0].cell.defense.label, len(runs))
    known = [entry for run in runs if (entry := entries.get(run.key)) is not None]
    done = [entry for entry in known if "utility" in entry]
    if not done:
        first: Json = known[0] if known else {}
        why = next((f"{kind}: {first[kind]}" for kind in ("refused", "failed") if kind in first), "to do")
        return Setting(*about, len(known), why=why)
    pairs = [(entry, bare[place, entry["seed"]]) for entry in done if (place, entry["seed"]) in bare]
    bounds = (0.0, 1.0) if done[0]["metric"] == "accuracy" else (-math.inf, math.inf)
    interval = done[0]["interval"]
    rows = (interval["low"], interval["high"])
    private = [entry for entry in done if "epsilon" in entry]
    epsilons = [entry["epsilon"] for entry in private]
    return Setting(
        *(*about, len(done), done[0]["metric"]),
        utility=estimate([entry["utility"] for entry in done], bounds, rows, "rows"),
        lost=estimate([b["utility"] - a["utility"] for a, b in pairs]) if pairs else None,
        leaks={target: _leak(study, target, done, bare, place) for target in TARGETS},
        epsilon=max(epsilons) if epsilons and None not in epsilons else None,
        protects=private[0]["protects"] if private else "",
        seconds=fmean(entry["cpu_seconds"] for entry in done),
        bytes=fmean(entry["bytes"] for entry in done),
        slower=_ratio(pairs, "cpu_seconds"),
        larger=_ratio(pairs, "bytes"),
    )


def _ratio(pairs: Sequence[tuple[Json, Json]], key: str) -> float | None:
    below = sum(bare[key] for _, bare in pairs)
    return sum(entry[key] for entry, _ in pairs) / below if below else None


def _leak(
    study: BoardStudy, target: str, done: Sequence[Json], bare: Mapping[tuple[str, int], Json], place: str
) -> Leak:
    """Return what the attacks on `target` came to; in each seed that one counts which recovered most."""
    asked = [question for question in study.questions if question.target == target]
    if not asked:
        return Leak(why="not asked")
    labels = [question.label for question in asked]
    left = sum(question in asked for entry in done for question in study.open_questions(entry))
    answered = [(entry, best) for entry in done if (best := _strongest(entry, labels)) is not None]
    if not answered:
        found = [entry["attacks"][label] for entry in done for label in labels if label in entry["attacks"]]
        said = [f"{kind}: {one[kind]}" for one in found for kind in ("refused", "failed") if kind in one]
        return Leak(open=left, why=said[0] if said and not left else "to do")
    metric = answered[0][1].metric
    kind, first = METRICS[metric], answered[0][1]
    ceilings, shares = [], []
    for entry, best in answered:
        open_run = bare.get((place, entry["seed"]))
        top = None if open_run is None else _strongest(open_run, labels)
        if top is None or top.floor is None:
            continue
        ceilings.append(top.mean)
        if abs(span := kind.leak(top.mean) - kind.leak(top.floor)) > LEAST_RANGE:
            shares.append((kind.leak(best.mean) - kind.leak(top.floor)) / span)
    floors = [best.floor for _, best in answered if best.floor is not None]
    beyond = [best.excess for _, best in answered if best.excess is not None]
    judged = [best.converged for _, best in answered if best.converged is not None]
    return Leak(
        metric,
        estimate([best.mean for _, best in answered], kind.bounds, (first.low, first.high), "victims"),
        floor=fmean(floors) if floors else None,
        ceiling=fmean(ceilings) if ceilings else None,
        kept=estimate(shares) if shares and target == "inputs" else None,
        members=Counter(best.member for _, best in answered),
        converged=all(judged) if judged else None,
        excess=fmean(beyond) if beyond else None,
        open=left,
    )


class Reading(NamedTuple):
    """The best that was recovered of a run: the `mean` of `metric` with its interval over victims, and by whom."""

    metric: str
    mean: float
    low: float | None
    high: float | None
    floor: float | None
    member: str
    converged: bool | None
    excess: float | None


def _strongest(entry: Json, labels: Sequence[str]) -> Reading | None:
    """Return the reading in `entry` that leaks most: an attack's, or one of the closed forms scored beside it."""
    readings = []
    for one in (entry["attacks"].get(label, {}) for label in labels):
        if "scores" not in one:
            continue
        metric, beside = one["metric"], one["beside"]
        floor = next((beside[who]["mean"] for who in BLIND if who in beside), METRICS[metric].centre)
        scored = {one["member"] or "the attack itself": one["scores"][metric]}
        scored |= {f"{who}, as a floor": beside[who] for who in FLOORS if who in beside}
        excess = beside.get(EXCESS, {}).get("mean")
        readings += [
            Reading(metric, score["mean"], score["low"], score["high"], floor, who, one["converged"], excess)
            for who, score in scored.items()
            if score["mean"] is not None
        ]
    return max(readings, key=lambda reading: METRICS[reading.metric].leak(reading.mean), default=None)


def estimate(
    values: Sequence[float],
    bounds: tuple[float, float] = (-math.inf, math.inf),
    alone: tuple[float | None, float | None] = (None, None),
    over: str = "nothing",
) -> Estimate:
    """Return the mean of `values`, one a seed, with its 95 % Student interval within `bounds`.

    `alone`: the interval of a single seed's own, `over` its rows or victims.
    """
    if len(values) == 1:
        return Estimate(values[0], *alone, 1, over if alone[0] is not None else "nothing")
    found = mean_interval(values, low=bounds[0], high=bounds[1])
    return Estimate(found.mean, found.low, found.high, found.n, "seeds")
