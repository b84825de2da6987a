"""Synthetic heartbeats: waves worked out by hand, deviations of stated size, shares, patients, and how hard it is."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.random import generator
from splitfed.data import beats, csv, mean_beats, npz
from splitfed.data.dataset import Dataset
from splitfed.data.sources.beats import CLASSES, EVENTS
from splitfed.models import ecg_cnn
from tests.examples import refusal

NORMAL = [1.0, 0.0, 0.0, 0.0, 0.0]


def wave(amplitude: float, distance: float, width: float) -> float:
    return amplitude * math.exp(-((distance / width) ** 2) / 2)


def test_rows() -> None:
    data = beats(40)
    assert (len(data), data.shape, data.x.dtype, data.task.outputs) == (40, (1, 128), torch.float32, 5)
    assert data.y.tolist() == [i % 5 for i in range(40)]
    assert (data.value_range, data.domains, data.groups) == (None, None, None)
    assert (len(CLASSES), len(EVENTS)) == (5, 7)


def test_it_says_that_it_is_synthetic() -> None:
    assert "synthetic, not recorded" in str(beats.__doc__)
    assert "is comparable with one on MIT-BIH" in str(beats.__doc__)


def test_mean_beats_by_hand() -> None:
    found = mean_beats()
    assert found.shape == (5, 128)
    # Time 0 is sample 51, and a sample is 5.556 ms. At the top of a normal R: R itself, and the flanks of Q and S.
    assert float(found[0, 51]) == pytest.approx(1.0 + wave(-0.10, 33, 9) + wave(-0.20, 33, 10), abs=1e-4)
    # 183.3 ms before R: P of a normal beat; of a premature one a lower P, and the T of the beat before.
    assert float(found[0, 18]) == pytest.approx(wave(0.15, 13.333, 24), abs=1e-4)
    assert float(found[3, 18]) == pytest.approx(wave(0.06, 48.333, 18) + wave(0.16, 31.667, 45), abs=1e-4)
    # 55.6 ms after R: the second R of a left block stands out, and S of a right one is deep.
    assert float(found[1, 61]) == pytest.approx(
        wave(0.75, 55.556, 19) + wave(0.50, 0.556, 19) + wave(-0.10, 44.444, 16), abs=1e-4
    )
    # T is upright, but for a left block and a premature ventricular beat.
    assert (found[:, 51 + 50] > 0.1).tolist() == [True, False, True, True, False]
    assert (found[:, 51 + 50] < -0.1).tolist() == [False, True, False, False, True]


def test_without_spread_and_noise_rows_are_the_mean_beats() -> None:
    data = beats(10, noise=0.0, spread=0.0)
    assert torch.equal(data.x[:, 0], mean_beats()[data.y].float())


def test_noise_is_white_and_of_the_stated_size() -> None:
    data = beats(500, noise=0.1, spread=0.0)
    noise = data.x[:, 0].double() - mean_beats()[data.y]
    # 64000 numbers: standard deviations of .0003 of the first, and of .004 of the second.
    assert float(noise.std()) == pytest.approx(0.1, abs=0.0014)
    assert float((noise[:, 1:] * noise[:, :-1]).mean()) / 0.01 == pytest.approx(0.0, abs=0.02)
    # The noise of a seed is the same whatever the spread is.
    other = beats(500, noise=0.1, spread=0.5).x - beats(500, noise=0.0, spread=0.5).x
    assert torch.allclose(other[:, 0].double(), noise, atol=1e-6)


def deviations(**given: Any) -> Tensor:
    """Return by how much noiseless normal beats differ from their mean, (20000, 128), over a spread of .01."""
    data = beats(20000, noise=0.0, spread=0.01, shares=NORMAL, **given)
    return (data.x[:, 0].double() - mean_beats()[0]) / 0.01


def test_deviations_are_of_the_stated_size() -> None:
    found = deviations().var(0)
    # Baseline wander is a sine of amplitude N(0, .1) in any phase: .1^2 / 2. The first sample, 283 ms before R, has
    # .03 mV of the T before as well, 53.3 ms off its time. A variance of 20000 such products is known to 2 %.
    assert float(found[0]) == pytest.approx(0.005 + wave(0.03, 53.333, 45) ** 2, rel=0.08)
    # At the top of R time and width move nothing: shares .2 and .03 mV of its amplitude, the gain .2, and wander.
    assert float(found[51]) == pytest.approx(0.2**2 + 0.03**2 + 0.2**2 + 0.005, rel=0.05)
    # On its flank, 11.1 ms later, it is time that moves most: 10 ms of R, as many of S, and 8 of both together, times
    # the slopes in mV / ms.
    r, s = wave(1.0, 11.111, 11), wave(-0.20, 21.889, 10)
    slopes = -r * 11.111 / 11**2, s * 21.889 / 10**2
    times = 10**2 * (slopes[0] ** 2 + slopes[1] ** 2) + 8**2 * (slopes[0] + slopes[1]) ** 2
    others = (r * (11.111 / 11) ** 2 * 0.15) ** 2 + (0.2 * r) ** 2 + (0.2 * (r + s)) ** 2 + 0.005
    assert float(found[53]) == pytest.approx(times + others, rel=0.05)


def test_spread_multiplies_every_deviation() -> None:
    clean = mean_beats()
    small, twice = (beats(50, noise=0.0, spread=s).x[:, 0].double() - clean[torch.arange(50) % 5] for s in (1e-3, 2e-3))
    # Second order: some hundredths of a percent, and rounding to float32.
    assert float((twice - 2 * small).norm() / twice.norm()) < 0.01


def test_class_means_are_like_their_own_mean_beat_most() -> None:
    data = beats(2500)
    means = torch.stack([data.x[data.y == label, 0].mean(0) for label in range(5)]).double()
    likeness = torch.corrcoef(torch.cat([means, mean_beats()]))[:5, 5:]
    assert likeness.argmax(1).tolist() == [0, 1, 2, 3, 4]
    # No more than that, as R stands at other times in other rows, which makes it lower and wider in the mean.
    assert float(likeness.diagonal().min()) > 0.94


def test_a_seed_fixes_the_rows() -> None:
    parts: list[dict[str, Any]] = [{}, {"noise": 0.0}, {"spread": 0.0}, {"patients": 9}]
    for given in parts:
        one, two, other = beats(30, **given), beats(30, **given), beats(30, seed=1, **given)
        assert torch.equal(one.x, two.x)
        assert not torch.isclose(one.x, other.x).all(2).any(), given


@pytest.mark.parametrize(
    ("shares", "rows", "counts"),
    [
        ("balanced", 2500, [500] * 5),
        ("balanced", 12, [3, 3, 2, 2, 2]),
        # 75052, 8075, 7259, 2546, 7130 of 100062: 750.05, 80.70, 72.55, 25.44, 71.26, of which two are rounded up.
        ("mit_bih", 1000, [750, 81, 73, 25, 71]),
        ([1, 1, 2, 0, 0], 40, [10, 10, 20, 0, 0]),
        ((0, 0, 0, 0.5, 0.5), 4, [0, 0, 0, 2, 2]),
    ],
)
def test_shares(shares: Any, rows: int, counts: list[int]) -> None:
    y = beats(rows, shares=shares).y
    assert y.bincount(minlength=5).tolist() == counts
    # Spread evenly: the first half has half of each.
    assert torch.equal(beats(rows, shares=shares, patients=3).y, y)
    half = y[: rows // 2].bincount(minlength=5) - torch.tensor(counts) / 2
    assert float(half.abs().max()) <= 1


def test_patients_have_one_rhythm_and_premature_beats() -> None:
    data = beats(3000, shares="mit_bih", patients=40)
    assert data.groups is not None
    assert data.groups.unique().tolist() == list(range(40))
    rhythms = [set(data.y[(data.groups == p) & (data.y < 3)].tolist()) for p in range(40)]
    # Three are dealt out first, one a rhythm; .831, .089 and .080 of 37 are 30.7, 3.3 and 3.0.
    assert rhythms == [{0}] * 32 + [{1}] * 4 + [{2}] * 4
    premature = data.groups[data.y > 2].bincount(minlength=40)
    # 290 beats over 40 patients: 7.25 each.
    assert int((premature > 0).sum()) >= 38


def test_rows_of_a_patient_are_alike() -> None:
    # Two patients are kept for the blocks, which have no rows here.
    data = beats(20000, noise=0.0, spread=0.01, shares=NORMAL, patients=1002)
    found = deviations(patients=1002)[:, 51]
    assert data.groups is not None
    sizes = data.groups.bincount(minlength=1002)
    assert sizes[1000:].tolist() == [0, 0]
    sums = torch.zeros(1002, dtype=torch.float64).index_add_(0, data.groups, found)
    within = float((found - (sums / sizes)[data.groups]).square().sum() / (len(found) - 1000))
    # At the top of R: .0809 of beats, half of it between patients, and .005 of wander, which no patient shares.
    assert within == pytest.approx(0.0809 / 2 + 0.005, rel=0.05)
    assert float(found.var()) == pytest.approx(0.0809 + 0.005, rel=0.1)


def test_clients_test_on_other_patients() -> None:
    split = beats(600, patients=30).clients(2, auxiliary=20, victims=10, seed=0)
    parts = {
        part: {int(p) for client in split.clients for p in getattr(client, part).groups}
        for part in ("train", "validation", "test")
    }
    assert all(parts.values())
    assert not parts["train"] & parts["test"]
    assert not parts["train"] & parts["validation"]


def test_recorded_beats_come_from_a_file(tmp_path: Path) -> None:
    recorded = beats(30, patients=4)
    assert recorded.groups is not None
    rows, labels, patients = recorded.x.numpy(), recorded.y.numpy(), recorded.groups.numpy()
    np.savez(tmp_path / "mine.npz", beats=rows, label=labels, patient=patients)
    table = np.column_stack([rows[:, 0], labels, patients])
    header = ",".join([*(f"sample{i}" for i in range(128)), "label", "patient"])
    np.savetxt(tmp_path / "mine.csv", table, "%.9g", ",", header=header, comments="")
    arrays = npz(tmp_path / "mine.npz", x="beats", y="label", domains="patient")
    columns = csv(tmp_path / "mine.csv", target="label", domain="patient", task=recorded.task)
    for data, shape in ((arrays, (1, 128)), (columns, (128,))):
        renamed = replace(data, groups=data.domains, domains=None)
        assert renamed.shape == shape
        assert renamed.groups is not None
        assert torch.equal(renamed.groups, recorded.groups)
        assert torch.equal(renamed.x.view(30, 1, 128), recorded.x)
        assert ecg_cnn(renamed.shape, renamed.task.outputs)(renamed.x).shape == (30, 5)


def halves(rows: int, **given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows and labels of two halves, drawn from all rows."""
    data: Dataset = beats(rows, **given)
    order = torch.randperm(rows, generator=generator(0, "halves"))
    one, two = order.chunk(2)
    return data.x[one], data.y[one], data.x[two], data.y[two]


