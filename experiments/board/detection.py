"""Detectors against a hijacked training: how often they raise an alarm, and what had been reconstructed by then.

A study of this kind is a TOML file with `[[detector]]` tables beside those of any study. Its active training attacks
make a hijacked training of every setting beside the honest one, and each of both is done with every detector: an alarm
in an honest one is a false alarm. A line a run is kept, as of the board's other studies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from experiments.board.entries import Entries, Json, reason, today, versions
from experiments.board.settings import estimate
from experiments.board.studies import digest_of
from experiments.papers.table import markdown
from splitfed.core.errors import InvalidInput, SplitfedError
from splitfed.detectors.base import Detector
from splitfed.models.import_paths import NameResolver
from splitfed.study.config import build, schema
from splitfed.study.config.algorithm_tables import read_algorithm
from splitfed.study.config.grid import expand
from splitfed.study.config.lookup import StudyReader
from splitfed.study.config.mistakes import Mistakes
from splitfed.study.config.run_spec import NamedAlgorithm, RunSpec
from splitfed.study.report.metrics import METRICS
from splitfed.study.report.units import count_noun
from splitfed.study.run.preflight import adversaries_of
from splitfed.training.entry_point import train
from splitfed.training.settings import Evaluation

HONEST = "honest"
HEAD = (
    *("detector", "server", "alarms", "alarm at step", "in round"),
    *("recovered until the alarm", "by the end", "mean image", "utility", "runs"),
)


@dataclass(frozen=True)
class DetectionRun:
    """A training of `cell`, by whoever its server is, with a detector at its client; `key`: a digest of all of it."""

    cell: RunSpec
    detector: NamedAlgorithm
    key: str

    @property
    def server(self) -> str:
        """The attack in the training, or that there is none."""
        return HONEST if self.cell.training_attack is None else self.cell.training_attack.label


@dataclass(frozen=True)
class DetectionStudy:
    """The trainings of a study of detectors, seed by seed."""

    name: str
    runs: tuple[DetectionRun, ...]


def read_detections(folder: Path, names: Sequence[str] = ()) -> list[DetectionStudy]:
    """Return the studies of detectors whose files lie in `folder`, or those called `names`."""
    chosen = [path for path in sorted(folder.glob("*.toml")) if not names or path.stem in names]
    return [read_detection(path) for path in chosen if "detector" in schema.read_toml(path)]


def read_detection(path: Path) -> DetectionStudy:
    """Return the study of detectors in the file `path`; raises `InvalidInput` for what is none."""
    raw = schema.read_toml(path)
    tables, mistakes = raw.pop("detector"), Mistakes(path.name)
    reader = StudyReader(mistakes, NameResolver(refusal="import paths are not followed here"))
    given = enumerate(tables)
    read = [read_algorithm(reader, f"detector[{number}]", "detectors", one, lists="") for number, one in given]
    mistakes.stop()
    detectors = [one for one in read if one is not None]
    grid = expand(schema.parse_study(raw, path.name), path.name, path.parent)
    if not any(cell.training_attack for cell in grid.cells):
        raise InvalidInput(f"{path.name}: no attack of it is in a training; expected an active one, such as fsha")
    seeds = list(dict.fromkeys(cell.seed for cell in grid.cells))
    cells = sorted(grid.cells, key=lambda cell: seeds.index(cell.seed))
    runs = [DetectionRun(cell, one, _key_of(cell, one)) for cell in cells for one in detectors]
    return DetectionStudy(path.stem, tuple(runs))


def complete_detections(
    studies: Sequence[DetectionStudy], results: Path, told: Callable[[str], None] = print, *, retry: bool = False
) -> None:
    """Train what is missing of all `studies`; `retry`: what was refused or has failed too."""
    for study in studies:
        entries, data = Entries(results / f"{study.name}.jsonl"), None
        for run in study.runs:
            known = entries.get(run.key)
            if known is not None and not (retry and "failed" in known):
                continue
            data = build.dataset(run.cell.data) if data is None else data
            began = time.process_time()
            about = {"key": run.key, "run": run.cell.id, "detector": run.detector.label, "server": run.server}
            about |= {"seed": run.cell.seed, "date": today(), "versions": versions()}
            try:
                found = _watch(run, data)
            except SplitfedError as error:
                found = {"failed": reason(error)}
            entries.put({**about, **found, "cpu_seconds": time.process_time() - began}, [one.key for one in study.runs])
            alarm = found.get("failed") or (f"alarm at step {found['step']}" if found["step"] else "no alarm")
            told(f"{study.name}: {run.cell.id}, {run.detector.name}: {alarm}")


def _watch(run: DetectionRun, data: Any) -> Json:
    """Train, and return when the alarm was raised and what the server's attack recovered, round after round."""
    cell, plan = run.cell, run.cell.training
    topology, detector = build.topology(cell, data), run.detector.construct()
    assert isinstance(detector, Detector)
    adversaries = adversaries_of(cell, topology)
    trained = train(
        topology,
        build.federation(data, cell.data, cell.seed),
        schedule=build.schedule(cell),
        defenses=build.defenses(cell),
        rounds=plan.rounds,
        batch_size=plan.batch_size,
        optimizer=plan.optimizer,
        seed=cell.seed,
        device=plan.device,
        local=plan.local,
        adversaries=replace(adversaries, detectors={topology.data_roles[0]: detector}),
        evaluation=Evaluation(plan.evaluate_every),
    )
    alarms = [next(iter(metrics["detectors"].values())) for metrics in trained.history]
    scored = [scores for m in trained.history for scores in m.get("training_attack_scores", {}).values()]
    metric = next((metric for metric in METRICS if scored and metric in scored[-1]), None)
    return {
        "step": alarms[-1]["alarmed_at"],
        "round": next((number for number, one in enumerate(alarms, start=1) if one["alarm"]), None),
        "metric": metric,
        "curve": [one.get(metric, {}).get("attack") for one in scored],
        "floor": scored[-1][metric].get("mean_image") if metric else None,
        "utility": trained.history[-1]["test"]["union"],
    }


