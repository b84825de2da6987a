"""Parameters of registered algorithms, read from their source: nothing is imported, so torch is not either.

An algorithm is a function or a dataclass in a file of this package. Its names, which of them are required, types that
are built of plain ones, and the bounds that fields declare by `splitfed.core.errors.require_*` are read off the syntax
tree; a type that is not plain is left open. What is read is what `parameters_of` finds after importing, which a test
compares for everything that is registered.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from importlib.util import find_spec
from inspect import Parameter as Signature
from operator import or_
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from splitfed.core import errors
from splitfed.registry import module_file
from splitfed.study.config.parameters import Parameter

_TYPES: Mapping[str, Any] = {
    **{kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict)},
    "Any": Any,
    "Path": Path,
    "Sequence": Sequence,
    "Mapping": Mapping,
}
_PIECES = {"segments": r"\bSegment\b", "heads": r"\bHead\b", "piece": r"\bModule\b"}
_CHECKS = ("require_number", "require_count", "require_share", "require_name")


class _NeedsImport(Exception):
    """A part of the syntax tree that says nothing without an import."""


@dataclass(frozen=True)
class StaticParameter(Parameter):
    """A parameter as the source tells of it: `hint` is `Any` where its type is not plain.

    `pieces`: which tables of pieces of a model stand for it, as `piece_tables.piece_kind` but for "roles", which are
    "piece" here. `check`: refuses a value out of the bounds that its field declares.
    """

    pieces: str | None = None
    check: Callable[[Any], None] | None = None


class _Module:
    """The syntax tree of a module: what is defined, imported and assigned in it, by name."""

    def __init__(self, tree: ast.Module) -> None:
        self.defined: dict[str, ast.FunctionDef | ast.ClassDef] = {}
        self.imported: dict[str, tuple[str, str]] = {}
        self.assigned: dict[str, ast.expr] = {}
        for node in _statements(tree):
            match node:
                case ast.FunctionDef() | ast.ClassDef():
                    self.defined[node.name] = node
                case ast.ImportFrom(module=str(module)):
                    self.imported |= {alias.asname or alias.name: (module, alias.name) for alias in node.names}
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.assigned[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self.assigned[name] = value

    def annotation(self, node: ast.expr) -> Any:
        """Return the type that `node` stands for; raises `_NeedsImport` where that takes an import."""
        match node:
            case ast.Constant(value=None):
                return NoneType
            case ast.Constant(value=str(text)):
                return self.annotation(ast.parse(text, mode="eval").body)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return reduce(or_, (self.annotation(left), self.annotation(right)))
            case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
                return Literal[tuple(self.value(one) for one in _items(inner))]
            case ast.Subscript(value=outer, slice=inner):
                arguments = tuple(... if _is_ellipsis(one) else self.annotation(one) for one in _items(inner))
                return self.annotation(outer)[arguments if len(arguments) > 1 else arguments[0]]
            case ast.Name(id=name) if name in self.assigned:
                return self.annotation(self.assigned[name])
            case ast.Name(id=name) if name in _TYPES:
                return _TYPES[name]
            case ast.Name(id=name):
                module, original = self._imported(name)
                return module.annotation(ast.Name(original))
        raise _NeedsImport

    def value(self, node: ast.expr) -> Any:
        """Return the constant that `node` stands for; raises `_NeedsImport`."""
        if isinstance(node, ast.Name):
            if node.id in self.assigned:
                return self.value(self.assigned[node.id])
            module, original = self._imported(node.id)
            return module.value(ast.Name(original))
        if isinstance(node, (ast.Tuple, ast.List)):
            return tuple(self.value(one) for one in node.elts)
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise _NeedsImport from None

    def _imported(self, name: str) -> tuple[_Module, str]:
        module, original = self.imported.get(name, ("", ""))
        found = _read_module(module)
        if found is None or original not in {*found.assigned, *found.imported}:
            raise _NeedsImport
        return found, original


@cache
def read_parameters(target: str) -> dict[str, StaticParameter] | None:
    """Return the parameters of `target`, "module:name" of this package, by name; None where its source does not tell.

    The caller must not change what is returned.
    """
    module, _, name = target.partition(":")
    found = _read_module(module)
    node = None if found is None else found.defined.get(name)
    if found is None or node is None:
        return None
    try:
        if isinstance(node, ast.ClassDef):
            return _fields_of(found, node)
        return _arguments_of(found, node.args)
    except _NeedsImport:
        return None


@cache
def optimizer_options(name: str) -> list[str] | None:
    """Return the arguments of the optimizer `name` of `torch.optim` behind the weights; None where there is none."""
    return _torch_arguments("torch.optim", name)


@cache
def scheduler_options(name: str) -> list[str] | None:
    """Return the arguments of the scheduler `name` of `torch.optim.lr_scheduler` behind the optimizer, or None."""
    return _torch_arguments("torch.optim.lr_scheduler", name)


def _torch_arguments(module: str, name: str) -> list[str] | None:
    """Return the arguments of the class `name` in `module` of torch, behind self and the first; None if unknown."""
    tree = _read_module(module)
    if tree is None:
        return None
    if name not in tree.defined:
        origin = tree.imported.get(name, ("", ""))
        return None if origin[0] in ("", module) else _torch_arguments(*origin)
    made = next((one for one in _body(tree.defined[name]) if one.name == "__init__"), None)
    if made is None or made.args.vararg is not None or made.args.kwarg is not None:
        return None
    return [one.arg for one in (*made.args.posonlyargs, *made.args.args, *made.args.kwonlyargs)][2:]


@cache
def _read_module(module: str) -> _Module | None:
    """Return the tree of a module of this package or of torch; None of any other, and of one that cannot be read."""
    package, *path = module.split(".")
    if package == "torch":
        # Where torch lies can be told without importing it; where a module inside it lies, not.
        spec = find_spec("torch")
        folder = Path(spec.origin).parent.joinpath(*path) if spec is not None and spec.origin else None
        file = None if folder is None else folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    else:
        file = module_file(module) if package == __name__.partition(".")[0] else None
    if file is not None and not file.is_file():
        file = file.with_suffix("") / "__init__.py"
    try:
        return None if file is None else _Module(ast.parse(file.read_text("utf-8")))
    except (OSError, SyntaxError, ValueError):
        return None


def _fields_of(module: _Module, node: ast.ClassDef) -> dict[str, StaticParameter]:
    """Return what the constructor of a dataclass takes: its bases' fields first, then its own."""
    found: dict[str, StaticParameter] = {}
    for base in reversed(node.bases):
        found |= _base_fields(module, base)
    if made := next((one for one in _body(node) if one.name == "__init__"), None):
        return dict(list(_arguments_of(module, made.args).items())[1:])
    if not any(_name_of(one) == "dataclass" for one in node.decorator_list):
        return found
    for one in node.body:
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
            continue
        if _name_of(one.annotation) in ("ClassVar", "InitVar"):
            continue
        name, value = one.target.id, one.value
        options = {}
        if isinstance(value, ast.Call) and _name_of(value) == "field":
            options = {option.arg: option.value for option in value.keywords}
            value = options.get("default", options.get("default_factory"))
        if isinstance(init := options.get("init"), ast.Constant) and init.value is False:
            found.pop(name, None)
            continue
        found[name] = _parameter(module, name, one.annotation, value, _check_of(module, options.get("metadata")))
    return found


