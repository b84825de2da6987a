"""Repairs the links to the top-level packages before setuptools looks for packages; all else is in pyproject.toml.

`splitfed/attacks` and `splitfed/topologies` are symbolic links to the folders `attacks` and `topologies`. A checkout
without symbolic links (git's `core.symlinks=false`, some archives) has text files in their place, and a wheel built
from it would lack both packages without a word.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
NAMES = ("attacks", "topologies")


def repair(name: str) -> None:
    """Put a link to the top-level folder `name` where the package has a text file; stop where that cannot be done."""
    folder, link = ROOT / name, ROOT / "splitfed" / name
    if link.is_dir() or not folder.is_dir():
        # In a source distribution the packages are folders already, and the top-level ones are not there.
        if not link.is_dir():
            sys.exit(f"splitfed/{name} is missing, and so is {name}/: this source is incomplete")
        return
    link.unlink(missing_ok=True)
    try:
        os.symlink(Path("..", name), link, target_is_directory=True)
    except OSError:
        if sys.platform == "win32":
            import _winapi

            # Needs no privilege, in contrast to a symbolic link.
            _winapi.CreateJunction(str(folder), str(link))
    if not link.is_dir():
        sys.exit(f"splitfed/{name} could not be made a link to {name}/: copy that folder there by hand")
    # Git would show the link as a change of the text file; without git there is nobody to tell.
    told = ("git", "-C", str(ROOT), "update-index", "--skip-worktree", f"splitfed/{name}")
    with contextlib.suppress(OSError):
        subprocess.run(told, check=False, capture_output=True)


for name in NAMES:
    repair(name)
setup()
