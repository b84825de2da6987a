"""A study is checked as a whole: each mistake is one line with its place, its value and what is allowed."""

from __future__ import annotations

import copy
import os
import re
import tomllib
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from splitfed.attacks.reconstruction.rmle import Rmle
from splitfed.core.errors import InvalidInput
from splitfed.study.config import schema
from splitfed.study.config.mistakes import InvalidStudy
from splitfed.study.config.toml import dumps
from tests.study.examples import PLACED, SMALL, checked, placed, small


def lines_of(study: dict[str, Any], base: Path = Path()) -> list[str]:
    with pytest.raises(InvalidInput) as caught:
        checked(study, base)
    return str(caught.value).splitlines()


def changed(table: str, **values: Any) -> dict[str, Any]:
    return small(**{table: {**SMALL[table], **values}})


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        small(trainning={}),
        r"trainning: unknown key 'trainning'; did you mean 'training'\? \(allowed: attack, callback, data, ",
    ),
    (small(study=None), r"study: is missing; add \[study\]"),
    (changed("study", seed=1), r"study\.seed: unknown key 'seed'; did you mean 'seeds'\?"),
    (changed("study", seeds=[0, -1]), r"study\.seeds: seeds=-1 is not allowed; expected a whole number of at least 0"),
    (changed("study", seeds=[3, 3]), r"study\.seeds: 3 is there 2 times; expected once"),
    (changed("study", name="a/b"), r"study\.name: 'a/b' is not allowed; expected "),
    (changed("data", name="digit"), r"data\.name: unknown data set 'digit'; did you mean 'digits'\?"),
    (changed("data", victim=1), r"data\.victim: unknown key 'victim'; did you mean 'victims'"),
    (
        small(topology={"name": "vanilla", "cut": "relu1"}),
        r"topology: is one table; expected a list .* \[\[topology\]\]",
    ),
    (changed("data", victims="many"), r"data\.victims: 'many' is not allowed; expected a whole number"),
    (changed("data", clients=1766), r"data: client\d+ has no training rows|data: digits has 1797 rows: "),
    (changed("data", dirichlet=-0.5), r"data: dirichlet=-0\.5 is not allowed; expected a number in \("),
    (
        changed("data", dirichlet=1.0, classes_per_client=2),
        r"data: dirichlet and classes_per_client are two partitions",
    ),
    (changed("data", test=0.0), r"data: no client has a test row, so utility cannot be measured"),
    (changed("data", victims=0), r"attack\[0\]: there are no victims to attack"),
    (changed("data", auxiliary=0), r"attack\[0\]: there is no auxiliary row"),
    (changed("model", name="lenett"), r"model\.name: unknown model 'lenett'; did you mean 'lenet'"),
    (
        changed("model", name="net.py"),
        r"model\.name: unknown model 'net\.py'.*; your own in a file net\.py is 'net\.py:Name' or 'net:Name'",
    ),
    (changed("model", hiden=[3]), r"model\.hiden: unknown key 'hiden'; did you mean 'hidden'\?"),
    (changed("model", hidden=3), r"model\.hidden: 3 is not allowed; expected a list of whole numbers$"),
    (changed("model", hidden=[2**50]), r"model: model 'mlp' has weights of 3\.38e\+08 GB; this machine has "),
    (small(model={"name": "no_such_package:f"}), r"model: model 'no_such_package:f': cannot import"),
    (
        changed("training", rounds=0),
        r"training\.rounds: rounds=0 is not allowed; expected a whole number of at least 1",
    ),
    (
        changed("training", schedule="sequencial"),
        r"training\.schedule\.name: unknown schedule 'sequencial'; did you mean",
    ),
    (
        changed("training", schedule={"name": "sequential", "hand_over": "pear"}),
        r"training\.schedule\.hand_over: unknown hand_over 'pear'; did you mean 'peer'\?",
    ),
    (
        changed("training", optimizer={"name": "SDG"}),
        r"training\.optimizer: unknown optimizer 'SDG'; did you mean 'SGD'",
    ),
    (
        changed("training", optimizer={"lr": -1.0}),
        r"training\.optimizer: optimizer SGD\(lr=-1\.0\) is refused by torch",
    ),
    (
        changed("training", optimizer={"lr": 0.1, "clip_norm": 0}),
        r"training\.optimizer: clip_norm=0 is not allowed; expected a number in \(0, inf\)",
    ),
    (
        changed("training", optimizer={"scheduler": {"name": "StepLR", "step_size": 1, "every": "stepp"}}),
        r"training\.optimizer: unknown scheduler_every 'stepp'; did you mean 'step'\?",
    ),
    (
        changed("training", optimizer={"scheduler": {"name": "StepLR", "step_size": 1, "every": 3}}),
        r"training\.optimizer: unknown scheduler_every 3 \(allowed: round, step\)",
    ),
    (
        changed("training", drop_last=True, sampling="poisson"),
        r"training\.drop_last: drop_last=True is not allowed with sampling='poisson'",
    ),
    (changed("training", drop_last="yes"), r"training\.drop_last: 'yes' is not allowed; expected"),
    (changed("data", class_weights="balanced"), r"data\.class_weights: 'balanced' is not allowed; expected a list"),
    (changed("data", class_weights=[1.0]), r"data: class_weights has 1 numbers; expected one for each of 10 classes"),
    (
        changed("training", optimizer={"sever": {"name": "SGD", "lr": 0.1}}),
        r"training\.optimizer: unknown role in optimizer 'sever'; did you mean 'server'\?",
    ),
    (changed("training", device="gpu"), r"training\.device: device='gpu' is not allowed; expected cpu, cuda"),
    (changed("training", record={"parties": ["serve"]}), r"training\.record\.parties: unknown party to record 'serve'"),
    (
        small(topology=[{"name": "vanila", "cut": "relu1"}]),
        r"topology\[0\]\.name: unknown topology 'vanila'; did you mean",
    ),
    (small(topology=[{"name": "vanilla"}]), r"topology\[0\]\.cut: is missing; expected text"),
    (
        small(topology=[{"name": "vanilla", "cut": "relu"}]),
        r"topology\[0\]: unknown submodule of Mlp 'relu'; did you mean",
    ),
    (
        small(topology=[{"name": "vanilla", "cut": 1}]),
        r"topology\[0\]\.cut: 1 is not allowed; expected text, or a list",
    ),
    (small(topology=[]), r"topology: \[\] is not allowed; expected "),
    (small(defense=[{"name": "nose"}]), r"defense\[0\]\.name: unknown defense 'nose'; did you mean 'noise'"),
    (
        small(defense=[{"name": "noise", "scales": 1}]),
        r"defense\[0\]\.scales: unknown key 'scales'; did you mean 'scale' or 'clients'\?",
    ),
    (
        small(defense=[{"name": "none"}, {"name": "distance_correlation", "alpha": -0.5}]),
        r"defense\[1\]\.alpha: distance_correlation alpha=-0\.5 is not allowed; expected a number in \[0, 1\]",
    ),
    (
        small(defense=[{"name": "noise", "scale": [0.5, "much"]}]),
        r"defense\[0\]\.scale: \[0\.5, 'much'\] is not allowed; expected a number, or a list of those",
    ),
    (
        small(defense=[{"combine": [{"name": "noise"}, {"name": "noise", "kind": "laplas"}]}]),
        r"defense\[0\]\.combine\[1\]\.kind: unknown noise kind 'laplas'; did you mean 'laplace'",
    ),
    (
        small(defense=[{"name": "noise", "on": ["bottom->tap"]}]),
        r"defense\[0\]: unknown edge 'bottom->tap'; did you mean 'bottom->top'\?",
    ),
    (
        small(defense=[{"name": "noise"}, {"name": "noise"}]),
        r"defense: noise\(scale=1\) is there 2 times; expected once",
    ),
    (
        small(defense=[{"name": "gaussian_release", "epsilon": 1e12, "clip": 1.0}]),
        r"defense\[0\]\.epsilon: gaussian_release epsilon=1000000000000\.0 is not allowed; expected a number in ",
    ),
    (small(attack=[{"name": "rlme"}]), r"attack\[0\]\.name: unknown attack 'rlme'; did you mean 'rmle'"),
    (
        small(attack=[{"name": "rmle", "budget": "qiuck"}]),
        r"attack\[0\]\.budget: unknown budget 'qiuck'; did you mean 'quick'",
    ),
    (
        small(attack=[{"name": "rmle", "lr": 0.0}]),
        r"attack\[0\]\.lr: rmle lr=0\.0 is not allowed; expected a number in \(",
    ),
    (
        small(attack=[{"name": "strongest", "threat_model": ["black_box", "white_box"]}]),
        r"attack\[0\]\.threat_model: .*; attacks span no grid: write an \[\[attack\]\] table for each value",
    ),
    (
        small(attack=[{"name": "rmle", "adversary": "sever"}]),
        r"attack\[0\]: unknown party 'sever'; did you mean 'server'",
    ),
    (
        small(attack=[{"name": "rmle", "adversary": "client0"}]),
        r"attack\[0\]: rmle by client0: party 'client0' owns the inputs of client 0: there is nothing to",
    ),
]


