"""The harness of the published tables: measured once, kept through a crash, written into a section of its own."""

from __future__ import annotations

import importlib.util
import inspect
import json
import pkgutil
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments import papers
from experiments.papers import __main__ as command, he_mnist, mafml, method_accuracy, method_forms, unsplit_depth
from experiments.papers.he_lenet import he_lenet
from experiments.papers.table import ANY, RESULTS, SHARE, Cell, Measured, Table, markdown, mean, write
from splitfed.attacks.base import AsksForHints, Knowledge
from splitfed.core.messages import Message, Stamp, View


def shown(done: Measured) -> str:
    return ", ".join(f"{key}={entry['found']}" for key, entry in sorted(done.items()))


class Counter:
    """Cells that count how often each is measured; `broken` raises."""

    def __init__(self, *keys: str, broken: str = "") -> None:
        self.measured: list[str] = []
        self.broken = broken
        self.table = Table(
            "toy", "A toy", "No time at all.", tuple(Cell(key, self._measure(key)) for key in keys), shown
        )

    def _measure(self, key: str) -> Any:
        def measure(state: Path) -> dict[str, Any]:
            if key == self.broken:
                raise ArithmeticError("no luck")
            assert state.is_dir()
            self.measured.append(key)
            return {"found": len(self.measured)}

        return measure

    def complete(self, folder: Path) -> None:
        self.table.complete(folder, told=lambda line: None)


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_cell_is_measured_once(tmp_path: Path) -> None:
    toy = Counter("a", "b")
    toy.complete(tmp_path)
    toy.complete(tmp_path)
    assert toy.measured == ["a", "b"]
    found = toy.table.measured(tmp_path)
    assert {key: entry["found"] for key, entry in found.items()} == {"a": 1, "b": 2}
    for entry in found.values():
        assert entry["seconds"] >= 0
        assert entry["megabytes"] > 1
        assert len(entry["date"]) == len("2026-11-21")


def test_what_was_measured_before_a_crash_is_kept(tmp_path: Path) -> None:
    broken = Counter("a", "b", "c", broken="b")
    with pytest.raises(ArithmeticError):
        broken.complete(tmp_path)
    assert list(broken.table.measured(tmp_path)) == ["a"]
    whole = Counter("a", "b", "c")
    whole.complete(tmp_path)
    assert whole.measured == ["b", "c"]


def test_a_torn_last_line_is_measured_again_and_spoils_nothing(tmp_path: Path) -> None:
    Counter("a", "b").complete(tmp_path)
    path = tmp_path / "toy.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-9])
    toy = Counter("a", "b")
    assert list(toy.table.measured(tmp_path)) == ["a"]
    toy.complete(tmp_path)
    assert toy.measured == ["b"]
    assert list(toy.table.measured(tmp_path)) == ["a", "b"]
    lines = path.read_text().splitlines()
    assert [json.loads(line)["key"] for line in (lines[0], lines[-1])] == ["a", "b"]


def test_a_cell_that_the_table_no_longer_has_is_not_shown(tmp_path: Path) -> None:
    Counter("a", "old").complete(tmp_path)
    assert list(Counter("a").table.measured(tmp_path)) == ["a"]


def test_write_replaces_its_own_section_and_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    other = "<!-- other: begin -->\n## Other\n\nkept\n<!-- other: end -->\n"
    path.write_text(f"# Results\n\nby hand\n\n<!-- toy: begin -->\nold\n<!-- toy: end -->\n\n{other}")
    toy = Counter("a")
    toy.complete(tmp_path)
    write(toy.table, tmp_path, path)
    text = path.read_text()
    assert "old" not in text
    assert text.startswith("# Results\n\nby hand\n\n<!-- toy: begin -->\n## A toy (`make papers TABLE=toy`)\n")
    assert text.endswith(f"a=1\n<!-- toy: end -->\n\n{other}")
    write(toy.table, tmp_path, path)
    assert path.read_text() == text


def test_write_appends_a_new_section_and_nothing_where_nothing_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    path.write_text("# Results\n")
    toy = Counter("a")
    write(toy.table, tmp_path, path)
    assert path.read_text() == "# Results\n"
    toy.complete(tmp_path)
    write(toy.table, tmp_path, path)
    assert path.read_text().startswith("# Results\n\n<!-- toy: begin -->\n")


