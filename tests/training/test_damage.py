"""One changed character in any file of a folder is told by name, or changes nothing of what is found."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitfed.cli import main
from splitfed.core import digests
from splitfed.core.digests import Damaged
from splitfed.study.report.figures import federated
from splitfed.study.run.progress import Lines
from tests.study.examples import small, write

# Class means that clients send, recorded at who receives them: every kind of file that a run can have.
STUDY = small(
    study={"name": "damage", "seeds": [0]},
    data={"name": "digits", "clients": 2, "victims": 8, "auxiliary": 32},
    training={"rounds": 2, "schedule": "independent", "record": {"parties": ["fed_server"]}},
    topology=[{"name": "local", "cuts": ["relu1"]}],
    method=[{"name": "fedproto"}],
    defense=[{"name": "none"}],
    attack=[{"name": "class_shares"}],
)
Told = tuple[int, str, str]
Use = Callable[[Path, pytest.CaptureFixture[str]], Told]


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> Told:
    """Return exit code, standard output and standard error of a command."""
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code = main([str(one) for one in arguments])
    return code, *capsys.readouterr()


def the_run(folder: Path) -> Path:
    (found,) = (folder / "runs").iterdir()
    return found


def resume(folder: Path, capsys: pytest.CaptureFixture[str]) -> Told:
    code, _, err = call(capsys, "run", folder.parent / "study.toml", "--folder", folder, "--resume")
    # What training found; the clock is not to be the same.
    result = the_run(folder) / "result.json"
    return code, json.dumps(timeless(json.loads(result.read_bytes()))) if code == 0 else "", err


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key not in ("seconds", "digest")}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def report(folder: Path, capsys: pytest.CaptureFixture[str]) -> Told:
    code, out, err = call(capsys, "report", folder, "--json")
    return code, out, err


def read_back(folder: Path, capsys: pytest.CaptureFixture[str]) -> Told:
    code, out, err = call(capsys, "attack", the_run(folder), "--attack", "class_shares", "--json")
    return code, json.dumps(timeless(json.loads(out))) if code == 0 else "", err


def attack(folder: Path, capsys: pytest.CaptureFixture[str]) -> Told:
    code, out, err = call(capsys, "attack", the_run(folder), "--attack", "prototype_membership", "--json")
    return code, json.dumps(timeless(json.loads(out))) if code == 0 else "", err


def predict(folder: Path, capsys: pytest.CaptureFixture[str]) -> Told:
    code, out, err = call(capsys, "predict", the_run(folder), "--input", folder.parent / "rows.npy", "--json")
    return code, json.dumps(json.loads(out.splitlines()[-1])["predictions"]) if code == 0 else "", err


USES: dict[str, Use] = {u.__name__: u for u in (resume, report, read_back, attack, predict)}


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Leave out to arrange the dots of one picture, which takes longer than all else."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(federated, "plot_prototypes", lambda found, name: str(len(found.z)))
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study in `whole`, the same one interrupted after the first round in `half`."""
    folder = tmp_path_factory.mktemp("damage")
    path = write(folder, STUDY)
    np.save(folder / "rows.npy", np.linspace(0, 1, 128, dtype=np.float32).reshape(2, 1, 8, 8))
    assert main(["run", str(path), "--folder", str(folder / "whole")]) == 0

    def stop(self: Lines, done: int, total: int, epsilon: float | None = None) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Lines, "round", stop)
        assert main(["run", str(path), "--folder", str(folder / "half")]) == 130
    return folder


@pytest.fixture
def copy(home: Path, tmp_path: Path) -> Callable[[str], Path]:
    def make(which: str) -> Path:
        """Return a fresh copy, always at the same place: a path that is told is the same too."""
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        for name in ("study.toml", "rows.npy"):
            shutil.copy(home / name, tmp_path / name)
        return Path(shutil.copytree(home / which, tmp_path / "out"))

    return make


