"""Import paths of models, `package.module:Name`: what they may lead to, checked before anything is called.

A path leads to a subclass of `torch.nn.Module` in any module that can be imported, or to a function in a Python file
of one folder, the study's own. Importing a module runs its code, so what can be told without it is told first: a module
of Python's standard library, one that is not there, a function elsewhere and a name that no line of it mentions are
refused before anything is imported.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import keyword
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from torch import nn

from splitfed.core.errors import InvalidInput
from splitfed.models.local_modules import LocalModules

MODULE = "a subclass of torch.nn.Module"


class Code:
    """The import paths of one study or one run.

    `folder` holds the Python files whose functions may be called, None for no folder; `files`: those files that may be
    run, relative path -> SHA-256 in hexadecimal digits (None: all). `refusal`: why no import path may be followed at
    all, None where they may. A module that another `Code` took from its folder is loaded anew.
    """

    def __init__(
        self, folder: Path | None = None, files: Mapping[str, str] | None = None, refusal: str | None = None
    ) -> None:
        self._local = None if folder is None else LocalModules(folder.absolute(), files)
        self._refusal = refusal
        place = None if folder is None else str(folder.absolute())
        self._given = {"folder": place, "files": None if files is None else dict(files), "refusal": refusal}

    def to_json(self) -> str:
        """Return what this was made from, for another process: see `from_json`."""
        return json.dumps(self._given)

    @classmethod
    def from_json(cls, text: str) -> Code:
        """Return the `Code` that `to_json` told of."""
        given = json.loads(text)
        return cls(None if given["folder"] is None else Path(given["folder"]), given["files"], given["refusal"])

    def find(self, path: str) -> Callable[..., Any]:
        """Return the class or function that `path` leads to; nothing is called. Raises `InvalidInput`."""
        if self._refusal is not None:
            raise InvalidInput(self._refusal)
        module, attributes = _parts(path)
        if self._local is not None:
            self._local.enter()
        local = self._local if self._local is not None and self._local.has(module) else None
        if local is None:
            _check_unimported(path, module, attributes, self._expected)
        else:
            local.check(path, module)
        target = self._resolved(path, module, attributes)
        if inspect.isclass(target):
            if not issubclass(target, nn.Module):
                raise InvalidInput(f"model {path!r} is a class, but no torch.nn.Module; expected {self._expected}")
        elif not inspect.isroutine(target) or local is None:
            what = "a function" if inspect.isroutine(target) else f"a {type(target).__name__}"
            raise InvalidInput(f"model {path!r} is {what}; expected {self._expected}")
        elif not local.defines(inspect.unwrap(getattr(target, "__func__", target))):
            raise InvalidInput(f"model {path!r} is a function from elsewhere; expected {self._expected}")
        result: Callable[..., Any] = target
        return result

    def sources(self) -> dict[str, bytes]:
        """Return every Python file of the folder that was run for a path: relative path -> content as it was run."""
        return {} if self._local is None else self._local.sources()

    @property
    def _expected(self) -> str:
        return MODULE if self._local is None else f"{MODULE}, or a function in a Python file of the study's folder"

    def _resolved(self, path: str, module: str, attributes: str) -> Any:
        """Import and return what `path` names; whatever the module's own code raises is one line."""
        try:
            imported = importlib.import_module(module)
        except (Exception, SystemExit) as error:
            known = isinstance(error, (ImportError, InvalidInput))
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            raise InvalidInput(
                f"model {path!r}: cannot import {module!r} ({' '.join(reason.split())[:300]})"
            ) from error
        try:
            return reduce(getattr, attributes.split("."), imported)
        except AttributeError:
            raise InvalidInput(f"model {path!r}: {module!r} has no {attributes!r}") from None


def _parts(path: str) -> tuple[str, str]:
    """Return module and attribute of `path`; refuse what is no name, and what is meant to run as a program."""
    module, _, attributes = path.partition(":")
    names = [*module.split("."), *attributes.split(".")]
    if not all(name.isidentifier() and not keyword.iskeyword(name) and name[:2] != "__" for name in names):
        raise InvalidInput(f"model {path!r} is no import path; expected package.module:Name")
    return module, attributes


def _check_unimported(path: str, module: str, attributes: str, expected: str) -> None:
    """Refuse what can be told to be no model without running any of it."""
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise InvalidInput(f"model {path!r} is part of Python itself, which has no models; expected {expected}")
    spec = _find_spec(module)
    if spec is None:
        raise InvalidInput(f"model {path!r}: cannot import {module!r} (No module named {module!r})")
    file = Path(spec.origin or "")
    if spec.has_location and file.suffix == ".py" and file.is_file():
        name = attributes.partition(".")[0]
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            return  # Importing it says what is wrong.
        if any(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name for node in tree.body):
            raise InvalidInput(f"model {path!r} is a function of another package; expected {expected}")
        if not _may_have(tree, name):
            raise InvalidInput(f"model {path!r}: {module!r} has no {name!r}")


def _find_spec(module: str) -> ModuleSpec | None:
    """Return where `module` would be imported from, without importing the packages that it is in."""
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
    """Tell whether the module could hold `name`: some line binds it, or makes names that cannot be read off."""
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
