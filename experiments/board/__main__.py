"""Do what is missing of the board and write its pages: `python -m experiments.board [STUDY ...] [--show] [--retry]`.

The studies are the TOML files in docs/board. What they came to is kept there too, a line a run, and is not computed
again; runs themselves lie in the folder `board`, so that an attack can be asked of them later.
"""

from __future__ import annotations

import argparse
import fcntl
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.board.detection import complete_detections, read_detections
from experiments.board.measure import complete
from experiments.board.page import write_pages
from experiments.board.studies import BOARD, read_studies
from splitfed.core.errors import SplitfedError


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, 1 after a computation that failed, 2 after a mistake in the input, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m experiments.board", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="STUDY", help="all, if none is named")
    parser.add_argument("--folder", type=Path, default=Path("board"), help="where runs are kept (default: board)")
    parser.add_argument("--board", type=Path, default=BOARD, help="where studies, results and pages lie")
    parser.add_argument("--show", action="store_true", help="compute nothing, write the pages from what is there")
    parser.add_argument("--retry", action="store_true", help="try again what was refused or has failed")
    options = parser.parse_args(arguments)
    try:
        every = read_studies(options.board)
        chosen = read_studies(options.board, options.names)
        detections = read_detections(options.board)
        if options.show:
            write_pages(every, options.board, detections)
            return 0
        options.folder.mkdir(parents=True, exist_ok=True)
        with (options.folder / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                print(f"another process is at work in {str(options.folder)!r}; wait for it to end", file=sys.stderr)
                return 2
            try:
                complete(chosen, options.board, options.folder, retry=options.retry)
                watched = read_detections(options.board, options.names)
                complete_detections(watched, options.board, retry=options.retry)
            finally:
                write_pages(every, options.board, detections)
    except SplitfedError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what is finished is kept: make board goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
