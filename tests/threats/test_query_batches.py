"""An adversary asks for as many rows at once as the victims were, for a defense may go by the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import splitfed as sf
from splitfed.attacks.base import Attack, Knowledge, unwrap
from splitfed.attacks.reconstruction.inverse_network import InverseNetwork, draw_synthetic
from splitfed.core.messages import View
from splitfed.defenses import Quantization
from splitfed.models import mlp
from splitfed.threats.knowledge import LEAST_AT_ONCE
from splitfed.topologies import vanilla
from tests.attacks.test_strongest import released


@pytest.mark.parametrize("victims", [1, 20])
def test_rows_are_asked_for_in_batches_as_large_as_the_victims(victims: int) -> None:
    data = sf.data.breast_cancer().clients(1, auxiliary=60, victims=victims, seed=0)
    run = sf.train(vanilla(mlp((30,), 1, (8,), seed=0), cut="relu1"), data, rounds=1, defenses=(Quantization(bits=2),))
    x, more = run.data.victims.x, run.data.auxiliary.x
    known = run.evaluator.grants.knowledge("server", 0, 0)
    if victims < LEAST_AT_ONCE:
        x, more = more[:LEAST_AT_ONCE], more[LEAST_AT_ONCE:]
    else:
        assert torch.equal(unwrap(known.query)(x)["relu1"], run.observe().tensors()["relu1"])
    for ask in (unwrap(known.query), unwrap(known.sample)):
        alone = ask(x)["relu1"]
        assert torch.equal(ask(torch.cat([x, more]))["relu1"][: len(x)], alone)
        if victims == 20:
            # The range of all rows at once is another one.
            assert not torch.equal(ask(torch.cat([x[:5], more]))["relu1"][:5], alone[:5])
    fewer = run.evaluator.grants.knowledge("server", 0, 0, at_once=40)
    both = torch.cat([x, more])[:40]
    assert not torch.equal(unwrap(fewer.query)(both)["relu1"], unwrap(known.query)(both)["relu1"])


def asked(query: object, attack: Attack, rows: Tensor) -> list[Tensor]:
    """Return the rows of every query that `attack` makes for the release of one row of zeros."""
    seen: list[Tensor] = []

    def ask(x: Tensor) -> dict[str, Tensor]:
        seen.append(x)
        return query(x)  # type: ignore[no-any-return, operator]

    knowledge = Knowledge((3,), auxiliary=rows, query=ask)
    view: View = released(torch.zeros(1, 3))
    attack(view, knowledge, torch.Generator().manual_seed(0))
    return seen


def test_a_decoder_asks_anew_every_epoch_where_releases_change() -> None:
    rows, drawn = torch.arange(60.0).view(20, 3), torch.Generator().manual_seed(0)
    attack = InverseNetwork(epochs=4, width=1, queries=3)
    once = asked(lambda x: {"z": 2 * x}, attack, rows)
    assert len(once) == 2, "the second says that nothing changes"
    random = asked(lambda x: {"z": 2 * x + torch.randn(x.shape, generator=drawn)}, attack, rows)
    by_batch = asked(lambda x: {"z": x - x[:10].mean(0)}, attack, rows)
    for found in (random, by_batch):
        assert len(found) == 3 + 4
        assert all(sorted(x[:, 0].tolist()) == rows[:, 0].tolist() for x in found)
        assert len({tuple(x[:, 0].tolist()) for x in found}) == len(found), "in another order each time"


def test_synthetic_rows_have_the_mean_and_the_covariance_of_those_they_are_drawn_about() -> None:
    drawn = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 3, generator=drawn) @ torch.tensor([[1.0, 0.5, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 0.1]]) + 5
    made = draw_synthetic(rows, 500, drawn)
    assert made.shape == (20_000, 3)
    assert torch.allclose(made.mean(0), rows.mean(0), atol=0.03)
    assert torch.allclose(made.T.cov(correction=0), rows.T.cov(correction=0), atol=0.03)
    fresh = asked(lambda x: {"z": x}, InverseNetwork(epochs=3, width=1, synthetic=2), rows)
    assert [len(x) for x in fresh] == [40, 40, 120, 120, 120]
    assert not torch.equal(fresh[-1].sort(0)[0], fresh[-2].sort(0)[0])
