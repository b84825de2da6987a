"""Import paths in a study: one of every kind, what each may lead to, and who may have them followed."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from splitfed.cli import main
from splitfed.core import digests
from splitfed.core.errors import InvalidInput
from splitfed.models.import_paths import CLASSES, NameResolver
from splitfed.registry import PLUGINS, TABLES
from splitfed.study import trust
from splitfed.study.config import build, schema
from splitfed.study.config.grid import expand
from splitfed.study.config.lookup import StudyReader
from splitfed.study.config.mistakes import Mistakes
from splitfed.study.config.toml import dumps
from splitfed.study.run import run_command
from tests.study.examples import checked, small, write

TOY = Path(__file__).parents[1] / "plugin" / "toy_splitfed"
STUDY: dict[str, Any] = {
    "study": {"name": "own", "seeds": [0]},
    "data": {"name": "toy_parts.data:toy_digits", "rows": 120, "victims": 8, "auxiliary": 32},
    "model": {"name": "toy_parts.model:toy_net", "width": 12},
    "training": {"rounds": 1, "batch_size": 64, "schedule": {"name": "toy_parts.schedule:ToyReverse"}},
    "method": [{"name": "toy_parts.method:ToyMethod"}],
    "topology": [{"name": "toy_parts.topology:toy_topology", "cut": "relu"}],
    "defense": [{"name": "toy_parts.defense:ToySign", "share": 0.25}],
    "attack": [{"name": "toy_parts.attack:ToyNearest"}],
}
OTHERS = """
import pathlib
from dataclasses import dataclass
from splitfed.aggregation.base import AggregationRule
from splitfed.core.defense import ReleaseDefense
@dataclass(frozen=True, kw_only=True)
class First(AggregationRule):
    place: int = 0
    def fuse(self, rows, shares): return rows[self.place]
@dataclass(frozen=True)
class Fails(ReleaseDefense):
    def __post_init__(self): raise KeyError("share")
    def release(self, name, z, context): return z
@dataclass(frozen=True)
class Unreadable(ReleaseDefense):
    share: "nowhere.Share" = 1
    def release(self, name, z, context): return z
def fails(): raise KeyError("width")
def text(): return "rows"
number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A study's folder with one algorithm of every kind; nothing of them is left in this process afterwards."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    before, finders = set(sys.modules), list(sys.meta_path)
    shutil.copytree(TOY, tmp_path / "toy_parts", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "toy_others.py").write_text(OTHERS)
    yield tmp_path
    sys.meta_path[:] = finders
    for name in set(sys.modules) - before:
        if name.startswith("toy_"):
            del sys.modules[name]


def test_every_kind_is_named_once(own: Path) -> None:
    (cell,) = checked(STUDY, own).cells
    data = build.dataset(cell.data)
    made = [build.schedule(cell), build.method(cell, data), *build.defenses(cell), build.attack(cell.attacks[0])]
    assert [type(one).__name__ for one in made] == ["ToyReverse", "ToyMethod", "ToySign", "ToyNearest"]
    assert len(data) == 120
    assert build.topology(cell, data).segments[0].module.hidden.out_features == 12
    assert cell.defense.label == "toy_parts.defense:ToySign(share=0.25)"
    assert cell.id == "toy_parts.topology-toy_topology-relu--toy_parts.defense-ToySign-0.25--seed0"
    assert cell.attacks[0].key == "toy_parts.attack-ToyNearest"
    alone = checked(tomllib.loads(dumps(cell.config)), own)
    assert alone.cells[0].config["topology"] == cell.config["topology"]


def test_names_of_classes_stand_in_lists_and_in_combinations(own: Path) -> None:
    toy, lists = "toy_parts.defense:ToySign", {"name": ["toy"]}
    study = small(defense=[{"combine": [{"name": "noise", "scale": 0.5}, {"name": toy, "share": [0.1, 0.2]}]}])
    study["training"]["schedule"] = ["sequential", "toy_parts.schedule:ToyReverse"]
    grid = checked(study, own)
    assert len(grid.cells) == 4
    assert grid.cells[0].defense.name == f"noise+{toy}"
    with pytest.raises(InvalidInput, match=r"attack\[0\]\.name: \['toy'\] is not allowed"):
        checked(small(attack=[lists]), own)


