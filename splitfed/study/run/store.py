"""A study's folder: what was asked, the runs, and one table of all results."""

from __future__ import annotations

import sys
import time
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from splitfed.core import digests
from splitfed.core.errors import InvalidInput
from splitfed.privacy.ledger import describe_ledger
from splitfed.study.config import schema
from splitfed.study.config.grid import Grid
from splitfed.study.config.mistakes import short_repr
from splitfed.study.config.toml import dumps
from splitfed.study.report.contained import is_plain_name
from splitfed.study.run.runner import Json, read_result
from splitfed.training.checkpoint import make_folder, write_atomic
from splitfed.training.folder import describe_differences, environment

if TYPE_CHECKING:
    import pandas as pd

if sys.platform != "win32":
    import fcntl


PATIENCE = 1.0
"""Seconds for which a folder that another process has is asked for: one that was killed has it until it is gone."""
DATA = "data.json"
STRENGTH = ("strength", "strength_parameter", "strength_unit", "stronger")


class StudyFolder:
    """Owns `path`: `check` and `claim` refuse a folder that belongs to something else."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self, grid: Grid, rows: str, *, resume: bool) -> None:
        """Refuse, without writing, a folder that holds another study, or this one when it is not to be resumed.

        `rows`: the digest of its data, which is a part of what a study is.
        """
        if self.path.exists() and not self.path.is_dir():
            raise InvalidInput(f"folder={str(self.path)!r} is a file; give a new or empty folder")
        if not self.path.is_dir() or not any(self.path.iterdir()) or self._begun():
            return
        config_path = self.path / "config.toml"
        if not config_path.is_file() or not (self.path / "study.toml").is_file():
            raise InvalidInput(f"folder {str(self.path)!r} is not empty and holds no study; give a new or empty folder")
        wanted = tomllib.loads(dumps(grid.resolved))
        there = schema.read_toml(config_path, digests.STUDY_CONFIG)
        if (difference := next(describe_differences("", there, wanted), None)) is not None:
            raise InvalidInput(f"folder {str(self.path)!r} holds another study: {difference}; give another folder")
        if not resume:
            raise InvalidInput(f"folder {str(self.path)!r} holds this study already; add --resume to go on with it")
        self.check_data(rows)

    def check_data(self, rows: str) -> None:
        """Refuse a study of which any run was trained on other data than those with the digest `rows`."""
        known = self.path / DATA
        found = [digests.read(known, "delete it: it is written anew")] if known.is_file() else []
        runs = sorted(path.parent.name for path in (self.path / "runs").glob("*/result.json"))
        if any(one.get("data_digest", rows) != rows for one in [*found, *self.results(runs)]):
            raise InvalidInput(
                f"folder {str(self.path)!r} holds this study on other data: what it reads has changed since; put back "
                "the data that it was begun with, or give another folder"
            )

    def _begun(self) -> bool:
        """Return whether nothing is there but what `lock` and `claim` write first: a crash came between."""
        found = {entry.name.removeprefix(".").removesuffix(".tmp") for entry in self.path.iterdir()}
        begun = "lock" in found and found <= {"lock", "environment.json", "config.toml", "study.toml", DATA}
        return begun and not (self.path / "study.toml").is_file()

    def claim(self, grid: Grid, text: str, rows: str) -> None:
        """Write what the study is, `text` being the file as the user wrote it and `rows` the digest of its data."""
        if not (self.path / DATA).is_file():
            write_atomic(self.path / DATA, digests.json_with_digest({"data_digest": rows}))
        if (self.path / "study.toml").is_file():
            return
        write_atomic(self.path / "environment.json", digests.json_with_digest(environment()))
        write_atomic(self.path / "config.toml", digests.toml_with_digest(dumps(grid.resolved)))
        write_atomic(self.path / "study.toml", text.encode())

    @contextmanager
    def lock(self) -> Iterator[int | None]:
        """Keep other processes off the study inside the block; yields a descriptor that workers inherit.

        The lock lives as long as any process holds the descriptor, so workers that outlive a crash keep it too. Raises
        `InvalidInput` where another process has it for longer than `PATIENCE`.
        """
        make_folder(self.path)
        if sys.platform == "win32":  # two processes on one folder are not kept apart there
            yield None
            return
        with (self.path / ".lock").open("w") as file:
            limit = time.monotonic() + PATIENCE
            while not _take(file):
                if time.monotonic() > limit:
                    raise InvalidInput(f"another process is at work in {str(self.path)!r}; wait for it to end")
                time.sleep(0.02)
            yield file.fileno()

    def run(self, name: str) -> Path:
        """Return the folder of the run called `name`; refuse one that would lie elsewhere."""
        if not is_plain_name(name):
            raise InvalidInput(f"run {short_repr(name)} of {str(self.path)!r} is not allowed; expected a name, no path")
        return self.path / "runs" / name

    def results(self, names: Iterable[str]) -> list[Json]:
        """Return the results of those runs that have one, in the order of `names`."""
        return [found for name in names if (found := read_result(self.run(name), name)) is not None]

    def write_table(self, results: Iterable[Json]) -> None:
        """Write results.csv and results.parquet, a row a run and attack."""
        # pandas takes half a second to import.
        import pandas as pd

        table = pd.DataFrame([row for found in results for row in table_rows(found)])
        write_atomic(self.path / "results.csv", table.to_csv(index=False).encode())
        write_atomic(self.path / "results.parquet", table.to_parquet(index=False))


def _take(file: IO[str]) -> bool:
    """Return whether this process now has the lock of `file`."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_trials_table(folder: Path, records: Iterable[Json], front: Collection[int]) -> None:
    """Write trials.csv into the study's `folder`; see `trials_frame`."""
    write_atomic(folder / "trials.csv", trials_frame(records, front).to_csv(index=False).encode())


