"""Compares settings of finished runs, paired over seeds, and over rows where rows were scored one by one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from splitfed.core import digests
from splitfed.core.errors import InvalidInput, check_number, unknown
from splitfed.stats.paired import compare_pairs, holm, needed_pairs
from splitfed.study.config.mistakes import short_repr
from splitfed.study.config.schema import read_toml
from splitfed.study.report.data import describe_unfinished, group_by, make_visible
from splitfed.study.report.metrics import METRICS
from splitfed.study.results import FILE, RunResult, read_result, result_from_json, to_json
from splitfed.study.run.comparison import ComparedMetric, ComparedPair, Comparison
from splitfed.study.run.row_scores import WHOLE_ROWS, RowScores, mean_over_runs, score_test_rows, score_victims
from splitfed.study.trust import check_links

AXES = ("topology", "schedule", "method", "defense", "training_attack", "model")
"""What runs of a study may differ in beside the seed."""
COUNTED = {"bytes": "sends more", "simulated seconds": "takes longer", "epsilon": "promises less"}
"""Costs that are counted or planned, and what more of them means."""
DIGEST = "digest of all rows"
Values = Mapping[str, str]
RunPair = tuple[RunResult, RunResult]


@dataclass(frozen=True)
class ComparedSide:
    """Runs under one name; `failed`: seeds of runs that failed; `unfinished`: which runs have no result, in words."""

    name: str
    runs: tuple[RunResult, ...]
    failed: tuple[int, ...] = ()
    unfinished: str = ""

    def values(self, axis: str) -> list[str]:
        """Return the values that the runs have on `axis`, each once; what has nothing comes first."""
        return sorted(dict.fromkeys(_value(run, axis) for run in self.runs), key=lambda value: value != "none")


@digests.reads_folder
def compare(
    *folders: str | Path,
    settings: Sequence[Values] = (),
    axis: str | None = None,
    only: Values | None = None,
    metrics: Sequence[str] = (),
    level: float = 0.05,
    power: float = 0.8,
    rows: bool = True,
    test_rows: bool = False,
    trust: bool = False,
) -> Comparison:
    """Compare two or more folders of runs or studies, or settings of one study, pair by pair: second minus first.

    `settings`: of one study, {axis: value, ...} a side; `axis`: every value of that axis is a side; `only`: runs with
    these values alone. Axes are topology, schedule, method, defense, training_attack and model; a value is its label in
    the results, or its name where one label alone has it. What both sides vary over is matched value by value.
    `metrics`: those alone, by the names that a comparison prints or by their last word ("psnr"): fewer tests leave more
    to claim, if they were chosen before the results were seen. `level`: of claims, after Holm's correction, and one
    minus that of intervals; `power`: the chance of a claim for which seeds are counted. `rows`: whether victims are
    compared too; `test_rows`: whether runs are rebuilt to compare their test rows, as `splitfed predict` does (`trust`
    as there). Raises `InvalidInput` where data, victims, metric or seeds do not allow pairing, and for folders without
    finished runs.
    """
    sides = read_sides([Path(folder) for folder in folders], settings, axis, only, trust=trust)
    return compare_sides(sides, metrics=metrics, level=level, power=power, rows=rows, test_rows=test_rows, trust=trust)


def compare_sides(
    sides: Sequence[ComparedSide],
    *,
    metrics: Sequence[str] = (),
    level: float = 0.05,
    power: float = 0.8,
    rows: bool = True,
    test_rows: bool = False,
    trust: bool = False,
) -> Comparison:
    """Compare every two of `sides`.

    A run that was read from no folder is compared by its scores alone: then nothing vouches for equal data but their
    name.
    """
    for name, value in (("level", level), ("power", power)):
        check_number(name, value, low=0, high=1, open_low=True, open_high=True)
    if len(sides) < 2:
        raise InvalidInput(f"a comparison has {len(sides)} sides; expected at least 2")
    pairs: list[ComparedPair] = []
    compared: list[ComparedMetric] = []
    for first, second in itertools.combinations(sides, 2):
        for pair, runs in _pair_settings(first, second):
            number = len(pairs)
            found, notes = _compare_seeds(number, pair, runs, level)
            if rows:
                found += _compare_victims(number, runs, level)
            if test_rows:
                found += _compare_test_rows(number, runs, level, trust)
            compared += found
            pairs.append(replace(pair, notes=(*pair.notes, *notes)))
    chosen = _choose(compared, metrics)
    return Comparison(tuple(pairs), tuple(_with_claims(chosen, level, power)), level, power)


def read_sides(
    folders: Sequence[Path],
    settings: Sequence[Values] = (),
    axis: str | None = None,
    only: Values | None = None,
    *,
    trust: bool = False,
) -> list[ComparedSide]:
    """Return the sides that `compare` is asked for; see there."""
    if not folders:
        raise InvalidInput("nothing to compare; expected folders of runs or of studies")
    resolved = [folder.resolve() for folder in folders]
    if len(set(resolved)) < len(resolved):
        raise InvalidInput(f"{str(folders[-1])!r}: a folder is there twice; expected different ones")
    if len(folders) > 1 and (settings or axis is not None):
        raise InvalidInput("settings and axis choose among the runs of one study; give one folder, or `only`")
    whole = [_restrict(_read_side(folder, trust), only or {}) for folder in folders]
    if len(folders) > 1:
        names = [folder.name for folder in resolved]
        return [
            replace(side, name=n if names.count(n) == 1 else side.name) for side, n in zip(whole, names, strict=True)
        ]
    (study,) = whole
    if (len(settings) > 0) == (axis is not None):
        varied = [f"{a} ({', '.join(study.values(a))})" for a in AXES if len(study.values(a)) > 1]
        raise InvalidInput(
            f"{str(folders[0])!r} is one folder: choose settings or an axis of it; it varies "
            + (" and ".join(varied) or "nothing but its seeds")
        )
    if axis is not None:
        _check_axis(axis)
        values = study.values(axis)
        if len(values) < 2:
            raise InvalidInput(
                f"axis={axis!r} has one value in {str(folders[0])!r}, {values[0]}; expected several{_besides(study)}"
            )
        return [replace(_restrict(study, {axis: value}), name=f"{axis}={value}") for value in values]
    named = [(_restrict(study, one), ", ".join(f"{a}={v}" for a, v in one.items())) for one in settings]
    return [replace(side, name=name) for side, name in named]


def parse_setting(text: str) -> dict[str, str]:
    """Return the axes and values of `text`, such as "defense=none; topology=vanilla(cut=relu1)"."""
    found = {}
    for part in text.split(";"):
        name, equals, value = part.strip().partition("=")
        if not equals or not value.strip():
            raise InvalidInput(f"setting {part.strip()!r} is not allowed; expected AXIS=VALUE, several with ; between")
        _check_axis(name.strip())
        found[name.strip()] = value.strip()
    return found


def _check_axis(axis: str) -> None:
    if axis not in AXES:
        raise unknown("axis", axis, AXES)


def _value(run: RunResult, axis: str) -> str:
    """Return the label of `run` on `axis`."""
    found = getattr(run, axis) or "none"
    return found if isinstance(found, str) else str(found.label)


def _restrict(side: ComparedSide, values: Values) -> ComparedSide:
    """Return `side` with the runs that have `values`; raises `InvalidInput` where none has."""
    runs = side.runs
    for axis, value in values.items():
        _check_axis(axis)
        labels = list(dict.fromkeys(_value(run, axis) for run in runs))
        if value not in labels:
            named = [label for label in labels if label.partition("(")[0] == value]
            if len(named) > 1:
                raise InvalidInput(f"{axis} {value!r} has {len(named)} settings: name one of {', '.join(named)}")
            if not named:
                raise InvalidInput(f"{unknown(axis, value, labels)}{_besides(side)}")
            value = named[0]
        runs = tuple(run for run in runs if _value(run, axis) == value)
    return replace(side, runs=runs)


def _read_side(folder: Path, trust: bool) -> ComparedSide:
    """Return the finished runs in `folder`, that of a run or of a study; refuse what has none."""
    if not folder.is_dir():
        raise InvalidInput(f"{str(folder)!r} is no folder; expected that of a run or of a study")
    if not trust:
        check_links(folder)
    places = [folder] if (folder / FILE).is_file() else sorted((folder / "runs").glob("*/"))
    found = [result_from_json(make_visible(to_json(one)), place) for place in places if (one := read_result(place))]
    runs = tuple(result for result in found if result.failed is None)
    unfinished = describe_unfinished(folder) if (folder / "runs").is_dir() else ""
    if not runs:
        why = f": {unfinished}" if unfinished else "; expected the folder of a study, or STUDY/runs/NAME"
        raise InvalidInput(f"{str(folder)!r} holds no finished run{why}")
    failed = tuple(result.seed for result in found if result.failed is not None)
    return ComparedSide(str(folder), runs, failed, unfinished)


def _besides(*sides: ComparedSide) -> str:
    """Return what is to be said of sides that lack runs, after what does not go with those that are there."""
    return "".join(f"; {said}" for said in dict.fromkeys(side.unfinished for side in sides) if said)


def _pair_settings(first: ComparedSide, second: ComparedSide) -> Iterator[tuple[ComparedPair, list[RunPair]]]:
    """Yield every two settings of the sides that are to be compared, with their runs, paired by seed."""
    shared = {
        axis: common
        for axis in AXES
        if (common := [value for value in first.values(axis) if value in second.values(axis)])
    }
    varied = [axis for axis in shared if max(len(first.values(axis)), len(second.values(axis))) > 1]
    grouped = [
        group_by(
            (run for run in side.runs if all(_value(run, axis) in shared[axis] for axis in varied)),
            lambda run: tuple(_value(run, axis) for axis in varied),
        )
        for side in (first, second)
    ]
    keys = [key for key in grouped[0] if key in grouped[1]]
    if not keys:
        raise InvalidInput(
            f"{first.name!r} and {second.name!r} share no setting of {' and '.join(varied)}{_besides(first, second)}"
        )
    for key in keys:
        sides = [replace(side, runs=tuple(runs[key])) for side, runs in zip((first, second), grouped, strict=True)]
        for side in sides:
            _check_one_setting(side)
        by_seed = [{run.seed: run for run in side.runs} for side in sides]
        seeds = sorted(by_seed[0].keys() & by_seed[1].keys())
        if not seeds:
            there = (f"{side.name!r} has {sorted(by)}" for side, by in zip(sides, by_seed, strict=True))
            raise InvalidInput(f"no seed is in both: {' and '.join(there)}; runs are paired by seed{_besides(*sides)}")
        runs = [(by_seed[0][seed], by_seed[1][seed]) for seed in seeds]
        for one, other in runs:
            _check_same_data(first.name, second.name, one, other)
        left = [_left_out(side, by, seeds) for side, by in zip(sides, by_seed, strict=True)]
        left += dict.fromkeys(side.unfinished for side in sides)
        where = ", ".join(key)
        differs = tuple(_differing_settings(*runs[0]))
        yield ComparedPair(first.name, second.name, where, differs, tuple(seeds), tuple(filter(None, left))), runs


def _left_out(side: ComparedSide, by_seed: Mapping[int, RunResult], seeds: Sequence[int]) -> str:
    """Say which seeds of `side` have no partner, and which failed; a failure may be no accident."""
    alone = sorted(by_seed.keys() - set(seeds))
    said = [f"has seeds {alone} alone, which are left out"] if alone else []
    said += [f"has runs that failed (seeds {sorted(set(side.failed))})"] if side.failed else []
    return f"{side.name} {' and '.join(said)}" if said else ""


def _check_one_setting(side: ComparedSide) -> None:
    """Refuse a side with several runs of one seed: it is not clear which is meant."""
    for axis in AXES:
        if len(values := side.values(axis)) > 1:
            raise InvalidInput(
                f"{side.name!r} has {len(values)} values of {axis} ({', '.join(values)}); "
                f"choose one by only {axis}=VALUE"
            )
    seeds = [run.seed for run in side.runs]
    if len(set(seeds)) < len(seeds):
        raise InvalidInput(
            f"{side.name!r} has several runs of seed {max(seeds, key=seeds.count)} that differ in nothing"
        )


def _check_same_data(first: str, second: str, one: RunResult, other: RunResult) -> None:
    """Refuse runs of one seed that did not have the same rows; name the first difference."""
    where = f"seed {one.seed} of {first!r} and {second!r} cannot be paired"
    kept = [_kept_data(run) for run in (one, other)]
    for key in dict.fromkeys([*kept[0], *kept[1]]):
        values = [table.get(key) for table in kept]
        if values[0] != values[1]:
            told = f"data.{key} is {short_repr(values[0])}, not {short_repr(values[1])}"
            raise InvalidInput(f"{where}: {'their rows are not the same' if key == DIGEST else told}")
    metrics = [run.utility.metric for run in (one, other)]
    if metrics[0] != metrics[1]:
        raise InvalidInput(f"{where}: metric: {metrics[0]!r}, not {metrics[1]!r}")


def _kept_data(run: RunResult) -> dict[str, Any]:
    """Return what a run tells of its data: the table of its study, then how many rows, then the digest of all."""
    found = {"name": run.data, "clients": run.clients}
    if (folder := run.folder) is None:
        return found
    table = read_toml(folder / "config.toml", digests.RUN_CONFIG).get("data", {})
    described = digests.read(folder / "run.json", digests.RETRAIN)["data"]
    counts = {"rows of each client": described["clients"], "number of victims": described["victims"]}
    return {**found, **table, **counts, DIGEST: described["rows"]}


def _differing_settings(one: RunResult, other: RunResult) -> Iterator[str]:
    """Yield the names of all that two runs differ in by their configuration, data, seed and attacks apart."""
    for axis in AXES:
        if _value(one, axis) != _value(other, axis):
            yield axis
    if one.folder is None or other.folder is None:
        return
    paths = [folder / "config.toml" for folder in (one.folder, other.folder)]
    tables = [read_toml(path, digests.RUN_CONFIG).get("training", {}) for path in paths]
    for key in dict.fromkeys([*tables[0], *tables[1]]):
        if key != "schedule" and tables[0].get(key) != tables[1].get(key):
            yield f"training.{key}"


def _compare_seeds(
    number: int, pair: ComparedPair, runs: Sequence[RunPair], level: float
) -> tuple[list[ComparedMetric], list[str]]:
    """Return every metric that all runs of both sides have, and notes on those that only some have."""
    told = [(_scores_of(one), _scores_of(other)) for one, other in runs]
    names = list(dict.fromkeys(name for both in told for scores in both for name in scores))
    found, missing = [], []
    for name in names:
        values = [[scores[name][0] for scores in side if name in scores] for side in zip(*told, strict=True)]
        if any(len(side) < len(runs) or None in side for side in values):
            missing.append(name)
            continue
        positive = next(scores[name][1] for both in told for scores in both if name in scores)
        first, second = (torch.tensor(side, dtype=torch.float64) for side in values)
        one = _compared(number, name, "seeds", first, second, level, positive)
        if name in COUNTED and bool((second - first == (second - first)[0]).all()):
            one = replace(one, tested=False)
        if name == "seconds":
            one = replace(one, note=_machine_note(runs))
        found.append(one)
    few = ", ".join(missing)
    return found, [f"not in every run of both sides, so left out: {few}"] if missing else []


def _scores_of(run: RunResult) -> dict[str, tuple[float | None, str]]:
    """Return metric -> value of `run`, and what more of it means."""
    utility = run.utility
    found: dict[str, tuple[float | None, str]] = {}
    if utility.test is not None:
        found[utility.metric] = (utility.test, "is better" if utility.higher_is_better else "is worse")
    for attack in run.attacks:
        for metric, by in attack.scores.items():
            if metric in METRICS and "attack" in by:
                found[f"{attack.label} {metric}"] = (by["attack"].mean, _leak_meaning(metric))
    found["bytes"] = (float(run.bytes), COUNTED["bytes"])
    found["seconds"] = (float(run.seconds), "takes longer")
    if run.history and "simulated_seconds" in run.last:
        found["simulated seconds"] = (float(run.last["simulated_seconds"]), COUNTED["simulated seconds"])
    if run.ledger is not None:
        found["epsilon"] = (run.ledger["epsilon"], COUNTED["epsilon"])
    return found


def _leak_meaning(metric: str) -> str:
    if METRICS[metric].centre is not None:
        return f"is attacked at a higher {METRICS[metric].title}"
    return "leaks more" if METRICS[metric].up else "leaks less"


def _machine_note(runs: Sequence[RunPair]) -> str:
    """Say where the runs are known to come from different machines: their times are then not comparable."""
    known = []
    for folder in (run.folder for run in itertools.chain.from_iterable(runs)):
        if folder is not None and (path := folder / "environment.json").is_file():
            told = digests.read(path, "delete it to go on without it")
            known.append((told.get("platform"), told.get("device"), told.get("threads")))
    return "the runs were made on different machines, devices or numbers of threads" if len(set(known)) > 1 else ""


def _compare_victims(number: int, runs: Sequence[RunPair], level: float) -> list[ComparedMetric]:
    """Return the metrics of every attack that both sides kept the predictions of, paired by victim."""
    found = []
    for label in [attack.label for attack in runs[0][0].attacks]:
        kept: list[tuple[RowScores, RowScores]] = []
        target = "inputs"
        for one, other in runs:
            first, second = one.attack(label), other.attack(label)
            if one.folder is None or other.folder is None or not (first and first.sha256 and second and second.sha256):
                break
            pair = score_victims(one.folder, first), score_victims(other.folder, second)
            if not torch.equal(pair[0].truth, pair[1].truth):
                raise InvalidInput(
                    f"seed {one.seed}: attack {label!r} went against other victims in "
                    f"{one.id!r} ({len(pair[0].truth)}) than in {other.id!r} ({len(pair[1].truth)})"
                )
            target = first.target
            kept.append(pair)
        if len(kept) == len(runs):
            found += _compare_rows(number, f"{label} ", "victims", kept, level, target in WHOLE_ROWS)
    return found


def _compare_test_rows(number: int, runs: Sequence[RunPair], level: float, trust: bool) -> list[ComparedMetric]:
    """Return the scores of test rows, by runs that are rebuilt."""
    kept = []
    for one, other in runs:
        if one.folder is None or other.folder is None:
            raise InvalidInput("test_rows needs the folders of the runs; these are results alone")
        pair = score_test_rows(one.folder, trust=trust), score_test_rows(other.folder, trust=trust)
        if not torch.equal(pair[0].truth, pair[1].truth):
            raise InvalidInput(f"seed {one.seed}: {one.id!r} and {other.id!r} have different test rows")
        kept.append(pair)
    return _compare_rows(number, "", "test rows", kept, level, whole=True)


def _compare_rows(
    number: int, prefix: str, over: str, kept: Sequence[tuple[RowScores, RowScores]], level: float, whole: bool
) -> list[ComparedMetric]:
    """Return the metrics that all of `kept`, a pair of sides a seed, have of every row, each row's mean over seeds."""
    found = []
    for name in kept[0][0].scores:
        if all(name in side.scores for pair in kept for side in pair):
            both = [
                mean_over_runs([(pair[side].truth, pair[side].scores[name]) for pair in kept], whole) for side in (0, 1)
            ]
            found.append(_compared(number, f"{prefix}{name}", over, both[0], both[1], level))
    return found


