"""Sequences of Markov chains: their law, the likelihood worked out by hand, and the ceiling that is stated."""

from __future__ import annotations

import pytest
import torch

from splitfed.data import MarkovChains, markov_tokens
from tests.examples import refusal


def test_rows() -> None:
    data = markov_tokens(rows=40, length=6, vocabulary=5, classes=3)
    assert (data.x.dtype, data.shape, data.task.outputs) == (torch.int64, (6,), 3)
    assert data.y.tolist() == [i % 3 for i in range(40)]
    assert data.x.unique().tolist() == [1, 2, 3, 4]
    assert torch.equal(markov_tokens(rows=40, length=6, vocabulary=5, classes=3).x, data.x)
    assert not torch.equal(markov_tokens(rows=40, length=6, vocabulary=5, classes=3, seed=1).x, data.x)


def test_padded_rows() -> None:
    data = markov_tokens(rows=300, length=5, shortest=3)
    ids, mask = (data.features[name].select(data.x) for name in ("input_ids", "attention_mask"))
    assert torch.equal(mask, (ids > 0).long())
    assert torch.equal(mask, mask.sort(1, descending=True).values)
    counts = mask.sum(1).bincount(minlength=6).tolist()
    assert counts[:3] == [0, 0, 0]
    assert min(counts[3:]) > 60


def test_tokens_follow_one_another_as_the_chain_says() -> None:
    chains = MarkovChains(vocabulary=4, classes=2, difference=1.0)
    assert torch.allclose(chains.transitions.sum(-1), torch.ones(2, 3, dtype=torch.float64))
    y = torch.arange(40000) % 2
    ids = chains.draw(y, 2, torch.Generator().manual_seed(0)) - 1
    for label in (0, 1):
        pairs = ids[y == label]
        counts = torch.zeros(3, 3).index_put_((pairs[:, 0], pairs[:, 1]), torch.ones(len(pairs)), accumulate=True)
        # About 6700 of each first token: a share has a standard deviation of .006 at most.
        assert torch.allclose((counts / counts.sum(1, keepdim=True)).double(), chains.transitions[label], atol=0.03)


def test_likelihood_by_hand() -> None:
    chains = MarkovChains(vocabulary=4, classes=2)
    p = chains.transitions
    found = chains.log_likelihood(torch.tensor([[1, 3, 2], [2, 2, 0]]))
    assert torch.allclose(found[0], (p[:, 0, 2] * p[:, 2, 1]).log())
    # Padding says nothing.
    assert torch.allclose(found[1], p[:, 1, 1].log())
    same = MarkovChains(difference=0.0).transitions
    assert torch.equal(same[0], same[3])


def test_the_ceiling_is_what_the_docstring_says() -> None:
    assert "right for 90.5 % of rows" in str(markov_tokens.__doc__)
    chains, data = MarkovChains(), markov_tokens(rows=4000)
    right = (chains.log_likelihood(data.x).argmax(1) == data.y).double().mean()
    # A standard deviation of .0046.
    assert float(right) == pytest.approx(0.905, abs=0.0185)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"length": 1}, "length=1 is not allowed; expected a whole number of at least 2"),
        ({"vocabulary": 2}, "vocabulary=2 is not allowed; expected a whole number of at least 3"),
        ({"classes": 1}, "classes=1 is not allowed; expected a whole number of at least 2"),
        ({"difference": 1.5}, "difference=1.5 is not allowed; expected a number in [0, 1]"),
        ({"rows": 1}, "rows=1 is not allowed; expected a whole number of at least 2"),
        ({"shortest": 33}, "shortest=33 is not allowed; expected at most length=32"),
        ({"shortest": 1}, "shortest=1 is not allowed; expected a whole number of at least 2"),
    ],
)
def test_refused(given: dict[str, float], text: str) -> None:
    assert refusal(markov_tokens, **given) == text
