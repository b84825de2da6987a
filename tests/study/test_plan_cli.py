"""`splitfed plan`: what it promises is what a training counts, every refusal has its reason, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from splitfed.cli import main
from splitfed.registry import TABLES
from splitfed.study.report import planned_costs
from splitfed.study.run import checked_study
from tests.study.examples import PLACED, small, write

SPEEDS = {"default": {"compute": 1e8, "up": 1e5, "down": 2e5, "latency": 0.01}}
THREE = {"name": "digits", "victims": 8, "auxiliary": 32, "clients": 3}


def study(defenses: list[dict[str, Any]] | None = None, **training: Any) -> dict[str, Any]:
    given = {"data": THREE, "training": {"rounds": 2, "batch_size": 64, **training}, "attack": None}
    return small(**given, **({} if defenses is None else {"defense": defenses}))


def planned(folder: Path, made: dict[str, Any], capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    path = write(folder, made)
    before = sorted(folder.iterdir())
    assert main(["plan", str(path), "--json", *more]) == 0
    assert sorted(folder.iterdir()) == before
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_plan_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One client, one round: 1797 - 8 - 32 = 1757 rows, of which 176 validate and 351 test; 20 batches of 1230."""
    found = planned(tmp_path, small(training={"rounds": 1, "batch_size": 64}), capsys, "--schedules", "joint")
    (place,) = found["topologies"]
    assert place["topology"] == "vanilla(cut=relu1)"
    own, joint = place["schedules"]
    assert (own["schedule"], own["in_study"], joint["schedule"], joint["in_study"]) == (
        "sequential",
        True,
        "joint",
        False,
    )
    z = 12 * 4
    for row in (own, joint):
        assert row["bytes_by_kind"] == {"activation": 1230 * z, "gradient": 1230 * z, "label": 1230 * 8}
        assert row["client_bytes"] == [row["bytes"]] == [1230 * (2 * z + 8)]
        assert row["messages"] == 20 * 3
        # A product of (1, 64) with (64, 12) is 2 * 64 * 12 operations forward and as many for its weights.
        # The server's gradient of its input is a third product.
        assert row["flops"] == {"client": [1230 * 4 * 64 * 12], "server": [1230 * 6 * 12 * 10]}
        assert row["memory"]["client"]["weights"] == 4 * (64 * 12 + 12)
        assert row["seconds"] is None
    n, rows = (64 * 12 + 12) + (12 * 10 + 10), 1230
    assert place["federated_averaging_bytes"] == 2 * 4 * n
    formulas = place["formulas"]
    assert formulas["split_with_hand_over"]["total"] == 2 * rows * 12 + (64 * 12 + 12)
    assert formulas["split_without_hand_over"] == {"client": 2 * rows * 12, "total": 2 * rows * 12}
    assert formulas["federated"]["total"] == 2 * n
    assert formulas["crossover_clients"]["without_hand_over"] == pytest.approx(rows * 12 / n)
    assert formulas["unit"] == "floats an epoch"
    # K = 1: 2pq + 2aN, as SplitFed's authors count; (2 - phi) pq + q with phi = .5; pq + 2aN.
    weights = 64 * 12 + 12
    totals = {name: formula["total"] for name, formula in formulas["schedules"].items()}
    assert totals == pytest.approx(
        {
            **dict.fromkeys(("sequential", "splitfed_v1", "splitfed_v2"), 2 * rows * 12 + 2 * weights),
            "sglr": 1.5 * rows * 12 + 12,
            "local_loss": rows * 12 + 2 * weights,
        }
    )
    assert set(totals) < set(TABLES["schedules"])
    # Computing takes rows * n; R = 1.
    assert formulas["latency"]["thapa"]["splitfed_v1"] == pytest.approx(rows * n + 2 * rows * 12 + 2 * weights)
    # Han et al. with K = 1, |D| = rows, |w| = n, P_C = R = 1: 2wK/R + Dw/P_C.
    assert formulas["latency"]["federated"] == pytest.approx(2 * n + rows * n)
    client = 64 * 12 + 12
    split = 2 * 12 * rows + 2 * client + rows * client + rows * (n - client) / 100
    assert formulas["latency"]["splitfed"] == pytest.approx(split)


def test_a_plan_is_what_training_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedules = ["sequential", {"name": "splitfed_v1", "drop_out": 0.3}, "local_loss"]
    made = study([{"name": "noise"}], schedule=schedules, speeds=SPEEDS)
    rows = planned(tmp_path, made, capsys)["topologies"][0]["schedules"]
    assert main(["run", str(tmp_path / "study.toml"), "--folder", str(tmp_path / "out"), "--json"]) == 0
    results = [json.loads(p.read_text("utf-8")) for p in sorted((tmp_path / "out" / "runs").glob("*/result.json"))]
    assert len(results) == 3
    own = {row["schedule"]: row for row in rows if row["in_study"]}
    assert set(own) == {"sequential", "splitfed_v1(drop_out=0.3)", "local_loss"}
    for found in results:
        row = own[found["schedule"]]
        assert found["bytes_by_kind"] == row["bytes_by_kind"] == found["predicted"]["bytes_by_kind"]
        assert found["messages"] == row["messages"]
        assert found["history"][-1]["simulated_seconds"] == pytest.approx(row["seconds"], rel=1e-9)


