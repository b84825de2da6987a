"""`splitfed cuts`, and studies that leave their cuts to the rule: what is printed, drawn, kept, resumed and refused."""

from __future__ import annotations

import json
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from splitfed.cli import main
from splitfed.core.cut_places import cut_places
from splitfed.study.report.figures.cut_places import arrange, save_figure
from splitfed.study.run import checked_study, session
from splitfed.study.run.reattack import load_finished_run
from tests.core.test_cut_places import Repeated, residual, seeded
from tests.examples import images
from tests.pages import ROOT
from tests.study.examples import checked, small, write

NET = """
from torch import nn

def net(shape, outputs, width=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, outputs))

def nested(outputs):
    return nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(64, 3), nn.ReLU()), nn.Linear(3, outputs))

class Chain(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.layer = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
        self.unused, self.head = nn.ModuleList(nn.Linear(2, 2) for _ in range(2)), nn.Linear(8, outputs)

    def forward(self, x):
        x = self.stem(x)
        for block in self.layer:
            x = block(x)
        return self.head(x)

class Words(nn.Sequential):
    def __init__(self, outputs):
        super().__init__(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(24, outputs))
"""


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["cuts", *arguments]) == 0
    return capsys.readouterr().out


def places_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed(capsys, *arguments, "--json"))
    return {place["name"]: place for place in found["places"]} | {"auto": found["auto"]}


@pytest.mark.drawn
def test_the_page_shows_what_is_printed_and_the_figure_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lenet.svg"
    *lines, last = printed(capsys, "lenet", "--shape", "1,28,28", "--figure", str(file)).splitlines()
    page = (ROOT / "docs" / "models.md").read_text("utf-8")
    assert "```text\n" + "\n".join(line.rstrip() for line in lines) + "\n```" in page
    assert last == f"figure: {file}"
    text = "".join(ElementTree.parse(file).getroot().itertext())
    for word in (
        "LeNet: where it can be cut",
        "conv1",
        "6x14x14  (auto)",
        "9,408",
        "leaves an empty segment",
        "refused",
    ):
        assert word in text


def test_a_model_by_path_and_a_study_give_the_same_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own_net.py").write_text(NET, "utf-8")
    path = f"{tmp_path / 'own_net.py'}:net"
    alone = places_of(capsys, path, "--shape", "1x8x8", "--set", "width=5")
    assert alone["1"]["values"] == [{"name": "_1", "shape": [5], "dtype": "float32", "returned": True}]
    assert alone["1"]["multiply_adds"] == [64 * 5, 5 * 10]
    assert alone["auto"]["vanilla"]["cuts"] == ["2"]
    made = small(model={"name": "own_net:net", "width": 5}, topology=[{"name": "vanilla", "cut": "nowhere"}])
    assert places_of(capsys, str(write(tmp_path, made))) == alone
    nested = places_of(capsys, f"{tmp_path / 'own_net.py'}:nested", "--shape", "64", "--depth", "1")
    assert list(nested) == ["0", "1", "2", "auto"]
    ids = places_of(capsys, f"{tmp_path / 'own_net.py'}:Words", "--shape", "6", "--integers", "50", "--outputs", "2")
    assert [ids["0"]["forward_bytes"], ids["0"]["parameters"]] == [6 * 4 * 4, [200, 50]]


def test_places_by_block_and_one_line_for_equal_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own_net.py").write_text(NET, "utf-8")
    chain = (f"{tmp_path / 'own_net.py'}:Chain", "--shape", "6", "--blocks")
    found = places_of(capsys, *chain)
    names = ["stem", "layer.0", "layer.1", "layer.2", "head", "unused.0", "unused.1"]
    assert list(found) == [*names, "auto"]
    # Its choice is among all places.
    assert found["auto"] == {}
    text = printed(capsys, *chain, "--figure", str(tmp_path / "chain.svg"))
    refusals = [line for line in text.splitlines() if line.startswith("no cut after")]
    assert refusals == [
        "no cut after head: cut 'head' leaves an empty segment after 'head'",
        "no cut after unused.0, unused.1: submodule '...' is never called by Chain; nothing to cut after",
    ]
    assert "auto" not in text