def _base_fields(module: _Module, base: ast.expr) -> dict[str, StaticParameter]:
    if isinstance(base, ast.Subscript):  # Base[T]
        base = base.value
    if not isinstance(base, ast.Name):
        return {}
    if isinstance(node := module.defined.get(base.id), ast.ClassDef):
        return _fields_of(module, node)
    target, original = module.imported.get(base.id, ("", ""))
    if not target.startswith(f"{__name__.partition('.')[0]}."):
        return {}  # Protocol, Generic, ABC: none of those has fields
    found = _read_module(target)
    while found is not None and original in found.imported:
        target, original = found.imported[original]
        found = _read_module(target)
    node = None if found is None else found.defined.get(original)
    if found is None or not isinstance(node, ast.ClassDef):
        raise _NeedsImport
    return _fields_of(found, node)


def _arguments_of(module: _Module, arguments: ast.arguments) -> dict[str, StaticParameter]:
    given = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(given) - len(arguments.defaults))
    pairs = [*zip(given, [*defaults, *arguments.defaults], strict=True)]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {
        one.arg: _parameter(module, one.arg, one.annotation, default)
        for one, default in pairs[len(arguments.posonlyargs) :]
    }


def _parameter(
    module: _Module,
    name: str,
    annotation: ast.expr | None,
    default: ast.expr | None,
    check: Callable[[Any], None] | None = None,
) -> StaticParameter:
    text = "" if annotation is None else ast.unparse(annotation)
    pieces = next((kind for kind, pattern in _PIECES.items() if re.search(pattern, text)), None)
    try:
        hint = Any if annotation is None else module.annotation(annotation)
    except (_NeedsImport, TypeError):
        hint = Any
    # What the default is does not matter here, but for there being one.
    return StaticParameter(name, hint, Signature.empty if default is None else None, pieces, check)


def _check_of(module: _Module, metadata: ast.expr | None) -> Callable[[Any], None] | None:
    """Return the check that the metadata of a field declare, where all of it is constant."""
    if not isinstance(metadata, ast.Call) or _name_of(metadata) not in _CHECKS:
        return None
    try:
        arguments = [module.value(one) for one in metadata.args]
        options = {str(one.arg): module.value(one.value) for one in metadata.keywords}
    except _NeedsImport:
        return None
    required: errors.Requirement = getattr(errors, _name_of(metadata))(*arguments, **options)
    return required["check"]


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in tree.body:
        # What is imported for the type checker alone is what annotations name.
        yield from node.body if isinstance(node, ast.If) and _name_of(node.test) == "TYPE_CHECKING" else [node]


def _body(node: ast.FunctionDef | ast.ClassDef) -> list[ast.FunctionDef]:
    return [one for one in node.body if isinstance(one, ast.FunctionDef)]


def _items(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _name_of(node: ast.expr) -> str:
    """Return the last name of what is called, subscripted or reached by dots; "" for anything else."""
    match node:
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return _name_of(inner)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""
