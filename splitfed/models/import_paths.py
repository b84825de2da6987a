"""Import paths, `package.module:Name`, in place of registered names: what they may lead to, checked before any call.

A file of the folder may be named as such: `nets/my.py:Net` means `nets.my:Net`.
Of a kind that has a contract a path leads to a subclass of it, of models to one of `torch.nn.Module`, in any module
that can be imported; of topologies, data sets and models it leads to a function in a Python file of one folder, the
study's own. Importing a module runs its code, so what can be told without it is told first: a module of Python's
standard library, one that is not there, a function elsewhere and a name that no line of it mentions are refused before
anything is imported.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import keyword
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from functools import reduce
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from splitfed import registry
from splitfed.core.errors import InvalidInput, describe_error, unknown
from splitfed.models.local_modules import LocalModules
from splitfed.registry import SINGULAR

CLASSES = {
    **registry.CONTRACTS,
    "models": "torch.nn:Module",
    "optimizers": "torch.optim:Optimizer",
    "callbacks": "splitfed.training.callbacks:Callback",
}
"""Kind -> the required base class; topologies, data sets, losses and metrics are functions only."""

NOUNS = {
    **SINGULAR,
    "optimizers": "optimizer",
    "losses": "loss",
    "metrics": "metric",
    "transforms": "transform",
    "callbacks": "callback",
}
"""Kind -> its singular noun; the last five kinds have no registered names."""

OWN = "your own in a file net.py is 'net.py:Name' or 'net:Name'"
"""How a class or function in a file of the folder is named."""

FUNCTIONS = ("topologies", "data", "models", "optimizers", "losses", "metrics", "transforms")
"""Kinds of which a path may lead to a function."""


class NameResolver:
    """Resolution of the names, including import paths, in one study or one run.

    `folder` holds the Python files whose functions may be called, None for no folder; `files`: those files that may be
    run, relative path -> SHA-256 in hexadecimal digits (None: all). `refusal`: the reason why no import path may be
    followed, None if they may. A module that another `NameResolver` loaded from its folder is loaded again.
    """

    def __init__(
        self, folder: Path | None = None, files: Mapping[str, str] | None = None, refusal: str | None = None
    ) -> None:
        self._local = None if folder is None else LocalModules(folder.absolute(), files)
        self._refusal = refusal
        place = None if folder is None else str(folder.absolute())
        self._given = {"folder": place, "files": None if files is None else dict(files), "refusal": refusal}

    def to_json(self) -> str:
        """Return the arguments of this resolver as JSON, for another process: see `from_json`."""
        return json.dumps(self._given)

    @classmethod
    def from_json(cls, text: str) -> NameResolver:
        """Return the `NameResolver` that `to_json` described."""
        given = json.loads(text)
        return cls(None if given["folder"] is None else Path(given["folder"]), given["files"], given["refusal"])

    def load(self, kind: str, name: str) -> Callable[..., Any]:
        """Return the registered function or class `name` of `kind`, or the target of an import path."""
        if kind == "models" and ":" not in name and name not in registry.TABLES[kind]:
            raise InvalidInput(f"{unknown(SINGULAR[kind], name, registry.TABLES[kind])}; {OWN}")
        found: Callable[..., Any] = self.find(name, kind) if ":" in name else registry.load(kind, name)
        return found

    def find(self, path: str, kind: str = "models") -> Callable[..., Any]:
        """Return the class or function of `kind` at `path`, without a call; raise `InvalidInput` for other targets."""
        if self._refusal is not None:
            raise InvalidInput(self._refusal)
        what, expected = f"{NOUNS[kind]} {path!r}", self._expected(kind)
        module, attributes = _parts(path, what)
        if self._local is not None:
            self._local.enter()
        local = self._local if self._local is not None and self._local.has(module) else None
        if local is None:
            _check_unimported(what, kind, module, attributes, expected)
        else:
            local.check(what, module)
        target = _import_target(what, module, attributes)
        if inspect.isclass(target):
            contract = registry.resolve(CLASSES[kind]) if kind in CLASSES else None
            if contract is None or not issubclass(target, contract):
                no = "" if contract is None else f", but no {CLASSES[kind].replace(':', '.')}"
                raise InvalidInput(f"{what} is a class{no}; expected {expected}")
        elif not inspect.isroutine(target) or local is None or kind not in FUNCTIONS:
            found = "a function" if inspect.isroutine(target) else f"a {type(target).__name__}"
            raise InvalidInput(f"{what} is {found}; expected {expected}")
        elif not local.defines(inspect.unwrap(getattr(target, "__func__", target))):
            raise InvalidInput(f"{what} is a function from elsewhere; expected {expected}")
        result: Callable[..., Any] = target
        return result

    def sources(self) -> dict[str, bytes]:
        """Return every Python file of the folder that was run: relative path -> content as it was run."""
        return {} if self._local is None else self._local.sources()

    def _expected(self, kind: str) -> str:
        found = [f"a subclass of {CLASSES[kind].replace(':', '.')}"] if kind in CLASSES else []
        if kind in FUNCTIONS and (self._local is not None or not found):
            found.append("a function in a Python file of the study's folder")
        return ", or ".join(found)


def _import_target(what: str, module: str, attributes: str) -> Any:
    """Import and return the target of a path; raise `InvalidInput` for any error of the module's own code."""
    try:
        with redirect_stdout(sys.stderr):  # standard output may be read by a program
            imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        # Importing runs the user's file, which may raise anything; one that ends the process is to be named as well.
        known = isinstance(error, (ImportError, InvalidInput))
        reason = " ".join(str(error).split())[:300] if known else describe_error(error)
        raise InvalidInput(f"{what}: cannot import {module!r} ({reason})") from error
    try:
        return reduce(getattr, attributes.split("."), imported)
    except AttributeError:
        raise InvalidInput(f"{what}: {module!r} has no {attributes!r}") from None


