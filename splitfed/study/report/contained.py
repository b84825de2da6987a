"""What lies inside a folder once links are followed: a folder from somebody else may hold links that lead out."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def path_inside(folder: Path, name: str) -> Path | None:
    """Return the path of `name`, written in a file of `folder`; None where it lies elsewhere, also by a link."""
    path = _resolve(folder / name)
    return path if path is not None and path.is_relative_to(folder.resolve()) else None


def is_plain_name(name: object) -> bool:
    """Return whether `name` is that of an entry of a folder, and no path, the folder itself or the one above it."""
    text = name if isinstance(name, str) else ""
    return text not in ("", ".", "..") and not any(sign in text for sign in "/\\\0")


def find_link_out(folder: Path) -> str | None:
    """Return the first link below `folder` that leads out of it, relative to `folder`; None where there is none.

    A folder that is a link itself is followed: whoever names it means what it leads to.
    """
    home = folder.resolve()
    for place, folders, files in os.walk(home):
        for path in (Path(place, name) for name in sorted((*folders, *files))):
            end = _resolve(path) if path.is_symlink() else path
            if end is None or not end.is_relative_to(home):
                return path.relative_to(home).as_posix()
    return None


def _resolve(path: Path) -> Path | None:
    """Return where `path` leads; None where that cannot be said, as of links in a circle."""
    try:
        end = path.resolve()
        # From Python 3.13 on `resolve` raises nothing where links lead in a circle.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            end.stat()
        return end
    except (OSError, RuntimeError, ValueError):
        return None