@pytest.mark.parametrize("given", ["toy_others:First", {"name": "toy_others:First", "place": 1}])
def test_aggregation_rules_are_named_too(own: Path, given: Any) -> None:
    study = small(training={"rounds": 1, "schedule": {"name": "splitfed_v1", "aggregation": given}}, defense=None)
    study["data"] = {**study["data"], "clients": 2}
    (cell,) = checked(study, own).cells
    rule: Any = getattr(build.schedule(cell), "aggregation")  # noqa: B009
    assert (type(rule).__name__, rule.place) == ("First", given["place"] if isinstance(given, dict) else 0)
    study["training"]["schedule"] = {"name": "independent"}
    study["topology"] = [{"name": "local", "cuts": ["relu1"]}]
    study["attack"] = []
    study["method"] = [{"name": "fedavg", "aggregation": {"rule": given, "quorum": 2}}]
    method = build.method(checked(study, own).cells[0], build.dataset(cell.data))
    assert type(getattr(method, "aggregation").rule).__name__ == "First"  # noqa: B009


CONTRACT = "is a class, but no splitfed.{0}; expected a subclass of splitfed.{0}"
FUNCTION = "expected a function in a Python file of the study's folder"
REFUSED: list[tuple[str, Any, str]] = [
    ("attack", "toy_parts.defense:ToySign", CONTRACT.format("attacks.base.Attack")),
    ("defense", "toy_parts.attack:ToyNearest", CONTRACT.format("core.defense.Defense")),
    ("method", "toy_parts.attack:ToyNearest", CONTRACT.format("federated.base.Method")),
    ("schedule", "toy_parts.attack:ToyNearest", CONTRACT.format("schedules.base.Schedule")),
    ("aggregation", "toy_parts.attack:ToyNearest", CONTRACT.format("aggregation.base.AggregationRule")),
    (
        "defense",
        "subprocess:Popen",
        "is part of Python itself, which has no defenses; expected a subclass of splitfed.",
    ),
    ("defense", "splitfed.core.errors:unknown", "is a function of another package; expected a subclass of"),
    ("defense", "toy_others:text", "is a function; expected a subclass of splitfed.core.defense.Defense"),
    ("defense", "toy_others:number", "is a int; expected a subclass of splitfed.core.defense.Defense"),
    ("defense", "toy_others:Gone", "'toy_others' has no 'Gone'"),
    ("defense", "toy_gone:Gone", "cannot import 'toy_gone' (No module named 'toy_gone')"),
    ("defense", "toy_others:", "is no import path; expected package.module:Name"),
    ("defense", "toy_others:Fails", "cannot be built: KeyError: 'share'"),
    ("defense", "toy_others:Unreadable", "has no parameters to check (NameError: name 'nowhere' is not defined)"),
    ("topology", "splitfed.topologies.vanilla:vanilla", f"is a function of another package; {FUNCTION}"),
    ("topology", "toy_parts.attack:ToyNearest", f"is a class; {FUNCTION}"),
    ("data", "toy_parts.attack:ToyNearest", f"is a class; {FUNCTION}"),
    ("data", "toy_parts.data:digits", f"is a function from elsewhere; {FUNCTION}"),
    ("data", "toy_others:text", "returned a value of type str; expected a Dataset"),
]


@pytest.mark.parametrize(("kind", "path", "line"), REFUSED, ids=[f"{kind} {path}" for kind, path, _ in REFUSED])
def test_a_path_leads_to_its_kind_alone(own: Path, kind: str, path: str, line: str) -> None:
    changes: dict[str, Any] = {kind: [{"name": path}]}
    if kind == "data":
        changes = {"data": {"name": path}}
    elif kind in ("schedule", "aggregation"):
        changes = {"training": {"rounds": 1, "schedule": path}}
        if kind == "aggregation":
            changes["training"]["schedule"] = {"name": "splitfed_v1", "aggregation": path}
    with pytest.raises(InvalidInput) as caught:
        checked(small(**{"defense": None, "attack": None, **changes}), own)
    first = str(caught.value).splitlines()[0]
    named = {"data": "data set", "aggregation": "aggregation rule"}.get(kind, kind)
    assert f": {named} {path!r}" in first
    assert line in first


@pytest.mark.parametrize(
    ("kind", "target", "line"),
    [
        ("defenses", "toy_others:Fails", "defense 'plugged' cannot be built: KeyError: 'share'"),
        ("models", "toy_others:fails", "model plugged cannot be built: KeyError: 'width'"),
    ],
)
def test_what_a_plug_in_raises_is_its_own_mistake(
    own: Path, monkeypatch: pytest.MonkeyPatch, kind: str, target: str, line: str
) -> None:
    monkeypatch.syspath_prepend(own)
    monkeypatch.setitem(TABLES[kind], "plugged", target)
    monkeypatch.setitem(PLUGINS, (kind, "plugged"), "other 2.0")
    changes: dict[str, Any] = {"defense": None, "attack": None}
    changes |= {"model": {"name": "plugged"}} if kind == "models" else {"defense": [{"name": "plugged"}]}
    with pytest.raises(InvalidInput) as caught:
        checked(small(**changes), own)
    assert line in str(caught.value).splitlines()[0]


