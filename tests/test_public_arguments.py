"""Wrong values in place of every argument of everything public: taken, or refused by an error of this package alone.

What is tried is derived from what the packages show, so that a new name is tried from its first day.
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_args, get_origin

import numpy as np
import pytest
import torch
from torch import nn

import splitfed as sf
from splitfed.core.argument_kinds import fits, signature_of
from splitfed.core.errors import LONGEST, InvalidInput, SplitfedError, short
from tests.api import public

QUICK = 300
"""Calls of the quick part, drawn from all of them."""


class Stranger:
    """An object that nobody knows."""

    def __repr__(self) -> str:
        return "Stranger()"


WRONG: tuple[Any, ...] = (
    *(None, -1, 1.5, "x", b"x", [0, 1], {"a": 1}, Stranger(), Stranger, float("nan"), torch.tensor(1.0), {1, 2}),
    *((1, "a"), True, np.array([1, 2]), np.float64(0.5), [Stranger()], {}, (), "", "a\nb", "\0", lambda: 0),
    *(torch.zeros(2, 0), complex(1, 2), float("inf"), Path("missing"), range(0), {"a": Stranger()}, sf.Optim),
    *(2**64, 10**400, np.int64(-3), ["x"], object, "é" * 3000, "a\0b", Path("/missing/\0x"), lambda *_: None, [[]]),
)


class Call(NamedTuple):
    """A public callable, the arguments that it needs, and the one that is given wrong."""

    name: str
    function: Callable[..., Any]
    needed: Mapping[str, Any]
    argument: str


def shown() -> Iterator[tuple[str, Any]]:
    """Yield every public function and class by name, those that hold no code of ours or are no values left out."""
    modules = {"splitfed": sf} | {
        found.__name__: found for name in sf.__all__ if isinstance(found := getattr(sf, name), ModuleType)
    }
    seen: set[int] = set()
    for path, module in modules.items():
        for name in public(module):
            found = getattr(module, name)
            if id(found) not in seen and (inspect.isfunction(found) or _is_made(found)):
                seen.add(id(found))
                yield f"{path}.{name}", found


def _is_made(found: Any) -> bool:
    return (
        inspect.isclass(found)
        and not getattr(found, "_is_protocol", False)
        and not issubclass(found, (BaseException, Enum))
    )


class Lines:
    """An object that is shown in three lines."""

    def __repr__(self) -> str:
        return "Lines(\n    a,\n)"


WRONG += (Lines(),)

torch.manual_seed(0)
DATA = sf.data.from_arrays(torch.rand(24, 3), torch.arange(24) % 2)
MODEL = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


class World:
    """What arguments are taken from that must be right: a small run, and files, in the folder that is current."""

    def __init__(self) -> None:
        self.clients = DATA.clients(2, auxiliary=6, victims=4, seed=0)
        self.topology = sf.topologies.vanilla(MODEL, "0")
        self.run = sf.train(self.topology, self.clients, rounds=1, logging=sf.Logging("run"))
        table = {"name": "synthetic", "devices": 2, "victims": 4, "auxiliary": 8}
        self.study = sf.study(
            "s", data=table, model={"name": "mlp", "hidden": [4]}, topology={"name": "vanilla", "cut": "relu1"}
        )
        self.study.run("study")
        self.poisoned = sf.poisoning.Backdoor(target=1, clients=(0,))
        Path("rows.csv").write_text("a,b\n1,0\n2,1\n")
        np.save("x.npy", np.ones((4, 3), np.float32))
        np.save("y.npy", np.array([0, 1, 0, 1]))
        np.savez("rows.npz", x=np.ones((4, 3), np.float32), y=np.array([0, 1, 0, 1]))
        repository = sf.matching.Repository()
        for name in "ab":
            repository.experts[name] = None  # type: ignore[assignment]
        bottoms = {"a": nn.Linear(2, 2), "b": nn.Linear(1, 2)}
        pair, tensor = {"a": [1, 2], "b": [2, 3]}, torch.rand(8, 3)
        self.samples: dict[str, Any] = {
            "nn.Module": MODEL,
            "Federation": self.clients,
            "Dataset": DATA,
            "Topology": self.topology,
            "Task": sf.classification(2),
            "Run": self.run,
            "EvaluatedRun": self.run,
            "Tensor": tensor,
            "Array": tensor,
            "torch.Generator": torch.Generator(),
            "Repository": repository,
            "str": "x",
            "str | Path": "x",
            "int": 2,
            "float": 1.0,
            "bytes": b"x" * 32,
            "bool": False,
        }
        self.needed: dict[str, dict[str, Any]] = {
            "Dataset": {"x": DATA.x, "y": DATA.y, "task": DATA.task},
            "Federation": {"clients": self.clients.clients, "auxiliary": DATA, "victims": DATA, "sources": {}},
            "ClientData": {"train": DATA, "validation": DATA, "test": DATA},
            "ParameterGroup": {"options": {"lr": 0.1}},
            "Task": {"loss": DATA.task.loss, "metric": DATA.task.metric},
            "Topology": {n: getattr(self.topology, n) for n in ("segments", "inputs", "heads")},
            "Segment": {"inputs": ("x",), "outputs": ("z",)},
            "Edge": {"values": ("z",)},
            "cut_places": {"example": tensor},
            "cut": {"at": ("0",)},
            "load": {"folder": "run", "topology": self.topology, "data": self.clients},
            "model_task": {"example": {"input": tensor, "labels": DATA.y}},
            "Steps": {"steps": ((0, 0.1),)},
            "made": {"table": {"name": "constant", "value": 1.0}},
            "number_or_course": {"value": 1.0},
            "Feature": {"positions": torch.arange(3), "shape": (3,)},
            "LabelSet": {"y": DATA.y, "task": DATA.task},
            "align": {"tables": {"a": sf.data.Table([1], tensor[:1], DATA.y[:1]), "b": sf.data.Table([1], tensor[:1])}}
            | {"labels": "a"},
            "csv": {"path": "rows.csv", "target": "b"},
            "npy": {"x": "x.npy", "y": "y.npy"},
            "npz": {"path": "rows.npz"},
            "from_sequences": {"sequences": [[1.0, 2.0], [1.0]], "y": [0, 1]},
            "from_arrays": {"x": DATA.x, "y": DATA.y},
            "from_torch": {"dataset": [(1.0, 0), (2.0, 1)]},
            "in_clear": {"keys": pair, "leader": "a"},
            "feed": {"names": {"x": "client"}, "features": {}},
            "batches": {"count": 4, "size": 2, "seed": 0, "epoch": 0},
            "DpSgd": {"noise_multiplier": 1.0},
            "GaussianRelease": {"noise_multiplier": 1.0},
            "permutation_test": {"permutations": 2},
            "slope": {"statistic": "distance_correlation"},
            "Autoencoder": {"inputs": 4},
            "predict": {"topology": self.run.engine.topology},
            "build": {"name": "mlp", "shape": (3,)},
            "transformers": {"shape": (4,)},
            "ecg_cnn": {"shape": (1, 8)},
            **{
                name: {"shape": (1, 8, 8)}
                for name in ("alexnet", "fedavg_cnn", "lenet", "resnet18", "resnet34", "resnet8", "vgg11")
            },
            "mlp": {"shape": (3,)},
            "success_rate": {"trigger": self.poisoned},
            "Run.attack": {"attacks": sf.attacks.Nearest((1,))},
            "Run.plan_attack": {"attack": sf.attacks.Nearest((1,))},
            "Run.evaluate": {"part": "test"},
            "Run.across": {"part": "test", "number": 0},
            "PreparedStudy": {"checked": self.study.checked},
            "PreparedStudy.run": {"folder": "study", "resume": True},
            "StudyResults": {"folder": Path("study")},
            "StudyResults.load": {"run": sf.load_study("study").runs[0]},
            "custom": {
                "segments": [{"name": "a", "role": "client", "module": MODEL, "inputs": ("x",), "outputs": ("z",)}],
                "inputs": {"x": "client"},
                "heads": [{"value": "z", "role": "client", "labels": "client"}],
            },
            "extended_vanilla": {"bottoms": bottoms, "middle": nn.Linear(4, 4), "top": nn.Linear(4, 2), "labels": "a"},
            "heterogeneous": {"topologies": [self.topology, self.topology]},
            "multi_hop": {"cuts": ("0", "1")},
            "multi_task": {"bottoms": bottoms, "tops": {"s": nn.Linear(4, 2)}, "targets": {"s": None}}
            | {"labels": {"s": "a"}},
            "u_shaped": {"cuts": ("0", "1")},
            "vanilla": {"cut": "0"},
            "vertical": {"bottoms": bottoms, "top": nn.Linear(4, 2), "labels": "a"},
        }
        self.instances = {"Dataset": DATA, "Run": self.run, "Federation": self.clients, "PreparedStudy": self.study}
        self.instances["StudyResults"] = sf.load_study("study")
        """What the methods of a class are called on."""

    def sample(self, annotation: Any) -> Any:
        """Return a value that is right for an argument that is needed, as far as its annotation tells."""
        text = str(annotation)
        known = [value for kind, value in self.samples.items() if text == kind or text.startswith(f"{kind} |")]
        return known[0] if known else None

    def calls(self) -> Iterator[Call]:
        """Yield a call for every argument of everything public, and of the methods of what there is one of."""
        for name, found in shown():
            short_name = name.rpartition(".")[2]
            yield from self._of(name, found, short_name)
            if short_name in self.instances:
                methods = [n for n, f in vars(found).items() if not n.startswith("_") and inspect.isfunction(f)]
                for method in methods:
                    bound = getattr(self.instances[short_name], method)
                    yield from self._of(f"{name}.{method}", bound, f"{short_name}.{method}")

    def _of(self, name: str, function: Callable[..., Any], needs: str) -> Iterator[Call]:
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        needed = {p.name: self.sample(p.annotation) for p in named if p.default is p.empty}
        needed |= self.needed.get(needs, {})
        for one in named:
            yield Call(name, function, needed, one.name)


def outcome(call: Call, **given: Any) -> BaseException | None:
    """Return what the call raises with these arguments beside those that it needs."""
    arguments = {**call.needed, **given}
    parameters = inspect.signature(call.function).parameters
    placed = [arguments.pop(name) for name, one in parameters.items() if one.kind is one.POSITIONAL_ONLY]
    try:
        call.function(*placed, **arguments)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return error
    return None


def is_named(text: str, call: Call, value: Any) -> bool:
    """Whether `text` says which argument it is about: by its name, by the value or an entry of it, or by its file."""
    words = {word.rstrip("s") for word in call.argument.split("_") if len(word) > 3 or "_" not in call.argument}
    entries = value if isinstance(value, (Mapping, list, tuple, set)) else ()
    values = [short(one)[:100] for one in (value, *entries)] + [str(one) for one in (value, *entries) if str(one)]
    values += [repr(str(value))] if isinstance(value, Path) else []
    values += [" ".join(value.split())] if isinstance(value, str) else []
    files = [str(one) for one in call.needed.values() if isinstance(one, str) and Path(one).exists()]
    return any(word in text for word in (*words, *values, *files, *CALLED.get(call.argument, ())))


CALLED: dict[str, tuple[str, ...]] = {
    "dataset": ("data set", "item", "has no length"),
    "drop": ("no column but",),
    "evidence": ("measure",),
    "example": ("fails by itself",),
    "folder": (". has",),
    "keys": ("leader",),
    "names": ("features",),
    "parties": ("party",),
    "path": (". is a folder", ". has"),
    "shown": ("shows",),
    "table": ("course",),
    "tables": ("party",),
    "topologies": ("topology",),
    "topology": ("topologies",),
    "y": (". is a folder",),
    "domains": (". is a folder",),
    "training_only": ("segment",),
}
"""Argument -> what else an error may call it, where it speaks of what it was taken for."""


def mistakes(calls: Iterable[tuple[Call, Any]]) -> Iterator[str]:
    """Yield a line for every call that leaves by a foreign error, or by one that does not say what was wrong."""
    without: dict[str, BaseException | None] = {}
    for call, value in calls:
        if call.name not in without:
            without[call.name] = outcome(call)
        error, usual = outcome(call, **{call.argument: value}), without[call.name]
        where = f"{call.name}({call.argument}={short(value)})"
        if error is not None and not isinstance(error, SplitfedError):
            yield f"{where} raised {type(error).__name__}: {error}"
        elif error is not None and (len(str(error)) > LONGEST or len(str(error).splitlines()) != 1):
            yield f"{where} is not told in a line: {error}"
        elif error is not None and str(error) != str(usual) and not is_named(str(error), call, value):
            yield f"{where} does not say what was wrong: {error}"


FUNCTIONS = {"progress", "intersect", "collate", "transform", "loss", "metric", "check", "constant", "query"}
"""Arguments that are functions of a user's own: what they raise is theirs."""


