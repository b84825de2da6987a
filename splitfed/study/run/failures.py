"""What the machine refuses, in words: a full disk, a read-only folder, too few file handles, a request to stop."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

WRITABLE = "give another folder, or make that one writable"
SPACE = "free some space"
HANDLES = "allow more, say with ulimit -n 1024"

# What the user can mend: error number -> what is wrong, and how to mend it.
_REASONS = {
    errno.ENOSPC: ("the disk is full", SPACE),
    errno.EDQUOT: ("the disk quota is used up", SPACE),
    errno.EROFS: ("the file system is read-only", WRITABLE),
    errno.EACCES: ("permission denied", WRITABLE),
    errno.EPERM: ("operation not permitted", WRITABLE),
    errno.EMFILE: ("too many open files", HANDLES),
    errno.ENFILE: ("too many open files on this machine", "close other programs"),
    errno.ENOMEM: ("out of memory", "close other programs, or take smaller batches or less data"),
    errno.EIO: ("the disk cannot be read or written", "look after the disk, or give a folder on another one"),
    errno.ENAMETOOLONG: ("the name is too long", "give a shorter one"),
    errno.ENOTDIR: ("a part of the path is a file", "give another path"),
    errno.EISDIR: ("it is a folder", "give another path"),
    errno.ELOOP: ("its links lead in a circle", "give another path"),
}
# How libraries that hide the number say the same.
_WORDS = {
    "database or disk is full": errno.ENOSPC,
    "attempt to write a readonly database": errno.EROFS,
    "disk i/o error": errno.EIO,
    "no space left on device": errno.ENOSPC,
    "read-only file system": errno.EROFS,
    "too many open files": errno.EMFILE,
    "cannot allocate memory": errno.ENOMEM,
}
_QUEUE = {
    "can't start new thread": (
        "no memory or thread is left for another thread",
        "raise the limit (ulimit -v, ulimit -u), or take fewer --workers",
    ),
    "database is locked": ("study.db is locked by another program", "close that"),
    "unable to open database file": ("study.db cannot be opened", f"see that its folder can be written, or {HANDLES}"),
}
_NUMBER = re.compile(r"os error (\d+)")


class Terminated(KeyboardInterrupt):
    """The process was asked to end by SIGTERM; handled wherever an interruption from the keyboard is."""


def explain_failure(error: BaseException) -> tuple[str, str] | None:
    """Return what the machine refused and how to mend it, where that is behind `error`; None for anything else."""
    cause: BaseException | None = error
    while cause is not None:
        if reason := _REASONS.get(_error_number(cause) or 0):
            name = getattr(cause, "filename", None)
            return (f"{os.fspath(name)}: {reason[0]}" if isinstance(name, (str, os.PathLike)) else reason[0]), reason[1]
        for words, reason in _QUEUE.items():
            if words in str(cause):
                return reason
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None


def _error_number(error: BaseException) -> int | None:
    """Return the error number behind `error`; None where it has none."""
    match error:
        case MemoryError():
            return errno.ENOMEM
        case OSError() if error.errno is not None:
            return error.errno
    text = str(error).lower()
    found = _NUMBER.search(text)
    return int(found[1]) if found else next((number for words, number in _WORDS.items() if words in text), None)


@contextmanager
def catch_termination() -> Iterator[None]:
    """Raise `Terminated` inside the block when SIGTERM arrives; handlers are afterwards what they were before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """Ignore further requests to stop: what is left to do is brief, and is to be done whole."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated
