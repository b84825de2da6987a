"""The layers hold: every import of the library is read from its source, and none is executed.

Each rule is a function from the parsed files to a list of complaints (`file:line imports name: why`). It is
run over the library, where it must find nothing, and over made-up files, where it must find what they break.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from splitfed.registry import TABLES
from tests.sources import nodes, parsed

ROOT = Path(__file__).resolve().parent.parent

# Inside the core, lowest first. A module of the core that stands in neither table is a helper: it may import the base,
# the rest of the core and other helpers, and whoever imports it answers for all that it reaches.
BASE = (
    "errors",
    "grouping",
    "random",
    "rows",
    "tasks",
    "privacy_events",
    "optimizers",
    "secure_computation",
    "aliasing",
    "payload",
    "model_call",
    "plain_values",
    "unchanging",
    "object_kinds",
    "code_kinds",
    "reachable",
    "reachable_names",
    "state_encoding",
    "unread_state",
    "unsaved_state",
    "model_snapshot",
    "warming",
)
CORE = (
    "topology",
    "topology_facts",
    "example_pass",
    "trial_rows",
    "row_losses",
    "row_independence",
    "row_places",
    "traffic",
    "messages",
    "defense_context",
    "gradient_privatizer",
    "defense",
    "step_plan",
    "local_objective",
    "party_state",
    "step_state",
    "party",
    "executor",
    "replay_passes",
    "meta_copies",
    "replay_branches",
    "replay_constants",
    "replay_plan",
    "replay",
    "tracing",
    "equivalence_sides",
    "equivalence",
    "cutting",
    "cut_places",
)

DEFENSE = ("defense_context", "gradient_privatizer", "defense")
TRIAL = ("trial_rows", "row_losses", "row_independence", "row_places")


def _core(*names: str) -> set[str]:
    return {f"core.{name}" for name in (*BASE, *names)}


# What rooms may see of the core, where that is not all of it, and of other rooms, where that is less than all below.
SEES: dict[str, set[str]] = {
    "core.errors": set(),
    **{f"core.{name}": _core() for name in BASE[1:]},
    **{f"core.{name}": _core(*CORE[:above]) for above, name in enumerate(CORE)},
    "package_links": {"core.errors"},
    "registry": {"core.errors", "package_links"},
    "stats": _core(),
    "data": _core(),
    "models": {*_core(), "registry"},
    "secure_sum": _core(),
    "drawing": _core("topology"),
    "topologies": _core("topology", "cutting", "cut_places"),
    "attacks": {*_core("topology", "messages"), "registry", "stats"},
    "defenses": {
        *_core("topology", "topology_facts", *TRIAL, "messages", *DEFENSE),
        "privacy",
        "stats",
    },
    "privacy": _core("topology", "topology_facts", "example_pass", *TRIAL, "messages", *DEFENSE),
    "costs": _core("topology", "topology_facts", "example_pass", "messages", *DEFENSE),
    "matching": {*_core("topology", "cutting", "messages", "traffic"), "data", "stats"},
    "detectors": _core("topology", "messages"),
    "aggregation": {*_core(), "registry", "secure_sum"},
    "engines": {*_core(*CORE), "aggregation", "registry", "secure_sum"},
    "federated": {*_core(*CORE), "aggregation", "defenses", "engines", "secure_sum"},
    "schedules": {*_core(*CORE), "aggregation", "engines", "data", "registry", "secure_sum"},
    "poisoning": {*_core(*CORE), "engines", "data"},
}
ALGORITHMS = ("topologies", "attacks", "defenses", "schedules", "federated", "costs", "privacy", "data", "models")
ALGORITHMS += ("matching", "poisoning", "detectors", "aggregation")

# Costs and privacy run backward passes to measure work and sensitivity; ExpertMatcher trains autoencoders of its own.
# The equivalence test trains the user's uncut model, beside which the segments are tried. The tracer names functions
# with a backward of their own, to refuse them.
AUTOGRAD = {"core.party", "core.equivalence_sides", "core.model_loss", "attacks", "defenses", "federated", "stats"}
AUTOGRAD |= {"costs", "privacy", "matching", "core.row_losses", "core.shape_rules", "core.tracer"}
# Slow or optional: the only packages that a function may import when it is called. The command line may delay
# anything, for a help page must not wait for torch.
HEAVY = {"sklearn", "mlxtend", "pandas", "scipy", "matplotlib", "PIL", "pyarrow", "optuna"}
HEAVY |= {"private_set_intersection", "ray", "tenseal", "opacus", "dp_accounting", "torchvision", "transformers"}
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
            if (real := path.resolve()) not in seen:
                seen.add(real)
                relative = str(path.relative_to(root))
                module = module_of(relative)
                files[module] = File(module, relative, parsed(real))
    return files


def parse(sources: dict[str, str]) -> Files:
    """Parse `sources`: path relative to the root -> text."""
    return {module_of(path): File(module_of(path), path, ast.parse(text, path)) for path, text in sources.items()}


def module_of(path: str) -> str:
    """Return the dotted name of the module at `path`, relative to the root."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def unit(module: str) -> str:
    """Return the room that `module` is in; of the core, the module itself, and of studies, the second name."""
    parts = module.split(".")[1:]
    if not parts:
        return "splitfed"
    return ".".join(parts[:2]) if parts[0] in ("core", "study") and len(parts) > 1 else parts[0]