def describe_detections(studies: Sequence[DetectionStudy], folder: Path) -> str:
    """Return what the tables say and the table of every study: a row a detector and server; "to do" without any."""
    tables = [_table(study, Entries(folder / f"{study.name}.jsonl")) for study in studies]
    return "\n\n".join(tables) or "to do"


def _table(study: DetectionStudy, entries: Entries) -> str:
    groups: dict[tuple[str, str], list[DetectionRun]] = {}
    for run in study.runs:
        groups.setdefault((run.detector.label, run.server), []).append(run)
    rows = []
    for (detector, server), runs in groups.items():
        found = [entry for run in runs if (entry := entries.get(run.key)) is not None]
        rows.append([f"`{detector}`", server if server == HONEST else f"`{server}`", *_row(found, len(runs))])
    first = study.runs[0].cell
    return (
        f"{first.data.name} with {first.model_label}, {count_noun(first.training.rounds, 'round')}"
        f" ([{study.name}.toml]({study.name}.toml)).\n\n{markdown(HEAD, rows)}"
    )


def _row(found: Sequence[Mapping[str, Any]], wanted: int) -> list[str]:
    """Return the cells of a detector and server: alarms of all runs, and of those with one the middle step."""
    done = [entry for entry in found if "failed" not in entry]
    runs = f"{len(done)}/{wanted}"
    if not done:
        return [next((f"failed: {entry['failed']}" for entry in found), "to do"), *[""] * 6, runs]
    alarmed = [entry for entry in done if entry["round"] is not None]
    when = [f"{median(entry[key] for entry in alarmed):g}" if alarmed else "-" for key in ("step", "round")]
    curves = [entry for entry in done if entry["curve"] and None not in entry["curve"]]
    digits = METRICS[curves[0]["metric"]].digits if curves else 0
    unit = METRICS[curves[0]["metric"]].unit if curves else ""
    values = [
        # Scored at the end of rounds: what was recovered until an alarm within one is at most about that.
        [entry["curve"][(entry["round"] or len(entry["curve"])) - 1] for entry in curves],
        [entry["curve"][-1] for entry in curves],
        [entry["floor"] for entry in curves if entry["floor"] is not None],
    ]
    said = [f"{_said(each, digits)}{unit}" if each else "-" for each in values]
    if values[2] and (leak := METRICS[curves[0]["metric"]].leak)(fmean(values[1])) < leak(fmean(values[2])):
        # A hijacker that does not work in the undefended world shows no detector to be of use.
        said[1] += ": less than the mean image tells"
    return [f"{len(alarmed)} of {len(done)}", *when, *said, _said([entry["utility"] for entry in done], 3), runs]


def _said(values: Sequence[float], digits: int) -> str:
    found = estimate(values)
    if found.low is None or found.high is None:
        return f"{found.mean:.{digits}f}"
    return f"{found.mean:.{digits}f} ({found.low:.{digits}f} to {found.high:.{digits}f})"


def _key_of(cell: RunSpec, detector: NamedAlgorithm) -> str:
    config = {**cell.config, "study": {key: value for key, value in cell.config["study"].items() if key != "name"}}
    return digest_of({**config, "detector": [detector.name, detector.parameters]})