@pytest.mark.parametrize(("study", "pattern"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_a_mistake_is_one_line(study: dict[str, Any], pattern: str) -> None:
    lines = lines_of(study)
    assert len(lines) == 1, lines
    assert re.match(rf"study\.toml: (?:{pattern})", lines[0]), lines[0]


def test_several_mistakes_are_several_lines() -> None:
    """Names of pieces, and what is inside of these."""
    study = small(defense=[{"name": "nose"}, {"name": "noise", "scale": -1.0}], attack=[{"name": "rlme"}])
    places = ["defense[0].name", "defense[1].scale", "attack[0].name"]
    assert [line.split(": ")[1] for line in lines_of(study)] == places
    inside = small(defense=[{"name": "noise", "scal": 1}, {"name": "noise", "scale": -1.0}])
    assert [line.split(": ")[1] for line in lines_of(inside)] == ["defense[0].scal", "defense[1].scale"]


def test_batch_of_one_with_batch_norm_is_refused() -> None:
    # 1797 rows - 8 victims - 32 auxiliary = 1757; 176 for validation, 351 for test leave 1230 = 1229 + 1.
    study = small(
        model={"name": "resnet8"}, topology=[{"name": "vanilla", "cut": "stem"}], training={"batch_size": 1229}
    )
    study["topology"][0]["cut"] = resnet_cut()
    (line,) = lines_of(study)
    assert re.match(
        r"study\.toml: training\.batch_size: client0 has 1230 training rows, so batch_size=1229 leaves", line
    )


def resnet_cut() -> str:
    from splitfed.models.resnet8 import resnet8

    return str(resnet8((1, 8, 8), 10).cuts[1])


def test_lists_expand_to_a_grid_in_order() -> None:
    study = small(
        study={"name": "s", "seeds": [4, 7]},
        model={"name": "lenet"},
        topology=[{"name": "vanilla", "cut": ["pool1", "conv2"]}, {"name": "u_shaped", "cuts": [["conv1", "fc2"]]}],
        defense=[
            {"name": "none"},
            {"combine": [{"name": "noise", "scale": [1.0, 2.0]}, {"name": "distance_correlation"}]},
        ],
    )
    cells = checked(study).cells
    both = [f"noise-{scale}+distance_correlation-0.5" for scale in (1, 2)]
    expected = [
        f"{topology}--{defense}--seed{seed}"
        for topology in ("vanilla-pool1", "vanilla-conv2", "u_shaped-conv1+fc2")
        for defense in ("none", *both)
        for seed in (4, 7)
    ]
    assert [cell.id for cell in cells] == expected
    strengths = [cell.defense.strength for cell in cells[:6:2]]
    assert [found and (found.name, found.value) for found in strengths] == [
        *(None, ("noise scale", 1.0), ("noise scale", 2.0)),
    ]
    assert cells[2].defense.label == "noise(scale=1) + distance_correlation(alpha=0.5)"
    assert cells[2].defense.guarantee == "no formal guarantee"
    assert cells[12].topology.part.label == "u_shaped(cuts=conv1+fc2)"


def test_attacks_take_their_budget_and_what_is_changed() -> None:
    (probe,) = checked(small()).cells[0].attacks
    assert Rmle(**probe.attack.parameters) == replace(Rmle.with_budget("quick"), iterations=5)
    assert probe.label == "rmle(budget=quick, iterations=5)"
    (usual,) = checked(small(attack=[{"name": "rmle", "iterations": 5}])).cells[0].attacks
    assert Rmle(**usual.attack.parameters) == Rmle.with_budget("standard", iterations=5)
    assert usual.label == "rmle(budget=standard, iterations=5)"


def test_the_config_of_a_run_means_that_run_alone() -> None:
    for cell in checked(small()).cells:
        again = checked(tomllib.loads(dumps(cell.config))).cells
        assert len(again) == 1
        for name in ("id", "seed", "data", "model", "training", "attacks"):
            assert getattr(again[0], name) == getattr(cell, name)
        assert again[0].topology.part == cell.topology.part
        assert again[0].defense.parts == cell.defense.parts


def test_paths_start_from_the_folder_of_the_study(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b,y\n" + "".join(f"{i},{i % 3}.5,{i % 2}\n" for i in range(40)))
    study = small(
        data={"name": "csv", "path": "t.csv", "target": "y", "victims": 4, "auxiliary": 4},
        topology=[{"name": "vanilla", "cut": "relu1"}],
    )
    grid = checked(study, tmp_path)
    assert grid.resolved["data"]["path"] == str(tmp_path / "t.csv")
    assert re.match(r"study\.toml: data: .*t\.csv is missing", lines_of(study, tmp_path / "elsewhere")[0])


def test_what_is_no_toml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    with pytest.raises(InvalidInput, match=r"bad\.toml cannot be read as a study: No such file"):
        schema.read_toml(path)
    path.write_text("[study\n")
    with pytest.raises(InvalidInput, match=r"bad\.toml cannot be read as a study: .*line 1"):
        schema.read_toml(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match=r"bad\.toml cannot be read as a study: "):
        schema.read_toml(path)
    path.write_text("seed = " + "1" * 100_000)
    with pytest.raises(InvalidInput, match=r"bad\.toml cannot be read as a study: Exceeds the limit"):
        schema.read_toml(path)
    path.write_bytes(b"\xef\xbb\xbfseed = 1\n")
    assert schema.read_toml(path) == {"seed": 1}
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InvalidInput, match=r"bad\.toml cannot be read as a study: it is a pipe, socket or device$"):
        schema.read_toml(path)


@pytest.mark.parametrize("name", ["CON", "nul", "com1.2024", "a."])
def test_a_name_must_do_for_a_folder_everywhere(name: str, tmp_path: Path) -> None:
    (line,) = lines_of({**small(), "study": {"name": name}}, tmp_path)
    assert line == (
        f"study.toml: study.name: {name!r} is not allowed; expected a name for a folder, no device of Windows "
        "(CON, NUL, COM1) and no dot at the end"
    )


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value if item is not None] if isinstance(value, list) else value


@given(st.dictionaries(st.text(), st.dictionaries(st.text(), PLAIN, max_size=4), max_size=4))
@settings(max_examples=100, derandomize=True)
def test_toml_is_read_back_as_written(document: dict[str, Any]) -> None:
    # repr tells 1 from 1.0 and from True, and nan is nan.
    assert repr(tomllib.loads(dumps(document))) == repr(without_none(document))


JUNK = st.one_of(
    st.integers(-(2**70), 2**70),
    st.integers(-3, 3000),
    st.floats(),
    st.booleans(),
    st.text(max_size=8),
    st.sampled_from(
        ["none", "digits", "csv", "lenet", "vanilla", "u_shaped", "relu1", "bottom->top", "server", "cuda:7"]
    ),
    st.sampled_from(
        ["vertical", "custom", "multi_task", "left", "x", "a", "top", "joined", "sum", "odd", "torch.nn:ReLU"]
    ),
    st.just(date(2020, 1, 1)),
    st.lists(st.one_of(st.integers(-2, 9), st.floats(), st.text(max_size=3)), max_size=3),
    st.dictionaries(
        st.sampled_from(["name", "lr", "scheduler", "x"]), st.one_of(st.integers(), st.text(max_size=3)), max_size=2
    ),
)

RICH = small(
    defense=[
        {"name": "none"},
        {"name": "noise", "scale": [0.5, 1.0], "relative": True},
        {"combine": [{"name": "noise", "kind": "laplace"}, {"name": "distance_correlation", "alpha": 0.3}]},
    ],
    training={"rounds": 1, "batch_size": 64, "schedule": {"name": "sequential"}, "optimizer": {"lr": 0.1}},
)


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(path for key, item in inner for path in paths(item, (*here, key)))]