def room(module: str) -> str:
    """Return the room that `module` is in."""
    return "core" if unit(module).startswith("core.") else unit(module)


def imports(files: Files) -> list[Import]:
    """Return all imports of all files, wherever in the file they stand."""
    return library_imports() if files is library() else _every_import(files)


def _every_import(files: Files) -> list[Import]:
    return [found for file in files.values() for found in _walk(file, file.tree, files, False, False)]


def _walk(file: File, node: ast.AST, files: Files, function: bool, typing_only: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        for target in _targets(file, node, files):
            yield Import(file.module, target, f"{file.path}:{node.lineno}", function, typing_only)
    function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    guarded: list[ast.stmt] = []
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        guarded = node.body
    for child in ast.iter_child_nodes(node):
        # No expression holds an import.
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
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
    """Modules of the core, and rooms that may not see all of it, reach only what they may, by helpers too."""
    edges: dict[str, list[Import]] = {}
    for found in imports(files):
        if found.target.split(".")[0] == "splitfed":
            edges.setdefault(found.source, []).append(found)
    return list(dict.fromkeys(complaint for module in files for complaint in _reach(module, edges)))


def _reach(module: str, edges: dict[str, list[Import]]) -> Iterator[str]:
    own = unit(module)
    if own not in SEES and not own.startswith("core."):
        return
    allowed = set(SEES.get(own, _core(*CORE)))
    todo = [(found, str(found)) for found in edges.get(module, [])]
    seen = {module}
    while todo:
        found, chain = todo.pop()
        target = unit(found.target)
        if target in SEES or not target.startswith("core."):
            if target != own and target not in allowed:
                yield f"{chain}: {own} may not import {target}"
        elif found.target not in seen:
            seen.add(found.target)
            todo += [(further, f"{chain}; {further}") for further in edges.get(found.target, [])]


def cycles(files: Files) -> list[str]:
    """No module needs itself to be imported, what only the type checker imports included."""
    graph: dict[str, set[str]] = {module: set() for module in files}
    for found in imports(files):
        if found.target in files and found.target != found.source:
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
    """Nothing is unpickled: no pickle module, no loader of torch, and those of NumPy are told not to."""
    complaints = [f"{found}: it unpickles" for found in imports(files) if found.target.split(".")[0] in UNSAFE]
    for file, node in _nodes(files):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name = ast.unparse(node.func)
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name in ("torch.load", "torch.save", "torch.jit.load", "torch.hub.load"):
            complaints.append(
                f"{file.path}:{node.lineno} calls {name}: keep state as splitfed.core.state_encoding does"
            )
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
    return ((file, node) for file in files.values() for node in nodes(file.tree))


def one_class_of_a_name(files: Files) -> list[str]:
    """No class name is defined twice: one word, one meaning."""
    places: dict[str, list[str]] = {}
    for file, node in _nodes(files):
        if isinstance(node, ast.ClassDef):
            places.setdefault(node.name, []).append(f"{file.path}:{node.lineno}")
    return [f"class {name} is defined at {' and '.join(found)}" for name, found in places.items() if len(found) > 1]


def engines_by_contract(files: Files) -> list[str]:
    """The local engine is known to engines alone: others name a contract, and call `make_engine`."""
    return [
        f"{found}: name a contract of splitfed.engines, or call make_engine"
        for found in imports(files)
        if found.target == "splitfed.engines.local" and room(found.source) != "engines"
    ]


Rule = Callable[[Files], list[str]]
RULES: list[Rule] = [
    layers,
    cycles,
    top_of_file,
    one_backward,
    one_copy,
    nothing_unpickled,
    loaded_by_name,
    one_class_of_a_name,
    engines_by_contract,
]


@cache
def library() -> Files:
    """The files of the package, parsed once, and not where tests are only collected."""
    return read(ROOT, "splitfed")


@cache
def library_imports() -> list[Import]:
    """The imports of the package, which most rules ask for."""
    return _every_import(library())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_library_keeps(rule: Rule) -> None:
    found = rule(library())
    assert not found, "\n".join([f"{rule.__doc__}", *found])


def test_tests_import_no_second_copy() -> None:
    """Only files with words that may be such an import are parsed."""
    suspect = re.compile(r"\b(?:from|import)\s+(?:[\w., ]*,\s*)?(?:attacks|topologies)\b")
    texts = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")}
    assert len(texts) > 300
    assert suspect.search("import os, attacks.noise")
    assert one_copy(parse({path: text for path, text in texts.items() if suspect.search(text)})) == []


def test_links_are_followed_and_no_file_is_read_twice() -> None:
    assert {"splitfed.core.errors", "splitfed.registry"} <= set(library())
    for name in ("attacks", "topologies"):
        paths = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / name).rglob("*.py"))
        expected = {f"splitfed.{'.'.join(path.parts)}" for path in paths if path.name != "__init__"}
        assert expected <= set(library())
    real = [(ROOT / file.path).resolve() for file in library().values()]
    assert len(real) == len(set(real))