def test_a_table_with_missing_cells_says_so(tmp_path: Path) -> None:
    Counter("a").complete(tmp_path)
    text = Counter("a", "b", "c").table.text(tmp_path)
    assert "**Not finished: 2 of 3 measurements are missing.**" in text
    assert "Not finished" not in Counter("a").table.text(tmp_path)


def test_an_unknown_name_is_refused_in_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command.main(["he_mnits", "--folder", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("no table 'he_mnits'; there are ")
    assert not list(tmp_path.iterdir())


def test_every_table_has_its_modules_name_and_keys_of_its_own() -> None:
    found = command.tables()
    assert {"he_mnist", "unsplit_depth"} <= set(found)
    for table in found.values():
        keys = [cell.key for cell in table.cells]
        assert len(set(keys)) == len(keys)


def test_means_have_intervals_from_two_seeds_on() -> None:
    assert mean([1.0], ANY) == "1.00"
    # t(.975, 1) = 12.706, standard error of (1, 3) is 1.
    assert mean([1.0, 3.0], ANY) == "2.00 (-10.71 to 14.71)"
    assert mean([0.9, 1.0], SHARE) == "0.95 (0.00 to 1.00)"
    assert markdown(["a", "b"], [[1, 2]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_the_network_of_he_releases_what_theirs_does() -> None:
    net, x = he_lenet(), torch.zeros(2, 1, 28, 28)
    assert sum(p.numel() for p in net.parameters()) == 45_278
    assert net[:1](x).shape == (2, 8, 24, 24)
    assert net[:5](x).shape == (2, 16, 8, 8)
    assert net(x).shape == (2, 10)


@pytest.mark.exhaustive
def test_he_mnist_reconstructs_and_shows_any_part(tmp_path: Path) -> None:
    line = next(one for one in he_mnist.LINES if one.name == "black box, same distribution, their decoder")
    found = he_mnist.measure(line, "conv1", 1, tmp_path, training=1, changes={"epochs": 2})
    assert found["attack psnr"] > found["mean_image psnr"] + 2
    text = he_mnist.show({"black box, same distribution, their decoder | conv1 | seed 1": found})
    assert f"| conv1 | {found['attack psnr']:.2f} | 40.72 |" in text
    assert he_mnist.show({}).count("| conv1 |") == len(he_mnist.LINES) + 2
    assert he_mnist.show({}).count("| ReLU2 |") == len(he_mnist.LINES) + 1


@pytest.mark.exhaustive
def test_unsplit_depth_takes_an_image_a_class_and_shows_any_part(tmp_path: Path) -> None:
    victims = unsplit_depth.one_a_class(unsplit_depth.federation(1).victims)
    assert victims.y.tolist() == list(range(10))
    found = unsplit_depth.measure("ReLU1", 1, tmp_path, rounds=1, epochs=1)
    text = unsplit_depth.show({"ReLU1 | seed 1": found})
    assert f"| 1 | ReLU1 | {found['stretched mse'][0]:.4f} (" in text
    assert f"| as the authors print it | {found['attack mse'][0]:.4f} (" in text
    assert f"| {found['clone accuracy']:.3f} |" in text


def test_mafml_reports_the_round_that_validation_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(number: int, validation: float, test: float) -> dict[str, Any]:
        scores = {"validation": validation, "test": test}
        return {"round": number} | {
            part: {"across": {k: [score + d] * 4 for k, d in (("union", 0.0), ("own", 0.1), ("others", -0.1))}}
            for part, score in scores.items()
        }

    history = [entry(0, 0.5, 0.8), {"round": 1}, entry(2, 0.7, 0.6), entry(3, 0.6, 0.7)]
    run = SimpleNamespace(history=history, bytes=3 * 2**20)
    monkeypatch.setattr(mafml, "train", lambda *args, once: run)
    found = mafml.measure("MAFML", 0.1, 0, True, tmp_path)
    assert found == pytest.approx({"ACC": 60.0, "BWT": 70.0, "FWT": 50.0, "round": 3, "last": 70.0, "MiB": 3.0})
    once, apart = "MAFML (10 %) | divided once | seed 0", "MAFML (10 %) | seed 0"
    text = mafml.show({once: found, apart: {**found, "ACC": 61.0}})
    first, second = text.split(mafml.DIVIDED_APART)
    assert "| MAFML (10 %) | 60.0 | 70.0 | 50.0 | 88.21 / 92.67 / 87.67 | 3.0 | 1 |" in first
    assert "| MAFML (10 %) | 61.0 | 70.0 | 50.0 | 88.21 / 92.67 / 87.67 | 3.0 | 1 |" in second


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "share"), [("IND", None), ("FedAvg", None), (mafml.FEW, None), ("AGG", 0.1), ("FedMD", 0.1)]
)
def test_methods_of_the_mafml_table_train(name: str, share: float | None) -> None:
    run = mafml.train(name, share, 0, 2, 2, per_class=4)
    assert [len(client.train) for client in run.data.clients] == [30] * 4
    across = run.history[-1]["test"]["across"]
    assert len(set(across["union"])) == 1 or name not in ("FedAvg", mafml.FEW)
    assert (run.bytes > 0) == (name != "IND")


def test_method_accuracy_says_which_methods_are_below_training_alone() -> None:
    scores = {"standalone": (90.0, 91.0), "fedavg": (80.0, 81.0), "fedproto": (94.0, 95.0), "fml": (80.0, 99.0)}
    done = {
        f"{name} | kept, shared | seed {seed}": {"own": s, "own classes": s, "all": s, "MiB": 1.0}
        for name, both in scores.items()
        for seed, s in enumerate(both)
    }
    done |= {f"fednova | kept, shared | seed {seed}": {"diverged": "loss is nan"} for seed in (0, 1)}
    text = method_accuracy.show(done)
    assert "| `fedavg` | -10.0 (-10.0 to -10.0): **below** |" in text
    assert "| `fedproto` | +4.0 (4.0 to 4.0): above |" in text
    assert re.search(r"\| `fml` \| -1\.0 \(.*\): not settled \|", text)
    assert "| `fednova` | 2 of 2 diverged |" in text
    one = {key: found for key, found in done.items() if "seed 0" in key}
    assert "| `fedavg` | -10.0: not settled |" in method_accuracy.show(one)


def test_method_accuracy_compares_what_is_tried_with_training_alone_of_as_many_rounds() -> None:
    def entry(told: str, seed: int, *each: float) -> tuple[str, dict[str, Any]]:
        return f"tried: {told} | seed {seed}", {"own": sum(each) / len(each), "each": list(each)}

    plain, twice, whole = method_accuracy.PLAIN, method_accuracy.TWICE, "`mafml` with twice the rounds"
    done = dict(
        (
            entry(plain, 0, 90.0, 80.0),
            entry(twice, 0, 96.0, 96.0),
            entry(twice, 2, 94.0, 96.0),
            entry("`mafml` as it comes", 0, 60.0, 90.0),
            entry(whole, 0, 95.0, 97.0),
            entry(whole, 2, 97.0, 93.0),
        )
    )
    done["standalone | restarted, shared | seed 0"] = {"own": 50.0}
    done["tried: `scaffold`, restarted | seed 0"] = {"own": 40.0}
    text = method_accuracy.show(done)
    assert f"| {plain} | 85.0 |  | 80.0, -, - | 90.0 |" in text
    assert "| `mafml` as it comes | 75.0 | -10.0 | 60.0, -, - | 90.0 |" in text
    assert f"| {whole} | 95.5 (82.9 to 98.9) | +0.0 (0.0 to 0.0) | 95.0, -, 93.0 | 97.0 (97.0 to 97.0) |" in text
    assert "| `scaffold`, restarted | 40.0 | -10.0 |  |  |" in text


@pytest.mark.parametrize("name", ["fedproto", "mafml"])
def test_methods_of_the_accuracy_table_train(name: str, tmp_path: Path) -> None:
    variant = method_accuracy.Variant(name, rounds=1, steps=1)
    found = method_accuracy.measure(variant, method_accuracy.APART, 0, tmp_path, rows=250)
    assert found["starts"] == "own"
    assert 0 <= found["all"] <= 100
    assert found["own"] <= found["own classes"]


@pytest.mark.parametrize(
    "name", [m.name for m in pkgutil.iter_modules(papers.__path__) if not m.name.startswith("test_")]
)
def test_what_a_table_changes_of_the_library_is_something_that_the_library_calls(name: str) -> None:
    """A method of a name that no base has, and that nothing there calls, changes nothing: its line is of other code."""
    module = importlib.import_module(f"experiments.papers.{name}")
    source = inspect.getsource(module)
    for kind in vars(module).values():
        if not (inspect.isclass(kind) and kind.__module__ == module.__name__):
            continue
        bases = [base for base in kind.__mro__[1:] if base.__module__.startswith("splitfed.")]
        for method in (name for name, value in vars(kind).items() if bases and inspect.isfunction(value)):
            known = any(hasattr(base, method) for base in kind.__mro__[1:]) or hasattr(AsksForHints, method)
            assert known or f".{method}(" in source, f"{kind.__name__}.{method}"


def test_every_section_names_the_command_that_measures_it() -> None:
    heads = [line for line in RESULTS.read_text("utf-8").splitlines() if line.startswith("## ")]
    root = RESULTS.parents[1]
    targets = (root / "Makefile").read_text("utf-8")
    for head in heads:
        (told,) = re.findall(r"\(`([^`]+)`\)$", head)
        word, *rest = told.split()
        if word == "make":
            assert f"\n{rest[0]}:" in targets, head
            assert all(one.removeprefix("TABLE=") in command.tables() for one in rest[1:]), head
        elif word == "python":
            assert importlib.util.find_spec(rest[1]), head
        else:
            assert word == "pytest", head
            assert (root / rest[-1]).is_file(), head


@pytest.mark.parametrize("name", command.tables())
def test_what_is_published_is_what_the_code_makes_of_what_was_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line of a section but its date: a table whose code has changed since is written again, or not published."""
    table, published = command.tables()[name], RESULTS.read_text("utf-8")
    # Some draw a picture beside it, which is no part of this.
    monkeypatch.setattr(f"experiments.papers.{name}.RESULTS", tmp_path / RESULTS.name, raising=False)
    done = table.measured(RESULTS.parent / "measured")
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    assert (begin in published) == bool(done)
    if done:
        section = published.split(begin)[1].split(end)[0]
        assert section.endswith(f"\n\n{table.budget}\n\n{table.show(done)}\n")


@pytest.mark.parametrize(("channels", "size", "weights"), [(8, 24, 201), (16, 8, 16 * 8 * 25 + 8 + 201)])
def test_their_decoder_is_what_predicts(
    channels: int, size: int, weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers of their code, trained and then asked: a decoder of zeros predicts zeros."""
    x = torch.rand(12, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    z = torch.rand(12, channels, size, size, generator=torch.Generator().manual_seed(1))
    assert sum(p.numel() for p in he_mnist._decoder(z).parameters()) == weights
    asked: list[int] = []

    class Zero(torch.nn.Linear):
        def forward(self, seen: torch.Tensor) -> torch.Tensor:
            asked.append(len(seen))
            return self.weight.sum() * torch.zeros(len(seen), 1, 28, 28)

    monkeypatch.setattr(he_mnist, "_decoder", lambda seen: Zero(1, 1))
    message = Message("client", "server", "activation", "e", {"z": z[:3]}, Stamp("predict", 0, 0, 0))
    known = Knowledge((1, 28, 28), auxiliary=x, query=lambda rows: {"z": z})
    attack = he_mnist.TheirDecoder(epochs=2, batch_size=6, queries=1)
    found = attack(View("server", (message,), {}), known, torch.Generator().manual_seed(0)).prediction
    assert found.abs().max() == 0
    assert asked == [6, 6, 6, 6, 3]


def test_method_forms_tell_the_schedule_or_the_reason(tmp_path: Path) -> None:
    form = replace(method_forms.FORMS["vertical, one server"], rounds=1)
    learns = method_forms.measure(form, "fedavg", 0, tmp_path)
    refused = method_forms.measure(form, "fedkd", 0, tmp_path)
    assert learns["schedule"] == "splitfed_v3"
    assert refused["reason"].startswith("fedkd needs clients of one party that holds rows and labels")
    name = "vertical, one server"
    done = {method_forms.key(name, "fedavg", 0): learns, method_forms.key(name, "fedkd", 0): refused}
    text = method_forms.show(done)
    assert f"| {learns['accuracy']:.2f} splitfed_v3 |" in text
    assert "no (1)" in text
    assert "\n1. fedkd needs clients of one party" in text