def trials_frame(records: Iterable[Mapping[str, Any]], front: Collection[int]) -> pd.DataFrame:
    """Return a table with a row a trial: how it ended, whether it is on the front, what it tried, its metrics."""
    # pandas takes half a second to import.
    import pandas as pd

    rows = []
    for record in records:
        row = {key: record[key] for key in ("trial", "state", "reason", "feasible")}
        row |= {"front": record["trial"] in front, **(record["setting"] or {}), **record["parameters"]}
        for name, found in record["metrics"].items():
            row |= {name: found["mean"], f"{name}_low": found["low"], f"{name}_high": found["high"]}
        row |= {f"objective {name}": value for name, value in record["objectives"].items()}
        row |= {f"violation of {text}": value for text, value in record["violations"].items()}
        rows.append(row | {"runs": " ".join(record["runs"])})
    return pd.DataFrame(rows)


def promised_epsilon(ledger: Json) -> float | None:
    """Return the largest epsilon of a ledger's promises, whatever else crosses; None where one has no bound."""
    found = [total["epsilon"] for total in ledger["totals"]]
    return max(found) if found and None not in found else None


def table_rows(result: Json) -> Iterator[dict[str, Any]]:
    """Yield one flat row an attack of `result`, that of a run; one alone where there was no attack."""
    run = {
        "run": result["id"],
        "failed": result.get("failed"),
        "topology": result["topology"]["name"],
        "topology_label": result["topology"]["label"],
        "defense": result["defense"]["name"],
        "defense_label": result["defense"]["label"],
        **{key: result["defense"].get(key) for key in STRENGTH},
        "guarantee": result["defense"]["guarantee"],
        **{key: result[key] for key in ("seed", "schedule", "model", "data", "clients")},
        "method": result.get("method", "none"),
        "encryption": result.get("encryption", "none"),
        **({"variant": result["variant"]} if result.get("variant") else {}),
        **({"training_attack": result["training_attack"]} if result.get("training_attack") else {}),
    }
    if "failed" in result:
        yield run
        return
    utility, dependence = result["utility"], result["dependence"] or {}
    last, bounds = result["history"][-1], utility.get("interval") or {}
    run |= {
        "metric": utility["metric"],
        "utility": utility["test"],
        "utility_validation": utility["validation"],
        "utility_low": bounds.get("low"),
        "utility_high": bounds.get("high"),
        "utility_interval": bounds.get("kind"),
        "utility_of_constant_answer": (utility.get("constant") or {}).get("score"),
        **_client_columns(result),
        **{key: result.get(key) for key in ("restart_optimizers", "starts")},
        **{key: result[key] for key in ("bytes", "messages", "seconds", "rounds")},
        **{key: result[key] for key in ("stopped",) if key in result},
        **{f"bytes_{kind.replace(' ', '_')}": n for kind, n in result["bytes_by_kind"].items()},
        **{key: last[key] for key in ("simulated_seconds",) if key in last},
    }
    if sealed := (result.get("predicted") or {}).get("encryption"):
        names = ("protocol", "parameters", "layout", "keys", "key_holder")
        run |= {f"encryption_{name}": sealed[name] for name in names}
    if result.get("privacy"):
        ledger = result["privacy"]["ledger"]
        told = {"promise": " | ".join(describe_ledger(ledger)), "epsilon_promised": promised_epsilon(ledger)}
        run |= {"epsilon": ledger["epsilon"], "delta": ledger["delta"], **told}
    run |= {key: dependence.get(key) for key in ("u_distance_correlation_sqr", "p_value")}
    for attack in result["attacks"]:
        scored = {
            "attack": attack["attack"],
            "attack_label": attack["label"],
            "adversary": attack["adversary"],
            "target": attack.get("target", "inputs"),
            "victims": attack["victims"],
            "attack_seconds": attack["seconds"],
        }
        for metric, who in attack["scores"].items():
            score = who["attack"]
            scored |= {metric: score["mean"], f"{metric}_low": score["low"], f"{metric}_high": score["high"]}
            scored |= {f"{metric}_{name}": score["mean"] for name, score in who.items() if name != "attack"}
        yield run | scored
    if not result["attacks"]:
        yield run


def _client_columns(result: Json) -> dict[str, Any]:
    """Return what a result says of its clients one by one, of further scores, of the round chosen, and its target."""
    utility, target = result["utility"], result.get("target")
    columns = {f"client_{name}": value for name, value in (utility.get("spread") or {}).items()}
    for kind in ("method", "across"):
        columns |= {f"{kind}_{name}": scores["mean"] for name, scores in (utility.get(kind) or {}).items() if scores}
    if result.get("selected"):
        columns |= {"selected_round": result["selected"]["round"], "selected_utility": result["selected"]["test"]}
    if target is not None:
        columns |= {"target": target["value"], "rounds_to_target": target["rounds"], "bytes_to_target": target["bytes"]}
    return columns
