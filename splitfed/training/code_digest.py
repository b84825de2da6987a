"""A digest of a function's code: by its syntax tree where its source is at hand, and by its bytecode.

Comments, layout, docstrings and annotations do not count. The bytecode tells the truth of what runs, but only within
one version of Python; the tree is the same for all of them, and is used where the source on the disk is, once
compiled, the very code that runs.
"""

from __future__ import annotations

import ast
import dis
import linecache
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import Any

from splitfed.core import digests
from splitfed.core.grouping import group_pairs

_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
_IDLE = {"NOP", "RESUME", "CACHE", "EXTENDED_ARG", "MAKE_CELL", "COPY_FREE_VARS", "PRECALL"}
# Fields of a syntax tree that change nothing of what runs.
_WORDLESS = {"annotation", "returns", "type_comment", "kind", "ctx", "type_params"}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def digest(code: CodeType) -> str:
    """Return the digest of `code`: `source:...` where its source is known, and `python3.11:...`, its bytecode's."""
    tree = _tree(code)
    parts = [] if tree is None else [f"source:{_short(_write_node(tree, top=True))}"]
    return " ".join([*parts, f"{_PYTHON}:{_short(_bytecode(code))}"])


def same_code(first: str, second: str) -> bool:
    """Return whether two digests are of the same code: by the source where both have one, else by the bytecode."""
    one, other = (dict(part.partition(":")[::2] for part in text.split()) for text in (first, second))
    kinds = [kind for kind in one if kind in other]
    return bool(kinds) and one[kinds[0]] == other[kinds[0]]


def nested_code(code: CodeType) -> Iterator[CodeType]:
    """Yield `code` and the code of everything defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested_code(constant)


def _short(text: str) -> str:
    return digests.of(text.encode("utf-8", "surrogatepass"))[:16]


def _tree(code: CodeType) -> ast.AST | None:
    """Return the definition of `code` in its file; None where it is not there, or not the one that runs."""
    linecache.checkcache(code.co_filename)
    text = "".join(linecache.getlines(code.co_filename))
    if not text:
        return None
    known, found = _parse_definitions(code.co_filename, text)
    key = (code.co_name, code.co_firstlineno)
    if len(found.get(key, ())) != 1 or not any(_equal(code, other) for other in known.get(key, ())):
        return None
    return found[key][0]


Place = tuple[str, int]


@lru_cache(maxsize=32)
def _parse_definitions(name: str, text: str) -> tuple[dict[Place, list[CodeType]], dict[Place, list[ast.AST]]]:
    """Return the code and the definitions in a source file, by their name and first line."""
    try:
        whole = ast.parse(text)
        compiled = compile(text, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return {}, {}
    codes = group_pairs(((code.co_name, code.co_firstlineno), code) for code in nested_code(compiled))
    return codes, group_pairs((place, node) for node in ast.walk(whole) if (place := _place_of(node)) is not None)


def _place_of(node: ast.AST) -> Place | None:
    """Return the name and the first line of a definition, decorators included; None of any other node."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return node.name, min([node.lineno, *(one.lineno for one in node.decorator_list)])
        case ast.Lambda():
            return "<lambda>", node.lineno
    return None


def _equal(code: CodeType, other: object) -> bool:
    """Return whether two pieces of code do the same in the same words, wherever they stand."""
    if not isinstance(other, CodeType) or len(code.co_consts) != len(other.co_consts):
        return False
    names = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_kwonlyargcount")
    return all(getattr(code, name) == getattr(other, name) for name in names) and all(
        _equal(a, b) if isinstance(a, CodeType) else (type(a), repr(a)) == (type(b), repr(b))
        for a, b in zip(code.co_consts, other.co_consts, strict=True)
    )


def _write_node(node: Any, top: bool = False) -> str:
    """Write a syntax tree down without what changes nothing; of a definition on its own the name is left out too."""
    if isinstance(node, list):
        return "[" + ", ".join(map(_write_node, node)) + "]"
    if not isinstance(node, ast.AST):
        return f"{type(node).__name__} {node!r}"
    parts = []
    for name, value in ast.iter_fields(node):
        if name in _WORDLESS or value is None or (top and name == "name"):
            continue
        if name == "body" and isinstance(node, _DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
            value = value[1:]
        if value != []:
            parts.append(f"{name}={_write_node(value)}")
    return f"{type(node).__name__}({', '.join(parts)})"


def _bytecode(code: CodeType) -> str:
    """Write the instructions down: names and constants in place of their numbers, without lines."""
    instructions = [one for one in dis.get_instructions(code) if one.opname not in _IDLE]
    lines = [f"{code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount} {code.co_varnames}"]
    jumps = {*dis.hasjabs, *dis.hasjrel}
    for one in instructions:
        match one.argval:
            case place if one.opcode in jumps:
                what = str(sum(other.offset < place for other in instructions))
            case CodeType():
                what = _bytecode(one.argval)
            case frozenset():
                what = str(sorted(map(repr, one.argval)))
            case str(name) if "<locals>" in name:
                # The name of a function defined inside says where it stands.
                what = ""
            case _:
                what = repr(one.argval)
        lines.append(f"{one.opname} {what}")
    return "\n".join(lines)