MISUSE = [
    (["lenet"], "the model needs the shape of one row: --shape 1,28,28"),
    (["lenett", "--shape", "1,8,8"], "unknown model 'lenett'; did you mean 'lenet' or"),
    (["lenet", "--shape", "1,x"], "shape='1,x' is not allowed; expected whole numbers of at least 1"),
    (["lenet", "--shape", "1,8,8", "--set", "pol=max"], "splitfed cuts: lenet.pol: unknown key 'pol'; did you mean"),
    (["lenet", "--shape", "1,8,8", "--set", "max"], "set='max' is not allowed; expected KEY=VALUE"),
    (["lenet", "--shape", "1,8,8", "--depth", "0"], "depth=0 is not allowed; expected a whole number of at least 1"),
    (["lenet", "--shape", "1,8,8", "--blocks"], "LeNet has no list of repeated blocks (an nn.ModuleList or"),
    (["lenet", "--shape", "1,8,8", "--blocks", "--depth", "2"], "depth=2 and blocks exclude each other: blocks lie"),
    (["lenet", "--shape", "1,8,8", "--outputs", "0"], "outputs=0 is not allowed; expected a whole number of at least"),
    (["lenet", "--shape", "1,8,8", "--integers", "9"], "LeNet fails by itself with 2 rows: "),
    (["lenet", "--shape", "1,8,8", "--figure", "a.pdf"], "figure='a.pdf' is not allowed; expected a file that ends in"),
    (["lenet", "--shape", "1,8,8", "--figure", "no/a.png"], "figure='no/a.png': there is no folder 'no'"),
    (["no/net.py:Net", "--shape", "8"], "model 'no/net.py:Net': there is no file 'no/net.py'"),
    (["os:path", "--shape", "8"], "model 'os:path' is part of Python itself"),
    (["no.toml"], "no.toml cannot be read as a study: No such file or directory"),
    (["no.toml", "--shape", "8"], "--shape is for a model by itself; the study no.toml has its own"),
]


@pytest.mark.parametrize(("arguments", "text"), MISUSE, ids=[" ".join(arguments) for arguments, _ in MISUSE])
def test_misuse_is_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cuts", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith(text)


def test_a_model_of_ones_own_has_the_same_names_as_in_a_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_net.py").write_text(NET, "utf-8")
    monkeypatch.chdir(tmp_path)
    found = [places_of(capsys, name, "--shape", "64") for name in ("own_net:net", "own_net.py:net")]
    assert found[0] == found[1]
    for name in ("own_net:net", "own_net.py:net"):
        write(tmp_path, small(model={"name": name}, topology=[{"name": "vanilla", "cut": "auto"}]))
        assert main(["plan", "study.toml"]) == 0
    (tmp_path / "study.db").write_bytes(b"")
    assert main(["cuts", "own_net:net", "--shape", "64"]) == 2
    assert "is a folder of results, and would run 'own_net': add --trust" in capsys.readouterr().err


def test_code_in_a_folder_of_results_is_not_run_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "study.db").write_bytes(b"")
    (tmp_path / "foreign_net.py").write_text("raise SystemExit('run')\n" + NET, "utf-8")
    assert main(["cuts", f"{tmp_path / 'foreign_net.py'}:net", "--shape", "64"]) == 2
    assert "is a folder of results, and would run 'foreign_net.py': add --trust" in capsys.readouterr().err
    assert main(["cuts", f"{tmp_path / 'foreign_net.py'}:net", "--shape", "64", "--trust"]) == 2
    assert "(SystemExit: run)" in capsys.readouterr().err


def left_to_the_rule(**changes: Any) -> dict[str, Any]:
    """A study of three runs at most that leaves cuts to the rule."""
    tables = [{"name": "vanilla", "cut": "auto"}]
    return small(
        model={"name": "mlp", "hidden": [70, 60]}, **{"topology": tables, "defense": None, "attack": None, **changes}
    )


