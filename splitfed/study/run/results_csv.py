"""The columns of results.csv, a row a run and attack, and of trials.csv, a row a trial of a search."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitfed.privacy.ledger import describe_ledger
from splitfed.study.config.run_spec import COMPUTATION
from splitfed.study.results import RunResult
from splitfed.training.checkpoint import write_atomic

if TYPE_CHECKING:
    import pandas as pd

Json = dict[str, Any]
STRENGTH = ("strength", "strength_parameter", "strength_unit", "stronger")
COSTS = ("restart_optimizers", "starts", "bytes", "messages", "seconds", "rounds")


def write_trials_table(folder: Path, records: Iterable[Mapping[str, Any]], front: Collection[int]) -> None:
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


def promised_epsilon(ledger: Mapping[str, Any]) -> float | None:
    """Return the largest epsilon of a ledger's promises, whatever else crosses; None where one has no bound."""
    found = [total["epsilon"] for total in ledger["totals"]]
    return max(found) if found and None not in found else None


def table_rows(result: RunResult) -> Iterator[dict[str, Any]]:
    """Yield one flat row an attack of `result`, that of a run; one alone where there was no attack."""
    run = {
        "run": result.id,
        "failed": result.failed,
        "topology": result.topology.name,
        "topology_label": result.topology.label,
        "defense": result.defense.name,
        "defense_label": result.defense.label,
        **{key: getattr(result.defense, key) for key in (*STRENGTH, "guarantee")},
        **{key: getattr(result, key) for key in ("seed", "schedule", "model", "data", "clients", "method")},
        COMPUTATION: result.computation,
        **{key: label for key in ("variant", "training_attack") if (label := getattr(result, key))},
    }
    if result.failed is not None:
        yield run
        return
    run |= {**_utility_columns(result), **_cost_columns(result)}
    dependence = result.dependence or {}
    run |= {key: dependence.get(key) for key in ("u_distance_correlation_sqr", "p_value")}
    for attack in result.attacks:
        scored = {
            "attack": attack.attack,
            "attack_label": attack.label,
            "adversary": attack.adversary,
            "target": attack.target,
            "victims": attack.victims,
            "attack_seconds": attack.seconds,
        }
        for metric, who in attack.scores.items():
            score = who["attack"]
            scored |= {metric: score.mean, f"{metric}_low": score.low, f"{metric}_high": score.high}
            scored |= {f"{metric}_{name}": score.mean for name, score in who.items() if name != "attack"}
        yield run | scored
    if not result.attacks:
        yield run


def _utility_columns(result: RunResult) -> dict[str, Any]:
    """Return how good the model is, of all clients and one by one, of the round chosen, and when a target was met."""
    utility, bounds, target = result.utility, result.utility.interval or {}, result.target
    columns = {
        "metric": utility.metric,
        "utility": utility.test,
        "utility_validation": utility.validation,
        "utility_low": bounds.get("low"),
        "utility_high": bounds.get("high"),
        "utility_interval": bounds.get("kind"),
        "utility_of_constant_answer": (utility.constant or {}).get("score"),
        **{f"client_{name}": value for name, value in (utility.spread or {}).items()},
    }
    for kind, told in (("method", utility.method), ("across", utility.across)):
        columns |= {f"{kind}_{name}": scores["mean"] for name, scores in (told or {}).items() if scores}
    if result.selected:
        columns |= {"selected_round": result.selected["round"], "selected_utility": result.selected["test"]}
    if result.kept_round is not None:
        columns |= {"kept_round": result.kept_round}
    if target is not None:
        columns |= {"target": target["value"], "rounds_to_target": target["rounds"], "bytes_to_target": target["bytes"]}
    return columns


def _cost_columns(result: RunResult) -> dict[str, Any]:
    """Return what training cost, and what privacy was promised for it."""
    columns = {key: getattr(result, key) for key in COSTS}
    columns |= {} if result.stopped is None else {"stopped": result.stopped}
    columns |= {f"bytes_{kind.replace(' ', '_')}": n for kind, n in result.bytes_by_kind.items()}
    columns |= {key: result.last[key] for key in ("simulated_seconds",) if key in result.last}
    if batch := (result.predicted or {}).get(COMPUTATION):
        settings = [name for name, value in batch.items() if isinstance(value, str) and name != "machine"]
        columns |= {f"{COMPUTATION}_{name}": batch[name] for name in settings}
    if (ledger := result.ledger) is not None:
        told = {"promise": " | ".join(describe_ledger(ledger)), "epsilon_promised": promised_epsilon(ledger)}
        columns |= {"epsilon": ledger["epsilon"], "delta": ledger["delta"], **told}
    return columns
