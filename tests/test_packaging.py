"""The packages behind links are in the sdist and the wheel, and import beside folders of their names."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("attacks", "topologies")
# One worker of pytest-xdist builds for all tests of this file.
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Built:
    """`sources`: path in the package -> text, of every file under splitfed as the links show it."""

    sources: dict[str, bytes]
    sdist: Path
    wheel: Path


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Return what `command` prints; a failure shows all that it printed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=clean | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copy_checkout(target: Path) -> None:
    """Copy what git tracks or would track; links stay links."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        if source.is_symlink() or source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("packaging")
    checkout = folder / "checkout"
    copy_checkout(checkout)
    for name in LINKED:
        assert (checkout / "splitfed" / name).is_symlink()
    sources = {
        str(Path(parent, name).relative_to(checkout)): Path(parent, name).read_bytes()
        for parent, _, names in os.walk(checkout / "splitfed", followlinks=True)
        for name in names
    }
    # Without --sdist and --wheel the wheel is built from the sdist, so that what the sdist lacks is missed.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, checkout, cwd=folder)
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return Built(sources, sdist, wheel)


@pytest.mark.exhaustive
def test_sources_reach_through_the_links(built: Built) -> None:
    for name in LINKED:
        expected = {f"splitfed/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / name).rglob("*.py")}
        assert expected
        assert expected <= set(built.sources)


@pytest.mark.exhaustive
def test_sdist_holds_every_file_as_a_real_one(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        members = {member.name.partition("/")[2]: member for member in archive}
        missing = sorted(set(built.sources) - set(members))
        assert missing == []
        for name, content in built.sources.items():
            assert members[name].isreg(), f"{name} is a link in the sdist"
            file = archive.extractfile(members[name])
            assert file is not None
            assert file.read() == content, name


def test_sdist_holds_the_pages(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    pages = {page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").glob("*.md")}
    assert pages
    assert pages | {"README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "CITATION.cff"} <= held


def test_wheel_holds_every_file_as_a_real_one(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        held = {info.filename: info for info in archive.infolist() if info.filename.startswith("splitfed/")}
        assert sorted(held) == sorted(built.sources)
        for name, content in built.sources.items():
            assert held[name].external_attr >> 28 != 0o12, f"{name} is a link in the wheel"
            assert archive.read(name) == content, name
        others = {name.partition("/")[0] for name in archive.namelist()} - {"splitfed"}
        assert all(name.endswith(".dist-info") for name in others), f"the wheel also installs {others}"
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())


IMPORT_ALL = """
import importlib, json, pkgutil
found = {}
for name in ("attacks", "topologies"):
    own = importlib.import_module(name)
    ours = importlib.import_module("splitfed." + name)
    modules = [m.name for m in pkgutil.walk_packages(ours.__path__, f"splitfed.{name}.")]
    files = [importlib.import_module(m).__file__ for m in modules]
    found[name] = {"own": own.__file__, "ours": list(ours.__path__), "files": files}
print(json.dumps(found))
"""


@pytest.mark.exhaustive
def test_wheel_imports_beside_packages_of_the_same_names(built: Built, tmp_path: Path) -> None:
    target, work = tmp_path / "target", tmp_path / "work"
    install = ("install", "--quiet", "--no-deps", "--no-index", "--target", target, built.wheel)
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", *install, cwd=tmp_path)
    for name in LINKED:
        (work / name).mkdir(parents=True)
        (work / name / "__init__.py").touch()
    found = json.loads(run(sys.executable, "-c", IMPORT_ALL, cwd=work, PYTHONPATH=str(target)))
    for name in LINKED:
        package = target / "splitfed" / name
        assert found[name]["own"] == str(work / name / "__init__.py")
        assert found[name]["ours"] == [str(package)]
        there = {path.relative_to(ROOT / name) for path in (ROOT / name).rglob("*.py")} - {Path("__init__.py")}
        assert {Path(file).relative_to(package) for file in found[name]["files"]} == there


@pytest.fixture(scope="module")
def unlinked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout by git with `core.symlinks=false`: text files in place of links."""
    checkout = tmp_path_factory.mktemp("unlinked") / "checkout"
    copy_checkout(checkout)
    for name in LINKED:
        (checkout / "splitfed" / name).unlink()
        (checkout / "splitfed" / name).write_text(f"../{name}")
    return checkout


USE_ALL = """
import json
said = []
for code in ("import splitfed.attacks", "import splitfed; splitfed.attacks", "import splitfed.topologies.vanilla"):
    try:
        exec(code)
    except Exception as error:
        said.append(str(error))
    else:
        said.append(f"{code} does nothing")
print(json.dumps(said))
"""
TELL_ALL = """
from splitfed.cli import main
print([main(words) for words in (["list", "topologies", "--json"], ["plan", "splitfed/study/config/demo.toml"])])
"""


@pytest.mark.exhaustive
def test_a_checkout_without_links_says_what_to_do(unlinked: Path) -> None:
    done = subprocess.run([sys.executable, "-c", USE_ALL], cwd=unlinked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for said in json.loads(done.stdout):
        assert "is a text file in place of a link to the folder attacks: run `make setup`" in said
    given = [sys.executable, "-m", "splitfed", "list", "attacks"]
    done = subprocess.run(given, cwd=unlinked, capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "run `make setup`" in done.stderr
    done = subprocess.run([sys.executable, "-c", TELL_ALL], cwd=unlinked, capture_output=True, text=True, check=False)
    assert (done.stdout.splitlines()[-1], len(done.stderr.splitlines())) == ("[2, 2]", 2), done.stderr
    assert all("run `make setup`" in line for line in done.stderr.splitlines())


def test_a_wheel_of_a_checkout_without_links_holds_both_packages(unlinked: Path, built: Built, tmp_path: Path) -> None:
    """The links are repaired before packages are looked for, and stay repaired."""
    copied = tmp_path / "copied"
    shutil.copytree(unlinked, copied)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, copied, cwd=tmp_path)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        held = {name for name in archive.namelist() if name.startswith("splitfed/")}
    assert held == set(built.sources)
    assert all((copied / "splitfed" / name).is_symlink() for name in LINKED)


def test_a_source_that_lacks_a_package_is_not_built(unlinked: Path, tmp_path: Path) -> None:
    shutil.copytree(unlinked, tmp_path / "copied")
    shutil.rmtree(tmp_path / "copied" / "attacks")
    command = [sys.executable, "setup.py", "--name"]
    done = subprocess.run(command, cwd=tmp_path / "copied", capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "splitfed/attacks is missing, and so is attacks/: this source is incomplete\n"


@pytest.mark.exhaustive
def test_folders_in_place_of_links_are_left_alone(unlinked: Path, built: Built, tmp_path: Path) -> None:
    """As a junction of Windows looks to Python."""
    copied = tmp_path / "copied"
    shutil.copytree(unlinked, copied)
    for name in LINKED:
        (copied / "splitfed" / name).unlink()
        shutil.copytree(copied / name, copied / "splitfed" / name)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, copied, cwd=tmp_path)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        assert {name for name in archive.namelist() if name.startswith("splitfed/")} == set(built.sources)
    assert not any((copied / "splitfed" / name).is_symlink() for name in LINKED)


def test_every_version_of_python_that_is_promised_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    said = " :: Python :: 3."
    promised = [f"3.{one.partition(said)[2]}" for one in project["classifiers"] if said in one]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    tried = re.search(r"^PYTHONS := (.*)$", makefile, re.MULTILINE)
    assert tried is not None
    assert promised == tried[1].split()
    assert re.search(r"^test-all:.*\n(\t.*\n)*\t@\$\(MAKE\) .*test-pythons$", makefile, re.MULTILINE)
    assert project["requires-python"] == f">={promised[0]}"
    assert f"Python {promised[0]} to {promised[-1]}" in (ROOT / "README.md").read_text("utf-8")
