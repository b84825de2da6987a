"""The layers hold: every import of the library is read from its source, and none is executed.

Each rule is a function from the parsed files to a list of complaints (`file:line imports name: why`). It is
run over the library, where it must find nothing, and over made-up files, where it must find what they break.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from splitfed.registry import TABLES

ROOT = Path(__file__).resolve().parent.parent

# The layers, lowest first. A unit is a module or package directly under splitfed. What no table names is a
# helper: it may import BASE, CORE and other helpers, and whoever imports it answers for all that it reaches.
BASE = ("errors", "seeding", "task", "privacy", "registry", "dependence", "intervals", "optim", "aliasing", "payload")
BASE += ("model_snapshot",)
CORE = (
    "graph",
    "probe",
    "row_independence",
    "view",
    "traffic",
    "defense",
    "duty",
    "finite",
    "tutoring",
    "belongings",
    "backprop",
    "tape",
    "party",
    "executor",
    "equivalence_sides",
    "equivalence",
    "cutting",
    "secure",
    "engines",
)
ALGORITHMS = ("topologies", "attacks", "defenses", "schedules", "federated", "accounting", "data", "models", "matching")
ALGORITHMS += ("manipulations", "detectors", "fusions")
RUNNING = (
    "folder",
    "preparation",
    "rounds",
    "planning",
    "description",
    "insiders",
    "watching",
    "learning",
    "uploads",
    "granting",
    "idling",
    "inquiry",
    "tuning",
    "run",
    "training",
)
RUNNING += ("study",)
EVERYTHING = {*BASE, *CORE, *ALGORITHMS, *RUNNING}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    **{unit: set(BASE) for unit in BASE[1:]},
    **{unit: {*BASE, *CORE[:above]} for above, unit in enumerate(CORE)},
    "topologies": {*BASE, "graph", "cutting"},
    "attacks": {*BASE, "graph", "view"},
    "defenses": {*BASE, "graph", "probe", "row_independence", "view", "defense"},
    "schedules": {*BASE, *CORE, "accounting", "data"},
    "federated": {*BASE, *CORE},
    "accounting": {*BASE, "graph", "probe", "row_independence", "view", "defense"},
    "data": set(BASE),
    "models": set(BASE),
    "matching": {*BASE, "graph", "cutting", "view", "traffic", "data"},
    "manipulations": {*BASE, *CORE, "data"},
    "fusions": {*BASE, "engines"},
    "detectors": {*BASE, "graph", "view"},
    **{
        unit: {*BASE, *CORE, *ALGORITHMS, *RUNNING[:above]}
        for above, unit in enumerate(RUNNING)
        if unit not in ("folder", "study")
    },
    "folder": {*BASE, *CORE, *ALGORITHMS, "run"},
    "study": EVERYTHING,
    "cli": {*EVERYTHING, "splitfed"},
    "splitfed": EVERYTHING,  # splitfed/__init__.py, the shop window
    "__main__": {"cli"},
}
HELPER = {*BASE, *CORE}

# Accounting runs a backward pass to measure what it costs; ExpertMatcher trains autoencoders of its own.
# The equivalence test trains the user's uncut model, beside which the segments are tried.
AUTOGRAD = {"backprop", "party", "attacks", "defenses", "federated", "dependence", "accounting", "matching"}
AUTOGRAD |= {"equivalence_sides"}
# Slow or optional: the only packages that a function may import when it is called. The command line may delay
# anything, for a help page must not wait for torch.
HEAVY = {"sklearn", "mlxtend", "pandas", "scipy", "matplotlib", "torchmetrics", "PIL", "pyarrow", "optuna"}
HEAVY |= {"private_set_intersection", "ray", "tenseal", "opacus", "torchvision"}
UNSAFE = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
# An algorithm's own file is for the registry alone; what two siblings share stands in a file that no table names,
# such as base, metrics or decoder. A package's __init__ may show them all.
REGISTERED = {target.partition(":")[0] for table in TABLES.values() for target in table.values()}


@dataclass(frozen=True)
class Import:
    """One name imported: `target` is the longest module among the files, or the name as written."""

    source: str
    target: str
    where: str
    in_function: bool = False
    typing_only: bool = False

    def __str__(self) -> str:
        return f"{self.where} imports {self.target}"


@dataclass(frozen=True)
class File:
    """A parsed file: `module` is its dotted name, `path` is relative to the repository's root."""

    module: str
    path: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.module if self.path.endswith("__init__.py") else self.module.rpartition(".")[0]