def _compared(
    number: int, name: str, over: str, first: Tensor, second: Tensor, level: float, positive: str = ""
) -> ComparedMetric:
    means = float(first.mean()), float(second.mean())
    return ComparedMetric(number, name, over, *means, compare_pairs(second - first, 1 - level), positive)


def _choose(compared: Sequence[ComparedMetric], names: Sequence[str]) -> list[ComparedMetric]:
    """Return those of `compared` that bear one of `names`, or end in it; all of them without names."""
    for name in names:
        if not any(name in (one.metric, one.metric.rpartition(" ")[2]) for one in compared):
            raise unknown("metric", name, dict.fromkeys(one.metric for one in compared))
    return [one for one in compared if not names or {one.metric, one.metric.rpartition(" ")[2]} & set(names)]


def _with_claims(metrics: Sequence[ComparedMetric], level: float, power: float) -> Iterator[ComparedMetric]:
    """Correct the p values of all metrics of all pairs, those over seeds and those over rows apart."""
    corrected: dict[int, float] = {}
    tests = {}
    for family in (True, False):
        places = [i for i, one in enumerate(metrics) if one.tested and (one.over == "seeds") == family]
        tests[family] = len(places)
        corrected |= {
            i: p for i, p in zip(places, holm([metrics[i].found.flip.p for i in places]), strict=True) if p is not None
        }
    for i, one in enumerate(metrics):
        if i not in corrected:
            yield one
            continue
        seeds = one.over == "seeds" and not math.isnan(one.found.effect)
        needed = needed_pairs(one.found.effect, level / tests[True], power) if seeds else None
        yield replace(one, corrected=corrected[i], claim=corrected[i] <= level, needed=needed)
