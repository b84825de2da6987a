"""What a mistake costs before it is told: torch is not imported for keys, nor torch's compiler for names and plans."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from ast import literal_eval
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from splitfed.core.equivalence import check_original
from splitfed.core.equivalence_sides import LR, MOMENTUM, WEIGHT_DECAY, RehearsalStep
from splitfed.core.optimizers import Optim
from splitfed.costs.memory import COPIES, optim_copies
from splitfed.models.import_paths import NameResolver
from splitfed.study.config.mistakes import InvalidStudy
from splitfed.study.config.table_check import check_tables
from splitfed.study.report import planned_costs
from splitfed.study.run import checked_study
from tests.examples import assert_same
from tests.study.examples import PLACED, SMALL, placed, small, write
from tests.study.search_examples import searching

SLOW = {"torch._dynamo", "sympy", "scipy", "sklearn", "pandas", "optuna", "sqlalchemy", "matplotlib", "opacus"}
"""Packages that no check of a study needs."""

PRINTED = """
import json, sys
from splitfed.cli import main
found = [main(arguments) for arguments in json.loads(sys.argv[1])]
print(json.dumps([found, sorted(sys.modules)]))
"""


def imported(*commands: list[str]) -> tuple[list[int], set[str], str]:
    """Return the exit codes of `commands`, run one after the other in a new process, its modules and its errors."""
    given = [sys.executable, "-c", PRINTED, json.dumps(commands)]
    done = subprocess.run(given, capture_output=True, text=True, check=True)
    codes, modules = json.loads(done.stdout.splitlines()[-1])
    return codes, set(modules), done.stderr


def training(**changes: Any) -> dict[str, Any]:
    return small(training={**SMALL["training"], **changes})


KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "a table": (small(atack=[{"name": "rmle"}]), "atack: unknown key 'atack'"),
    "training": (training(ruonds=3), "training.ruonds: unknown key 'ruonds'; did you mean 'rounds'"),
    "data": (small(data={"name": "digits", "victim": 3}), "data.victim: unknown key 'victim'"),
    "model": (small(model={"name": "mlp", "hiden": [3]}), "model.hiden: unknown key 'hiden'"),
    "schedule": (
        training(schedule=[{"name": "joint"}, {"name": "sequential", "hand_ove": "x"}]),
        "training.schedule[1].hand_ove: unknown key 'hand_ove'",
    ),
    "optimizer": (
        training(optimizer={"client": {"name": "Adam", "beta": 1}}),
        "training.optimizer.client: unknown option of optimizer Adam 'beta'; did you mean 'betas'",
    ),
    "scheduler": (
        training(optimizer={"lr": 0.1, "scheduler": {"name": "StepLR", "steps": 1}}),
        "training.optimizer: unknown option of scheduler StepLR 'steps'",
    ),
    "clipping": (
        training(optimizer={"lr": 0.1, "clip_nrm": 1.0}),
        "training.optimizer: unknown option of optimizer SGD 'clip_nrm'; did you mean 'clip_norm'",
    ),
    "a group": (
        training(optimizer={"lr": 0.1, "groups": [{"lr": 0.0}]}),
        "training.optimizer: groups=[{'lr': 0.0}] is not allowed; expected match or max_dims in each of them",
    ),
    "no scheduler": (
        training(optimizer={"lr": 0.1, "scheduler": {"step_size": 3}}),
        "training.optimizer: scheduler={'step_size': 3} is not allowed; expected a name, or a table with one",
    ),
    "speeds": (training(speeds={"defalt": {}}), "training.speeds.defalt: unknown key 'defalt'"),
    "machine": (training(speeds={"named": {"server": {"upp": 1}}}), "training.speeds.named.server.upp: unknown key"),
    "defense": (small(defense=[{"combine": [{"name": "noise", "scal": 1}]}]), "defense[0].combine[0].scal: unknown"),
    "none among parts": (
        small(defense=[{"combine": [{"name": "none"}]}]),
        "defense[0].combine[0].name: unknown defense 'none'; did you mean",
    ),
    "attack": (small(attack=[{"name": "rmle", "budgte": "quick"}]), "attack[0].budgte: unknown key 'budgte'"),
    "method": (small(method=[{"name": "fedprox", "nu": 1.0}]), "method[0].nu: unknown key 'nu'; did you mean 'mu'"),
    "none": (small(method=[{"name": "none", "mu": 1.0}]), "method[0].mu: unknown key 'mu' (allowed: name)"),
    "encryption": (small(encryption={"bond": 1.0}), "encryption[0].bond: unknown key 'bond'; did you mean 'bound'"),
    "a piece": (
        placed("vertical", top={"model": "mlp", "hiddne": [3]}),
        "topology[0].top.hiddne: unknown key 'hiddne'; did you mean 'hidden'",
    ),
    "a piece by role": (
        placed("vertical", bottoms={"left": {"model": "mlp", "widht": 3}}),
        "topology[0].bottoms.left.widht: unknown key 'widht'; did you mean 'width'",
    ),
    "a segment": (
        placed("custom", segments=[{"name": "a", "rle": "client", "inputs": ["x"], "model": "mlp"}]),
        "topology[0].segments[0].rle: unknown key 'rle'; did you mean 'role'",
    ),
    "a head": (
        placed("custom", heads=[{"value": "top", "label": "client"}]),
        "topology[0].heads[0].label: unknown key 'label'; did you mean 'labels'",
    ),
    "a search": (searching({"samplr": "tpe"}), "search.samplr: unknown key 'samplr'"),
    "in a choice": (
        searching(method=[{"choice": [{"name": "fedavg"}, {"name": "fedprox", "nu": {"low": 0.1, "high": 1.0}}]}]),
        "method[0].nu: unknown key 'nu'",
    ),
}


FIRST = ("a table", "training", "a search")
"""Of `KEYS`, those of tables and not of a piece: they are told without torch, as are names."""

TOLD = """
import resource, sys
from pathlib import Path
from splitfed import cli
from splitfed.study.run import terminal_messages