def test_every_schedule_stands_beside_the_study_and_a_refusal_has_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(tmp_path, study(schedule={"name": "splitfed_v1", "quorum": 2}), capsys)
    rows = found["topologies"][0]["schedules"]
    assert [row["schedule"] for row in rows] == [
        "splitfed_v1(quorum=2)",
        *(name for name in TABLES["schedules"] if name != "splitfed_v1"),
    ]
    refused = {row["schedule"]: row["refused"] for row in rows if row["refused"]}
    assert list(refused) == ["joint", "independent"]
    assert refused["joint"].startswith("schedule 'joint' trains one group of parties")
    assert refused["independent"].startswith("schedule 'independent' trains whole models at their clients")
    assert [d["guarantee"] for d in found["defenses"]] == ["no formal guarantee"] * 3


def test_speeds_give_seconds_that_grow_with_a_straggler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = planned(tmp_path, study(speeds=SPEEDS), capsys, "--schedules", "splitfed_v1")
    slow = planned(
        tmp_path, study(speeds={**SPEEDS, "stragglers": {"client1": 50.0}}), capsys, "--schedules", "splitfed_v1"
    )
    for one, other in zip(*(p["topologies"][0]["schedules"] for p in (plain, slow)), strict=True):
        assert 0 < one["seconds"] < other["seconds"]
        assert one["bytes"] == other["bytes"]


def test_the_formulas_are_told_only_where_they_apply(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topologies = [{"name": "u_shaped", "cuts": ["fc1", "relu1"]}, {"name": "multi_hop", "cuts": ["fc1", "relu1"]}]
    places = planned(tmp_path, small(topology=topologies), capsys, "--schedules", "sequential")["topologies"]
    assert [place["formulas"] is None for place in places] == [False, True]
    assert all(place["federated_averaging_bytes"] for place in places)
    # Both cuts are 12 wide, and so is what returns over each.
    assert places[0]["formulas"]["cut_width"] == 24


def test_parties_with_columns_of_the_same_rows_have_no_federated_counterpart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place,) = planned(tmp_path, small(**PLACED["vertical"], attack=None), capsys, "--schedules", "local_loss")[
        "topologies"
    ]
    assert (place["formulas"], place["federated_averaging_bytes"]) == (None, None)
    own, refused = place["schedules"]
    assert list(own["flops"]) == ["left", "right", "server"]
    # Two releases of 8 floats there and back, and the labels, of 1230 rows in two rounds.
    assert own["bytes"] == 2 * 1230 * (2 * 2 * 8 * 4 + 8)
    assert "role 'left' of topology 'vertical' holds none" in refused["refused"]


def test_the_table_shows_what_json_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(write(tmp_path, study()))]) == 0
    text = capsys.readouterr().out
    for words in (
        "sequential *",
        "joint is refused: schedule 'joint' trains one group",
        "fed_server",
        "federated averaging of the uncut model",
        "Singh, Vepakomma, Gupta, Raskar, 2019",
        "simulated time needs [training.speeds]",
        "noise(scale=0.5, relative=true): no formal guarantee",
    ):
        assert words in text, words
    # 1230 rows in two rounds, 48 bytes each: 118 kB.
    assert "118 kB" in text
    assert main(["plan", str(write(tmp_path, study(speeds=SPEEDS))), "--schedules", "blind"]) == 0
    timed = capsys.readouterr().out
    assert "simulated time needs" not in timed
    assert " s\n" in timed


def test_what_is_wrong_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, study())
    assert main(["plan", str(path), "--schedules", "splitfed"]) == 2
    assert capsys.readouterr().err.startswith("unknown schedule 'splitfed'; did you mean 'splitfed_v")
    broken = write(tmp_path, study(schedule=["sequential", "joint"]))
    assert main(["plan", str(broken)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("study.toml: training.schedule[1]: schedule 'joint' trains one group of parties")
    assert main(["plan", "no.toml"]) == 2
    assert capsys.readouterr().err == "no.toml cannot be read as a study: No such file or directory\n"
    assert main(["plan", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path} is a folder; expected a file: its study is {path}\n"
    path.rename(tmp_path / "other.toml")
    assert main(["plan", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path} is a folder; expected a file\n"


def test_costs_of_another_seed_are_not_mixed_in(tmp_path: Path) -> None:
    ready = checked_study.prepare_study(write(tmp_path, small(study={"name": "s", "seeds": [3, 4]})))
    found = planned_costs.plan_study(ready.grid, ready.data, [])
    assert (found["seed"], found["seeds"], len(found["topologies"])) == (3, 2, 1)
    assert [row["schedule"] for row in found["topologies"][0]["schedules"]] == ["sequential"]


def test_what_a_defense_packs_is_planned_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four bits a number of twelve, two a byte, and a range of two floats a batch, in place of 48 bytes a row."""
    made = study([{"name": "none"}, {"name": "quantization", "bits": 4}])
    found = planned(tmp_path, made, capsys)
    plain, packed = found["defenses"]
    assert plain["bytes"] == []
    (row,) = packed["bytes"]
    assert row["undefended"] == found["topologies"][0]["schedules"][0]["bytes"]
    assert row["bytes"] < row["undefended"]
    assert main(["run", str(tmp_path / "study.toml"), "--folder", str(tmp_path / "out")]) == 0
    results = [json.loads(p.read_text("utf-8")) for p in (tmp_path / "out" / "runs").glob("*/result.json")]
    counted = {r["defense"]["label"]: (r["bytes"], r["predicted"]["bytes"]) for r in results}
    assert counted["none"] == (row["undefended"], row["undefended"])
    assert counted["quantization(bits=4)"] == (row["bytes"], row["bytes"])
    capsys.readouterr()
    assert main(["plan", str(tmp_path / "study.toml")]) == 0
    assert "x what crosses without it" in capsys.readouterr().out
