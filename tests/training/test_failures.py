"""What the machine refuses, and requests to stop: one line, the exit code, what to type next, and nothing lost."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from splitfed import cli
from splitfed.cli import main
from splitfed.core.errors import InvalidInput
from splitfed.study.run import checked_study, failures, session, workers
from splitfed.study.run.progress import Lines
from splitfed.training import checkpoint
from tests.study.examples import small, write
from tests.study.test_run import outcome

LEAST: dict[str, Any] = {"defense": [{"name": "none"}]}


def refuse(number: int) -> Callable[..., Any]:
    def refused(*arguments: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return refused


def run(path: Path, folder: Path, *more: str) -> int:
    return main(["run", str(path), "--folder", str(folder), *more])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("whole")
    assert run(write(home, small(**LEAST)), home / "out") == 0
    return home / "out"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS], ids=lambda number: errno.errorcode[number])
def test_what_the_machine_refuses_is_one_line_and_the_study_goes_on(
    number: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The first file that is flushed to the disk in the second round cannot be."""
    path, folder = write(tmp_path, small(**LEAST)), tmp_path / "out"
    with monkeypatch.context() as patched:
        done = Lines.round

        def round(self: Lines, number_of: int, total: int, epsilon: float | None = None) -> None:
            done(self, number_of, total)
            patched.setattr(checkpoint.os, "fsync", refuse(number))

        patched.setattr(Lines, "round", round)
        assert run(path, folder) == 2
    (line,) = capsys.readouterr().err.splitlines()
    told = {
        errno.ENOSPC: "the disk is full; free some space, then go on with splitfed run",
        errno.EROFS: "the file system is read-only; give another folder, or make that one writable, then go on with",
    }
    assert told[number] in line
    assert line.endswith(" --resume")
    # Half a file would take the room that the next try needs.
    assert not list(folder.rglob("*.tmp"))
    if number == errno.ENOSPC:
        assert run(path, folder, "--resume") == 0
        assert outcome(folder) == outcome(whole)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("I/O error: No space left on device (os error 28)"), "the disk is full"),
        (RuntimeError("(sqlite3.OperationalError) database or disk is full"), "the disk is full"),
        (
            RuntimeError("attempt to write a readonly database"),
            "the file system is read-only",
        ),
        (RuntimeError("unable to open database file"), "study.db cannot be opened"),
        (RuntimeError("can't start new thread"), "no memory or thread is left for another thread"),
        (RuntimeError("database is locked"), "study.db is locked by another program"),
        (ImportError("libx.so: cannot open shared object file: Too many open files"), "too many open files"),
        (MemoryError(), "out of memory"),
        (OSError(errno.EDQUOT, "", "f"), "f: the disk quota is used up"),
        (OSError(errno.EACCES, "", "f"), "f: permission denied"),
        (OSError(errno.EIO, "", "f"), "f: the disk cannot be read or written"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "a" * 300), "the name is too long"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_libraries_that_hide_the_number_are_understood(error: Exception, text: str) -> None:
    outer = ValueError("something else")
    outer.__cause__ = error
    found = failures.explain_failure(outer)
    assert found is not None
    assert found[0].endswith(text)
    assert failures.explain_failure(ValueError("something else")) is None


