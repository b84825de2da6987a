"""Contracts are narrow: whoever writes an algorithm of its kind reads at most twelve public members.

Members are public methods and properties, inherited ones too; the fields of a frozen value are its parameters.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import textwrap
from collections import Counter
from functools import cache
from importlib import import_module
from inspect import get_annotations
from pathlib import Path
from typing import ClassVar, Protocol, get_origin

import pytest

import splitfed
from splitfed.attacks.base import Attack
from splitfed.core.defense import _CAPABILITIES, Defense
from splitfed.core.errors import InvalidInput
from splitfed.engines.engine import Engine
from splitfed.engines.local import LocalEngine
from splitfed.federated.learner import Learner
from splitfed.planning.counting import CountingLearner
from splitfed.registry import TABLES, load
from splitfed.training.local_learner import LocalLearner
from tests.pages import contributing
from tests.sources import nodes, parsed

MOST = 12
CONTRACTS = (
    "splitfed.aggregation.base:AggregationRule",
    "splitfed.attacks.base:Attack",
    "splitfed.attacks.training_time.training_attack:TrainingAttackState",
    "splitfed.attacks.training_time.training_attack:TrainingAttack",
    "splitfed.core.annealing:Annealing",
    "splitfed.core.defense:Accounted",
    "splitfed.core.defense:Calibrated",
    "splitfed.core.defense:Codec",
    "splitfed.core.defense:Defense",
    "splitfed.core.defense:GradientDefense",
    "splitfed.core.defense:LabelDefense",
    "splitfed.core.defense:LayerDefense",
    "splitfed.core.defense:LearnedDefense",
    "splitfed.core.defense:PenaltyDefense",
    "splitfed.core.defense:ReceiverPenaltyDefense",
    "splitfed.core.defense:ReleaseDefense",
    "splitfed.core.defense:TaskWeightDefense",
    "splitfed.core.defense:WeightDefense",
    "splitfed.core.gradient_privatizer:GradientPrivatizer",
    "splitfed.core.local_objective:LocalObjective",
    "splitfed.core.rows:RowSource",
    "splitfed.detectors.base:Detector",
    "splitfed.detectors.base:DetectorState",
    "splitfed.engines.base:RunSetup",
    "splitfed.engines.base:Stateful",
    "splitfed.engines.base:Trainer",
    "splitfed.engines.inference:Inference",
    "splitfed.engines.observers:AttackObserver",
    "splitfed.engines.observers:DetectorObserver",
    "splitfed.engines.observers:Observable",
    "splitfed.engines.party_data:PartyData",
    "splitfed.federated.base:Method",
    "splitfed.federated.learner:LearnerData",
    "splitfed.federated.learner:LearnerIdentity",
    "splitfed.federated.learner:LearnerMessages",
    "splitfed.federated.learner:LearnerOutputs",
    "splitfed.federated.learner:LearnerTraining",
    "splitfed.federated.learner:LearnerWeights",
    "splitfed.poisoning.base:Poisoning",
    "splitfed.schedules.base:Schedule",
    "splitfed.training.callbacks:Callback",
)


def find(path: str) -> type:
    module, _, name = path.partition(":")
    found: type = getattr(import_module(module), name)
    return found


def members(contract: type) -> set[str]:
    """Return the public members of a class that are ours, inherited ones too, without its fields."""
    ours = [kind for kind in contract.__mro__ if kind.__module__.startswith(("splitfed.", "tests."))]
    # What a protocol asks for is declared there; of any other class only what it defines counts.
    found = {name for kind in ours if getattr(kind, "_is_protocol", False) for name in get_annotations(kind)}
    for kind in ours:
        found |= set(vars(kind))
    public = {name for name in found if not name.startswith("_")}
    return public - set(getattr(contract, "__dataclass_fields__", ()))


@pytest.mark.parametrize("path", CONTRACTS)
def test_no_contract_has_more_than_twelve_public_members(path: str) -> None:
    found = members(find(path))
    assert 1 <= len(found) <= MOST, f"{path} has {len(found)}: {', '.join(sorted(found))}"


WIDE = ("splitfed.engines.engine:Engine", "splitfed.federated.learner:Learner")
"""Contracts that are several narrow ones at once, for who leads a run and for who writes a method."""


@pytest.mark.parametrize("path", WIDE)
def test_a_wide_contract_asks_for_no_more_than_its_narrow_ones(path: str) -> None:
    wide = find(path)
    narrow = [kind for kind in wide.__bases__ if kind is not Protocol]
    assert {f"{kind.__module__}:{kind.__name__}" for kind in narrow} <= set(CONTRACTS)
    assert members(wide) == set().union(*(members(kind) for kind in narrow))


def test_the_parts_of_a_run_offer_all_that_their_contract_asks_for() -> None:
    assert Engine in LocalEngine.__mro__
    for kind in (LocalLearner, CountingLearner):
        assert members(Learner) <= members(kind) | set(kind.__dataclass_fields__), kind


def test_what_an_attack_may_say_of_its_class_is_counted_too() -> None:
    """Class variables are no parameters: whoever writes an attack chooses among them."""
    said = {name for name, kind in get_annotations(Attack, eval_str=True).items() if get_origin(kind) is ClassVar}
    assert len(said) > 5
    assert len(members(Attack) | said) <= MOST


def test_members_are_counted() -> None:
    wide = type("Wide", (Defense,), {f"helper{n}": property(lambda self: 1) for n in range(7)})
    assert len(members(wide)) == len(members(Defense)) + 7 == MOST + 1


def test_every_capability_is_a_contract_that_people_can_import() -> None:
    capabilities = set(_CAPABILITIES.values())
    named = {path for path in CONTRACTS if path.startswith("splitfed.core.defense:")}
    assert {find(path) for path in named} == capabilities | {Defense}
    assert all(getattr(splitfed, kind.__name__) is kind for kind in capabilities)
    assert not any(issubclass(one, other) for one in capabilities for other in capabilities if one is not other)


@pytest.mark.parametrize("name", TABLES["defenses"])
def test_a_defense_offers_only_what_it_inherits(name: str) -> None:
    kind = load("defenses", name)
    offered = {hook for hook, capability in _CAPABILITIES.items() if issubclass(kind, capability)}
    assert offered
    assert {hook for hook in _CAPABILITIES if hasattr(kind, hook)} == offered


def required(kind: type) -> set[str]:
    """The parameters of a frozen value that say what they must be, there or in a class that it inherits from."""
    declared = [one for base in kind.__mro__ for one in getattr(base, "__dataclass_fields__", {}).values()]
    return {one.name for one in declared if "check" in one.metadata}


REQUIRED = [
    (kind, name)
    for table in ("aggregation", "attacks", "defenses", "detectors", "methods", "poisoning")
    for kind in (load(table, one) for one in TABLES[table])
    for name in sorted(required(kind))
]


@pytest.mark.parametrize(("kind", "name"), REQUIRED, ids=lambda v: getattr(v, "__name__", v))
def test_what_a_parameter_must_be_is_checked(kind: type, name: str) -> None:
    """In every class, also where it gives an inherited parameter another default, or checks more of its own."""
    needed = {one.name: 0 for one in dataclasses.fields(kind) if one.init and one.default is one.default_factory}
    requirement = next(one for one in dataclasses.fields(kind) if one.name == name).metadata["check"]
    with pytest.raises(InvalidInput, match=requirement.args[0]):
        kind(**{**needed, name: object()})


def test_the_defense_of_the_contributing_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.search(r"   ```python\n(   \"\"\"Clamp.*?)   ```", contributing(), re.DOTALL)
    assert code is not None
    (tmp_path / "clamp.py").write_text(textwrap.dedent(code[1]), "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    clamp = import_module("clamp").Clamp(limit=0.25)
    data = splitfed.data.digits().clients(1, auxiliary=0, victims=8)
    topology = splitfed.topologies.vanilla(splitfed.models.lenet((1, 8, 8), 10), "pool1")
    run = splitfed.train(topology, data, rounds=1, defenses=clamp)
    (seen,) = run.observe("server").select(kind="activation").tensors().values()
    assert float(seen.abs().max()) == 0.25


def test_the_contributing_page_lists_every_hook_of_every_capability() -> None:
    rows = re.findall(r"   \| `(\w+)` \| ([^|]*) \| [^|]* \|\n", contributing())
    listed = {name: set(re.findall(r"`(\w+)`", hooks)) for name, hooks in rows}
    assert set(listed.pop("Defense")) | {"uploads"} == members(Defense)
    assert listed == {
        kind.__name__: {hook for hook, owner in _CAPABILITIES.items() if owner is kind}
        for kind in _CAPABILITIES.values()
    }
    optional = {
        hook for _, hooks in rows for part in re.findall(r"\(([^)]*)\)", hooks) for hook in part.split("`")[1::2]
    }
    required = {h for h, kind in _CAPABILITIES.items() if getattr(vars(kind)[h], "__isabstractmethod__", False)}
    assert optional - members(Defense) == set(_CAPABILITIES) - required


@cache
def library() -> dict[Path, ast.Module]:
    """Return every module of the library by its file, each once."""
    rooms = [Path(splitfed.__file__).parent.parent / name for name in ("splitfed", "attacks", "topologies")]
    files = {path.resolve() for room in rooms for path in room.rglob("*.py")}
    return {path: parsed(path) for path in sorted(files)}


def test_every_protocol_of_the_library_is_narrow() -> None:
    """Whatever one part asks another for, named in the list of contracts or not."""
    root, names = Path(splitfed.__file__).parent.parent, set()
    for path, tree in library().items():
        inside = path.relative_to(root).with_suffix("").parts
        module = ".".join(inside if inside[0] == "splitfed" else ("splitfed", *inside))
        classes = (node for node in nodes(tree) if isinstance(node, ast.ClassDef))
        names |= {f"{module}:{c.name}" for c in classes if any(ast.unparse(b).startswith("Protocol") for b in c.bases)}
    assert set(WIDE) <= names
    assert {name for name in names - set(WIDE) if len(members(find(name))) > MOST} == set()


def test_no_function_takes_more_than_fourteen_parameters() -> None:
    wide = []
    for path, tree in library().items():
        for node in nodes(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                given = node.args
                count = len(
                    [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
                )
                wide += [f"{path.name}:{node.lineno} {node.name} takes {count}"] if count > 14 else []
    assert wide == []


def test_the_docstring_of_a_class_says_what_it_is_before_what_its_parameters_are() -> None:
    bare = []
    for path, tree in library().items():
        for node in nodes(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                first = (ast.get_docstring(node) or "").splitlines()[:1]
                # "`[study]`: ..." names the table of a study that the class is.
                bare += [f"{path.name}: {node.name}"] if first and re.match(r"`[a-z_]+`[^.]*:", first[0]) else []
    assert bare == []


def test_no_class_is_there_only_as_the_base_of_one_other() -> None:
    """A class cut in two by inheritance: nothing names its first part but the second one's line.

    Contracts do not count: a part of one is what somebody may ask for.
    """
    inherited: Counter[str] = Counter()
    named: Counter[str] = Counter()
    classes, contracts = set(), {path.rpartition(":")[2] for path in CONTRACTS}
    for tree in library().values():
        for node in nodes(tree):
            if isinstance(node, ast.ClassDef):
                classes.add(node.name)
                for base in node.bases:
                    base = base.value if isinstance(base, ast.Subscript) else base
                    # With a dot it is a class of another package.
                    inherited[base.id if isinstance(base, ast.Name) else ""] += 1
            elif isinstance(node, ast.Name):
                named[node.id] += 1
            elif isinstance(node, ast.Attribute):
                named[node.attr] += 1
    assert sorted(name for name in classes - contracts if inherited[name] == named[name] == 1) == []