def told(text):
    lines.append((text, bool({"torch", "numpy"} & sys.modules.keys())))
    spent.append(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - began)

began, lines, spent = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]), [], []
cli.print_error = told
codes = [cli.main(arguments) for arguments in eval(sys.argv[1])]
print([codes, lines, spent[0]])
"""


def told_by_the_command(*commands: list[str]) -> tuple[list[int], list[tuple[str, bool]], float]:
    """Return exit codes, each text told with whether torch was imported by then, and CPU seconds before the first."""
    given = [sys.executable, "-c", TOLD, repr(commands)]
    codes, lines, seconds = literal_eval(subprocess.run(given, capture_output=True, text=True, check=True).stdout)
    return codes, lines, seconds


@pytest.mark.parametrize("name", [*FIRST, "a name"])
def test_a_misspelt_key_of_a_table_is_told_without_torch(name: str, tmp_path: Path) -> None:
    study, expected = {**KEYS, "a name": (small(attack=[{"name": "rlme"}]), "attack[0].name: unknown attack")}[name]
    path = write(tmp_path, study, "s.toml")
    for command in ("run", "plan"):
        codes, lines, seconds = told_by_the_command([command, str(path)])
        assert codes == [2]
        assert len(lines) == 1, "nothing else is wrong"
        text, with_torch = lines[0]
        assert text.startswith(f"s.toml: {expected}")
        assert not with_torch
        assert seconds < 0.6


def test_a_wrong_command_imports_nothing() -> None:
    codes, modules, _ = imported(["rnu"])
    assert codes == [2]
    assert not {"torch", "numpy", *SLOW} & modules


def test_keys_names_and_values_are_told_in_one_call(tmp_path: Path) -> None:
    wrong = small(
        training={"ruonds": 2, "batch_size": 0, "optimizer": {"lrr": 0.1}},
        defense=[{"name": "nose"}, {"name": "noise", "scale": -1.0}],
        attack=[{"name": "rmle", "lr": 0.0, "iterations": 0}],
    )
    (code,), lines, _ = told_by_the_command(["run", str(write(tmp_path, wrong))])
    assert code == 2
    (first, early), (then, late) = lines
    assert not early
    assert late
    places = [[line.split(": ")[1] for line in text.splitlines()] for text in (first, then)]
    assert sorted(places[0]) == ["defense[0].name", "training.ruonds"]
    values = ["attack[0].iterations", "attack[0].lr", "defense[1].scale", "training.batch_size", "training.optimizer"]
    assert sorted(places[1]) == values
    with pytest.raises(InvalidStudy) as caught:
        checked_study.check_raw(wrong, "s.toml", Path(), NameResolver(Path()), "", None)
    assert sorted(line.split(": ")[1] for line in caught.value.lines) == sorted([*places[0], *places[1]])


@pytest.mark.parametrize("where", KEYS)
def test_a_misspelt_key_is_told_before_anything_is_computed(where: str) -> None:
    study, expected = KEYS[where]
    with pytest.raises(InvalidStudy) as caught:
        checked_study.check_raw(study, "s.toml", Path(), NameResolver(Path()), "", None)
    assert any(line.startswith(f"s.toml: {expected}") for line in caught.value.lines), caught.value.lines


def test_a_wrong_name_a_wrong_cut_and_a_plan_import_little(tmp_path: Path) -> None:
    right = small(data={"name": "mnist5k", "victims": 8, "auxiliary": 32}, attack=[{"name": "inverse_network"}])
    name = write(tmp_path, {**right, "attack": [{"name": "inverse_netwrk"}]}, "name.toml")
    cut = write(tmp_path, {**right, "topology": [{"name": "vanilla", "cut": "relu"}]}, "cut.toml")
    plan = ["plan", str(write(tmp_path, right)), "--json"]
    codes, modules, errors = imported(["run", str(name)], ["run", str(cut)], plan)
    assert codes == [2, 2, 0]
    assert not SLOW & modules
    name_line, cut_line = errors.splitlines()
    assert name_line.startswith("name.toml: attack[0].name: unknown attack 'inverse_netwrk'; did you mean")
    assert cut_line.startswith("cut.toml: topology[0]: unknown submodule of Mlp 'relu'; did you mean")


def test_mistakes_are_told_together_in_the_order_of_the_file_names_and_tables_first() -> None:
    study = {
        "attack": [{"name": "inverse_netwrk"}],
        "defense": [{"name": "noise", "scal": 2.0}, {"name": "noise", "scale": [1.0, -1.0]}],
        "study": {"name": "s"},
        "training": {"schedule": "sequencial", "ruonds": 5, "optimizer": {"lrr": 0.1}},
        "data": {"name": "digits", "victims": "many"},
        "topology": [{"name": "vertical", "top": {"model": "mpl", "hidden": "x"}, "botoms": {}}],
    }
    with pytest.raises(InvalidStudy) as caught:
        check_tables(study, "s.toml")
    assert [line.split(": ")[1] for line in caught.value.lines] == [
        *("attack[0].name", "training.schedule.name", "training.ruonds", "data.victims", "topology[0].top.model")
    ]
    right = {
        **study,
        "attack": [{"name": "inverse_network"}],
        "training": {"schedule": "sequential", "optimizer": {"lrr": 0.1}},
        "data": {"name": "digits"},
        "topology": [{"name": "vertical", "top": {"model": "mlp", "hidden": "x"}, "botoms": {}}],
    }
    with pytest.raises(InvalidStudy) as caught:
        checked_study.check_study(right, "s.toml", Path())
    assert [line.split(": ")[1] for line in caught.value.lines] == [
        *("defense[0].scal", "defense[1].scale", "training.optimizer"),
        *("topology[0].top.hidden", "topology[0].botoms", "topology[0].labels", "topology[0].bottoms"),
    ]


def test_right_studies_pass_the_first_check() -> None:
    for study in (*(placed(name) for name in PLACED), searching(), searching(topology=[{"name": "vanilla", "cut": 1}])):
        check_tables(study, "s.toml")


def test_a_wrong_name_is_told_beside_what_needs_torch() -> None:
    study = {**training(optimizer={"name": "SDG"}), "attack": [{"name": "rlme"}]}
    both = ["training.optimizer", "attack[0].name"]
    for wrong, places in ((study, both), ({**study, "attack": []}, ["training.optimizer"])):
        with pytest.raises(InvalidStudy) as caught:
            checked_study.check_study(wrong, "s.toml", Path())
        assert [line.split(": ")[1] for line in caught.value.lines] == places


def test_the_step_of_the_rehearsal_is_that_of_torch() -> None:
    ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    step = RehearsalStep(ours.parameters())
    optimizer = torch.optim.SGD(theirs.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    for _ in range(3):
        x = torch.randn(4, 3)
        for model, stepper in ((ours, step), (theirs, optimizer)):
            model.zero_grad()
            model(x).square().sum().backward()
            stepper.step()
        assert_same(ours.state_dict(), theirs.state_dict())
    step.drop_gradients()
    assert all(weight.grad is None for weight in ours.parameters())


@pytest.mark.parametrize("name", COPIES)
def test_known_copies_of_an_optimizer_are_those_of_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = inspect.signature(getattr(torch.optim, name)).parameters
    optims = [Optim(name, {"lr": 0.1})]
    more: dict[str, Any] = {"momentum": 0.5, "amsgrad": True, "centered": True}
    optims += [Optim(name, {"lr": 0.1, key: value}) for key, value in more.items() if key in allowed]
    known = [optim_copies(optim) for optim in optims]
    monkeypatch.delitem(COPIES, name)
    assert [optim_copies(optim) for optim in optims] == known


def test_a_plan_cuts_and_compares_a_topology_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, data = checked_study.check_study(small(), "s.toml", Path())
    compared: list[object] = []

    def note(*given: Any) -> None:
        compared.append(given)
        check_original(*given)

    monkeypatch.setattr("splitfed.core.cutting.check_original", note)
    found = planned_costs.plan_study(grid, data, ["joint", "blind"])
    assert [one["schedule"] for one in found["topologies"][0]["schedules"]] == ["sequential", "joint", "blind"]
    assert len(compared) == 1