def test_runs_of_a_study_name_the_cuts_that_were_left_to_the_rule() -> None:
    tables = [{"name": "vanilla", "cut": ["auto", "relu1"]}, {"name": "u_shaped", "cuts": "auto"}]
    cells = checked(left_to_the_rule(topology=tables)).cells
    # Three settings, told apart, though two are cut after one submodule.
    labels = ["vanilla(cut=auto: relu1)", "vanilla(cut=relu1)", "u_shaped(cuts=auto: relu1+fc2)"]
    assert [cell.topology.part.label for cell in cells] == labels
    assert [cell.cut_choice.partition(":")[0] for cell in cells] == [
        *("auto cut after 'relu1'", "", "auto cut after 'relu1' and 'fc2'")
    ]
    assert [cell.config["topology"][0].get("cut") for cell in cells] == ["relu1", "relu1", None]
    assert cells[2].config["topology"][0]["cuts"] == ["relu1", "fc2"]


def test_a_study_that_leaves_its_cuts_is_planned_trained_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, home = write(tmp_path, left_to_the_rule()), tmp_path / "out"
    assert main(["plan", str(path), "--schedules", "sequential"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "vanilla(cut=auto: relu1) auto cut after 'relu1': of 4 possible places to depth 1" in told
    assert main(["run", str(path), "--folder", str(home)]) == 0
    run = home / "runs" / "vanilla-auto--none--seed0"
    assert tomllib.loads((run / "config.toml").read_text("utf-8"))["topology"] == [{"name": "vanilla", "cut": "relu1"}]
    why = json.loads((run / "run.json").read_text("utf-8"))["cut_choice"]
    first = json.loads((run / "result.json").read_text("utf-8"))
    assert why == first["topology"]["cut_choice"]
    assert why in told
    assert "auto cut after &#39;relu1&#39;" in (home / "report.html").read_text("utf-8")
    (run / "result.json").unlink()
    session.run_study(checked_study.prepare_study(path), home, resume=True)
    again = json.loads((run / "result.json").read_text("utf-8"))
    assert [again[key] for key in ("history", "topology")] == [first[key] for key in ("history", "topology")]
    # The run by itself names its cut, and nothing is chosen anew.
    cell = load_finished_run(run)[1]
    assert (cell.topology.part.parameters, cell.cut_choice) == ({"cut": "relu1"}, "")


def test_a_study_whose_model_has_no_such_place_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, small(model={"name": "mlp", "hidden": []}, topology=[{"name": "vanilla", "cut": "auto"}]))
    assert main(["run", str(path), "--folder", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("study.toml: topology[0]: cut='auto' finds no place in Mlp with a weight at every party")


@pytest.mark.drawn
def test_boxes_stand_in_the_order_they_run_in_the_frames_that_hold_them(tmp_path: Path) -> None:
    model = seeded(residual)
    chain = arrange(model, cut_places(model, images(8)[0]))
    boxes = ["conv", "conv1", "bn1", "relu1", "conv2", "bn2", "shortcut", "relu2", "flatten", "fc"]
    assert [(label, level) for label, _, level, _ in chain.boxes] == [
        (b, int(1 <= i <= 7)) for i, b in enumerate(boxes)
    ]
    middles = [y for *_, y in chain.boxes] + [y for _, y in chain.places]
    assert len(set(middles)) == len(middles)
    ((label, level, top, end),) = chain.frames
    assert (label, level) == ("block  Block, 80 weights", 0)
    inside = [label for label, _, _, y in chain.boxes if top < y < end]
    assert inside == boxes[1:8]
    assert next(y for place, y in chain.places if place.name == "block") > end
    twice = seeded(Repeated)
    places = cut_places(twice, images(8, side=2)[0].flatten(1))
    assert [box[0] for box in arrange(twice, places).boxes] == ["stem", "core#1", "act#1", "core", "act", "0", "1"]
    for kind, begins in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        save_figure(tmp_path / f"twice{kind}", twice, places, ())
        assert (tmp_path / f"twice{kind}").read_bytes().startswith(begins)
    assert "never called by themselves: spare" in (tmp_path / "twice.svg").read_text("utf-8")
