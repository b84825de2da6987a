"""Import paths of models: a class of `torch.nn.Module`, or a function beside the study; all else is never called."""

from __future__ import annotations

import ast
import importlib
import py_compile
import shutil
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from splitfed.core.errors import InvalidInput
from splitfed.models.build import make
from splitfed.models.import_paths import NameResolver
from tests.sources import nodes, parsed
from tests.study.examples import checked, placed, small

OWN = """
import functools
from os import system as borrowed
from subprocess import Popen
from torch import nn
import own_neighbour
Path("imported").touch() if False else None
class Holder:
    @staticmethod
    def flat(width): return nn.Linear(width, 1)
    @classmethod
    def other(cls, width): return nn.Linear(width, 2)
class Net(nn.Linear): pass
def full(shape, outputs, width=own_neighbour.WIDTH):
    return nn.Sequential(nn.Linear(*shape, width), nn.Linear(width, outputs))
def anything(**params): return nn.Linear(params['a'], params['b'])
def wrong(): return 'model'
def fails(): raise KeyError('weights')
cached = functools.lru_cache(full)
partial = functools.partial(full, width=3)
number = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    """Return a study's folder with modules in it, of which nothing is left in this process afterwards."""
    before, finders = set(sys.modules), list(sys.meta_path)
    (tmp_path / "own_models.py").write_text(OWN)
    (tmp_path / "own_neighbour.py").write_text("WIDTH = 4\n")
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("")
    (tmp_path / "own_package" / "deep.py").write_text("from . import wide\ndef net(): return wide.Net(2, 3)\n")
    (tmp_path / "own_package" / "wide.py").write_text("from torch.nn import Linear as Net\n")
    (tmp_path / "own_bare").mkdir()
    (tmp_path / "own_bare" / "net.py").write_text("from torch.nn import Linear\ndef net(): return Linear(2, 3)\n")
    yield tmp_path
    sys.meta_path[:] = finders
    for name in set(sys.modules) - before:
        if name.startswith("own_"):
            del sys.modules[name]


def made(own: Path, name: str, **params: Any) -> Any:
    return make(name, NameResolver(own).find(name), (3,), 2, 0, params)


def test_where_a_path_may_lead(own: Path) -> None:
    assert [tuple(p.shape) for p in made(own, "own_models:full").parameters()] == [(4, 3), (4,), (2, 4), (2,)]
    assert made(own, "own_models:full", width=5)[0].out_features == 5
    assert made(own, "own_models:Holder.flat", width=7).in_features == 7
    assert made(own, "own_models:Holder.other", width=7).out_features == 2
    assert made(own, "own_models:anything", a=1, b=2).out_features == 2
    assert made(own, "own_models:Net", in_features=1, out_features=2).in_features == 1
    assert made(own, "own_models:cached")[1].out_features == 2
    assert made(own, "own_package.deep:net").out_features == 3
    assert made(own, "own_bare.net:net").out_features == 3
    assert made(own, "own_models.py:full", width=5)[0].out_features == 5
    assert made(own, "own_package/deep.py:net").out_features == 3
    assert made(own, "torch.nn:Linear", in_features=1, out_features=2).in_features == 1
    assert str(own) not in sys.path


def test_what_was_run_is_told(own: Path) -> None:
    code = NameResolver(own)
    code.find("own_models:full")
    code.find("own_package.deep:net")
    assert code.sources() == {
        name: (own / name).read_bytes()
        for name in (
            *("own_models.py", "own_neighbour.py"),
            *("own_package/__init__.py", "own_package/deep.py", "own_package/wide.py"),
        )
    }


