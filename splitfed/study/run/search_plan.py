"""How many runs a search makes and about how long they train, said before any trial."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from splitfed.core.errors import InvalidInput
from splitfed.data.dataset import Dataset, Federation
from splitfed.study.config import build
from splitfed.study.config.run_spec import DefenseSetting, RunSpec, format_value
from splitfed.study.config.search import PRICE, SearchStudy
from splitfed.study.config.search_space import Assignment, Dimension, SearchChoice, list_variations
from splitfed.study.report.data import Json
from splitfed.study.report.units import count_noun, format_seconds
from splitfed.study.run.preflight import adversaries_of
from splitfed.training.entry_point import train

FEW, MORE = 2, 6
"""Batches of each client that are trained for the time of a row: the difference leaves out what a run takes once."""


def plan_search(search: SearchStudy, cells: Sequence[RunSpec], data: Dataset) -> Json:
    """Return what the search will do, as plain values; `cells` are the runs of one setting, which is timed.

    `seconds`: of training, of all runs, where each takes as long as that setting; None where it cannot be timed.
    """
    runs, seconds = search.trials * len(cells), measure_training(cells[0], data)
    return {
        "sampler": search.table.sampler,
        "trials": search.trials,
        "runs": runs,
        "seconds": None if seconds is None else runs * seconds,
        "objectives": {one.metric.name: one.table for one in search.objectives},
        "constraints": [one.text for one in search.constraints],
        "varies": describe_dimensions(search),
        "attacks": [setting.label for setting in cells[0].attacks],
        "price": PRICE if any(_promises(search, one) for one in list_variations(search.tree)) else None,
        "setting": f"{cells[0].defense.label}, {cells[0].topology.label}",
    }


def describe_dimensions(search: SearchStudy) -> dict[str, str]:
    """Return name of a parameter that varies -> the values it may take, in words."""
    return {name: _describe(dimension) for name, dimension in search.space.items()}


def print_search_plan(plan: Json, console: Console) -> None:
    """Print `plan`, as `plan_search` returns it."""
    lines = [
        f"search by {plan['sampler']}: {count_noun(plan['trials'], 'trial')}, {count_noun(plan['runs'], 'run')}"
        + ("" if plan["seconds"] is None else f", about {format_seconds(plan['seconds'])} of training"),
        *(f"  {name}: {text}" for name, text in plan["varies"].items()),
        *(
            f"  {goal if isinstance(goal, str) else goal['direction']} {name}"
            + ("" if isinstance(goal, str) else f", counted up to {goal['cap']:g}")
            for name, goal in plan["objectives"].items()
        ),
        *(f"  subject to {text}" for text in plan["constraints"]),
        *(
            []
            if plan["seconds"] is None
            else [
                f"timed on a few steps of {plan['setting']} on this machine, one process"
                + ("; attacks come on top" if plan["attacks"] else "")
            ]
        ),
        *([plan["price"]] if plan["price"] else []),
        "below: one setting, the first that fits",
        "",
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False)


def _promises(search: SearchStudy, assignment: Assignment) -> bool:
    return search.expand(assignment).cells[0].defense.guarantee != DefenseSetting("").guarantee


def measure_training(cell: RunSpec, data: Dataset) -> float | None:
    """Return about how many seconds the run `cell` trains, by the clock of a few steps; None where they are refused."""
    whole = build.federation(data, cell.data, cell.seed)
    rows, training = [len(client.train) for client in whole.clients], cell.training.training(cell.seed)
    sizes = [training.of_client(client).batch_size for client in range(len(rows))]
    few, more = ([min(count * size, there) for size, there in zip(sizes, rows, strict=True)] for count in (FEW, MORE))
    try:
        _time_round(cell, data, _first_rows(whole, few))  # what is imported and compiled at first
        short, long = (min(_time_round(cell, data, _first_rows(whole, part)) for _ in range(2)) for part in (few, more))
    except InvalidInput:
        return None
    # What every training costs once is left out, unless the clock of a busy machine cannot tell it apart.
    by_row = (long - short) / (sum(more) - sum(few)) if sum(more) > sum(few) and long > short else long / sum(more)
    return cell.training.rounds * sum(rows) * by_row


def _time_round(cell: RunSpec, data: Dataset, split: Federation) -> float:
    plan, built = cell.training, build.topologies(cell, data)
    started = time.perf_counter()
    train(
        built,
        split,
        schedule=build.schedule(cell),
        defenses=build.defenses(cell),
        method=build.method(cell, data),
        rounds=1,
        batch_size=plan.batch_size,
        optimizer=plan.optimizer,
        seed=cell.seed,
        device=plan.device,
        local=plan.local,
        adversaries=adversaries_of(cell, build.first_topology(built)),
    )
    return time.perf_counter() - started


def _first_rows(split: Federation, counts: Sequence[int]) -> Federation:
    """Return `split` with the first rows of every client's training rows alone."""
    pairs = zip(split.clients, counts, strict=True)
    return replace(split, clients=tuple(replace(c, train=c.train.rows(torch.arange(n))) for c, n in pairs))


def _describe(dimension: Dimension) -> str:
    if isinstance(dimension, SearchChoice):
        return ", ".join(format_value(label) for label in dimension.labels)
    said: list[Any] = [f"{dimension.low:g} to {dimension.high:g}"]
    said += ["on a logarithmic scale"] if dimension.log else []
    return ", ".join([*said, *([] if dimension.step is None else [f"in steps of {dimension.step:g}"])])
