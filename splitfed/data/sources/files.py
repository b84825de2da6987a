"""Paths that must exist, refused in one line when they do not."""

from __future__ import annotations

from pathlib import Path

from splitfed.core.errors import InvalidInput


def existing_file(path: str | Path) -> Path:
    """Return `path` with ~ expanded; `InvalidInput` unless it is a file."""
    found = Path(path).expanduser()
    if not found.is_file():
        raise InvalidInput(f"{found} is {'a folder' if found.is_dir() else 'missing'}; expected a file")
    return found


def existing_folder(path: str | Path) -> Path:
    """Return `path` with ~ expanded; `InvalidInput` unless it is a folder."""
    found = Path(path).expanduser()
    if not found.is_dir():
        raise InvalidInput(f"{found} is {'a file' if found.is_file() else 'missing'}; expected a folder")
    return found
