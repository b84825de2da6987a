"""Results that are whole JSON of another form than is written: one line that names the folder, no internal error."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import splitfed as sf
from splitfed.cli import main
from splitfed.core import digests
from splitfed.core.errors import SplitfedError
from tests.study.examples import small, write

DELETED = object()
VALUES: tuple[Any, ...] = (DELETED, None, 3, "x", [], {}, [None], -1.5)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every value of a document, of lists to the first two alone."""
    if at:
        yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*at, key))


def put(path: Path, at: tuple[Any, ...], value: Any) -> None:
    """Put `value` into the document at `path`, with a digest that fits, as a stranger would."""
    document = copy.deepcopy(json.loads(path.read_bytes()))
    document.pop(digests.FIELD, None)
    holder = document
    for key in at[:-1]:
        holder = holder[key]
    if value is DELETED:
        del holder[at[-1]]
    else:
        holder[at[-1]] = value
    path.write_bytes(digests.json_with_digest(document))


def read_all(folder: Path, other: Path) -> Iterator[str]:
    """Yield what goes wrong by an error that is not of this package when everything reads the folder."""
    (run,) = (folder / "runs").iterdir()
    study = sf.load_study(folder, trust=True)
    for what, call in {
        "load": lambda: sf.load(run, trust=True),
        "report": study.report,
        "compare": lambda: sf.compare(folder, other, trust=True),
        "frame": study.frame,
        "rounds": lambda: study.frame(rounds=True),
        "html": study._repr_html_,
        "repr": lambda: repr(study),
    }.items():
        try:
            call()
        except SplitfedError as error:
            if len(str(error).splitlines()) > 1:
                yield f"{what}: {error}"
        except Exception as error:  # noqa: BLE001
            yield f"{what}: {type(error).__name__}: {error}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of one private run with a ledger, weights that are sent, and an attack."""
    home = tmp_path_factory.mktemp("malformed")
    data = {"name": "digits", "clients": 3, "auxiliary": 60, "victims": 8}
    training = {"rounds": 1, "schedule": "splitfed_v1"}
    guard = {"name": "dp_sgd", "max_norm": 1.0, "epsilon": 8.0, "delta": 1e-3}
    path = write(home, small(data=data, training=training, defense=[guard], attack=[{"name": "linear_inverse"}]))
    assert main(["run", str(path), "--folder", str(home / "study")]) == 0
    return home / "study"


def mutate(study: Path, tmp_path: Path, count: int, seed: int) -> Iterator[str]:
    """Yield what goes wrong with `count` changed documents of a study."""
    (run,) = (study / "runs").iterdir()
    ways = [(name, at) for name in ("result.json", "run.json") for at in places(json.loads((run / name).read_bytes()))]
    drawn = random.Random(seed)
    for number in range(count):
        name, at = drawn.choice(ways)
        value = drawn.choice(VALUES)
        folder = tmp_path / str(number)
        shutil.copytree(study, folder)
        put(folder / "runs" / run.name / name, at, value)
        for said in read_all(folder, study):
            yield f"{name} {at} = {value!r}: {said}"
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (("privacy", "ledger"), []),
        (("attacks", 0, "scores"), DELETED),
        (("bytes_by_kind", "weights"), []),
        (("privacy", "ledger", "lines", 0, "epsilon"), DELETED),
    ],
)
def test_a_malformed_result_is_one_line(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], at: tuple[Any, ...], value: Any
) -> None:
    study = shutil.copytree(finished, tmp_path / "study")
    (run,) = (study / "runs").iterdir()
    put(run / "result.json", at, value)
    assert main(["report", str(study)]) == 2
    said = capsys.readouterr().err
    assert "holds a document of another form than splitfed writes" in said
    assert str(study) in said
    assert len(said.splitlines()) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(3))
def test_no_malformed_document_is_an_internal_error(finished: Path, tmp_path: Path, seed: int) -> None:
    assert not list(mutate(finished, tmp_path, 40, seed))