def test_a_full_disk_behind_standard_output_is_told(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this machine has no /dev/full")
    command = [sys.executable, "-m", "splitfed.cli", "list"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "the disk is full; free some space, then go on with splitfed list\n")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Undo what a shell does to whom it starts in the background: they are not to hear of Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_caller_of_workers_is_interrupted_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that cannot be started leave the handlers of a Python program as they found them."""
    ready = checked_study.prepare_study(write(tmp_path, small()))
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(workers.subprocess, "Popen", refuse(errno.EMFILE))
    with pytest.raises(OSError, match="Too many open files"):
        session.run_study(ready, tmp_path / "out", workers=2)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("kind", "code", "word"), [("SIGTERM", 143, "terminated"), ("SIGINT", 130, "interrupted")])
def test_a_request_to_stop_is_one_line_and_the_checkpoint_goes_on(
    kind: str, code: int, word: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path, folder = write(tmp_path, small(**LEAST)), tmp_path / "out"
    # A process in the background of a shell does not listen to the keyboard.
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patched:
        # Twice, as by somebody without patience.
        patched.setattr(Lines, "round", lambda *a: [os.kill(os.getpid(), getattr(signal, kind)) for _ in "12"])
        code_found = run(path, folder)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    signal.signal(signal.SIGINT, outside)
    assert code_found == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{word}; what is finished is kept: go on with splitfed run ")
    assert len(list(folder.glob("runs/*/checkpoints/*/manifest.json"))) == 1
    if kind == "SIGTERM":
        assert run(path, folder, "--resume") == 0
        assert outcome(folder) == outcome(whole)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["SIGTERM", "SIGINT"])
def test_workers_end_with_who_hired_them(kind: str, tmp_path: Path) -> None:
    study = small(training={"rounds": 2000, "batch_size": 64})
    command = [sys.executable, "-m", "splitfed.cli", "run", str(write(tmp_path, study))]
    command += ["--folder", str(tmp_path / "out"), "--workers", "2"]
    pipe = subprocess.PIPE
    # Whom a shell has started in the background does not hear of Ctrl-C, and nor do its children.
    listening = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=listening) as process:
        limit = time.monotonic() + 120
        while len(list(tmp_path.glob("out/runs/*/checkpoints/*/manifest.json"))) < 3:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < limit
            time.sleep(0.05)
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(workers) == 2
        process.send_signal(getattr(signal, kind))
        _, err = process.communicate(timeout=60)
    assert process.returncode == {"SIGTERM": 143, "SIGINT": 130}[kind]
    assert len(err.splitlines()) == 1
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    # What a worker was in the middle of is whole.
    for folder in tmp_path.glob("out/runs/*/checkpoints"):
        assert checkpoint.load(folder) is not None


def test_a_worker_that_does_not_listen_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PATIENCE", 0.2)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('.', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.read(1) == "."
        began = time.monotonic()
        workers.stop_workers([worker])
        assert worker.wait(5) == -signal.SIGKILL
        assert time.monotonic() - began < 5


def test_what_a_worker_says_of_the_users_mistake_is_handed_on() -> None:
    said = "out/x: the disk is full; free some space, then go on with --resume"
    command = ["sh", "-c", f"echo '{said}' >&2; exit 2"]
    with pytest.raises(InvalidInput, match="the disk is full; free some space, then go on with --resume"):
        workers.Workers(command, None, Lines(1), iter([workers.Job("a"), workers.Job("b")]), print).run(2)


FEW = """
import resource, sys
from splitfed import cli
from splitfed.study.run import session
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", range(3, 12))
def test_too_few_file_handles_are_one_line(count: int, whole: Path, tmp_path: Path) -> None:
    path, folder = write(tmp_path, small(**LEAST)), tmp_path / "out"
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > count
    command = [sys.executable, "-c", FEW, str(count), "run", str(path), "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = [line for line in done.stderr.splitlines() if not line.startswith("[1/1]")]
    if done.returncode:
        assert (done.returncode, len(last)) == (2, 1), done.stderr
        assert "ulimit -n 1024" in last[0]
    else:
        assert last == []
    assert run(path, folder, "--resume") == 0
    assert outcome(folder) == outcome(whole)


def test_handles_that_run_out_in_training_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The limit is that of the process, and as low as what is open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    path, folder = write(tmp_path, small(**LEAST)), tmp_path / "out"

    def begin(self: Lines, name: str) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))

    monkeypatch.setattr(Lines, "start", begin)
    try:
        code = run(path, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    said = capsys.readouterr().err.splitlines()
    (line,) = said
    assert code == 2
    assert "ulimit -n 1024" in line
    assert line.endswith("--resume")


def test_what_a_file_says_cannot_steer_the_terminal(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(options: Any) -> None:
        raise InvalidInput("a\x1b[2Jb\x07c")

    monkeypatch.setitem(cli.COMMANDS, "list", broken)
    assert main(["list"]) == 2
    assert capsys.readouterr().err == "a?[2Jb?c\n"


def test_a_thread_that_ends_beside_the_work_is_one_line(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def beside(options: Any) -> None:
        thread = threading.Thread(target=refuse(errno.EMFILE))
        thread.start()
        thread.join()

    before = threading.excepthook
    monkeypatch.setitem(cli.COMMANDS, "list", beside)
    assert main(["list"]) == 0
    assert capsys.readouterr().err == "warning: a thread beside the work has ended: too many open files\n"
    assert threading.excepthook is before
