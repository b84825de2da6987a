"""The library's own source, parsed once for all tests that read it and run in one process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    """Return the tree of the file `path`, resolved; nobody may change it."""
    return ast.parse(path.read_text("utf-8"), str(path))


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Return all nodes of `tree`, as `ast.walk` finds them."""
    return tuple(ast.walk(tree))
