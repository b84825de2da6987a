"""Every topology from a study: its pieces, its parts of the data, its grid, and what is refused and where."""

from __future__ import annotations

import copy
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from splitfed.cli import main
from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Topology
from splitfed.registry import TABLES
from splitfed.study.config import build
from splitfed.study.config.toml import dumps
from tests.study.examples import LINEAR, PLACED, checked, placed, small, write
from tests.thinning import thin

ROWS = 1230
"""Of 1797, 8 are victims and 32 auxiliary; 176 validate and 351 test."""
LABELS = 8 * ROWS


def activations(*widths: int) -> dict[str, int]:
    """A float of 4 bytes a value, row and round there, and as many back."""
    return {"activation": 4 * ROWS * sum(widths), "gradient": 4 * ROWS * sum(widths)}


# Bytes of one round, by hand: the widths that cross between two roles, and 8 bytes for each label that does.
BYTES = {
    "vanilla": activations(12) | {"label": LABELS},
    "u_shaped": activations(12, 12),
    "multi_hop": activations(12, 10) | {"label": 2 * LABELS},
    "vertical": activations(8, 8) | {"label": LABELS},
    "extended_vanilla": activations(8, 8, 9),
    "multi_task": activations(8, 8, 8, 8) | {"label": LABELS},
    "local": {},
    "custom": activations(8, 5) | {"label": LABELS},
}

# The first party without data, or the one that the study names.
ADVERSARIES = {"multi_hop": "relay", "extended_vanilla": "relay", "multi_task": "parity0", "local": "client0"}


def built(study: dict[str, Any], cell: int = 0) -> Topology:
    cells = checked(study).cells
    return build.topology(cells[cell], build.dataset(cells[cell].data))


def lines_of(study: dict[str, Any]) -> list[str]:
    with pytest.raises(InvalidInput) as caught:
        checked(study)
    return str(caught.value).splitlines()


def test_every_topology_is_here() -> None:
    assert set(PLACED) == set(BYTES) == set(TABLES["topologies"])


@pytest.mark.parametrize(
    "name",
    [
        # What a study does with a topology is seen with these; that every one trains, in tests of the schedules.
        pytest.param(name, marks=() if name in ("vertical", "custom") else pytest.mark.exhaustive)
        for name in PLACED
    ],
)
def test_runs_from_end_to_end(name: str, tmp_path: Path) -> None:
    study = placed(name) | {"defense": [{"name": "none"}], "training": {"rounds": 1, "batch_size": 64}}
    assert main(["run", str(write(tmp_path, study)), "--folder", str(tmp_path / "out")]) == 0
    (home,) = (tmp_path / "out" / "runs").iterdir()
    found = json.loads((home / "result.json").read_text("utf-8"))
    assert found["bytes_by_kind"] == BYTES[name]
    assert found["topology"]["name"] == name
    assert found["utility"]["test"] > 0.12  # chance is .1
    (attack,) = found["attacks"]
    assert attack["adversary"] == ADVERSARIES.get(name, "server")
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("name", thin(PLACED, 3))
def test_the_config_of_a_run_means_that_run_alone(name: str) -> None:
    for cell in checked(placed(name)).cells:
        (again,) = checked(tomllib.loads(dumps(cell.config))).cells
        for field in ("id", "seed", "data", "model", "training", "attacks"):
            assert getattr(again, field) == getattr(cell, field)
        assert again.topology.part == cell.topology.part


def test_a_piece_takes_what_arrives_and_the_last_one_is_as_wide_as_the_labels() -> None:
    left, right, _, top = (segment.module for segment in built(placed("vertical")).segments)
    assert [layer.in_features for layer in left.modules() if isinstance(layer, nn.Linear)] == [32, 6]
    assert [layer.out_features for layer in right.modules() if isinstance(layer, nn.Linear)] == [8]
    assert [(layer.in_features, layer.out_features) for layer in top.modules() if isinstance(layer, nn.Linear)] == [
        (8, 12),
        (12, 10),
    ]
    joined = built(placed("vertical", fusion="concat")).segment("top").module
    assert next(layer for layer in joined.modules() if isinstance(layer, nn.Linear)).in_features == 16
    tops = built(placed("multi_task"))
    assert [tops.segment(f"top_{server}").module[-1].out_features for server in ("digit", "parity")] == [10, 2]  # type: ignore[index]


