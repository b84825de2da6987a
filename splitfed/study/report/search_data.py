"""What the trials of a search found, read back from its folder: values, which hold to the constraints, the front."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitfed.core import digests
from splitfed.study.config.schema import read_toml
from splitfed.study.config.search import PRICE
from splitfed.study.config.search_metrics import DIRECTIONS
from splitfed.study.report.data import Json, call_defense
from splitfed.study.report.metrics import METRICS
from splitfed.study.report.units import count_noun
from splitfed.study.trust import is_plain_name

ADVICE = "delete it and go on with --resume: its runs are kept"
STATES = {"refused": "refused", "failed": "failed", "pruned": "pruned"}
"""States of trials without values, in the order in which they are told."""


@dataclass(frozen=True)
class SearchOutcome:
    """The trials of a search that are over: their `records`, and the numbers of those on the `front`.

    `directions`: name of each objective -> minimize or maximize; `table`: `[search]` as resolved.
    """

    table: Mapping[str, Any]
    directions: Mapping[str, str]
    records: tuple[Mapping[str, Any], ...]
    front: tuple[int, ...]

    @property
    def best(self) -> list[Mapping[str, Any]]:
        """The records of the trials on the front, the best in the first objective first."""
        known = {int(record["trial"]): record for record in self.records}
        return [known[number] for number in self.front]

    @property
    def runs(self) -> set[str]:
        """The names of the runs of trials on the front."""
        return {run for record in self.best for run in record["runs"]}


def read_search_outcome(folder: Path) -> SearchOutcome | None:
    """Return what the search in `folder` has found so far; None where the study there is a grid."""
    path = folder / "config.toml"
    table = read_toml(path, digests.STUDY_CONFIG).get("search") if path.is_file() else None
    if not isinstance(table, Mapping):
        return None
    directions = {
        str(name): str(goal.get("direction") if isinstance(goal, Mapping) else goal)
        for name, goal in table.get("objectives", {}).items()
    }
    records = tuple(read_trials(folder))
    return SearchOutcome(table, directions, records, find_front(records, directions))


def read_trials(folder: Path) -> list[Json]:
    """Return the records of the trials in `folder`, by number; raises `Damaged`."""
    paths = sorted((folder / "trials").glob("[0-9]*.json"))
    records = [(path, digests.read(path, ADVICE)) for path in paths]
    for path, record in records:
        if not all(is_plain_name(run) for run in record["runs"]):
            raise digests.Damaged(path, ADVICE, "it names a run outside of its folder")
    return sorted((record for _, record in records), key=lambda record: int(record["trial"]))


def find_front(records: Sequence[Mapping[str, Any]], directions: Mapping[str, str]) -> tuple[int, ...]:
    """Return the numbers of the feasible trials that no other one dominates, the best in the first objective first.

    One dominates another if it is at least as good in every objective and better in one. Of trials with the same
    values, which may be the same setting, the first one stands for all.
    """
    assert set(directions.values()) <= set(DIRECTIONS)
    signs = [1.0 if direction == "maximize" else -1.0 for direction in directions.values()]
    points: dict[tuple[float, ...], int] = {}
    for record in records:
        if record["state"] == "complete" and record["feasible"]:
            point = tuple(s * float(record["objectives"][name]) for s, name in zip(signs, directions, strict=True))
            points.setdefault(point, int(record["trial"]))
    front = [
        point
        for point in points
        if not any(other != point and all(o >= p for o, p in zip(other, point, strict=True)) for other in points)
    ]
    return tuple(points[point] for point in sorted(front, reverse=True))


def metric_label(name: str) -> str:
    """Return the name of a metric for an axis or a heading: of an attack's score with its unit."""
    attack, _, column = name.partition(".")
    for score, whose in ((name, ""), (column, f" of {attack}")):
        if score in METRICS:
            unit = METRICS[score].unit.strip()
            return f"{METRICS[score].title}{f' [{unit}]' if unit else ''}{whose}"
    return name.replace("_", " ")


def setting_label(record: Mapping[str, Any], several: Mapping[str, bool]) -> str:
    """Name the setting of a trial by what differs among trials (`several`, as `varied_parts` says), defense first."""
    setting = record["setting"] or {}
    known = {**setting, "defense": call_defense(setting.get("defense", ""))}
    return "; ".join(known[key] for key, more in several.items() if more and known.get(key)) or known["defense"]


def varied_parts(records: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Return which labels of settings are not the same in all trials."""
    settings = [record["setting"] for record in records if record["setting"]]
    keys = ("defense", "topology", "schedule", "method", "variant")
    return {key: len({setting[key] for setting in settings}) > 1 for key in keys}


def search_sentences(outcome: SearchOutcome) -> list[str]:
    """Return what is to be said of a search: how many trials, what became of them, and what its choice is worth."""
    table, records = outcome.table, outcome.records
    ended = Counter(record["state"] for record in records)
    outside = sum(record["state"] == "complete" and not record["feasible"] for record in records)
    others = [f"{ended[state]} {word}" for state, word in STATES.items() if ended[state]]
    others += [f"{outside} outside the constraints"] if outside else []
    asked = f" of {table['trials']}" if table.get("trials") and table["trials"] > len(records) else ""
    aims = ", ".join(f"{direction} {name}" for name, direction in outcome.directions.items())
    limits = f"; constraints: {', '.join(table['constraints'])}" if table.get("constraints") else ""
    said = [
        f"Search by {table['sampler']}: {count_noun(len(records), 'trial')}{asked}"
        f"{f' ({told})' if (told := ', '.join(others)) else ''}, {len(outcome.front)} on the front "
        f"({aims}{limits})."
    ]
    if any(record["promised"] for record in records):
        spent = [record["spent"] for record in records if record["spent"] is not None]
        total = (
            f" By basic composition all runs of the {count_noun(len(spent), 'trial')} with an epsilon have "
            f"{sum(spent):.4g} together."
        )
        price = f"{PRICE[:1].upper()}{PRICE[1:]} (Papernot and Steinke, ICLR 2022)."
        said.append(price + (total if spent else ""))
    if "utility" in outcome.directions:
        said.append(
            "The utility that was optimized is that of the test rows, which flatters what was chosen by it; "
            "utility_validation leaves the test rows for the choice."
        )
    return said


def search_to_json(outcome: SearchOutcome) -> Json:
    """Return the outcome as plain values."""
    return {
        "search": dict(outcome.table),
        "said": search_sentences(outcome),
        "front": list(outcome.front),
        "trials": list(outcome.records),
    }