A, B, C = "splitfed/core/executor.py", "splitfed/core/messages.py", "splitfed/attacks/a.py"
BREAKS: list[tuple[Rule, dict[str, str], list[str]]] = [
    (
        layers,
        {B: "import splitfed.core.party"},
        [f"{B}:1 imports splitfed.core.party: core.messages may not import core.party"],
    ),
    (
        engines_by_contract,
        {
            "splitfed/training/a.py": "from splitfed.engines.local import LocalEngine",
            "splitfed/engines/factory.py": "from splitfed.engines.local import LocalEngine",
            "splitfed/engines/local.py": "",
        },
        [
            "splitfed/training/a.py:1 imports splitfed.engines.local: "
            "name a contract of splitfed.engines, or call make_engine"
        ],
    ),
    (layers, {B: "from . import topology", "splitfed/core/topology.py": ""}, []),
    (
        layers,
        {B: "from splitfed.core import odd", "splitfed/core/odd.py": "\nimport splitfed.core.party"},
        [
            f"{B}:1 imports splitfed.core.odd; splitfed/core/odd.py:2 imports splitfed.core.party: "
            "core.messages may not import core.party"
        ],
    ),
    (
        layers,
        {C: "from splitfed.attacks.base import Attack\nfrom splitfed.core.executor import x"},
        [f"{C}:2 imports splitfed.core.executor: attacks may not import core.executor"],
    ),
    (
        cycles,
        {"splitfed/data/a.py": "from .b import x", "splitfed/data/b.py": "import splitfed.data.a"},
        ["cycle: splitfed.data.a imports splitfed.data.b imports splitfed.data.a"],
    ),
    (
        cycles,
        {A: "import splitfed.core.messages", B: "if TYPE_CHECKING:\n    import splitfed.core.executor"},
        ["cycle: splitfed.core.executor imports splitfed.core.messages imports splitfed.core.executor"],
    ),
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
        {A: "loss.backward()", "splitfed/core/party.py": "loss.backward()"},
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
        {A: "torch.load(f, weights_only=True)\nnp.load(f)\nnp.load(f, allow_pickle=True)"},
        [
            f"{A}:1 calls torch.load: keep state as splitfed.core.state_encoding does",
            f"{A}:3 lets np.load unpickle",
        ],
    ),
    (
        loaded_by_name,
        {C: "from splitfed.attacks.reconstruction.rmle import Rmle\nimport splitfed.attacks.base"},
        [
            f"{C}:1 imports splitfed.attacks.reconstruction.rmle: load it by name, or move what is shared into a file "
            "of its own"
        ],
    ),
    (loaded_by_name, {"splitfed/attacks/__init__.py": "from splitfed.attacks.reconstruction.rmle import Rmle"}, []),
]


BREAKS.append(
    (
        one_class_of_a_name,
        {A: "class Twice: ...", B: "class Once: ...\nclass Twice: ..."},
        [f"class Twice is defined at {A}:1 and {B}:2"],
    )
)


@pytest.mark.parametrize(("rule", "sources", "expected"), BREAKS, ids=lambda v: getattr(v, "__name__", ""))
def test_rule_finds(rule: Rule, sources: dict[str, str], expected: list[str]) -> None:
    assert rule(parse(sources)) == expected


def test_the_root_is_small() -> None:
    modules = sorted(path.name for path in (ROOT / "splitfed").glob("*.py"))
    assert modules == ["__init__.py", "__main__.py", "cli.py", "cli_options.py", "package_links.py", "registry.py"]


def test_a_method_is_read_without_reading_the_house() -> None:
    """Modules of the project that are imported with one federated method, itself included."""
    code = """import sys, splitfed.federated.fedavg
print(sum(name.startswith("splitfed.") and not hasattr(one, "__path__") for name, one in sys.modules.items()))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(done.stdout) <= 41
