"""What the command line says beside results: errors, warnings, and how to go on; one line each, on standard error."""

from __future__ import annotations

import os
import shlex
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

from splitfed.study.run import failures


def resume_command(given: Sequence[str]) -> str:
    """Return how to go on after an interruption of the command `given`."""
    if given[:1] == ["_worker"]:
        return "go on with --resume"
    more = ["--resume"] if given[:1] == ["run"] and "--resume" not in given else []
    return f"go on with {shlex.join(['splitfed', *given, *more])}"


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Say warnings, and what ends a thread beside the work, in a line each inside the block."""
    before = threading.excepthook
    with warnings.catch_warnings():
        warnings.showwarning = _print_warning
        threading.excepthook = _report_thread_failure
        try:
            yield
        finally:
            threading.excepthook = before


def _report_thread_failure(what: threading.ExceptHookArgs) -> None:
    machine_failure = None if what.exc_value is None else failures.explain_failure(what.exc_value)
    text = f"{what.exc_type.__name__}: {what.exc_value}" if machine_failure is None else machine_failure[0]
    print_error(f"warning: a thread beside the work has ended: {' '.join(text.split())[:300]}")


def _print_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Say a warning in one line, without the line of code it comes from."""
    print_error(f"warning: {' '.join(str(message).split())}")


def others_print_aside() -> redirect_stdout[TextIO]:
    """Let what somebody's code prints inside the block go to standard error: standard output is for results alone."""
    return redirect_stdout(sys.stderr)


def abandon_output() -> None:
    """Let what is still to be printed go nowhere, after its reader has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_error(text: str) -> None:
    """Write to standard error; what somebody's file has put into a message cannot steer the terminal."""
    print("\n".join("".join(c if c.isprintable() else "?" for c in line) for line in text.split("\n")), file=sys.stderr)
