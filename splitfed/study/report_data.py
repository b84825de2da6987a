"""What a study's folder holds, read back: finished runs grouped by setting, and the runs that did not finish."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitfed import digests
from splitfed.digests import Damaged
from splitfed.errors import InvalidInput
from splitfed.folder import RunFolder
from splitfed.intervals import mean_interval
from splitfed.study.config import parse, read
from splitfed.study.contained import inside
from splitfed.study.grid import expand
from splitfed.study.plain_text import plain, visible

NO_DEFENSE = "none"
NO_METHOD = "no method"


@dataclass(frozen=True)
class Metric:
    """How a score is written, and whether a larger value means that more leaked."""

    title: str
    unit: str
    up: bool
    digits: int


# The first of these that an attack was scored by is the one its headline uses.
METRICS = {
    "psnr": Metric("PSNR", " dB", True, 1),
    "ssim": Metric("SSIM", "", True, 3),
    "r2": Metric("R²", "", True, 3),
    "mse": Metric("MSE", "", False, 4),
    "auc": Metric("AUC", "", True, 3),
    "accuracy": Metric("accuracy", "", True, 3),
    "tpr_at_fpr_1%": Metric("TPR at FPR 1 %", "", True, 3),
    "tpr_at_fpr_0.1%": Metric("TPR at FPR 0.1 %", "", True, 3),
    "total_variation": Metric("total variation", "", False, 3),
}


@dataclass(frozen=True)
class Guessed:
    """How an attack on a target is told: what it `gets`, whom it is set beside (`baselines`, the first one counts).

    `metrics`: those that tell it best, before the others.
    """

    title: str
    gets: str
    baselines: Mapping[str, str]
    metrics: tuple[str, ...] = ()

    def order(self, metrics: Iterable[str]) -> list[str]:
        """Return `metrics`, those that tell most first."""
        return sorted(metrics, key=lambda m: m not in self.metrics)


MEANS = {"mean_image": "mean", "random_pairing": "other"}
# In the order in which a headline looks for an attack. A result that names no target is of an input's reconstruction.
TARGETS = {
    "inputs": Guessed("reconstruction", "reconstructs at", MEANS),
    "labels": Guessed("guessed labels", "tells labels at", {"majority": "majority", "random_pairing": "other"}),
    "members": Guessed("guessed membership", "tells members at", {"chance": "chance"}),
    "shares": Guessed(
        "guessed class shares", "tells what classes a client holds at", {"prior": "auxiliary rows' shares"}
    ),
    "representatives": Guessed("class representatives", "shows what classes look like at", MEANS, ("accuracy",)),
}


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval (None: there is none) over `n` of `over`, "seeds" or "victims"."""

    mean: float
    low: float | None
    high: float | None
    n: int
    over: str


@dataclass(frozen=True)
class Setting:
    """All runs that differ in nothing but the seed; `runs` are their results, in the order of their seeds.

    `intruder`: who hijacked the training, "" for an honest one. `place`: the topology, the schedule and the federated
    method where the study has several, and the intruder: what a figure tells apart by its markers.
    """

    topology: str
    defense: str
    family: str
    strength: float
    guarantee: str
    runs: tuple[Mapping[str, Any], ...]
    schedule: str = ""
    place: str = ""
    intruder: str = ""
    method: str = NO_METHOD

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that finished."""
        return tuple(int(run["seed"]) for run in self.runs)


@dataclass(frozen=True)
class Study:
    """A study's folder as read: `unfinished` are (run id, reason)."""

    folder: Path
    name: str
    config: str
    environment: Mapping[str, Any]
    settings: tuple[Setting, ...]
    unfinished: tuple[tuple[str, str], ...]

    @property
    def runs(self) -> tuple[Mapping[str, Any], ...]:
        """Every finished run."""
        return tuple(run for setting in self.settings for run in setting.runs)


def read_study(folder: Path) -> Study:
    """Read the study in `folder`; raises `InvalidInput` where none is, or where no run has finished."""
    runs = folder / "runs"
    if not runs.is_dir():
        raise InvalidInput(f"folder {str(folder)!r} holds no study: it has no runs/ in it")
    results, unfinished = [], []
    begun = [p.name for p in runs.iterdir() if p.is_dir()]
    for name in sorted({*begun, *_planned(folder)}):
        found = _json(runs / name / "result.json", digests.REMEASURE)
        if "utility" in found:
            results.append(found | {"folder": str(runs / name)})
        else:
            unfinished.append((visible(name), _reason(runs / name, found)))
    if not results:
        raise InvalidInput(
            f"study {str(folder)!r} has no finished run to report on ({len(begun)} begun): finish it first"
        )
    environment = _json(folder / "environment.json", "delete it to go on without it")
    config = visible(_text(folder / "config.toml").rpartition(digests.COMMENT)[0])
    return Study(folder, visible(_name(folder)), config, environment, _grouped(results), tuple(unfinished))