def test_what_splitfed_itself_raises_is_no_mistake_of_the_users(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(found: object) -> dict[str, Any]:
        raise KeyError("share")

    monkeypatch.setattr("splitfed.study.config.lookup.parameters_of", broken)
    with pytest.raises(KeyError, match="share"):
        checked(small(), own)
    text = r"defense\[0\]: defense 'toy_parts.defense:ToySign' has no parameters to check \(KeyError: 'share'\)"
    mistakes = Mistakes("study.toml")
    assert StudyReader(mistakes, NameResolver(own)).find("defense[0]", "defenses", "toy_parts.defense:ToySign") is None
    with pytest.raises(InvalidInput, match=text):
        mistakes.stop()


@pytest.mark.parametrize("kind", TABLES)
def test_every_kind_of_the_registry_has_the_rule(own: Path, kind: str) -> None:
    """Also those that no study names: detectors and poisoning."""
    with pytest.raises(InvalidInput, match="is part of Python itself"):
        NameResolver(own).find("subprocess:Popen", kind)
    with pytest.raises(InvalidInput, match="is a class"):
        NameResolver(own).find("splitfed.core.errors:Unknown", kind)
    if kind in CLASSES:
        assert NameResolver().find(CLASSES[kind], kind).__name__ == CLASSES[kind].partition(":")[2]
    with pytest.raises(InvalidInput, match=r"^no$"):
        NameResolver(own, refusal="no").load(kind, "toy_parts.attack:ToyNearest")


def places() -> dict[str, dict[str, Any]]:
    """Every place of a study where a path may stand, alone in an otherwise registered study."""
    toy = {key: STUDY[key] for key in ("data", "method", "defense", "attack")}
    rule = {"name": "splitfed_v1", "aggregation": {"name": "toy_others:First"}}
    return {
        **{key: {key: table} for key, table in toy.items()},
        "combine": {"defense": [{"combine": [{"name": "noise", "scale": 1.0}, *STUDY["defense"]]}]},
        "schedule": {"training": {"rounds": 1, "schedule": "toy_parts.schedule:ToyReverse"}},
        "schedules": {"training": {"rounds": 1, "schedule": ["sequential", STUDY["training"]["schedule"]]}},
        "rule": {"training": {"rounds": 1, "schedule": rule}},
        "topology": {"topology": [{**STUDY["topology"][0], "cut": "relu1"}]},
        "model": {"model": STUDY["model"], "topology": [{"name": "vanilla", "cut": "relu"}]},
    }


@pytest.mark.parametrize("place", places())
def test_nothing_of_a_stranger_is_imported(
    own: Path, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever the path stands in the configuration of a folder of results that has no mark."""
    for name in ("defense", "attack", "data", "schedule", "method", "topology", "model", "__init__"):
        (own / "toy_parts" / f"{name}.py").write_text(f"import pathlib\npathlib.Path({str(own / 'run')!r}).touch()\n")
    (own / "toy_others.py").write_text((own / "toy_parts" / "data.py").read_text())
    study = small(**{"defense": [{"name": "none"}], "attack": [], **places()[place]})
    (own / "config.toml").write_bytes(digests.toml_with_digest(dumps(study)))
    (own / "study.db").touch()
    assert main(["plan", str(own / "config.toml")]) == 2
    error = capsys.readouterr().err
    assert "is not known to be your own (it has no mark of yours), and would import 'toy_" in error
    assert error.count("\n") == 1
    assert not (own / "run").exists()
    assert main(["plan", str(own / "config.toml"), "--trust"]) == 2
    assert (own / "run").exists()


def test_a_mark_covers_attacks_of_import_paths_alone() -> None:
    """Registered attacks may be added to a folder that is one's own; what would be imported may not."""
    plain, toy = {"name": "rmle", "budget": "quick"}, {"name": "toy_parts.attack:ToyNearest", "share": 1}
    marks = [
        trust._signature(b"key", {"data": {}, "attack": attacks}, {}) for attacks in ([], [plain], [toy], [plain, toy])
    ]
    assert (marks[0] == marks[1], marks[2] == marks[3], marks[0] == marks[2]) == (True, True, False)
    assert marks[2] != trust._signature(b"key", {"data": {}, "attack": [{**toy, "share": 2}]}, {})


def test_whoever_only_counts_runs_imports_nothing(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a report does, which is read without trust."""
    monkeypatch.syspath_prepend(own)
    with pytest.raises(InvalidInput, match=r"defense\[0\]\.name: import paths are not followed here"):
        expand(schema.parse_study(STUDY, "study.toml"), "study.toml", own)
    assert not any(name.startswith("toy_parts") for name in sys.modules)


@pytest.mark.exhaustive
def test_own_results_are_followed_until_they_change(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attack afterwards and a resumed study find what was run, though the study's files are gone."""
    out = own / "out"
    assert main(["run", str(write(own, STUDY)), "--folder", str(out)]) == 0
    (run,) = (out / "runs").iterdir()
    assert {path.name for path in (run / "code" / "toy_parts").iterdir()} == {path.name for path in TOY.glob("*.py")}
    shutil.rmtree(own / "toy_parts")
    for command in (
        ["attack", str(run), "--attack", "toy_parts.attack:ToyNearest"],
        ["attack", str(run), "--attack", "rmle", "--budget", "quick"],
        ["run", str(out / "study.toml"), "--folder", str(out), "--resume"],
    ):
        assert main(command) == 0, command
    for name in [name for name in sys.modules if name.startswith("toy_parts")]:
        del sys.modules[name]
    shutil.copytree(TOY, own / "elsewhere" / "toy_parts")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(own / "elsewhere")
        assert main(["report", str(out)]) == 0
        assert not any(name.startswith("toy_parts") for name in sys.modules), "a report imports nothing"
    capsys.readouterr()
    assert main(["attack", str(run), "--attack", "toy_parts.defense:ToySign"]) == 2
    assert "is an import path that the run's study does not name" in capsys.readouterr().err
    text = tomllib.loads((run / "config.toml").read_text())
    text["attack"].append({"name": "toy_parts.attack:ToyNearest", "budget": "standard"})
    (run / "config.toml").write_bytes(digests.toml_with_digest(dumps(text)))
    assert main(["attack", str(run), "--attack", "rmle"]) == 2
    assert "its mark is not yours, or its configuration has changed since" in capsys.readouterr().err


@pytest.fixture
def talking(own: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, whose attack and defense print, and end no line."""
    for name, begins in (("attack", "assert knowledge.query is not None"), ("defense", "return self.share * z")):
        path = own / "toy_parts" / f"{name}.py"
        path.write_text(path.read_text().replace(begins, f"print('hello', end=''); {begins}"))
    monkeypatch.setattr(run_command, "write_report", lambda home, trust: home / "report.html")
    return own


def test_what_own_code_prints_is_no_part_of_the_json(talking: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study, out = str(write(talking, STUDY)), str(talking / "out")
    for command in (["plan", study], ["run", study, "--folder", out, "--dry-run"], ["run", study, "--folder", out]):
        assert main([*command, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)
    (run,) = (talking / "out" / "runs").iterdir()
    assert main(["attack", str(run), "--attack", "toy_parts.attack:ToyNearest", "--json"]) == 0
    found = capsys.readouterr()
    assert json.loads(found.out)
    assert "hello" in found.err


@pytest.mark.exhaustive
def test_workers_follow_the_paths_of_their_study(talking: Path, capfd: pytest.CaptureFixture[str]) -> None:
    study = write(talking, {**STUDY, "study": {"name": "own", "seeds": [0, 1]}})
    assert main(["run", str(study), "--folder", str(talking / "out"), "--workers", "2", "--json"]) == 0
    assert len(list((talking / "out" / "runs").glob("*/code/toy_parts/attack.py"))) == 2
    said = capfd.readouterr()
    assert json.loads(said.out)["settings"][0]["seeds"] == 2
    # What the workers print stands between no two events of theirs.
    assert re.findall(r"\[./2\]", said.err) == ["[1/2]", "[2/2]"]


def test_the_report_names_the_files_that_a_run_takes(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own / "toy_wide.py").write_text("def width():\n    return 8\n")
    made = "from torch import nn\nfrom toy_wide import width\ndef net(w: int = 2):\n    return nn.Sequential("
    layers = "nn.Flatten(), nn.Linear(64, width()), nn.ReLU(), nn.Linear(width(), 10))\n"
    (own / "toy_nets.py").write_text(made + layers)
    plain = {"attack": None, "defense": [{"name": "none"}]}
    study = small(model={"name": "toy_nets:net"}, topology=[{"name": "vanilla", "cut": "2"}], **plain)
    assert main(["run", str(write(own, study)), "--folder", str(own / "out")]) == 0
    page = (own / "out" / "report.html").read_text("utf-8")
    said = re.search(r"To run it again,</b> in a folder with (\S+), and .* under code/ here \((.*)\):</p>", page)
    assert said
    assert said[2] == "code/toy_nets.py, code/toy_wide.py"
    shutil.move(own / "out", own / "elsewhere")
    for name in (said[1], *said[2].split(", ")):
        (own / "new").mkdir(exist_ok=True)
        shutil.copy(own / "elsewhere" / name, own / "new" / Path(name).name)
    monkeypatch.chdir(own / "new")
    assert main(["run", "study.toml", "--folder", "again"]) == 0
