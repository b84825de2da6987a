"""Points for rows of token ids: Hamming distances, whatever the ids are called."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from splitfed.core.defense_context import Context
from splitfed.core.messages import Stamp
from splitfed.defenses import DistanceCorrelation
from splitfed.stats.dependence import distance_correlation
from splitfed.stats.token_points import as_points, token_points

ROWS = torch.randint(0, 5, (12, 3, 2), generator=torch.Generator().manual_seed(0))


def test_distances_are_those_of_one_hot_codes() -> None:
    rows = torch.cat([ROWS, ROWS[:1]])
    points = token_points(rows)
    codes = functional.one_hot(rows, 5).flatten(1).double()
    assert torch.allclose(torch.cdist(points, points), torch.cdist(codes, codes), atol=1e-5)
    x = torch.rand(3, 2)
    assert as_points(x) is x


def test_names_of_tokens_do_not_count() -> None:
    renamed = torch.tensor([900, -3, 7, 2**40, 0])[ROWS]
    z = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    found = [distance_correlation(as_points(x), z) for x in (ROWS, renamed)]
    assert torch.allclose(*found, atol=1e-5)
    assert not torch.allclose(distance_correlation(ROWS, z), distance_correlation(renamed, z), atol=1e-3)
    codes = functional.one_hot(ROWS, 5).double()
    assert float(distance_correlation(as_points(ROWS), codes)) == pytest.approx(1.0, abs=1e-6)


def test_the_defense_pushes_alike_whatever_tokens_are_called() -> None:
    renamed = torch.tensor([900, -3, 7, 2**40, 0])[ROWS]
    z = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    stamp = Stamp("train", 0, 0, 0, "train")
    pushes = [
        DistanceCorrelation(0.5).penalty(z, Context("client", "edge", stamp, 0, 0, {"ids": rows, "mask": ROWS[:, 0]}))
        for rows in (ROWS, renamed)
    ]
    assert torch.allclose(pushes[0].gradient, pushes[1].gradient, atol=1e-5)
    assert float(pushes[0].gradient.norm()) > 1e-3
