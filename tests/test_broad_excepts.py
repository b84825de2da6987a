"""An `except Exception` hides mistakes of ours: it stands where other people's code runs, or where it is raised again.

Whoever adds one adds its place here, with the reason.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.sources import parsed

ROOT = Path(__file__).resolve().parents[1]
BROAD = {"Exception", "BaseException"}

ALLOWED = {
    "splitfed/cli.py:main": "a mistake of ours is one line too, and --debug shows where it is",
    "splitfed/core/argument_kinds.py:guarded.checked": "raised again, or said of an argument of a wrong kind",
    "splitfed/core/errors.py:others_code": "whatever users wrote runs within, and what it raises is raised in one line",
    "splitfed/core/optimizer_arguments.py:construct": "a user's own optimizer or scheduler is made",
    "splitfed/core/replay_plan.py:_record": "a user's own forward runs",
    "splitfed/core/replay_constants.py:_find_by_shapes": "a user's own forward runs, on tensors without numbers",
    "splitfed/core/replay_constants.py:_ConstantsPass.operation": "torch asks a tensor without numbers for one",
    "splitfed/core/row_independence.py:_run_all": "a user's own module runs on rows that were made up",
    "splitfed/core/row_losses.py:loss_fault": "a user's own loss runs on rows that were made up",
    "splitfed/core/task_checks.py:_call": "a user's own loss or metric runs",
    "splitfed/core/task_checks.py:check_class_probabilities": "a user's own loss runs",
    "splitfed/data/transform.py:TransformedRows._apply": "a user's own transform runs",
    "splitfed/encryption/stages.py:read_stages": "a user's own forward is traced",
    "splitfed/models/build.py:_check_memory": "a plug-in's model is made without numbers; what it raises is warned of",
    "splitfed/models/import_paths.py:_import_target": "a user's own file is imported, and may even end the process",
    "splitfed/models/transformers.py:transformers": "classes of another package check their configuration as they like",
    "splitfed/registry.py:_load_plugin": "another package is imported",
    "splitfed/registry.py:read_head": "another package is imported; the list shows what it raises",
    "splitfed/study/config/assembly.py:build_model": "a user's own model is made",
    "splitfed/study/config/run_spec.py:NamedAlgorithm.call": "an algorithm of a user's own is made",
    "splitfed/study/config/lookup.py:StudyReader.find": "hints of a user's own class are run to be read",
    "splitfed/study/run/trials.py:detect_damage": "three libraries read a damaged file, each failing in its own way",
    "splitfed/study/run/workers.py:Workers.run": "workers are stopped before whatever it was goes on",
    "splitfed/training/description.py:_shown": "a user's own module shows itself, maybe by what it does not hold",
    "splitfed/training/identity.py:_parts": "an object of a user's own class is asked what a copy is made of",
    "splitfed/training/checkpoint.py:write_atomic": "half a file is deleted before whatever it was goes on",
}
"""Where -> why."""


def named(node: ast.expr | None) -> Iterator[str]:
    """Yield the names that an expression for classes of errors has; "BaseException" where it is left out."""
    match node:
        case None:
            yield "BaseException"
        case ast.Name(id=name) | ast.Attribute(attr=name):
            yield name
        case ast.Tuple(elts=elements):
            for element in elements:
                yield from named(element)


def is_broad(node: ast.AST) -> bool:
    """Return whether `node` catches every error, or is a tuple by which another place would."""
    match node:
        case ast.ExceptHandler(type=kind):
            return not BROAD.isdisjoint(named(kind))
        case ast.Call(func=ast.Name(id="suppress") | ast.Attribute(attr="suppress"), args=kinds):
            return any(not BROAD.isdisjoint(named(kind)) for kind in kinds)
        case ast.Assign(value=ast.Tuple() as kinds):
            return not BROAD.isdisjoint(named(kinds))
    return False


def places(tree: ast.AST, inside: tuple[str, ...] = ()) -> Iterator[tuple[str, ast.AST]]:
    """Yield every node that catches all errors, with the function that it stands in."""
    for node in ast.iter_child_nodes(tree):
        names = (node.name,) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else ()
        if is_broad(node):
            yield ".".join(inside), node
        yield from places(node, (*inside, *names))


@cache
def broad_excepts() -> list[tuple[str, ast.AST]]:
    return [
        (f"{file.relative_to(ROOT).as_posix()}:{where}", node)
        for top in ("splitfed", "attacks", "topologies")
        for file in sorted((ROOT / top).rglob("*.py"))
        for where, node in places(parsed(file.resolve()))
    ]


def test_errors_of_every_kind_are_caught_in_these_places_alone() -> None:
    assert Counter(where for where, _ in broad_excepts()) == Counter(ALLOWED.keys()), "say why, or name the errors"


def test_whoever_catches_all_errors_raises_or_names_the_error() -> None:
    """None of them is passed over in silence; whoever stops the process is passed on, but for an import that does."""
    for where, node in broad_excepts():
        assert isinstance(node, ast.ExceptHandler), where
        raised = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
        used = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        assert raised or node.name in used, f"{where} passes an error over"
        if "BaseException" in named(node.type):
            assert isinstance(node.body[-1], ast.Raise), f"{where} keeps an interrupt"


@pytest.mark.parametrize(
    "text",
    [
        "try: f()\nexcept: pass",
        "try: f()\nexcept (OSError, Exception): pass",
        "with contextlib.suppress(Exception): f()",
        "FAILURES = (ValueError, BaseException)",
    ],
)
def test_every_way_to_catch_all_errors_is_seen(text: str) -> None:
    assert [where for where, _ in places(ast.parse(text))] == [""]


def test_named_errors_are_no_broad_ones() -> None:
    assert not list(
        places(ast.parse("try: f()\nexcept (OSError, ValueError): pass\nFAILURES = (ValueError, KeyError)"))
    )