def estimate(values: Sequence[float | None], scores: Sequence[Mapping[str, Any]] = ()) -> Estimate | None:
    """Return the mean of one value a seed, with Student's interval over two seeds or more.

    With one seed the interval is that of its own victims, where `scores` (a mapping a seed with low, high) has it.
    Values that are missing or not finite are left out; None when nothing is left.
    """
    kept = [float(v) for v in values if v is not None and math.isfinite(v)]
    if not kept:
        return None
    if len(kept) > 1:
        found = mean_interval(kept)
        return Estimate(found.mean, found.low, found.high, len(kept), "seeds")
    victims = next((s for s in scores if s.get("low") is not None), None)
    if victims is None:
        return Estimate(kept[0], None, None, 1, "seeds")
    return Estimate(kept[0], float(victims["low"]), float(victims["high"]), 1, "victims")


def score(runs: Sequence[Mapping[str, Any]], attack: str, metric: str, who: str = "guess") -> Estimate | None:
    """Return what the attack labelled `attack` scored over `runs`; `who`: guess, mean_image or random_pairing."""
    found = [
        a["scores"][metric][who]
        for run in runs
        for a in run["attacks"]
        if a["label"] == attack and who in a["scores"].get(metric, {})
    ]
    return estimate([s["mean"] for s in found], found)


def _grouped(results: Sequence[Mapping[str, Any]]) -> tuple[Setting, ...]:
    """Group by all that a result says of its setting; without a method first, undefended first, then by strength."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for result in results:
        key = (
            *(result["topology"]["label"], result["defense"]["label"]),
            *(str(result.get(name) or "") for name in ("schedule", "intruder")),
            _method(result),
            *(str(result.get(name) or "") for name in ("model", "data", "clients")),
        )
        groups.setdefault(key, []).append(result)
    several = len({result["schedule"] for result in results}) > 1
    methods = len({_method(result) for result in results}) > 1
    settings = []
    for (topology, defense, schedule, intruder, method, *_), members in groups.items():
        about = members[0]["defense"]
        ordered = tuple(sorted(members, key=lambda r: int(r["seed"])))
        place = ", ".join([topology, *([schedule] if several else []), *([method] if methods else [])])
        settings.append(
            Setting(
                *(topology, defense, about["name"], float(about["strength"]), about["guarantee"], ordered, schedule),
                f"{place}, {intruder} inside" if intruder else place,
                intruder,
                method,
            )
        )
    return tuple(sorted(settings, key=_order))


def _order(setting: Setting) -> tuple[Any, ...]:
    """Sort by place, what has no method and what has no defense first."""
    where = (setting.topology, setting.schedule, setting.method != NO_METHOD, setting.place)
    return (*where, setting.family != NO_DEFENSE, setting.family, setting.strength)


def _method(result: Mapping[str, Any]) -> str:
    found = str(result.get("method") or "none")
    return NO_METHOD if found == "none" else found


def _planned(folder: Path) -> list[str]:
    """Return the runs that the study asks for; none where its config is not there or is no study any more."""
    path = folder / "config.toml"
    if not path.is_file():
        return []
    raw = read(path, digests.STUDY_CONFIG)
    try:
        return [cell.id for cell in expand(parse(raw, path.name), path.name, folder).cells]
    except InvalidInput:
        return []


def _reason(place: Path, found: Mapping[str, Any]) -> str:
    """Return why the run in `place` has no result: the line it left behind, or how far it came."""
    if "failed" in found:
        return f"failed: {found['failed']}"
    if not place.is_dir():
        return "not begun"
    try:
        rounds = len(RunFolder(place).metrics())
    except Damaged as error:
        return f"not finished: {error}"
    return f"not finished: stopped after {rounds} round{'' if rounds == 1 else 's'}"


def _json(path: Path, advice: str) -> dict[str, Any]:
    """Return the object in the file at `path`, an empty one where there is none; raises `Damaged` with `advice`.

    Whatever is read here ends up before somebody's eyes, so its texts are made visible.
    """
    found: dict[str, Any] = plain(digests.read(path, advice)) if path.is_file() else {}
    return found


def _text(path: Path) -> str:
    """Return what stands in the file at `path`, nothing where there is none, or a link to one elsewhere."""
    own = inside(path.parent, path.name) is not None
    return path.read_text("utf-8") if own and path.is_file() else ""


def _name(folder: Path) -> str:
    path = folder / "config.toml"
    return (
        str(read(path, digests.STUDY_CONFIG).get("study", {}).get("name") or folder.name)
        if path.is_file()
        else folder.name
    )
