"""Measure tables and write them into RESULTS.md: `python -m experiments.papers [NAME ...] [--show]`.

What RESULTS.md shows stands, cell by cell, in experiments/measured; `--folder experiments/measured` goes on
from there, any other folder measures anew.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from pathlib import Path

import experiments.papers
from experiments.papers.table import Table, write


def tables() -> dict[str, Table]:
    """Return every table of this package by name."""
    names = [
        m.name for m in pkgutil.iter_modules(experiments.papers.__path__) if not m.name.startswith(("__", "test_"))
    ]
    modules = [importlib.import_module(f"experiments.papers.{name}") for name in names]
    found = [module.TABLE for module in modules if hasattr(module, "TABLE")]
    return {table.name: table for table in found}


def main(arguments: list[str] | None = None) -> int:
    known = tables()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], epilog=f"tables: {', '.join(known)}")
    parser.add_argument("names", nargs="*", metavar="NAME", help="all, if none is named")
    parser.add_argument("--folder", type=Path, default=Path("papers"), help="where measurements are kept")
    parser.add_argument("--show", action="store_true", help="measure nothing, write what is there")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in known:
            print(f"no table {name!r}; there are {', '.join(known)}", file=sys.stderr)
            return 2
    for name in options.names or known:
        table = known[name]
        if not options.show:
            table.complete(options.folder)
        write(table, options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
