"""Paths that must exist, refused in one line when they do not."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from splitfed.core.errors import InvalidInput, check_names


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


def check_columns(
    source: Path, columns: Collection[str], target: str, drop: Collection[str], domain: str | None
) -> None:
    """Refuse a target, columns to drop or a domain that `columns` of a table have not, and one in two places."""
    for name in (target, *drop, *(() if domain is None else (domain,))):
        check_names(f"column in {source.name}:", columns, name)
    for role, column in (("target", target), ("domain", domain)):
        if column in drop:
            raise InvalidInput(f"{role}={column!r} is also in drop; expected it in the table")
    if domain == target:
        raise InvalidInput(f"domain={domain!r} is the target as well; expected another column")