Files = dict[str, File]


def read(root: Path, top: str) -> Files:
    """Parse every file under `root/top`, following symbolic links, each real file once."""
    files: Files = {}
    seen: set[Path] = set()
    for folder, _, names in os.walk(root / top, followlinks=True):
        for path in (Path(folder, name) for name in sorted(names) if name.endswith(".py")):
            if path.resolve() not in seen:
                seen.add(path.resolve())
                relative = path.relative_to(root)
                files |= parse({str(relative): path.read_text("utf-8")})
    return files


def parse(sources: dict[str, str]) -> Files:
    """Parse `sources`: path relative to the root -> text."""
    files = {}
    for path, text in sources.items():
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        files[module] = File(module, path, ast.parse(text, path))
    return files


def unit(module: str) -> str:
    """Return the layer that `module` belongs to: the part directly under splitfed."""
    return module.split(".")[1] if "." in module else module


def imports(files: Files) -> list[Import]:
    """Return all imports of all files, wherever in the file they stand."""
    return [found for file in files.values() for found in _walk(file, file.tree, files, False, False)]


def _walk(file: File, node: ast.AST, files: Files, function: bool, typing_only: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        for target in _targets(file, node, files):
            yield Import(file.module, target, f"{file.path}:{node.lineno}", function, typing_only)
    function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    guarded: list[ast.stmt] = []
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        guarded = node.body
    for child in ast.iter_child_nodes(node):
        yield from _walk(file, child, files, function, typing_only or child in guarded)


def _targets(file: File, node: ast.Import | ast.ImportFrom, files: Files) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    parents = file.package.split(".")
    prefix = parents[: len(parents) - node.level + 1] if node.level else []
    base = ".".join([*prefix, *([node.module] if node.module else [])])
    for alias in node.names:
        name = f"{base}.{alias.name}"
        yield name if name in files else base


def layers(files: Files) -> list[str]:
    """Each unit reaches only what stands above it, by itself and through helpers."""
    edges: dict[str, list[Import]] = {}
    for found in imports(files):
        if found.target.split(".")[0] == "splitfed":
            edges.setdefault(found.source, []).append(found)
    return list(dict.fromkeys(complaint for module in files for complaint in _reach(module, edges)))


def _reach(module: str, edges: dict[str, list[Import]]) -> Iterator[str]:
    own = unit(module)
    todo = [(found, str(found)) for found in edges.get(module, [])]
    seen = {module}
    while todo:
        found, chain = todo.pop()
        target = unit(found.target)
        if target in ALLOWED:
            if target != own and target not in ALLOWED.get(own, HELPER):
                yield f"{chain}: {own} may not import {target}"
        elif found.target not in seen:
            seen.add(found.target)
            todo += [(further, f"{chain}; {further}") for further in edges.get(found.target, [])]


def core_knows_no_algorithm(files: Files) -> list[str]:
    """Base and core import no algorithm, nor the registry, which would load one by its name."""
    forbidden = {*ALGORITHMS, "registry"}
    return [
        f"{found}: the core knows no algorithm"
        for found in imports(files)
        if unit(found.source) in HELPER and found.target.startswith("splitfed.") and unit(found.target) in forbidden
    ]


def cycles(files: Files) -> list[str]:
    """No module needs itself to be imported; what only the type checker imports is exempt."""
    graph: dict[str, set[str]] = {module: set() for module in files}
    for found in imports(files):
        if not found.typing_only and found.target in files:
            graph[found.source].add(found.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        # graphlib lists the imported before the importing
        return ["cycle: " + " imports ".join(reversed(error.args[1]))]
    return []


def top_of_file(files: Files) -> list[str]:
    """Imports stand at the top of a file, except heavy ones, and except in the command line."""
    return [
        f"{found}: inside a function"
        for found in imports(files)
        if found.in_function and found.target.split(".")[0] not in HEAVY and unit(found.source) != "cli"
    ]


def one_backward(files: Files) -> list[str]:
    """`.backward(` and `autograd` stand only where a module is trained."""
    complaints = [
        f"{found}: it belongs to {', '.join(sorted(AUTOGRAD))}"
        for found in imports(files)
        if unit(found.source) not in AUTOGRAD and "autograd" in found.target.split(".")
    ]
    for file, node in _nodes(files):
        if unit(file.module) in AUTOGRAD:
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward":
            complaints.append(f"{file.path}:{node.lineno} calls {ast.unparse(node.func)}(")
        elif isinstance(node, ast.Attribute) and node.attr == "autograd":
            complaints.append(f"{file.path}:{node.lineno} uses {ast.unparse(node)}")
        elif isinstance(node, ast.alias) and node.name == "autograd":
            complaints.append(f"{file.path}:{node.lineno} uses autograd")
    return complaints


def one_copy(files: Files) -> list[str]:
    """`attacks` and `topologies` are imported through splitfed: a bare import loads a second copy."""
    return [
        f"{found}: write splitfed.{found.target.split('.')[0]}"
        for found in imports(files)
        if found.target.split(".")[0] in ("attacks", "topologies")
    ]


def nothing_unpickled(files: Files) -> list[str]:
    """Nothing is unpickled: no pickle module, and the loaders that could are told not to."""
    complaints = [f"{found}: it unpickles" for found in imports(files) if found.target.split(".")[0] in UNSAFE]
    for file, node in _nodes(files):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name = ast.unparse(node.func)
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name == "torch.load" and options.get("weights_only") != "True":
            complaints.append(f"{file.path}:{node.lineno} calls torch.load without weights_only=True")
        if options.get("allow_pickle", "False") != "False" or node.func.attr == "read_pickle":
            complaints.append(f"{file.path}:{node.lineno} lets {name} unpickle")
    return complaints


def loaded_by_name(files: Files) -> list[str]:
    """An algorithm's own file is loaded through the registry, and imported by no other file."""
    return [
        f"{found}: load it by name, or move what is shared into a file of its own"
        for found in imports(files)
        if found.target in REGISTERED and not files[found.source].path.endswith("__init__.py")
    ]


def _nodes(files: Files) -> Iterator[tuple[File, ast.AST]]:
    return ((file, node) for file in files.values() for node in ast.walk(file.tree))


Rule = Callable[[Files], list[str]]
RULES: list[Rule] = [
    layers,
    core_knows_no_algorithm,
    cycles,
    top_of_file,
    one_backward,
    one_copy,
    nothing_unpickled,
    loaded_by_name,
]

LIBRARY = read(ROOT, "splitfed")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_library_keeps(rule: Rule) -> None:
    found = rule(LIBRARY)
    assert not found, "\n".join([f"{rule.__doc__}", *found])


def test_tests_import_no_second_copy() -> None:
    assert one_copy(read(ROOT, "tests")) == []


def test_links_are_followed_and_no_file_is_read_twice() -> None:
    assert {"splitfed.errors", "splitfed.registry"} <= set(LIBRARY)
    for name in ("attacks", "topologies"):
        expected = {f"splitfed.{name}.{path.stem}" for path in (ROOT / name).glob("*.py") if path.stem != "__init__"}
        assert expected <= set(LIBRARY)
    real = [(ROOT / file.path).resolve() for file in LIBRARY.values()]
    assert len(real) == len(set(real))


A, B, C = "splitfed/executor.py", "splitfed/view.py", "splitfed/attacks/a.py"
BREAKS: list[tuple[Rule, dict[str, str], list[str]]] = [
    (layers, {B: "import splitfed.party"}, [f"{B}:1 imports splitfed.party: view may not import party"]),
    (layers, {B: "from . import graph", "splitfed/graph.py": ""}, []),
    (
        layers,
        {B: "from splitfed import odd", "splitfed/odd.py": "\nimport splitfed.party"},
        [f"{B}:1 imports splitfed.odd; splitfed/odd.py:2 imports splitfed.party: view may not import party"],
    ),
    (
        layers,
        {"splitfed/odd.py": "import splitfed.attacks.base"},
        ["splitfed/odd.py:1 imports splitfed.attacks.base: odd may not import attacks"],
    ),
    (
        layers,
        {C: "from splitfed.attacks.base import Attack\nfrom splitfed.executor import x"},
        [f"{C}:2 imports splitfed.executor: attacks may not import executor"],
    ),
    (
        core_knows_no_algorithm,
        {A: "from splitfed.registry import load", "splitfed/cli.py": "import splitfed.registry"},
        [f"{A}:1 imports splitfed.registry: the core knows no algorithm"],
    ),
    (
        cycles,
        {"splitfed/data/a.py": "from .b import x", "splitfed/data/b.py": "import splitfed.data.a"},
        ["cycle: splitfed.data.a imports splitfed.data.b imports splitfed.data.a"],
    ),
    (cycles, {A: "import splitfed.view", B: "if TYPE_CHECKING:\n    import splitfed.executor"}, []),
    (
        top_of_file,
        {
            A: "import math\ndef f():\n import scipy.stats\n import json",
            "splitfed/cli.py": "def f():\n import torch",
        },
        [f"{A}:4 imports json: inside a function"],
    ),
    (
        one_backward,
        {A: "loss.backward()", "splitfed/party.py": "loss.backward()"},
        [f"{A}:1 calls loss.backward("],
    ),
    (one_backward, {A: "torch.autograd.grad(x, y)"}, [f"{A}:1 uses torch.autograd"]),
    (one_backward, {A: "from torch import autograd"}, [f"{A}:1 uses autograd"]),
    (
        one_backward,
        {A: "from torch.autograd import grad"},
        [f"{A}:1 imports torch.autograd: it belongs to {', '.join(sorted(AUTOGRAD))}"],
    ),
    (
        one_copy,
        {A: "import attacks.base\nimport splitfed.attacks"},
        [f"{A}:1 imports attacks.base: write splitfed.attacks"],
    ),
    (nothing_unpickled, {A: "import pickle"}, [f"{A}:1 imports pickle: it unpickles"]),
    (
        nothing_unpickled,
        {A: "torch.load(f)\ntorch.load(f, weights_only=True)\nnp.load(f, allow_pickle=True)"},
        [f"{A}:1 calls torch.load without weights_only=True", f"{A}:3 lets np.load unpickle"],
    ),
    (
        loaded_by_name,
        {C: "from splitfed.attacks.rmle import Rmle\nimport splitfed.attacks.base"},
        [f"{C}:1 imports splitfed.attacks.rmle: load it by name, or move what is shared into a file of its own"],
    ),
    (loaded_by_name, {"splitfed/attacks/__init__.py": "from splitfed.attacks.rmle import Rmle"}, []),
]


@pytest.mark.parametrize(("rule", "sources", "expected"), BREAKS, ids=lambda v: getattr(v, "__name__", ""))
def test_rule_finds(rule: Rule, sources: dict[str, str], expected: list[str]) -> None:
    assert rule(parse(sources)) == expected