EXPECTED = "; expected a subclass of torch.nn.Module, or a function in a Python file of the study's folder"
BAD = [
    ("subprocess:Popen", "model 'subprocess:Popen' is part of Python itself, which has no models" + EXPECTED),
    ("os:system", "model 'os:system' is part of Python itself, which has no models" + EXPECTED),
    ("this:x", "model 'this:x' is part of Python itself, which has no models" + EXPECTED),
    ("builtins:exec", "model 'builtins:exec' is part of Python itself, which has no models" + EXPECTED),
    ("own_models:Popen", "model 'own_models:Popen' is a class, but no torch.nn.Module" + EXPECTED),
    ("own_models:Holder", "model 'own_models:Holder' is a class, but no torch.nn.Module" + EXPECTED),
    ("own_models:borrowed", "model 'own_models:borrowed' is a function from elsewhere" + EXPECTED),
    ("own_models:number", "model 'own_models:number' is a int" + EXPECTED),
    ("own_models:partial", "model 'own_models:partial' is a partial" + EXPECTED),
    ("own_models:own_neighbour", "model 'own_models:own_neighbour' is a module" + EXPECTED),
    ("torch:save", "model 'torch:save' is a function" + EXPECTED),
    ("torch.serialization:load", "model 'torch.serialization:load' is a function of another package" + EXPECTED),
    ("torch.hub:load", "model 'torch.hub:load' is a function of another package" + EXPECTED),
    ("numpy:ndarray", "model 'numpy:ndarray' is a class, but no torch.nn.Module" + EXPECTED),
    ("torch.nn:Lineer", "model 'torch.nn:Lineer': 'torch.nn' has no 'Lineer'"),
    ("own_models:fool", "model 'own_models:fool': 'own_models' has no 'fool'"),
    ("own_modelz:full", "model 'own_modelz:full': cannot import 'own_modelz' (No module named 'own_modelz')"),
    ("own_models.deep:full", "model 'own_models.deep:full': cannot import 'own_models.deep' (No module named"),
    (":full", "model ':full' is no import path; expected package.module:Name"),
    ("own_models:", "model 'own_models:' is no import path; expected package.module:Name"),
    ("..own_models:full", "model '..own_models:full' is no import path; expected package.module:Name"),
    ("own_models:full.__globals__", "model 'own_models:full.__globals__' is no import path; expected"),
    ("pip.__main__:main", "model 'pip.__main__:main' is no import path; expected package.module:Name"),
    ("own_models:full:x", "model 'own_models:full:x' is no import path; expected package.module:Name"),
    (
        "/tmp/x.py:full",
        "model '/tmp/x.py:full' is no import path; expected package.module:Name; your own in a file net",
    ),
    ("../own_models.py:full", "model '../own_models.py:full' is no import path; expected package.module:Name"),
    ("own_models.py:", "model 'own_models.py:' is no import path; expected package.module:Name; your own in a file ne"),
    ("own_modelz.py:full", "model 'own_modelz.py:full': cannot import 'own_modelz' (No module named 'own_modelz')"),
    ("own_broken:x", "model 'own_broken:x': cannot import 'own_broken' (ZeroDivisionError: division by zero)"),
    ("own_exits:x", "model 'own_exits:x': cannot import 'own_exits' (SystemExit: 3)"),
    ("own_syntax:x", "model 'own_syntax:x': cannot import 'own_syntax' (SyntaxError: "),
    ("own_needs:x", "model 'own_needs:x': cannot import 'own_needs' (No module named 'no_such_package')"),
    ("json:x", "model 'json:x': 'json' in '"),
    ("antigravity:y", "model 'antigravity:y': 'antigravity' in '"),
    ("safetensors:x", "model 'safetensors:x': 'safetensors' in '"),
    ("sqlalchemy:x", "model 'sqlalchemy:x': 'sqlalchemy' in '"),
]


@pytest.mark.parametrize(("path", "text"), BAD, ids=[path for path, _ in BAD])
def test_where_a_path_may_not_lead(own: Path, path: str, text: str) -> None:
    (own / "own_broken.py").write_text("1 / 0\n")
    (own / "own_exits.py").write_text("raise SystemExit(3)\n")
    (own / "own_syntax.py").write_text("def x(:\n")
    (own / "own_needs.py").write_text("import no_such_package\n")
    for name in ("json.py", "antigravity.py", "safetensors.py", "sqlalchemy.py"):
        (own / name).write_text("from torch.nn import Linear as x\n")
    with pytest.raises(InvalidInput) as caught:
        NameResolver(own).find(path)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


ARGUMENTS = [
    ("own_models:wrong", {}, "model 'own_models:wrong' returned a str; expected an nn.Module"),
    (
        "own_models:full",
        {"widht": 3},
        "unknown parameter of model 'own_models:full': 'widht'; did you mean 'width'? (allowed: width)",
    ),
    (
        "own_models:Holder.flat",
        {},
        "model 'own_models:Holder.flat' needs width; give it among the model's parameters",
    ),
    ("torch.nn:Linear", {"in_features": 3}, "model 'torch.nn:Linear' needs out_features; give it among the model's"),
]