def test_a_linear_classifier_is_far_above_chance_and_far_from_perfect() -> None:
    x, y, unseen, truth = halves(4000)
    rows, others = (torch.cat([z.flatten(1), torch.ones(len(z), 1)], 1).double() for z in (x, unseen))
    weight: Tensor = torch.linalg.solve(
        rows.T @ rows + torch.eye(129, dtype=torch.float64), rows.T @ functional.one_hot(y, 5).double()
    )
    # A standard deviation of .007.
    assert 0.84 < float(((others @ weight).argmax(1) == truth).double().mean()) < 0.94


def test_the_cnn_ends_where_a_loss_of_two_points_would_show() -> None:
    x, y, unseen, truth = halves(4000)
    model, random = ecg_cnn((1, 128), 5), generator(0, "batches")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for _ in range(400):
        rows = torch.randint(len(x), (32,), generator=random)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        right = (model(unseen).argmax(1) == truth).double().mean()
    assert 0.85 < float(right) < 0.95


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"rows": 1}, "rows=1 is not allowed; expected a whole number of at least 2"),
        ({"noise": -1.0}, "noise=-1.0 is not allowed; expected a number in [0, inf)"),
        ({"spread": math.nan}, "spread=nan is not allowed; expected a number in [0, inf)"),
        ({"patients": 2}, "patients=2 is not allowed; expected a whole number of at least 3"),
        ({"shares": "mitbih"}, "unknown shares 'mitbih'; did you mean 'mit_bih'? (allowed: balanced, mit_bih)"),
        ({"shares": [1, 2]}, "shares=[1, 2] is not allowed; expected balanced, mit_bih or 5 numbers"),
        ({"shares": [0] * 5}, "shares=[0, 0, 0, 0, 0] is not allowed; expected one above 0"),
        ({"shares": [1, 1, 1, 1, -1]}, "shares=-1 is not allowed; expected a number in [0, inf)"),
    ],
)
def test_refused(given: dict[str, Any], text: str) -> None:
    assert refusal(beats, **given) == text
