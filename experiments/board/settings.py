"""From entries to what the board shows of a setting: means over seeds with intervals, floors, ceilings and costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from experiments.board.entries import Entries
from experiments.board.studies import COLUMNS, BoardRun, BoardStudy
from splitfed.attacks.scoring.label_metrics import EXCESS
from splitfed.attacks.scoring.reconstruction_metrics import PSNR_CAP
from splitfed.attacks.threat_model import BLACK_BOX, WHITE_BOX
from splitfed.stats.intervals import mean_interval
from splitfed.study.report.data import NO_DEFENSE, Estimate
from splitfed.study.report.metrics import FLOORS, LABEL_FLOORS, METRICS

ROWS = (BLACK_BOX, WHITE_BOX)
"""The columns of recovered rows."""
BLIND = ("mean_image", *LABEL_FLOORS, "majority")
"""What reads nothing: the mean of the adversary's own rows, its own columns, the most frequent class."""
LEAST_SPAN = 1e-6
"""A ceiling whose error is that of the floor, but for this share of it, leaves no share to speak of."""
EXACT = 1e-6
"""Mean squared error, as a share of the data range's square (of a table's variance), that more work need not lower."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Leak:
    """What the attacks of a column came to: the `score` in `metric` of the one that counts, and how it was reached.

    In each seed that one counts which recovered most: rows by the least mean squared error, labels by what is most
    beyond the adversary's own data, else by the score; closed forms that are scored beside an attack count too, and in
    the white box all of the black box. `median`, `worst_decile`: of rows, over victims, in `metric`; `decibels`: of
    the mean squared error of all victims; `ssim`: of images. `floor`: what the blind baseline scores (of labels the
    adversary's own columns where `own`, else the most frequent class or chance); `ceiling`: the same without a
    defense. `kept`: the share of the error that releases spare the adversary which is spared still, (floor - this) /
    (floor - ceiling) in mean squared error; None where `unshared` says why. `members`: who made the prediction, by
    seeds. `converged`: whether more work would not have helped, in every seed; None where that was not asked.
    `excess`: of labels how far the score is beyond the floor. `open`: how many attacks of runs that have ended are
    still to be asked. `why`: in place of all that, why there is no score.
    """

    metric: str = ""
    score: Estimate | None = None
    median: float | None = None
    worst_decile: float | None = None
    decibels: float | None = None
    ssim: float | None = None
    floor: float | None = None
    own: bool = False
    ceiling: float | None = None
    kept: Estimate | None = None
    unshared: str = ""
    members: Mapping[str, int] = field(default_factory=dict)
    converged: bool | None = None
    excess: Estimate | None = None
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
        leaks={column: _leak(study, column, done, bare, place) for column in COLUMNS},
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
    study: BoardStudy, column: str, done: Sequence[Json], bare: Mapping[tuple[str, int], Json], place: str
) -> Leak:
    """Return what the attacks of a `column` came to, seed by seed."""
    asked = [question for question in study.questions if question.column == column]
    if not asked:
        return Leak(why="not asked")
    left = sum(question in asked for entry in done for question in study.open_questions(entry))
    answered = [(entry, best) for entry in done if (best := _strongest(study, entry, column)) is not None]
    if not answered:
        found = [answer for entry in done for question in asked if (answer := question.answer_in(entry)) is not None]
        said = [f"{kind}: {one[kind]}" for one in found for kind in ("refused", "failed") if kind in one]
        return Leak(open=left, why=said[0] if said and not left else "to do")
    every = [best for _, best in answered]
    first, kind = every[0], METRICS[every[0].metric]
    tops = [
        (best, top)
        for entry, best in answered
        if (run := bare.get((place, entry["seed"]))) is not None and (top := _strongest(study, run, column)) is not None
    ]
    floors = [best.floor for best in every if best.floor is not None]
    beyond = [best.excess for best in every if best.excess is not None]
    judged = [best.converged for best in every if best.converged is not None]
    kept, unshared = _share(tops) if column in ROWS else (None, "")
    errors = [best.error for best in every if best.error is not None]
    return Leak(
        first.metric,
        estimate([best.mean for best in every], kind.bounds, (first.low, first.high), "victims"),
        median=_mean(best.median for best in every),
        worst_decile=_mean(best.worst_decile for best in every),
        decibels=fmean(_decibels(error) for error in errors) if errors and first.metric == "psnr" else None,
        ssim=_mean(best.ssim for best in every),
        floor=fmean(floors) if floors else None,
        own=all(best.own for best in every),
        ceiling=fmean(top.mean for _, top in tops) if tops else None,
        kept=kept,
        unshared=unshared,
        members=Counter(best.member for best in every),
        converged=all(judged) if judged else None,
        excess=estimate(beyond) if beyond else None,
        open=left,
    )


def _share(tops: Sequence[tuple[Reading, Reading]]) -> tuple[Estimate | None, str]:
    """Return the share of the ceiling that is left, and why there is none: readings of a setting and undefended."""
    if not tops:
        return None, "to do"
    rough = [top for _, top in tops if top.converged is False and not (top.error is not None and top.error < EXACT)]
    if rough:
        of = f" in {len(rough)} of {len(tops)} seeds" if len(tops) > 1 else ""
        return None, f"ceiling not converged{of}"
    shares = [
        (top.floor_error - best.error) / span
        for best, top in tops
        if best.error is not None and top.error is not None and top.floor_error is not None
        if (span := top.floor_error - top.error) > LEAST_SPAN * top.floor_error
    ]
    return (estimate(shares), "") if shares else (None, "ceiling at the floor")


def _decibels(error: float) -> float:
    return -10 * math.log10(max(error, 10 ** (-PSNR_CAP / 10)))


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of one value a seed; None where one is missing."""
    found = list(values)
    known = [value for value in found if value is not None]
    return fmean(known) if known and len(known) == len(found) else None


class Reading(NamedTuple):
    """What was recovered of a run: the `mean` of `metric` over victims with its interval and spread, and by whom.

    `error`: of rows the mean squared error as a share of the data range's square, of tables of the victims' variance.
    """

    metric: str
    mean: float
    low: float | None
    high: float | None
    median: float | None
    worst_decile: float | None
    error: float | None
    ssim: float | None
    floor: float | None
    floor_error: float | None
    own: bool
    member: str
    converged: bool | None
    excess: float | None

    @property
    def merit(self) -> float:
        """What is greater where more leaked; see `Leak`."""
        if self.error is not None:
            return -self.error
        return METRICS[self.metric].leak(self.mean) if self.excess is None else self.excess


def _strongest(study: BoardStudy, entry: Json, column: str) -> Reading | None:
    """Return the reading in `entry` that leaks most; None where no attack of the `column` has a score.

    Who has weights can do all that others can, so in the white box the black box counts too; never the reverse.
    """
    own = _readings(study, entry, column)
    if not own:
        return None
    weaker = _readings(study, entry, BLACK_BOX) if column == WHITE_BOX else []
    # More work with the weights may yet recover more than who stands in for it.
    rough = {"converged": False} if any(one.converged is False for one in own) else {}
    named = [one._replace(member=f"black box: {one.member}", **rough) for one in weaker]
    return max([*own, *named], key=lambda one: one.merit)


def _readings(study: BoardStudy, entry: Json, column: str) -> list[Reading]:
    """Return what the attacks of a `column` recovered, and the closed forms that are scored beside them."""
    readings = []
    for question in study.questions:
        one = question.answer_in(entry) if question.column == column else None
        if one is None or "scores" not in one:
            continue
        scores, metric, width = one["scores"], one["metric"], one.get("width")
        blind = next((who for who in BLIND if who in scores), "")
        floor = scores[blind][metric]["mean"] if blind else METRICS[metric].centre
        recorded = scores.get(EXCESS, {}).get(metric, {}).get("mean")
        for who, by in scores.items():
            if by[metric]["mean"] is None or who not in ("attack", *FLOORS):
                continue
            leak = METRICS[metric].leak(by[metric]["mean"])
            beyond = None if floor is None else leak - floor
            readings.append(
                Reading(
                    metric,
                    *(by[metric].get(key) for key in ("mean", "low", "high", "median", "worst_decile")),
                    error=_error(by, width),
                    ssim=by.get("ssim", {}).get("mean"),
                    floor=floor,
                    floor_error=_error(scores[blind], width) if blind else None,
                    own=blind in LABEL_FLOORS,
                    member=(one["member"] or question.name) if who == "attack" else f"{who}, as a floor",
                    converged=one["converged"],
                    excess=None if column != "labels" else beyond if recorded is None else recorded,
                )
            )
    return readings


def _error(by: Mapping[str, Any], width: float | None) -> float | None:
    """Return the mean squared error among scores by metric, in the unit of `Reading`; None of what is no row."""
    if width is not None and "mse" in by:
        found = by["mse"]["mean"]
        return None if found is None else found / width**2
    found = by.get("r2", {}).get("mean")
    return None if found is None else 1 - found


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