def mutate(draw: st.DrawFn, tables: Any) -> Any:
    """Change `tables` in one to three places, as a slip of the hand would, or with what belongs nowhere."""
    for _ in range(draw(st.integers(1, 3))):
        *outer, last = draw(st.sampled_from(paths(tables)[1:]))
        table: Any = tables
        for key in outer:
            table = table[key]
        change = draw(st.sampled_from(["drop", "rename", "replace", "add"]))
        if change == "replace":
            table[last] = draw(JUNK)
        elif change == "add" and isinstance(table[last], dict):
            table[last][draw(st.text(max_size=5))] = draw(JUNK)
        elif change in ("drop", "rename"):
            value = table.pop(last)
            if change == "rename" and isinstance(table, dict):
                table[str(last)[:-1] if draw(st.booleans()) else f"{last}s"] = value
        if not paths(tables)[1:]:
            break
    return tables


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    study = copy.deepcopy(draw(st.sampled_from([RICH, *(placed(name) for name in PLACED)])))
    return mutate(draw, study)


def check_study_is_valid_or_refused(study: dict[str, Any]) -> None:
    try:
        names = [cell.id for cell in checked(study).cells]
    except InvalidStudy as error:
        lines = list(error.lines)
    else:
        lines = ["study.toml: fine: "] if names and len(set(names)) == len(names) else []
    assert lines
    assert all(re.match(r"study\.toml: \S+: ", line) and len(line.splitlines()) == 1 for line in lines)


@given(mutated())
@settings(max_examples=60, derandomize=True)
def test_any_study_is_valid_or_refused_in_lines(study: dict[str, Any]) -> None:
    check_study_is_valid_or_refused(study)


@pytest.mark.exhaustive
@given(mutated())
@settings(max_examples=1000, derandomize=True)
def test_a_thousand_studies_are_valid_or_refused_in_lines(study: dict[str, Any]) -> None:
    check_study_is_valid_or_refused(study)
