"""What a value that is no features tells is in the plan, in what a run keeps of itself, and in the report's table."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import splitfed as sf
from splitfed.planning.example_passes import ExamplePasses
from splitfed.planning.held_rows import lines_told
from splitfed.planning.validation import prepare
from splitfed.schedules.base import Training
from splitfed.study.report.exposure import _party_rows, role_holdings
from splitfed.study.report.plan_table import print_plan
from splitfed.study.results import RunResult
from splitfed.training.description import describe
from tests.core.test_crossing_classes import Affine, Padded, by_trace, ids, images

CASES = [(Affine, images, ("x",), "carries the input 'x'"), (Padded, ids, (), "reveals lengths or a mask of 'ids'")]


@pytest.mark.parametrize(("kind", "rows", "sent", "said"), CASES, ids=["input", "mask"])
def test_plan_run_and_report_name_what_crosses(kind: Any, rows: Any, sent: tuple[str, ...], said: str) -> None:
    x = rows()
    named = {"sent_inputs": sent} if sent else {}
    data = sf.data.from_arrays(x, torch.arange(len(x)) % 10, dtype="float32" if sent else "int64")
    clients = data.clients(1, auxiliary=0, victims=0, validation=0.0, test=0.2)
    prepared = prepare(
        by_trace(kind, x, **named),
        clients,
        schedule="sequential",
        defenses=(),
        optimizer=None,
        training=Training(4),
        example_passes=ExamplePasses(),
    )
    (line,) = lines_told(prepared.topology, prepared.facts[0])
    assert line.endswith(f"on bottom->top (client to server) {said}")
    assert describe(prepared, 1, None, "cpu")["told"] == [line]

    console = Console(file=io.StringIO(), width=200)
    place = {"topology": "vanilla", "cut_choice": None, "replayed": False, "told": [line], "schedules": []}
    place |= {"federated_averaging_bytes": None, "formulas": None}
    plan = {"study": "one", "clients": 1, "rounds": 1, "local_epochs": 1, "seeds": 1, "seed": 0, "clients_differ": []}
    print_plan({**plan, "topologies": [place], "speeds": None, "defenses": [], "privacy": []}, console)
    assert line in console.file.getvalue()  # type: ignore[attr-defined]

    labels = {prepared.topology.heads[0].value: torch.arange(4)}
    _, server = role_holdings(prepared.topology, prepared.facts[0], labels, {}, {}, {}, {"server": "server"})
    (entry,) = (one for one in server["receives"] if "tells" in one)
    assert entry["tells"] == said
    assert said in str(_party_rows(RunResult("run", parties=(server,)), [], {"names": {}}))


def test_a_part_of_the_data_that_nobody_reads_is_named() -> None:
    """Else a party's columns would be left out of a vertical run without a word."""
    data = sf.data.breast_cancer().vertical({"left": range(15), "right": range(15, 30)}).clients(1, victims=8, seed=0)
    bottoms = {"left": nn.Sequential(nn.Linear(15, 4), nn.ReLU())}
    topology = sf.topologies.vertical(bottoms, nn.Linear(4, 1), labels="right")
    given: dict[str, Any] = {"schedule": "joint", "defenses": (), "optimizer": None, "example_passes": ExamplePasses()}
    prepared = prepare(topology, data, training=Training(4), **given)
    assert "'right' of the data is read by no segment" in describe(prepared, 1, None, "cpu")["told"]
