"""How much memory data sets take: bounds that follow from what must be held, measured on the process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.rows import BLOCK
from splitfed.data import from_arrays, from_torch, npy
from splitfed.topologies import vanilla

STATUS = Path("/proc/self/status")
pytestmark = pytest.mark.skipif(not STATUS.exists(), reason="only Linux says how much memory is anonymous")

MIB = 2**20
SLACK = 24 * MIB
"""What the allocators of Python and C may keep beside what is asked of them, and the checks of blocks of rows."""


def held(what: str) -> int:
    """Bytes of `what` of this process, such as RssAnon: memory with no file behind it."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{what}:"))
    return int(line.split()[1]) * 1024


@contextmanager
def most_anonymous() -> Iterator[Callable[[], int]]:
    """Watch the anonymous memory every few milliseconds; yield what returns the most that was seen."""
    seen, over = [held("RssAnon")], threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            seen.append(held("RssAnon"))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: max(*seen, held("RssAnon"))
    finally:
        over.set()
        thread.join()


class Made:
    """Items that are made when they are asked for: nothing of them is held by their owner."""

    def __init__(self, rows: int, width: int) -> None:
        self.rows, self.width = rows, width

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.full((self.width,), float(i)), i % 2


def test_reading_items_and_training_takes_one_copy() -> None:
    rows, width = 8000, 4000
    size = rows * width * 4
    with most_anonymous() as most:
        before = held("RssAnon")
        data = from_torch(Made(rows, width))
        assert most() - before >= 0.9 * size, "the measure must see the copy that there is"
        assert most() - before < size + 4 * BLOCK + SLACK
        # Nothing more for the parts of an experiment but the numbers of their rows.
        parts = data.clients(2)
        again = from_arrays(data.x, data.y)
        assert most() - before < size + 4 * BLOCK + SLACK
        assert len(again) == len(data)
        # Nor do the parties of a run copy them.
        topology = vanilla(nn.Sequential(nn.Linear(width, 4), nn.ReLU(), nn.Linear(4, 2)), "0")
        sf.train(topology, parts, rounds=1, batch_size=64)
        assert most() - before < size + 4 * BLOCK + SLACK
        assert parts.clients[0].train.source.tensor is data.x  # type: ignore[attr-defined]


FEW = 300
"""How many rows of a file are attacked."""


def sparse(folder: Path, rows: int, width: int) -> tuple[Path, Path]:
    """A .npy file of rows (width,) that are nearly all zeros, which takes hardly any disk, and one of labels."""
    with (folder / "x.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (rows, width)})
        start = file.tell()
        file.truncate(start + rows * width * 4)
        # Those that are attacked tell one another apart; each takes one block of the disk.
        for row in range(0, rows, rows // FEW):
            file.seek(start + row * width * 4)
            file.write(np.float32(row).tobytes())
    np.save(folder / "y.npy", np.arange(rows) % 2)
    return folder / "x.npy", folder / "y.npy"


def visit(folder: Path, rows: int, width: int) -> int:
    """Divide a file, train on a few rows of it, score and attack; return the most anonymous memory meanwhile."""
    paths = sparse(folder, rows, width)
    with most_anonymous() as most:
        data = npy(*paths)
        topology = vanilla(nn.Sequential(nn.Linear(width, 4), nn.ReLU(), nn.Linear(4, 2)), "0")
        run = sf.train(topology, data.clients(2, auxiliary=0.98, dirichlet=1.0), rounds=1, batch_size=16)
        if rows * width * 4 * 0.98 > 2**30:
            with pytest.raises(InvalidInput, match=r"GiB at once; at most 1 GiB is allowed: set fewer aside"):
                run.attack("inverse_network")
        few = data.rows(torch.arange(0, rows, rows // FEW)).clients(2, auxiliary=40, victims=20)
        (found,) = sf.train(topology, few, rounds=1, batch_size=16).attack("membership_threshold")
        assert len(found.prediction) == 40
        return most()


def test_a_mapped_file_stays_a_file(tmp_path: Path) -> None:
    before = held("RssAnon")
    rows, width = 5000, 2**14  # 312 MiB
    few = FEW * width * 4
    # Victims, auxiliary rows and candidates of the few that are attacked are copied a handful of times.
    assert visit(tmp_path, rows, width) - before < 3 * few + 4 * BLOCK + SLACK


@pytest.mark.exhaustive
def test_ten_gigabytes_in_less_than_one(tmp_path: Path) -> None:
    given = "import sys; from pathlib import Path; from tests.data.test_memory import visit"
    done = subprocess.run(
        [sys.executable, "-c", f"{given}; print(visit(Path(sys.argv[1]), 100_000, 26_844))", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.npy").stat().st_size > 10 * 2**30
    assert int(done.stdout) < 2**30