@pytest.mark.parametrize(("path", "params", "text"), ARGUMENTS, ids=[path for path, *_ in ARGUMENTS])
def test_arguments_and_results_are_checked(own: Path, path: str, params: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        made(own, path, **params)
    assert str(caught.value).startswith(text)


def test_nothing_is_imported_to_find_that_it_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module elsewhere on Python's path, whose import would be noticed, in a package that would be too."""
    home = tmp_path / "elsewhere" / "noticed"
    home.mkdir(parents=True)
    text = f"import pathlib\npathlib.Path({str(tmp_path / 'noticed')!r}).touch()\n"
    (home / "__init__.py").write_text(text)
    (home / "deep.py").write_text(text + "def function(): pass\nclass Net: pass\n")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    for path in ("noticed.deep:function", "noticed.deep:missing", "noticed.other:Net", "noticed.deep.more:Net"):
        with pytest.raises(InvalidInput):
            NameResolver(tmp_path).find(path)
        assert not (tmp_path / "noticed").exists(), path
    with pytest.raises(InvalidInput, match=r"is a class, but no torch\.nn\.Module"):
        NameResolver(tmp_path).find("noticed.deep:Net")  # what only the module itself can say
    assert (tmp_path / "noticed").exists()
    for name in ("noticed", "noticed.deep"):
        del sys.modules[name]


def test_only_known_files_are_run_and_only_their_source(own: Path) -> None:
    files = {name: sha256((own / name).read_bytes()).hexdigest() for name in ("own_models.py", "own_neighbour.py")}
    bad = own / "bad.py"
    bad.write_text("raise RuntimeError('the compiled file was run')\n")
    compiled = Path(importlib.util.cache_from_source(str(own / "own_neighbour.py")))
    py_compile.compile(str(bad), str(compiled), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    assert NameResolver(own, files).find("own_models:full").__defaults__ == (4,)  # type: ignore[attr-defined]
    with pytest.raises(InvalidInput, match=r"\(No module named 'own_package\.deep'\)"):
        NameResolver(own, files).find("own_package.deep:net")
    (own / "own_neighbour.py").write_text("WIDTH = 5\n")
    with pytest.raises(InvalidInput, match=r"cannot import 'own_models' \(own_neighbour.py has changed\)"):
        NameResolver(own, files).find("own_models:full")
    assert NameResolver(own).find("own_models:full").__defaults__ == (5,)  # type: ignore[attr-defined]


@pytest.mark.parametrize("loaded", [False, True], ids=["on the path", "loaded"])
def test_known_files_go_before_their_originals(own: Path, monkeypatch: pytest.MonkeyPatch, loaded: bool) -> None:
    """As of a run, whose copies are asked for where the study's folder is on Python's path, or has been imported."""
    kept = own / "kept"
    shutil.copytree(own / "own_package", kept / "own_package")
    for name in ("own_models.py", "own_neighbour.py"):
        shutil.copy(own / name, kept / name)
    (own / "own_neighbour.py").write_text("WIDTH = 6\n")
    files = {f.relative_to(kept).as_posix(): sha256(f.read_bytes()).hexdigest() for f in kept.rglob("*.py")}
    monkeypatch.syspath_prepend(own)
    originals = {}
    if loaded:
        for name in ("own_models", "own_package.deep"):
            importlib.import_module(name)
        originals = {name: module for name, module in sys.modules.items() if name.startswith("own_")}
        assert len(originals) == 5
    code = NameResolver(kept, files)
    assert code.find("own_models:full").__defaults__ == (4,)  # type: ignore[attr-defined]
    code.find("own_package.deep:net")
    assert set(code.sources()) == set(files)
    other = own / "other"
    other.mkdir()
    (other / "own_third.py").write_text("def net(): pass\n")
    NameResolver(other).find("own_third:net")
    assert {name: sys.modules[name] for name in originals} == originals


def test_a_worker_is_told_where_paths_may_lead(own: Path) -> None:
    """As the process says that has checked them: what has changed since is refused, and so is what was refused."""
    files = {name: sha256((own / name).read_bytes()).hexdigest() for name in ("own_models.py", "own_neighbour.py")}
    known = NameResolver(own, files).to_json()
    assert NameResolver.from_json(known).find("own_models:full").__defaults__ == (4,)  # type: ignore[attr-defined]
    (own / "own_neighbour.py").write_text("WIDTH = 5\n")
    with pytest.raises(InvalidInput, match=r"own_neighbour.py has changed"):
        NameResolver.from_json(known).find("own_models:full")
    with pytest.raises(InvalidInput, match=r"^no$"):
        NameResolver.from_json(NameResolver(refusal="no").to_json()).find("torch.nn:Linear")


def test_known_files_do_not_go_before_installed_packages(own: Path) -> None:
    (own / "jinja2.py").write_text("def net(): pass\n")
    (own / "sqlalchemy.py").write_text("def net(): pass\n")
    files = {name: sha256((own / name).read_bytes()).hexdigest() for name in ("jinja2.py", "sqlalchemy.py")}
    importlib.import_module("jinja2")
    for name in ("jinja2", "sqlalchemy"):
        with pytest.raises(InvalidInput, match=f"{name!r} in .* has the name of a module of Python, of an installed"):
            NameResolver(own, files).find(f"{name}:net")
    assert "site-packages" in str(sys.modules["jinja2"].__file__)


@pytest.mark.parametrize("loaded", [False, True], ids=["on the path", "loaded"])
def test_a_path_through_a_link_leads_to_the_same_file(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: bool
) -> None:
    (own / "study").mkdir()
    (own / "study" / "own_linked.py").write_text("from torch import nn\nclass Net(nn.Linear): pass\n")
    (tmp_path / "link").symlink_to(own / "study")
    monkeypatch.syspath_prepend(tmp_path / "link")
    there = importlib.import_module("own_linked") if loaded else None
    found = NameResolver(own / "study").find("own_linked:Net")
    assert there is None or found is there.Net


def test_two_folders_have_modules_of_their_own(tmp_path: Path, own: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "own_models.py").write_text("from torch.nn import Linear\ndef full(): return Linear(8, 9)\n")
    for _ in range(2):
        assert made(own, "own_models:full")[0].in_features == 3
        assert made(other, "own_models:full").in_features == 8


def test_a_study_is_told_where_its_mistake_is(own: Path) -> None:
    (own / "own_fails.py").write_text("def net(): raise KeyError('weights')\n")
    for name, text in (
        ("subprocess:Popen", "model 'subprocess:Popen' is part of Python itself"),
        ("own_fails:net", "model own_fails:net cannot be built: KeyError: 'weights'"),
    ):
        for cut in ("relu1", "auto"):
            with pytest.raises(InvalidInput) as caught:
                checked(small(model={"name": name}, topology=[{"name": "vanilla", "cut": cut}]), own)
            assert str(caught.value).startswith(f"study.toml: model: {text}")
        study = placed("vertical")
        study["topology"][0]["bottoms"]["right"] = {"model": name}
        with pytest.raises(InvalidInput) as caught:
            checked(study, own)
        assert str(caught.value).startswith(f"study.toml: topology[0].bottoms.right: {text}")


def test_methods_have_models_by_the_same_rules(own: Path) -> None:
    study = small(
        data={"name": "digits", "victims": 8, "auxiliary": 32, "clients": 2},
        method=[{"name": "fml", "meme": {"model": "subprocess:Popen", "args": ["touch", str(own / "run")]}}],
        topology=[{"name": "local", "cuts": ["relu1"]}],
        training={"rounds": 1, "batch_size": 64, "schedule": "independent"},
        defense=None,
        attack=None,
    )
    with pytest.raises(InvalidInput, match=r"^study.toml: method\[0\]: model 'subprocess:Popen' is part of Python"):
        checked(study, own)
    assert not (own / "run").exists()


def test_modules_are_imported_by_name_in_few_places() -> None:
    """Whatever imports by a name that it was given stands in this list, or follows the rules above."""
    root = Path(__file__).resolve().parents[2]
    ways = {"import_module", "resolve_name", "__import__", "run_module", "run_path", "exec", "eval", "literal_eval"}
    found = set()
    for file in [f for top in ("splitfed", "attacks", "topologies") for f in (root / top).rglob("*.py")]:
        for node in nodes(parsed(file.resolve())):
            named = node.func if isinstance(node, ast.Call) else None
            name = named.id if isinstance(named, ast.Name) else getattr(named, "attr", None)
            # Methods such as module.eval() are no builtins.
            if name in ways and (isinstance(named, ast.Name) or name not in ("eval", "exec")):
                found.add(file.relative_to(root).as_posix())
    assert found == {
        "splitfed/cli.py",  # a module of its own, by a constant name
        "splitfed/core/object_kinds.py",  # the numbers in the text of an itertools.count
        "splitfed/core/lazy_package.py",
        "splitfed/registry.py",
        "splitfed/models/import_paths.py",
        # Value classes of this package's own rooms alone.
        "splitfed/training/arguments.py",
        # Names that stand in the code.
        "splitfed/study/__init__.py",
        "splitfed/training/writers.py",
    }
    assert issubclass(nn.Linear, nn.Module)