def test_pieces_of_one_make_start_differently_and_from_the_seed() -> None:
    study = placed("extended_vanilla")
    study["study"]["seeds"] = [0, 1]
    first, other = (built(study, cell) for cell in (0, 3))
    again = built(study)
    one, two = (first.segment(f"bottom_party{i}").module.state_dict()["fc1.weight"] for i in (0, 1))
    assert one.shape == two.shape
    assert not torch.equal(one, two)
    assert torch.equal(one, again.segment("bottom_party0").module.state_dict()["fc1.weight"])
    assert not torch.equal(one, other.segment("bottom_party0").module.state_dict()["fc1.weight"])


def test_columns_go_to_the_parties_that_are_named() -> None:
    parts = {"lab": list(range(10)), "clinic": list(range(10, 30))}
    study = placed("vertical", bottoms=LINEAR, labels="lab", head={"model": "mlp", "hidden": []})
    study["topology"][0]["top"]["width"] = 7
    study["data"] = {"name": "breast_cancer", "victims": 8, "auxiliary": 32, "vertical": parts}
    topology = built(study)
    widths = [topology.segment(f"bottom_{role}").module.fc1.in_features for role in parts]  # type: ignore[union-attr]
    assert widths == [10, 20]
    assert topology.heads[0].role == topology.heads[0].labels == "lab"
    assert topology.segment("head").module.fc1.in_features == 7  # type: ignore[union-attr]
    study["data"] |= {"vertical": {"lab": ["mean radius", 3], "clinic": ["worst area"]}, "overlap": True}
    with pytest.raises(InvalidInput, match=r"column 1 \('mean texture'\) is given to no party \(27 in all\)"):
        built(study)
    study["data"]["vertical"] |= {"clinic": [*range(3), *range(4, 30)]}
    assert built(study).segment("bottom_lab").module.fc1.in_features == 2  # type: ignore[union-attr]
    del study["data"]["overlap"]
    study["data"]["vertical"] = 2
    study["topology"][0]["labels"] = "party1"
    assert built(study).segment("bottom_party1").module.fc1.in_features == 15  # type: ignore[union-attr]


def test_a_label_set_beside_the_main_one() -> None:
    data = build.dataset(checked(placed("multi_task")).cells[0].data)
    assert torch.equal(data.label("odd"), data.y % 2)
    assert data.tasks["odd"].outputs == 2
    heads = {head.role: (head.target, head.weight, head.labels) for head in built(placed("multi_task")).heads}
    assert heads == {"digit": (None, 1.0, "left"), "parity": ("odd", 0.5, "parity")}


def test_lists_give_a_grid_at_any_depth() -> None:
    study = placed("vertical", fusion=["sum", "concat"], labels=["left", "server"])
    study["topology"][0]["bottoms"]["left"]["hidden"] = [[6], [4, 3]]
    study["topology"][0]["top"] = [{"model": "mlp", "hidden": []}, {"model": "mlp", "hidden": [5]}]
    study |= {"defense": [{"name": "none"}], "attack": []}
    cells = checked(study).cells
    found = [
        (p["fusion"], p["labels"], p["bottoms"]["left"]["hidden"], p["top"]["hidden"])
        for p in (cell.topology.part.parameters for cell in cells)
    ]
    hidden = [([6], []), ([6], [5]), ([4, 3], []), ([4, 3], [5])]
    # What is written in the builder's own words varies slowest, then what stands in pieces.
    assert found == [
        (fusion, labels, *inner) for labels in ("left", "server") for fusion in ("sum", "concat") for inner in hidden
    ]
    assert len({cell.id for cell in cells}) == len({cell.topology.part.label for cell in cells}) == 16
    heads = placed("custom")
    heads["topology"][0]["heads"][0]["weight"] = [0.5, 1.0]
    heads["topology"][0]["segments"][2]["width"] = [3, 4]
    assert len(checked(heads).cells) == 4 * 3


@pytest.mark.parametrize("name", thin(PLACED, 3))
def test_names_stay_short(name: str) -> None:
    (cell, *_) = checked(placed(name)).cells
    assert re.fullmatch(r"[A-Za-z0-9.+_-]{1,110}", cell.id)
    assert len(cell.topology.part.slug) <= 80
    assert len(cell.topology.part.label) <= 250
    assert len(cell.topology.part.label.split(", ")) == len(cell.topology.part.label_values)


def test_long_tables_are_cut_and_still_told_apart() -> None:
    def table(width: int) -> dict[str, Any]:
        return {f"party{i}": {**LINEAR, "width": width if i == 29 else 8} for i in range(30)}

    study = placed("vertical", bottoms=[table(8), table(9)], fusion="concat", labels="party0")
    study["data"] = {"name": "breast_cancer", "victims": 8, "auxiliary": 32, "vertical": 30}
    one, two = checked(study | {"defense": [{"name": "none"}]}).cells
    assert one.id != two.id
    assert one.topology.part.label != two.topology.part.label
    assert max(len(one.id), len(one.topology.part.label)) < 160


