"""What the dcor package (0.7) gives for pairs of samples: `python -m tests.stats.dcor_oracle` writes it anew.

Stored, because dcor is compiled while it is imported, which takes half a minute and has crashed: run once by hand
(`pip install dcor`), it says the same of the same samples for ever. The samples come from NumPy's legacy
generator, the one whose stream is frozen.
"""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

STORED = Path(__file__).with_name("dcor_oracle.json")
STATISTICS = [
    "distance_covariance_sqr",
    "distance_correlation_sqr",
    "distance_correlation",
    "u_distance_correlation_sqr",
]
KINDS = ["plain", "duplicates", "constant column", "far away"]
SIZES = [(4, 2, 3), (5, 1, 2), (7, 30, 2), (16, 1, 5), (33, 9, 17), (80, 3, 40)]


def pair(n: int, wide_x: int, wide_z: int, kind: str) -> tuple[Tensor, Tensor]:
    """Two dependent samples of `n` rows, always the same ones."""
    random = np.random.RandomState(n)
    x = torch.from_numpy(random.standard_normal((n, wide_x)))
    z = torch.from_numpy(random.standard_normal((n, wide_z))) + x[:, :1] ** 2
    return as_kind(x, z, kind)


def as_kind(x: Tensor, z: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The pair made one of `KINDS`; it may be changed in place."""
    if kind == "duplicates":
        x[1], z[2:4], z[0] = x[0], z[2], z[2]
    if kind == "constant column":
        x = torch.cat([x, torch.full((len(x), 1), 7.0, dtype=x.dtype)], 1)
        z[:, 0] = -3.0
    if kind == "far away":
        x, z = x + 1e4, 1e3 * z - 1e6
    return x, z


def stored() -> dict[str, dict[str, float]]:
    """Statistic by name, for each `"n x wide_x x wide_z kind"`."""
    values: dict[str, dict[str, float]] = json.loads(STORED.read_text())
    return values


def main() -> None:
    dcor = importlib.import_module("dcor")
    values = {}
    for (n, wide_x, wide_z), kind in itertools.product(SIZES, KINDS):
        x, z = (part.numpy() for part in pair(n, wide_x, wide_z, kind))
        values[f"{n} x {wide_x} x {wide_z} {kind}"] = {
            name: float(getattr(dcor, name)(x, z, method=dcor.DistanceCovarianceMethod.NAIVE)) for name in STATISTICS
        }
    STORED.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
