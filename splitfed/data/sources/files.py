"""Files and folders given by the user: refused in one line if they are missing or no regular files.

Reading a pipe or a device could block, or never end.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

from splitfed.core.errors import InvalidInput, check_names


def existing_file(path: str | Path) -> Path:
    """Return `path` with ~ expanded; raise `InvalidInput` unless it is a readable regular file, or a link to one."""
    found = Path(path).expanduser()
    if not found.is_file():
        raise InvalidInput(f"{_shown(found)} is {_kind(found)}; expected a file")
    try:
        # Opened without blocking, as some system files wait for data.
        descriptor = os.open(found, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        try:
            os.read(descriptor, 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise InvalidInput(f"{_shown(found)} cannot be read: {error.strerror}") from None
    return found


def existing_folder(path: str | Path) -> Path:
    """Return `path` with ~ expanded; raise `InvalidInput` unless it is a folder."""
    found = Path(path).expanduser()
    if not found.is_dir():
        raise InvalidInput(f"{_shown(found)} is {_kind(found)}; expected a folder")
    return found


def _shown(path: Path) -> str:
    """Return `path` as one line of text, whatever characters its name has."""
    return str(path) if str(path).isprintable() else repr(str(path))


def _kind(path: Path) -> str:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return "missing"
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a file" if stat.S_ISREG(mode) else "a pipe, socket or device"


def check_columns(
    source: Path, columns: Collection[str], target: str, drop: Collection[str], domain: str | None
) -> None:
    """Raise `InvalidInput` for a target, dropped columns or a domain that are not in `columns`, or that overlap."""
    for name in (target, *drop, *(() if domain is None else (domain,))):
        check_names(f"column in {source.name}:", columns, name)
    for role, column in (("target", target), ("domain", domain)):
        if column in drop:
            raise InvalidInput(f"{role}={column!r} is also in drop; expected it in the table")
    if domain == target:
        raise InvalidInput(f"domain={domain!r} is the target as well; expected another column")