def test_ids_of_studies_with_one_model_are_as_they_were() -> None:
    ids = [cell.id for cell in checked(small()).cells]
    assert ids[1] == "vanilla-relu1--noise-0.5--seed0"
    assert next(cell.id for cell in checked(placed("multi_hop")).cells) == (
        "multi_hop-relu1+relu2-client+relay+server--none--seed0"
    )


def test_a_model_is_for_those_that_cut_it() -> None:
    study = placed("vertical")
    study["model"] = {"name": "mlp", "hidden": [12]}
    study["topology"].append({"name": "vanilla", "cut": "relu1"})
    cells = checked(study).cells
    assert [cell.model is None for cell in cells] == [True] * 3 + [False] * 3
    assert ["model" in cell.config for cell in cells] == [False] * 3 + [True] * 3
    assert lines_of(study | {"topology": study["topology"][:1]}) == [
        "study.toml: model: is used by no topology, whose pieces have models in their own tables; leave it out"
    ]
    del study["model"]
    assert lines_of(study) == ["study.toml: model: is missing; topology[1] cuts a model: add [model] with name = ..."]


class Pair(nn.Module):
    """Two values in, two out; `shape` is that of both inputs."""

    def __init__(self, shape: tuple[tuple[int, ...], ...], gain: float = 1.0) -> None:
        super().__init__()
        self.shapes, self.gain = shape, gain

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gain * a, self.gain * b


class Wide(nn.Linear):
    """As wide as it is told, from one flat value."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape[0], outputs)


def test_a_factory_may_take_several_values_and_return_several() -> None:
    study = placed("custom")
    own = {"name": "pair", "role": "server", "inputs": ["a", "b"], "outputs": ["c", "d"]}
    own |= {"model": "tests.study.test_topologies:Pair", "gain": 2.0}
    study["topology"][0]["segments"][1]["inputs"] = ["c", "d"]
    study["topology"][0]["segments"].append(own)
    pair = built(study).segment("pair").module
    assert isinstance(pair, Pair)
    assert (pair.shapes, pair.gain) == (((8,), (5,)), 2.0)


def turned(name: str, *steps: Any, to: Any = None) -> dict[str, Any]:
    """Return the study of topology `name` with the value at `steps` below its table set to `to`, None to drop it."""
    study = placed(name)
    value: Any = study["topology"][0]
    for step in steps[:-1]:
        value = value[step]
    if to is None:
        del value[steps[-1]]
    else:
        value[steps[-1]] = copy.deepcopy(to)
    return study


def with_data(name: str, **changes: Any) -> dict[str, Any]:
    study = placed(name)
    study["data"] = {key: value for key, value in {**study["data"], **changes}.items() if value is not None}
    return study


OWN = "tests.study.test_topologies:"
WRONG: list[tuple[dict[str, Any], str]] = [
    (turned("vertical", "bottoms"), r"topology\[0\]\.bottoms: is missing; expected a table \{role = \{model = "),
    (turned("vertical", "top"), r"topology\[0\]\.top: is missing; expected a table \{model = \.\.\., \.\.\.\}"),
    (turned("vertical", "labels"), r"topology\[0\]\.labels: is missing; expected text"),
    (turned("vertical", "labels", to="a/b"), r"topology\[0\]: role 'a/b' is not allowed: no slash"),
    (turned("vertical", "botoms", to={}), r"topology\[0\]\.botoms: unknown key 'botoms'; did you mean 'bottoms'\?"),
    (turned("vertical", "bottoms", to=3), r"topology\[0\]\.bottoms: 3 is not allowed; expected a table"),
    (turned("vertical", "bottoms", to=[]), r"topology\[0\]\.bottoms: \[\] is not allowed; expected a table"),
    (turned("vertical", "bottoms", "left", to="mlp"), r"topology\[0\]\.bottoms\.left: 'mlp' is not allowed; expected"),
    (turned("vertical", "bottoms", "left", "model"), r"topology\[0\]\.bottoms\.left\.model: is missing; add model = "),
    (
        turned("vertical", "bottoms", "left", "model", to="mpl"),
        r"topology\[0\]\.bottoms\.left\.model: unknown model 'mpl'; did you mean 'mlp'\?",
    ),
    (
        turned("vertical", "bottoms", "left", "model", to=4),
        r"topology\[0\]\.bottoms\.left\.model: 4 is not allowed; expected text",
    ),
    (
        turned("vertical", "bottoms", "left", "hiden", to=[3]),
        r"topology\[0\]\.bottoms\.left\.hiden: unknown key 'hiden'; did you mean 'hidden'\?",
    ),
    (
        turned("vertical", "bottoms", "left", "hidden", to="many"),
        r"topology\[0\]\.bottoms\.left\.hidden: 'many' is not allowed; expected a list",
    ),
    (
        turned("vertical", "bottoms", "left", "hidden", to=[0]),
        r"topology\[0\]\.bottoms\.left\.hidden: hidden=0 is not allowed; expected a whole number of at least 1",
    ),
    (
        turned("vertical", "bottoms", "left", "hidden", to=[2**50]),
        r"topology\[0\]\.bottoms\.left: model 'mlp' has weights of 1\.85e\+08 GB; this machine has ",
    ),
    (
        turned("vertical", "bottoms", "left", "width"),
        r"topology\[0\]\.bottoms\.left\.width: is missing; expected a whole number, how many values a row",
    ),
    (
        turned("vertical", "bottoms", "left", "width", to=-3),
        r"topology\[0\]\.bottoms\.left\.width: width=-3 is not allowed; expected a whole number of at least 1",
    ),
    (
        turned("vertical", "top", "width", to=10),
        r"topology\[0\]\.top\.width: 10 is not allowed: the labels say how wide the last piece is",
    ),
    (
        turned("vertical", "bottoms", "left", "model", to="lenet"),
        r"topology\[0\]\.bottoms\.left\.hidden: unknown key 'hidden'",
    ),
    (
        turned("vertical", "bottoms", "right", to={"model": "no_such_package:f", "width": 3}),
        r"topology\[0\]\.bottoms\.right: model 'no_such_package:f': cannot import",
    ),
    (
        turned("vertical", "bottoms", "right", to={"model": "torch.nn:ReLU", "width": 3}),
        r"topology\[0\]\.bottoms\.right\.width: 3 is not allowed: torch\.nn:ReLU takes no 'outputs'",
    ),
    (
        turned("vertical", "bottoms", "right", to={"model": "tests.study.test_topologies:Wide"}),
        r"topology\[0\]\.bottoms\.right\.width: is missing; expected a whole number",
    ),
    (
        turned("vertical", "bottoms", "right", "width", to=9),
        r"topology\[0\]: fusion 'sum' needs releases of one shape; got \[\(8,\), \(9,\)\]",
    ),
    (turned("vertical", "fusion", to="summ"), r"topology\[0\]: unknown fusion 'summ'; did you mean 'sum'"),
    (turned("vertical", "fusion", to=7), r"topology\[0\]\.fusion: 7 is not allowed; expected a table"),
    (
        turned("vertical", "bottoms", to={"middle": LINEAR, "right": LINEAR}),
        r"topology\[0\]: unknown feature for an input: 'middle' \(allowed: left, right\)",
    ),
    (turned("multi_task", "tops", to=LINEAR), r"topology\[0\]\.tops: is one piece; expected a table \{role = "),
    (turned("multi_task", "targets", to={"pariti": "odd"}), r"topology\[0\]: unknown server in targets 'pariti'; did"),
    (
        turned("multi_task", "targets", to={"parity": "even"}),
        r"topology\[0\]: unknown label set of the head on 'out_parity': 'even'",
    ),
    (
        turned("multi_task", "weights", to={"parity": "much"}),
        r"topology\[0\]\.weights: \{'parity': 'much'\} is not allowed; expected a table of numbers",
    ),
    (turned("multi_task", "weights", to={"parity": 0.0}), r"topology\[0\]: weight of the head on 'out_parity'=0\.0 is"),
    (
        turned("multi_task", "labels") | {"attack": [{"name": "rmle"}]},
        r"attack\[0\]: topology 'multi_task' has no party without data: name the adversary",
    ),
    (
        placed("multi_task") | {"attack": [{"name": "rmle", "adversary": "parity_"}]},
        r"attack\[0\]: unknown party 'parity_'; did you mean 'parity",
    ),
    (
        placed("extended_vanilla") | {"attack": [{"name": "rmle", "adversary": "party9"}]},
        r"attack\[0\]: unknown party 'party9'; did you mean",
    ),
    (turned("extended_vanilla", "relay", to="server"), r"topology\[0\]: relay='server' is not allowed; it must be an"),
    (turned("multi_hop", "cuts", to=["relu1"]), r"topology\[0\]: cuts=\('relu1',\) is not allowed; expected a list of"),
    (
        turned("multi_hop", "labels", to="relaid"),
        r"topology\[0\]: unknown labels of a multi-hop topology 'relaid'; did",
    ),
    (turned("custom", "segments", to=[]), r"topology\[0\]\.segments: \[\] is not allowed; expected tables, each with"),
    (turned("custom", "segments", to=[4]), r"topology\[0\]\.segments\[0\]: 4 is not allowed; expected a table"),
    (turned("custom", "segments", 0, "role"), r"topology\[0\]\.segments\[0\]\.role: is missing; expected text"),
    (turned("custom", "segments", 0, "model"), r"topology\[0\]\.segments\[0\]\.model: is missing; add model = "),
    (turned("custom", "segments", 2, "width"), r"topology\[0\]\.segments\[2\]\.width: is missing; expected a whole"),
    (turned("custom", "segments", 0, "inputs", to=["joint"]), r"topology\[0\]: unknown value read by segment 'top': "),
    (
        turned("custom", "segments", 0, "inputs", to=["joined", "a"]),
        r"topology\[0\]\.segments\[0\]: model mlp takes one value, not joined, a: join them by a fusion",
    ),
    (
        turned("custom", "segments", 2, "inputs", to=["b"]),
        r"topology\[0\]: segments 'a', 'b' wait for one another: a cycle",
    ),
    (turned("custom", "segments", 2, "role", to="server"), r"topology\[0\]: segment 'a' at role 'server' reads 'x', "),
    (turned("custom", "inputs"), r"topology\[0\]\.inputs: is missing; expected a table of text"),
    (turned("custom", "inputs", to={}), r"topology\[0\]: inputs=\{\} is not allowed; expected value -> role"),
    (turned("custom", "heads", 0, "value", to="tip"), r"topology\[0\]: unknown value at a head: 'tip'; did you mean"),
    (turned("custom", "heads", 0, "labels"), r"topology\[0\]\.heads\[0\]\.labels: is missing; expected text"),
    (turned("custom", "heads", 0, "weight", to=0), r"topology\[0\]: heads\[0\]: weight=0 is not allowed; expected a"),
    (
        turned("custom", "heads", 0, "via", to="hop"),
        r"topology\[0\]\.heads\[0\]\.via: 'hop' is not allowed; expected a l",
    ),
    (
        with_data("vertical", halves=None),
        r"topology\[0\]: inputs 'left' of left, 'right' of right: the data has no feat",
    ),
    (with_data("extended_vanilla", strips=None), r"topology\[0\]\.bottoms: one table for all parties needs parties: "),
    (with_data("vertical", strips=2), r"data\.strips: is not allowed beside halves: rows are divided in one way"),
    (with_data("extended_vanilla", strips=9), r"data: strips=9 is not allowed: digits is 8 pixels wide"),
    (with_data("extended_vanilla", strips="two"), r"data\.strips: 'two' is not allowed; expected a whole number"),
    (
        with_data("vertical", halves=None, vertical=2),
        r"data: digits has rows of shape \(1, 8, 8\), which are no columns",
    ),
    (
        with_data("vertical", halves=None, vertical="two"),
        r"data\.vertical: 'two' is not allowed; expected a whole number or a table of lists of whole numbers or text",
    ),
    (with_data("vertical", overlap=True), r"data\.overlap: is for columns by party; add vertical = "),
    (
        with_data("multi_task", targets={"odd": {"clases": [0]}}),
        r"data\.targets\.odd: holds clases; expected classes = \[\.\.\.\] alone",
    ),
    (
        with_data("multi_task", targets={"odd": {"classes": [0, 1]}}),
        r"data: targets\.odd\.classes has 2 entries; digits has 10 classes, expected one each",
    ),
    (
        with_data("multi_task", targets={"odd": {"classes": [0, 2] * 5}}),
        r"data: targets\.odd\.classes=\[0, 2, .*\] is not allowed; expected classes 0, 1, \.\.\. without a gap",
    ),
    (with_data("multi_task", targets={"odd": 3}), r"data\.targets: \{'odd': 3\} is not allowed; expected a table"),
]


@pytest.mark.parametrize(("study", "pattern"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_a_mistake_is_one_line(study: dict[str, Any], pattern: str) -> None:
    lines = lines_of(study)
    assert len(lines) == 1, lines
    assert re.match(rf"study\.toml: (?:{pattern})", lines[0]), lines[0]
