"""What the page on methods says of FML, FedAKT and MAFML between split nodes, by a run each."""

from __future__ import annotations

import re
from collections import Counter

import pytest

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.federated import FML, MAFML, FedAKT
from splitfed.federated.base import Method
from splitfed.models.mlp import mlp
from splitfed.topologies import vanilla
from splitfed.training.run import Run
from tests.examples import toy_data
from tests.pages import ROOT

ALONE = sf.schedules.Sequential(hand_over="none")
ROWS = 24


def go(method: Method, schedule: str | sf.Schedule) -> Run:
    """A round of one batch at each of two clients, whose cut is 12 numbers wide, for ten classes."""
    data = toy_data(80).clients(2, victims=6, auxiliary=6, validation=0.0, test=0.25, public=0.25)
    assert {len(client.train) for client in data.clients} <= {ROWS, ROWS + 1, ROWS + 2}
    topology = vanilla(mlp((1, 8, 8), 10, (12,), seed=0), "relu1")
    return sf.train(topology, data, schedule=schedule, method=method, rounds=1, batch_size=64)


def numbers_a_row(run: Run) -> Counter[tuple[str, str]]:
    """Numbers for each training row of client 0 that crossed between it and the server, by kind and receiver."""
    rows, found = len(run.data.clients[0].train), Counter[tuple[str, str]]()
    for flow, (_, nbytes) in run.engine.traffic.flows.items():
        if flow.phase == "train" and {flow.sender, flow.receiver} == {"client0", "server"}:
            found[flow.kind, flow.receiver] += nbytes // 4 // rows
    return found


def own_score(method: str) -> str:
    """The last cell of the row of `method` on split models."""
    page = (ROOT / "docs" / "methods.md").read_text("utf-8")
    row = re.search(rf"^\| `{method}`, split \|.*\| (.*) \|$", page, re.MULTILINE)
    assert row is not None
    return row[1].strip("`")


def test_fml_exchanges_scores_and_reports_the_meme() -> None:
    run = go(FML(), "splitfed_v1")
    crossed = numbers_a_row(run)
    assert crossed["activation", "server"] == 12 + 10
    assert crossed["activation", "client0"] == 10
    assert crossed["gradient", "client0"] == 12
    assert [head.value for head in run.engine.topology.heads] == ["fc2", "private_fc2"]
    assert list(run.history[-1]["test"]["method"]) == [own_score("fml")] == ["private"]
    assert "weights" in run.engine.traffic.by_kind()
    assert "weights" not in go(FML(), ALONE).engine.traffic.by_kind()


def test_fedakt_exchanges_the_features_of_both_and_reports_the_extractor() -> None:
    run = go(FedAKT(), "splitfed_v1")
    crossed = numbers_a_row(run)
    assert crossed["activation", "server"] == crossed["gradient", "client0"] == 2 * 12
    assert crossed["label", "server"] == 2 * 2, "whole numbers of eight bytes, for either output"
    topology = run.engine.topology
    (scored, _) = topology.heads
    (top,) = (s for s in topology.segments if scored.value in s.outputs)
    assert top.inputs == ("extractor_relu1",)
    assert "method" not in run.history[-1]["test"]
    assert own_score("fedakt") == "none"


def test_mafml_exchanges_soft_labels_of_public_rows() -> None:
    run = go(MAFML(batch=4), ALONE)
    assert {"data", "soft labels"} <= set(run.engine.traffic.by_kind())
    assert "weights" not in run.engine.traffic.by_kind()
    told = {(f.sender, f.receiver): n for f, n in run.engine.traffic.flows.items() if f.kind == "soft labels"}
    # Probabilities of 4 rows each; beside those of the other, which is told its accuracy.
    assert told == {("server", "fed_server"): (2, 2 * 4 * 10 * 4), ("fed_server", "server"): (2, 2 * (4 * 10 + 1) * 4)}
    assert "method" not in run.history[-1]["test"]
    assert own_score("mafml") == "none"
    for schedule in ("sequential", "splitfed_v1"):
        with pytest.raises(
            InvalidInput, match=r"take 'independent' .* 'splitfed_v3' or 'sequential' with hand_over='none' for split"
        ):
            go(MAFML(batch=4), schedule)
