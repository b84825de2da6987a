"""What crosses is one number a row, (rows,), with no dimension behind: attacks read it."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import splitfed as sf
from splitfed.core.random import stream
from splitfed.topologies import custom


@cache
def trained(labels: str) -> sf.Run:
    """A run whose labels are known to both parties or, with "server", to the server alone."""
    with stream(0):
        x = torch.rand(140, 1, 8, 8)
        bottom = nn.Sequential(nn.Flatten(), nn.Linear(64, 1), nn.Flatten(0))
        top = nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 2))
    data = sf.data.from_arrays(x, (x[:, 0, 0, 0] > 0.5).long(), value_range=(0, 1))
    segments = [
        sf.Segment("bottom", "client", bottom, ("x",), ("z",)),
        sf.Segment("top", "server", top, ("z",), ("out",)),
    ]
    topology = custom(segments, {"x": "client"}, [sf.Head("out", "server", labels)])
    recorded = sf.Recording(parties=("server",) if labels == "client" else ("client0",))
    return sf.train(
        topology, data.clients(1, auxiliary=20, victims=40, seed=0), rounds=1, logging=sf.Logging(record=recorded)
    )


# Who reads, by who holds the labels, and what runs in a few seconds.
READ = {
    "client": ("server", "inverse_network linear_inverse nearest membership_releases rmle lbfgs_inversion"),
    "server": ("client0", "norm direction spectral similar"),
}
SLOW = {
    "client": "latent_search dip ladder strongest shadow unsplit",
    "server": "unsplit_labels exploit model_completion gaussian_mixture strongest_labels",
}
CASES = [
    *((labels, who, name) for labels, (who, names) in READ.items() for name in names.split()),
    *(
        pytest.param(labels, READ[labels][0], name, marks=pytest.mark.exhaustive)
        for labels, names in SLOW.items()
        for name in names.split()
    ),
]


@pytest.mark.parametrize(("labels", "who", "name"), CASES)
def test_an_attack_reads_one_number_a_row(labels: str, who: str, name: str) -> None:
    (result,) = trained(labels).attack(name, adversary=who, budget="quick")
    assert bool(torch.as_tensor(result.prediction).isfinite().all())
