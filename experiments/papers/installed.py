"""Fashion-MNIST where Debian's package has put it, and tables that leave out its cells where it has not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from experiments.papers.table import Table

FASHION = Path("/usr/share/datasets/fashion-mnist")


class WhereInstalled(Table):
    """A table that leaves out the cells named after Fashion-MNIST where that is not installed, and says so."""

    def complete(self, folder: Path, told: Callable[[str], None] = print) -> None:
        """Measure what is missing and can be."""
        here = tuple(cell for cell in self.cells if FASHION.is_dir() or "Fashion" not in cell.key)
        if len(here) < len(self.cells):
            told(f"{self.name}: left out {len(self.cells) - len(here)} cells: no {FASHION} (dataset-fashion-mnist)")
        Table(self.name, self.title, self.budget, here, self.show).complete(folder, told)
