"""`splitfed predict`: new rows go through the parties of a finished run, and what crosses is counted and shown."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from splitfed.cli import main
from splitfed.core import digests
from splitfed.core.errors import InvalidInput
from splitfed.core.tasks import Task, binary, classification, regression
from splitfed.core.topology import Head
from splitfed.data.dataset import Dataset
from splitfed.defenses import Noise
from splitfed.models.mlp import mlp
from splitfed.study.run.input_rows import read_rows
from splitfed.study.run.prediction import prediction_table
from splitfed.topologies import u_shaped, vanilla
from splitfed.training import checkpoint
from splitfed.training.entry_point import train
from splitfed.training.inference import predict as predict_by
from tests.examples import toy_data
from tests.rounding import single
from tests.study.examples import small, write
from tests.thinning import thin

ROWS = 5


def images(rows: int = ROWS) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(0).random((rows, 1, 8, 8), dtype=np.float32)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of two clients: undefended, and with strong noise."""
    home = tmp_path_factory.mktemp("study")
    study = small(
        data={"name": "digits", "victims": 8, "auxiliary": 32, "clients": 2},
        training={"rounds": 1, "batch_size": 64, "schedule": "splitfed_v3"},
        defense=[{"name": "none"}, {"name": "noise", "scale": 3.0, "relative": True}],
        attack=None,
    )
    assert main(["run", str(write(home, study)), "--folder", str(home / "out"), "--json"]) == 0
    return home / "out" / "runs"


@pytest.fixture
def plain(runs: Path) -> Path:
    return runs / "vanilla-relu1--none--seed0"


@pytest.fixture
def noisy(runs: Path) -> Path:
    return runs / "vanilla-relu1--noise-3--seed0"


def saved(folder: Path, x: Any = None) -> Path:
    np.save(folder / "x.npy", images() if x is None else x)
    return folder / "x.npy"