def wrong_calls(world: World) -> list[tuple[Call, Any]]:
    """Return every call with every value, but no function or class where a function of the user's is taken."""
    return [
        (call, value)
        for call in world.calls()
        for value in WRONG
        if not (callable(value) and value is not object and call.argument in FUNCTIONS)
    ]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    warnings.simplefilter("ignore")
    return World()


def test_wrong_arguments_leave_as_errors_of_this_package_that_name_them(world: World) -> None:
    assert not list(mistakes(random.Random(0).sample(wrong_calls(world), QUICK)))


@pytest.mark.exhaustive
def test_every_wrong_argument_leaves_as_an_error_of_this_package_that_names_it(world: World) -> None:
    found = list(mistakes(wrong_calls(world)))
    assert not found, "\n".join(line[:400] for line in found)


UNREAD = {("splitfed.core.annealing.number_at", "epoch")}
"""Arguments that one of two kinds of value has no use for: a plain number is the same in every epoch."""


def ignored(world: World) -> list[tuple[Call, Any]]:
    """Return every call with what no whole number or switch is where one is taken, and every seed below 0."""
    found: list[tuple[Call, Any]] = []
    for call in world.calls():
        kind = signature_of(call.function)[1].get(call.argument)
        if kind in (int, bool, int | None) and (call.name, call.argument) not in UNREAD:
            # A seed may be any whole number; None is the first weights of torch's own generators.
            wrong = [v for v in WRONG if not fits(v, kind) and v is not None and not isinstance(v, int)]
            wrong += [v for v in (True, 2) if not fits(v, kind)] + [-1] * (call.argument == "seed")
            found += [(call, value) for value in wrong]
    return found