def _parts(path: str, what: str) -> tuple[str, str]:
    """Return module and attribute of `path`; raise `InvalidInput` for invalid or dunder identifiers."""
    module, _, attributes = path.rpartition(":")
    if module.endswith(".py"):
        module = ".".join(Path(module).with_suffix("").parts)
    names = [*module.split("."), *attributes.split(".")]
    if not all(name.isidentifier() and not keyword.iskeyword(name) and name[:2] != "__" for name in names):
        raise InvalidInput(f"{what} is no import path; expected package.module:Name; {OWN}")
    return module, attributes


def _check_unimported(what: str, kind: str, module: str, attributes: str, expected: str) -> None:
    """Raise `InvalidInput`, before anything is run, for a target that cannot be one of `kind`."""
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise InvalidInput(f"{what} is part of Python itself, which has no {kind}; expected {expected}")
    if (spec := _find_spec(module)) is None:
        raise InvalidInput(f"{what}: cannot import {module!r} (No module named {module!r}); {OWN}")
    file = Path(spec.origin or "")
    if spec.has_location and file.suffix == ".py" and file.is_file():
        name = attributes.partition(".")[0]
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            return  # Importing it says what is wrong.
        if any(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name for node in tree.body):
            raise InvalidInput(f"{what} is a function of another package; expected {expected}")
        if not _may_have(tree, name):
            raise InvalidInput(f"{what}: {module!r} has no {name!r}")


def _find_spec(module: str) -> ModuleSpec | None:
    """Return the import specification of `module`, without importing its parent packages."""
    spec, names = None, module.split(".")
    for i in range(len(names)):
        name = ".".join(names[: i + 1])
        path = None if spec is None else spec.submodule_search_locations
        if i and path is None:
            return None
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        spec = next((s for find in finders if find and (s := find(name, path)) is not None), None)
        if spec is None:
            return None
    return spec


def _may_have(tree: ast.Module, name: str) -> bool:
    """Return whether the module may define `name`: a line binds it, or creates names dynamically."""
    return any(bound in (name, "*", "__getattr__") for node in ast.walk(tree) for bound in _bound_names(node))


def _bound_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Store):
            yield node.id
        elif node.id in ("globals", "setattr", "vars", "exec"):
            yield "*"