def predicted(run: Path, x: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["predict", str(run), "--input", str(x), "--json", *more]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_predictions_are_those_of_the_trained_segments(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole model by hand: the client's layer and the server's, from the run's own checkpoint."""
    found = predicted(plain, saved(tmp_path), capsys, "--client", "1")
    newest = checkpoint.load(plain / "checkpoints")
    assert newest is not None
    states = [newest.states[f"party-{name}"] for name in ("client1", "server")]
    weights = {k: t for state in states for k, t in tensors(state).items()}
    hidden = torch.relu(torch.from_numpy(images()).flatten(1) @ weights["fc1.weight"].T + weights["fc1.bias"])
    chances = (hidden @ weights["fc2.weight"].T + weights["fc2.bias"]).softmax(1)
    told = torch.tensor([found["predictions"][f"probability_{i}"] for i in range(10)]).T
    assert told.tolist() == [single(row) for row in chances.tolist()]
    assert found["predictions"]["label"] == chances.argmax(1).tolist()


def tensors(state: Any) -> dict[str, torch.Tensor]:
    """Return the model's parameters in a party's state, wherever they stand in it."""
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and str(key).startswith("fc"):
            found[key] = value
        elif isinstance(value, dict):
            found |= tensors(value)
    return found


def test_what_crossed_is_counted_and_who_saw_it_is_told(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = predicted(plain, saved(tmp_path), capsys)
    # One batch of five rows of twelve floats; labels and gradients stay where they are.
    assert (found["messages"], found["bytes"]) == (1, ROWS * 12 * 4)
    assert found["bytes_by_kind"] == {"activation": ROWS * 12 * 4}
    (seen,) = found["views"].pop("server")
    assert found["views"] == {}
    assert (seen["value"], seen["from"], seen["shape"], seen["bytes"]) == ("relu1", "client0", [ROWS, 12], ROWS * 48)
    # 300 rows go in two batches, of 256 and 44.
    many = predicted(plain, saved(tmp_path, images(300)), capsys)
    assert (many["messages"], many["bytes"]) == (2, 300 * 48)
    assert many["views"]["server"][0]["shape"] == [300, 12]


def test_the_view_is_what_arrived_after_the_defense(
    plain: Path, noisy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    views = []
    for number, run in enumerate((plain, noisy, noisy)):
        file = tmp_path / f"view{number}.safetensors"
        predicted(run, saved(tmp_path), capsys, "--view", "server", "--view-output", str(file))
        views.append(load_file(file)["relu1"])
    # A ReLU releases nothing below zero; noise does. The same rows get the same draw, so a call can be repeated.
    assert views[0].shape == (ROWS, 12)
    assert float(views[0].min()) >= 0 > float(views[1].min())
    assert torch.equal(views[1], views[2])
    twice = images()
    twice[0, 0, 0, 0] += 1e-3
    other = tmp_path / "other.safetensors"
    predicted(noisy, saved(tmp_path, twice.clip(0, 1)), capsys, "--view", "server", "--view-output", str(other))
    # Of the second row nothing changed but the draw.
    assert not torch.allclose(load_file(other)["relu1"][1], views[1][1], atol=1e-2)


def test_arrays_and_tables_give_the_same(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = predicted(plain, saved(tmp_path), capsys)["predictions"]
    np.savez(tmp_path / "x.npz", x=images(), other=np.zeros(3))
    header = ",".join(f"p{i}" for i in range(64))
    np.savetxt(tmp_path / "x.csv", images().reshape(ROWS, 64), "%.9g", ",", header=header, comments="")
    for name in ("x.npz", "x.csv"):
        assert predicted(plain, tmp_path / name, capsys)["predictions"] == expected


def test_the_output_is_a_table(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.csv"
    found = predicted(plain, saved(tmp_path), capsys, "--output", str(out))
    lines = out.read_text("utf-8").splitlines()
    assert lines[0] == ",".join(["row", "label", *(f"probability_{i}" for i in range(10))])
    assert len(lines) == 1 + ROWS
    first = [float(field) for field in lines[1].split(",")]
    assert first[1] == found["predictions"]["label"][0]
    assert first[2] == found["predictions"]["probability_0"][0]
    assert sum(first[2:]) == pytest.approx(1)
    assert main(["predict", str(plain), "--input", str(saved(tmp_path, images(12)))]) == 0
    text = capsys.readouterr().out
    assert "... 2 more rows; --output FILE.csv has them all" in text
    assert "crossed: 1 message, 576 B (activation 576 B)" in text
    assert "server saw relu1 (activation, 12x12) from client0, over bottom->top" in text


MISUSE: list[tuple[Any, list[str], str]] = [
    (images()[:, :, :7], [], "has shape (5, 1, 7, 8); this run takes rows of shape (1, 8, 8)"),
    (np.full((2, 1, 8, 8), np.nan, np.float32), [], "is not finite in row 0"),
    (images() + 1, [], "leaves the value range [0, 1] of the run's data in row 0"),
    (images()[:0], [], "holds no row; expected at least one"),
    (np.array([["a"]]), [], "has type <U1; expected real numbers"),
    (np.array([{"a": 1}]), [], "cannot be read: Object arrays cannot be loaded, as their objects"),
    (None, ["--client", "2"], "client=2 is not allowed; expected 0 to 1"),
    (None, ["--head", "fc3"], "unknown head 'fc3'; did you mean 'fc2'?"),
    (None, ["--view", "sever", "--view-output", "v"], "unknown party 'sever'; did you mean 'server'?"),
    (None, ["--view", "server"], "--view and --view-output belong together"),
    (None, ["--output", "no/such/out.csv"], "'no/such/out.csv' is no file that can be written"),
]


@pytest.mark.parametrize(("x", "more", "text"), MISUSE, ids=[text[:30] for _, _, text in MISUSE])
def test_misuse_is_one_line(
    x: Any, more: list[str], text: str, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in (plain / "attacks").rglob("*")}
    given = str(saved(tmp_path, x))
    capsys.readouterr()
    assert main(["predict", str(plain), "--input", given, *more]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert text in err
    assert {path: path.stat().st_mtime_ns for path in (plain / "attacks").rglob("*")} == before


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    def refused(name: str, content: bytes, text: str) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidInput) as caught:
            read_rows(tmp_path / name, (2,))
        assert text in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1

    refused("x.npy", b"", "cannot be read: ")
    refused("x.npz", b"PK\x03\x04junk", "cannot be read: ")
    refused("x.csv", b"\xff\xfe\x00", "cannot be read as CSV")
    refused("x.csv", b"a,b\n", "holds no row")
    refused("x.csv", b"a,b\n1,2\n3\n", "has 1 fields in row 1, counted from 0; expected 2 numbers")
    refused("x.csv", b"1,2\n3,pear\n", "has 'pear' in row 1, counted from 0; expected 2 numbers")
    refused("x.csv", b"1,2,3\n", "has shape (1, 3); this run takes rows of shape (2,) (2 numbers a line)")
    refused("x.csv", b"1,inf\n", "is not finite in row 0")
    refused("x.txt", b"1,2\n", "is of no known kind; expected .npy, .npz, .csv")
    np.savez(tmp_path / "two.npz", a=np.ones(2), b=np.ones(2))
    with pytest.raises(InvalidInput, match=r"has no array 'x' \(there is a, b\); expected x, or one array"):
        read_rows(tmp_path / "two.npz", (2,))
    with pytest.raises(InvalidInput, match=r"gone\.npy' is no file"):
        read_rows(tmp_path / "gone.npy", (2,))
    (tmp_path / "ok.csv").write_text("1,2\n3,4\n")
    assert read_rows(tmp_path / "ok.csv", (2,)).tolist() == [[1, 2], [3, 4]]
    np.save(tmp_path / "one.npy", np.array([5, 6]))
    assert read_rows(tmp_path / "one.npy", (2,)).tolist() == [[5, 6]]


def test_columns_are_found_by_their_names(tmp_path: Path) -> None:
    path, names = tmp_path / "rows.csv", ("age", "bp", "sex=f")
    wanted = torch.tensor([[1.0, 2.0, 0.0], [3.0, 4.0, 1.0]])
    for text in ("age,bp,sex=f\n1,2,0\n3,4,1\n", "bp, sex=f ,age\n2,0,1\n4,1,3\n", "1,2,0\n3,4,1\n"):
        path.write_text(text, "utf-8")
        assert torch.equal(read_rows(path, (3,), columns=names), wanted)
    for header, other in (("age,bp,sex", "sex"), ("age,age,bp", "age"), ("age,bp", "sex=f")):
        rows = "\n".join(["1,2,0"[: 2 * len(header.split(",")) - 1]] * 2)
        path.write_text(f"{header}\n{rows}\n", "utf-8")
        with pytest.raises(
            InvalidInput, match=rf"another header than the run's data: .* called '{other}', .* age, bp, sex=f"
        ):
            read_rows(path, (3,), columns=names)


@pytest.mark.parametrize("standardize", thin([True, False], 2))
def test_a_run_on_standardised_numbers_predicts_rows_that_are_said_to_be(
    standardize: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = np.random.default_rng(0).normal(50.0, 9.0, (60, 2))
    lines = [f"{a:.3f},{b:.3f},{'yes' if a > b else 'no'}" for a, b in drawn]
    (tmp_path / "patients.csv").write_text("\n".join(["age,bp,sick", *lines]) + "\n", "utf-8")
    study = small(
        data={
            "name": "csv",
            "path": "patients.csv",
            "target": "sick",
            "standardize": standardize,
            "victims": 4,
            "auxiliary": 8,
        },
        training={"rounds": 1, "batch_size": 8},
        attack=None,
        model={"name": "mlp", "hidden": [6]},
    )
    home = tmp_path / str(standardize)
    assert main(["run", str(write(tmp_path, study)), "--folder", str(home), "--json"]) == 0
    run = min((home / "runs").iterdir())
    (tmp_path / "rows.csv").write_text("bp,age\n0.5,-0.5\n", "utf-8")
    capsys.readouterr()
    asked = ["predict", str(run), "--input", str(tmp_path / "rows.csv")]
    assert main([*asked, "--standardized"] if standardize else asked) == 0
    assert main(asked if standardize else [*asked, "--standardized"]) == 2
    said = "and say so with --standardized" if standardize else "--standardized is for runs on standardised data"
    assert said in capsys.readouterr().err


def test_rows_of_the_table_itself_are_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text was refused as the table has it, and so was a header that names the target or what is dropped."""
    drawn = np.random.default_rng(0)
    cities, smoke = drawn.choice(["Rome", "Bern", "Oslo"], 60), drawn.choice(["True", "False"], 60)
    lines = [f"{i};{drawn.integers(20, 60)}; {cities[i]};{smoke[i]};{i % 2}" for i in range(60)]
    header = "number;age;city;smokes;sick"
    (tmp_path / "table.csv").write_text("\n".join([header, *lines]) + "\n", "utf-8")
    described = {"name": "csv", "path": "table.csv", "target": "sick", "drop": ["number"], "separator": ";"}
    study = small(
        data={**described, "victims": 4, "auxiliary": 8},
        training={"rounds": 1, "batch_size": 8},
        attack=None,
        model={"name": "mlp", "hidden": [6]},
    )
    assert main(["run", str(write(tmp_path, study)), "--folder", str(tmp_path / "out"), "--json"]) == 0
    run, rows = min((tmp_path / "out" / "runs").iterdir()), tmp_path / "rows.csv"
    found = []
    for text in (
        f"{header}\n7;30; Rome;True;1\n8;40;Bern;False;0\n",
        "city;age;smokes\nRome;30;true\nBern;40;0\n",
        "30;0;0;1;1\n40;1;0;0;0\n",
        "city;city;city;age;smokes\n0;0;1;30;1\n1;0;0;40;0\n",
    ):
        rows.write_text(text, "utf-8")
        capsys.readouterr()
        assert main(["predict", str(run), "--input", str(rows), "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["predictions"])
    assert len(found[0]["label"]) == 2
    assert found == [found[0]] * 4
    rows.write_text("city;age;smokes\nParis;30;1\n", "utf-8")
    assert main(["predict", str(run), "--input", str(rows)]) == 2
    text = "has 'Paris' in column 'city', row 0, counted from 0; expected 'Bern', 'Oslo', 'Rome'"
    assert text in capsys.readouterr().err
    # The values stay in the data file: they are one party's.
    kept = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert kept
    assert not any(b"Oslo" in content for content in kept)


def test_only_finished_runs_are_asked(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(runs), "--input", str(saved(tmp_path))]) == 2
    assert capsys.readouterr().err.endswith("holds no finished run; expected a folder .../runs/NAME\n")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("result.json", "config.toml", "run.json"):
        (bare / name).write_bytes((runs / "vanilla-relu1--none--seed0" / name).read_bytes())
    commands = (["predict", str(bare), "--input", str(saved(tmp_path))], ["attack", str(bare), "--attack", "rmle"])
    for command in commands:
        assert main(command) == 2
        assert "holds no checkpoint of its last round any more; run its study again" in capsys.readouterr().err
        assert not (bare / "checkpoints").exists()
    # One of an earlier round is no better: the rest would be trained again.
    earlier = bare / "checkpoints" / "000000"
    earlier.mkdir(parents=True)
    (earlier / "manifest.json").write_text("{}")
    result = json.loads((bare / "result.json").read_bytes())
    result.pop("digest")
    (bare / "result.json").write_bytes(digests.json_with_digest({**result, "rounds": 2}))
    for command in commands:
        assert main(command) == 2
        assert "holds no checkpoint of its last round any more; run its study again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "outputs", "expected"),
    [
        (classification(2), [[0.0, 0.0], [0.0, np.log(3)]], {"label": [0, 1], "probability_1": [0.5, 0.75]}),
        (binary(), [[0.0], [np.log(3)]], {"label": [0, 1], "probability": [0.5, 0.75]}),
        (regression(2), [[1.5, -2.0]], {"value_0": [1.5], "value_1": [-2.0]}),
    ],
    ids=["classification", "binary", "regression"],
)
def test_outputs_are_told_as_the_task_has_them(task: Task, outputs: Any, expected: dict[str, list[float]]) -> None:
    found = prediction_table(Head("out", "server", "client", task), torch.tensor(outputs, dtype=torch.float64))
    for name, values in expected.items():
        assert found[name] == pytest.approx(values)


def test_in_python_predictions_are_counted_watched_and_defended() -> None:
    data: Dataset = toy_data(80)
    federation = data.clients(2, victims=6, auxiliary=6)
    made = [
        train(vanilla(mlp((1, 8, 8), 10, (12,)), "relu1"), federation, rounds=1, defenses=defenses, schedule="blind")
        for defenses in ((), Noise(scale=1.0))
    ]
    plain, noisy = made
    x = federation.victims.x
    assert torch.equal(plain.predict(x), plain.predict(x))
    assert plain.engine.traffic.bytes("predict") == 2 * 6 * 48
    assert plain.engine.traffic.messages("predict") == 2
    assert not torch.equal(plain.predict(x, client=0), plain.predict(x, client=1))
    # A fresh draw a call, and the same one for the same number.
    assert not torch.equal(noisy.predict(x), noisy.predict(x))
    assert torch.equal(noisy.predict(x, number=7), noisy.predict(x, number=7))
    for run in made:
        view = run.observe()
        assert {message.stamp.phase for message in view.messages} == {"predict"}
        assert {message.kind for message in view.messages} == {"activation"}
        assert view.tensors()["relu1"].shape == (6, 12)
    assert float(noisy.observe().tensors()["relu1"].min()) < 0 <= float(plain.observe().tensors()["relu1"].min())
    with pytest.raises(InvalidInput, match="unknown head 'fc1'"):
        plain.predict(x, head="fc1")
    with pytest.raises(InvalidInput, match="client=2 is not allowed; expected 0 to 1"):
        plain.predict(x, client=2)


def test_numbers_of_other_types_are_taken_as_the_data_are() -> None:
    """Doubles ended in an error of torch, arrays were printed whole, and a missing number was told of an activation."""
    data = toy_data(40).clients(1, victims=6, auxiliary=6)
    topology = vanilla(mlp((1, 8, 8), 10, (12,)), "relu1")
    run, x = train(topology, data, rounds=1), data.victims.x
    for predict in (run.predict, partial(predict_by, topology)):
        wanted = predict(x)
        for same in (x.double(), x.numpy(), x.double().numpy()):
            assert torch.equal(predict(same), wanted)
        for wrong, text in (
            (torch.full_like(x, torch.nan), "x is not finite in row 0, counted from 0; fill in missing values"),
            (x.double().masked_fill(torch.arange(6).view(6, 1, 1, 1) == 3, 1e300), "x is not finite in row 3"),
            (x.tolist(), "x is a list; expected a tensor, an array or a number"),
        ):
            with pytest.raises(InvalidInput, match=re.escape(text)):
                predict(wrong)
    assert torch.equal(run.predict(x.round().long()), run.predict(x.round()))
    with pytest.raises(InvalidInput, match="x holds 16777217 in row 0, counted from 0, which float32 cannot represent"):
        run.predict(torch.full(x.shape, 2**24 + 1))


def test_a_u_shaped_client_gets_its_own_activation_back() -> None:
    data = toy_data(60).clients(1, victims=4, auxiliary=4)
    run = train(u_shaped(mlp((1, 8, 8), 10, (12, 8)), ("relu1", "relu2")), data, rounds=1)
    run.predict(data.victims.x)
    flows = {(f.sender, f.receiver): counted for f, counted in run.engine.traffic.flows.items() if f.phase == "predict"}
    assert flows == {("client0", "server"): (1, 4 * 48), ("server", "client0"): (1, 4 * 32)}


def test_columns_of_one_name_are_taken_in_their_order(tmp_path: Path) -> None:
    """What a column of text has become was read from the first of its columns alone, without a word."""
    path = tmp_path / "rows.csv"
    path.write_text("city,age,city,city\n1,0.5,0,0\n0,0.2,0,1\n", "utf-8")
    found = read_rows(path, (4,), columns=("age", "city", "city", "city"))
    assert torch.as_tensor(found).tolist() == [[0.5, 1, 0, 0], [pytest.approx(0.2), 0, 0, 1]]
    path.write_text("age,city\n0.5,1\n", "utf-8")
    with pytest.raises(
        InvalidInput,
        match=r"has 1 column called 'city', and the run's data have 3 columns.* given as a column of 0",
    ):
        read_rows(path, (4,), columns=("age", "city", "city", "city"))