def taken(calls: Iterable[tuple[Call, Any]]) -> list[str]:
    return [
        f"{call.name}({call.argument}={short(value)})"
        for call, value in calls
        if outcome(call, **{call.argument: value}) is None
    ]


def test_what_is_no_whole_number_and_no_switch_is_not_ignored(world: World) -> None:
    assert not taken(random.Random(0).sample(ignored(world), QUICK // 3))


@pytest.mark.exhaustive
def test_nothing_that_is_no_whole_number_and_no_switch_is_ignored_anywhere(world: World) -> None:
    calls = ignored(world)
    arguments = {(call.name, call.argument) for call, _ in calls}
    assert {("splitfed.Run.attack", "round"), ("splitfed.PreparedStudy.run", "resume")} <= arguments
    assert not taken(calls)


def test_a_round_is_one_that_was_trained_and_that_an_attack_reads(world: World) -> None:
    with pytest.raises(sf.InvalidInput, match=r"^round=9 is not allowed; expected a whole number of .* and at most 0$"):
        world.run.attack("nearest", round=9)
    with pytest.raises(
        sf.InvalidInput, match=r"^round=0 is not allowed: nearest does not read recorded training; leave it"
    ):
        world.run.attack("nearest", round=0)


def test_everything_public_is_tried(world: World) -> None:
    tried = {call.name for call in world.calls()}
    assert {f"splitfed.{name}" for name in ("train", "load", "compare", "audit", "Dataset", "Run.attack")} <= tried
    rooms = {name.split(".")[1] for name in tried}
    assert {"data", "models", "topologies", "defenses", "federated", "schedules", "poisoning", "matching"} <= rooms


def test_text_in_place_of_a_list_is_no_list_of_letters(world: World) -> None:
    lists = [
        (call, hint)
        for call in world.calls()
        if (hint := signature_of(call.function)[1].get(call.argument)) is not None and _is_list(hint)
    ]
    assert {(call.name, call.argument) for call, _ in lists} >= {("splitfed.compare", "metrics")}
    errors = [(call, outcome(call, **{call.argument: "ab"})) for call, hint in lists if not fits("ab", hint)]
    taken = [
        f"{call.name}({call.argument}): {error}" for call, error in errors if f"{call.argument}='ab'" not in str(error)
    ]
    assert not taken


def _is_list(hint: Any) -> bool:
    return any((get_origin(one) or one) in (tuple, list, Sequence) for one in (hint, *get_args(hint)))


def test_an_argument_that_is_misspelt_is_answered_with_the_nearest_name(world: World) -> None:
    """But by what parties make at every step, by named tuples, and by the two modules that are shown whole."""
    silent, whole = [], ("splitfed.core.annealing.", "splitfed.stats.dependence.")
    for call in world.calls():
        often = inspect.isclass(call.function) and issubclass(call.function, tuple)
        if often or getattr(call.function, "_made_each_step", False) or call.name.startswith(whole):
            continue
        kinds = {one.kind for one in inspect.signature(call.function).parameters.values()}
        placed = inspect.signature(call.function).parameters[call.argument].kind is inspect.Parameter.POSITIONAL_ONLY
        if placed or inspect.Parameter.VAR_KEYWORD in kinds:
            continue
        error = outcome(call, **{f"{call.argument}_": None})
        if not isinstance(error, InvalidInput) or f"did you mean '{call.argument}'" not in str(error):
            silent.append(f"{call.name}({call.argument}_): {error!r}")
    assert not silent, "\n".join(silent)
