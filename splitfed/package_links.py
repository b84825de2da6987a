"""The packages `attacks` and `topologies` stand at the top of the repository and are reached through links.

A checkout without symbolic links has text files in their place; importing a package behind one raises an error that
names the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from splitfed.core.errors import InvalidInput

NAMES = ("attacks", "topologies")
_LINKED = frozenset(f"splitfed.{name}" for name in NAMES)


class BrokenLink(InvalidInput, ImportError):
    """Raised for a package that is a text file because symbolic links were not created."""


def check_links(package: Path = Path(__file__).parent) -> None:
    """Raise `BrokenLink` where a file stands in place of a package."""
    for name in NAMES:
        if (package / name).is_file():
            raise BrokenLink(
                f"{package / name} is a text file in place of a link to the folder {name}: run `make setup`, or "
                "`pip install -e .` in the checkout"
            )


class LinkedPackages(MetaPathFinder):
    """Finder that comes first: it finds nothing, and raises `BrokenLink` for a package behind a link that is a file."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise `BrokenLink` for a package behind a link that is a file; return None for any other module."""
        if fullname in _LINKED:
            check_links()
        return None