def flip(path: Path, place: int) -> None:
    """Change one character: into another printable one where it was one."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


# File of the run or the study, who reads it, and what is to be done.
READ = [
    ("runs/*/run.json", "predict", "put back a copy of it, or delete the run's folder and train the run again"),
    ("runs/*/environment.json", "predict", "delete it: it is written anew"),
    ("runs/*/config.toml", "predict", "delete it and result.json beside it, and run the study again with --resume"),
    ("runs/*/metrics.jsonl", "attack", "put back a copy of it, or delete the run's folder"),
    ("runs/*/result.json", "resume", "delete it and run the study again with --resume"),
    ("runs/*/result.json", "report", "delete it and run the study again with --resume"),
    ("runs/*/attacks/class_shares.json", "read_back", "delete it and repeat the command"),
    ("runs/*/attacks/class_shares.safetensors", "read_back", "delete it and class_shares.json and repeat the command"),
    ("runs/*/prototypes.safetensors", "report", "delete it and result.json, and run the study again with --resume"),
    ("runs/*/views/fed_server/part-00000.safetensors", "attack", "put back a copy of it"),
    ("config.toml", "resume", "put back a copy of it, or run the study in another folder"),
    ("config.toml", "report", "put back a copy of it, or run the study in another folder"),
    ("environment.json", "report", "delete it to go on without it"),
]


@pytest.mark.parametrize(("file", "use", "advice"), READ, ids=[f"{f.rpartition('/')[2]} by {u}" for f, u, _ in READ])
def test_a_damaged_file_is_named_by_who_reads_it(
    file: str, use: str, advice: str, copy: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy("whole")
    (path,) = folder.glob(file)
    # In what it says: not in a space, not in the digest itself.
    text = path.read_bytes()
    flip(path, next(i for i in range(len(text) // 2, len(text)) if text[i : i + 1].isalnum()))
    code, _, err = USES[use](folder, capsys)
    (line,) = err.splitlines()
    assert code == 2
    assert f"{path} is damaged: " in line
    assert advice in line


def test_a_damaged_checkpoint_is_told_and_the_one_before_gives_the_same(
    copy: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    expected = predict(copy("whole"), capsys)
    for name in ("manifest.json", "run.safetensors", "party-client0.safetensors"):
        folder = copy("whole")
        path = the_run(folder) / "checkpoints" / "000001" / name
        content = path.read_bytes()
        flip(path, content.index(b'"round": 1') + 9 if name == "manifest.json" else len(content) // 2)
        code, out, err = predict(folder, capsys)
        assert (code, out) == expected[:2]
        assert err == f"warning: {path} is damaged; the run goes on from the checkpoint of round 0\n"


def test_metrics_of_another_run_are_not_taken(copy: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Whole lines, each with a digest that follows from those before, but from another beginning."""
    folder = copy("whole")
    path = the_run(folder) / "metrics.jsonl"
    start, lines = "another", b""
    for line in path.read_text().splitlines():
        entry = {key: value for key, value in json.loads(line).items() if key != "digest"}
        lines, start = lines + digests.link(start, entry), digests.chain(start, entry)
    path.write_bytes(lines)
    code, _, err = predict(folder, capsys)
    assert code == 2
    assert err.startswith(f"{path} is damaged: the line of round 0 does not match its digest; put back")


def test_a_last_line_that_a_crash_cut_short_is_no_damage(
    copy: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    expected = resume(copy("half"), capsys)
    assert expected[0] == 0
    folder = copy("half")
    path = the_run(folder) / "metrics.jsonl"
    whole = path.read_bytes()
    assert whole.count(b"\n") == 1
    path.write_bytes(whole + whole[:-20])
    assert resume(folder, capsys)[:2] == expected[:2]
    # A line that the checkpoint counts on is missed, however it was lost.
    folder = copy("half")
    path.write_bytes(whole[:-20])
    code, _, err = resume(folder, capsys)
    assert code == 2
    assert "metrics.jsonl is damaged: the line of round 0" in err


def test_a_study_that_was_copied_from_a_folder_and_changed_says_how(
    copy: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy("whole") / "config.toml"
    text = path.read_text()
    path.write_text(text.replace("rounds = 2", "rounds = 3"))
    code, _, err = call(capsys, "plan", path)
    assert code == 2
    assert err.endswith("its content does not match its digest; take out its last line if it was changed on purpose\n")
    path.write_text(text.partition(digests.COMMENT)[0].replace("rounds = 2", "rounds = 3"))
    assert call(capsys, "plan", path, "--schedules", "independent", "--json")[0] == 0


def test_a_document_without_its_digest_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    for content, why in (
        (b'{"a": 1}', "it holds no digest of its content"),
        (b"[1]", "it holds no digest of its content"),
        (b'{"a": 1', "it is no JSON"),
        (b"\xff", "it is no JSON"),
        (b"[" * 100_000, "it is no JSON"),
    ):
        path.write_bytes(content)
        with pytest.raises(Damaged, match=f"result.json is damaged: {why}; do this"):
            digests.read(path, "do this")
    path.write_bytes(digests.json_with_digest({"a": [1, 2.5, None, "ü"], "b": {"c": float("nan")}}))
    assert digests.read(path, "")["a"] == [1, 2.5, None, "ü"]
    path.write_bytes(path.read_bytes().replace(b" ", b"  "))  # spaces say nothing
    assert digests.read(path, "")["a"][0] == 1


def damaged_places(path: Path, count: int) -> Iterator[int]:
    """Yield the first, the last and some other places of a file, always the same ones."""
    size = path.stat().st_size
    drawn = random.Random(path.name)
    yield from {0, size - 1, *(drawn.randrange(size) for _ in range(count))} if size else ()


def told_or_harmless(found: Told, expected: Told, path: Path) -> str | None:
    """Return what is wrong with how a use took a damaged `path`; None where nothing is."""
    code, out, err = found
    last = err.splitlines()[-1] if err else ""
    if code == 0:
        return None if out == expected[1] else f"another outcome, in silence: {out[:200]} not {expected[1][:200]}"
    named = path.name in last or (path.name.startswith("study.db") and "study.db" in last)
    return None if code == 2 and named and ";" in last else f"exit {code}: {err[-300:]}"


# What is written anew from the results: nobody reads it.
DERIVED = (".html", ".csv", ".parquet", ".lock", ".turn")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("which", "use"), [*(("whole", use) for use in USES), ("half", "resume")])
def test_every_file_at_several_places(
    which: str, use: str, copy: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    expected = USES[use](copy(which), capsys)
    assert expected[0] == 0, expected
    files = sorted(str(p.relative_to(copy(which))) for p in copy(which).rglob("*") if p.is_file())
    wrong = []
    for file in files:
        for place in damaged_places(copy(which) / file, 0 if file.endswith(DERIVED) else 2):
            folder = copy(which)
            flip(folder / file, place)
            complaint = told_or_harmless(USES[use](folder, capsys), expected, folder / file)
            if complaint is not None:
                wrong.append(f"{file} at {place}: {complaint}")
    assert not wrong, "\n".join(wrong)
