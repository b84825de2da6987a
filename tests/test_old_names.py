"""Old import paths lead to the new ones for one release, and say so."""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import splitfed
from splitfed.attacks.training_time.training_attack import TrainingAttack
from splitfed.core.random import stream
from splitfed.detectors import SplitGuard
from splitfed.federated import Method
from splitfed.models import mlp
from splitfed.old_names import MOVED
from splitfed.poisoning import SignFlip
from splitfed.registry import load
from splitfed.schedules import Independent, SplitFedV1
from splitfed.topologies import vanilla
from splitfed.training.settings import GROUPS, OLD_KEYWORDS
from tests.examples import assert_same
from tests.study.examples import checked, small

ROOT = Path(splitfed.__file__).parent


@pytest.mark.parametrize("package", sorted({old.split(".")[1] for old in MOVED}))
def test_an_old_module_holds_what_the_new_one_does(package: str) -> None:
    for old, new in MOVED.items():
        if old.split(".")[1] != package:
            continue
        sys.modules.pop(old, None)
        with pytest.warns(DeprecationWarning, match=rf"{old} is now {new}; the old name will be gone"):
            found = importlib.import_module(old)
        held = vars(importlib.import_module(new))
        shown = {name: value for name, value in held.items() if not name.startswith("__") or name == "__all__"}
        assert all(vars(found)[name] is value for name, value in shown.items())


def test_names_that_people_typed() -> None:
    for old in ("accounting", "courses", "manipulations"):
        sys.modules.pop(f"splitfed.{old}", None)
        vars(splitfed).pop(old, None)
        with pytest.warns(DeprecationWarning, match=f"splitfed.{old} is now splitfed"):
            assert getattr(splitfed, old)
    with pytest.warns(DeprecationWarning, match="splitfed.training.train is now splitfed.training.entry_point.train"):
        from splitfed.training import train
    assert train is inspect.unwrap(splitfed.train, stop=lambda found: found is train)


def test_hooks_of_classes_that_people_wrote() -> None:
    """Else a defense of one's own would be asked for nothing, without a word."""
    with pytest.warns(DeprecationWarning, match="Clip.shield is now privatizer"):

        class Clip(splitfed.WeightDefense):
            def guards(self, topology: object) -> tuple[str, ...]:
                return ()

            def shield(self, holder: object) -> str:
                return "mine"

    assert Clip().privatizer(None) == "mine"  # type: ignore[arg-type]
    with pytest.warns(DeprecationWarning, match="Own.tutor is now objective"):

        class Own(Method):
            def tutor(self, seat: object) -> None:
                return None

    assert Own.objective is Own.tutor


def test_classes_under_their_old_names() -> None:
    sys.modules.pop("splitfed.attacks.intruder", None)
    with pytest.warns(DeprecationWarning, match="splitfed.attacks.intruder is now"):
        found = importlib.import_module("splitfed.attacks.intruder")
    assert found.Intruder is TrainingAttack
    with pytest.warns(DeprecationWarning, match="splitfed.data.Target is now splitfed.data.LabelSet"):
        assert splitfed.data.Target is splitfed.data.LabelSet


def test_a_module_of_old_hides_no_function() -> None:
    sys.modules.pop("splitfed.data.digits", None)
    with pytest.warns(DeprecationWarning, match="splitfed.data.digits is now"):
        importlib.import_module("splitfed.data.digits")
    assert len(splitfed.data.digits()) == 1797


def test_no_old_name_hides_a_module_that_is_there() -> None:
    there = {
        ".".join(("splitfed", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for folder in (ROOT, ROOT / "attacks", ROOT / "topologies")
        for path in folder.rglob("*.py")
    }
    assert not there & set(MOVED)
    assert set(MOVED.values()) <= there


def test_the_root_is_small() -> None:
    modules = sorted(path.name for path in ROOT.glob("*.py"))
    assert modules == ["__init__.py", "__main__.py", "cli.py", "old_names.py", "package_links.py", "registry.py"]


@pytest.mark.exhaustive
def test_every_old_keyword_of_train_gives_the_same_run(tmp_path: Path) -> None:
    """Each by itself, in place of the field of a value that it has become; both at once are refused."""
    given: dict[str, Any] = {
        "local_epochs": 2,
        "sampling": "poisson",
        "restart_optimizers": True,
        "starts": "own",
        "intruders": {"server": "sdar"},
        "ask": {},
        "manipulations": SignFlip(),
        "detectors": {"client": SplitGuard()},
        "evaluate_every": 2,
        "across": True,
        "delta": 0.01,
        "speeds": splitfed.Speeds(),
        "folder": tmp_path / "old",
        "resume": False,
        "record": splitfed.Recording(("server",)),
        "link": "bytes",
        "progress": lambda done, rounds, metrics: None,
    }
    assert set(given) == set(OLD_KEYWORDS)
    for old, value in given.items():
        parameter, field = OLD_KEYWORDS[old]
        shown = f"{parameter}={GROUPS[parameter].__name__}\\({field}=...\\)"
        with pytest.warns(DeprecationWarning, match=rf"train\({old}=...\) is now {shown}"):
            one = _trained(**{old: value})
        new = tmp_path / "new" if old == "folder" else value
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)
            other = _trained(**{parameter: GROUPS[parameter](**{field: new})})
        assert_same(one.state(), other.state())
        for run in (one, other):
            for entry in run.history:
                entry.pop("seconds")
        assert one.history == other.history
        with pytest.raises(TypeError, match=f"'{old}'"):
            _trained(**{old: value, parameter: GROUPS[parameter]()})
    for old in ("intruders", "ask", "detectors", "record", "folder", "delta", "starts"):
        with pytest.warns(DeprecationWarning, match=old):
            assert _trained(**{old: None})


def test_old_names_of_the_registry_and_of_its_parameters() -> None:
    with pytest.warns(DeprecationWarning, match="schedules 'apart' is now 'independent'"):
        assert load("schedules", "apart") is Independent
    for old, new, name in (("fusions", "aggregation", "median"), ("manipulations", "poisoning", "sign_flip")):
        with pytest.warns(DeprecationWarning, match=f"kind '{old}' is now '{new}'"):
            assert load(old, name) is load(new, name)
    with pytest.warns(DeprecationWarning, match="splitfed.schedules.Apart is now splitfed.schedules.Independent"):
        assert splitfed.schedules.Apart is Independent
    with pytest.warns(DeprecationWarning, match="splitfed.poisoning.Manipulation is now splitfed.poisoning.Poisoning"):
        assert splitfed.poisoning.Manipulation is splitfed.poisoning.Poisoning
    with pytest.warns(DeprecationWarning, match="fusion=... of schedules is now aggregation=..."):
        old_way = SplitFedV1(fusion="median")  # type: ignore[call-arg]
    assert old_way == SplitFedV1(aggregation="median")
    with pytest.warns(DeprecationWarning, match="fusion is now aggregation"):
        assert old_way.fusion == old_way.aggregation


def test_old_names_of_a_study() -> None:
    training = {"rounds": 1, "schedule": {"name": "splitfed_v1", "fusion": "mean"}}
    with pytest.warns(DeprecationWarning, match="fusion=... of schedules is now aggregation=..."):
        grid = checked(small(training=training, defense=None, attack=None))
    assert grid.cells[0].training.schedule.parameters["aggregation"] == "mean"


def test_old_names_of_a_run() -> None:
    run = _trained(adversaries=splitfed.Adversaries({"server": "sdar"}))
    with pytest.warns(DeprecationWarning, match="Run.intruders is now Run.training_attacks"):
        assert run.intruders is run.training_attacks
    with pytest.warns(DeprecationWarning, match="Run.ask is now Run.evaluate_training_attack"):
        assert run.ask("server") == run.evaluate_training_attack("server")


def _trained(**given: Any) -> splitfed.Run:
    with stream(0):
        topology = vanilla(mlp((1, 8, 8), 10, (8,), seed=None), "relu1")
    data = splitfed.data.digits().rows(range(80)).clients(2, auxiliary=20, victims=8)
    return splitfed.train(topology, data, schedule="splitfed_v1", rounds=2, batch_size=16, **given)
