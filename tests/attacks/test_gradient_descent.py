"""Batches, steps and modes of what attacks train, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from splitfed.attacks.base import unwrap
from splitfed.attacks.networks.gradient_descent import descend, draw_batches, take_step
from splitfed.attacks.scoring.classifier import train_classifier
from splitfed.core.random import generator, stream


@pytest.mark.parametrize(("least", "sizes"), [(1, [3, 3, 1]), (2, [3, 3]), (4, [])])
def test_batches_hold_every_row_once_but_for_a_last_one_that_is_too_small(least: int, sizes: list[int]) -> None:
    batches = list(draw_batches(7, 3, generator(0), least))
    assert [len(rows) for rows in batches] == sizes
    expected = torch.randperm(7, generator=generator(0))[: sum(sizes)]
    assert [int(row) for rows in batches for row in rows] == expected.tolist()


def test_every_pass_draws_a_new_order_from_the_generator() -> None:
    random = generator(0)
    one, two = (torch.cat(list(draw_batches(50, 10, random))) for _ in range(2))
    assert not torch.equal(one, two)
    assert torch.equal(one.sort().values, two.sort().values)


def test_a_step_goes_down_this_gradient_alone() -> None:
    """From 3 by .5 times the slope 2 x = 6; what a gradient was left from before has no part in it."""
    x = torch.tensor(3.0, requires_grad=True)
    x.grad = torch.tensor(100.0)
    take_step(torch.optim.SGD([x], lr=0.5), x.square())
    assert x.item() == 0.0


def test_a_classifier_reads_the_passes_in_turn() -> None:
    """Two passes for four epochs are what four passes are that alternate, and not the first alone."""
    labels = torch.arange(40) % 2
    one, two = ({"z": torch.randn(40, 3, generator=generator(seed))} for seed in (1, 2))

    def trained(*passes: dict[str, Tensor]) -> Tensor:
        with stream(0), torch.enable_grad():
            net = train_classifier(one, passes, labels, 2, generator(0), width=4, epochs=4, lr=0.01, batch_size=8)
        assert not net.training
        with torch.no_grad():
            return net(two)

    assert torch.equal(trained(one, two), trained(one, two, one, two))
    assert not torch.equal(trained(one, two), trained(one))


@pytest.mark.parametrize("least", [1, 2])
def test_the_descent_is_that_of_adam_at_a_rate_that_falls_along_half_a_cosine(least: int) -> None:
    """Three epochs over two passes, step by step by torch's own parts: to the bit, in the same order."""
    passes = [torch.randn(7, 3, generator=generator(seed)) for seed in (1, 2)]
    told: list[tuple[int, int]] = []

    def weight() -> nn.Parameter:
        return nn.Parameter(torch.tensor([1.0, -1.0, 0.5]))

    found, expected = weight(), weight()
    with torch.enable_grad():
        descend(
            [found], passes, lambda z, rows: (z[rows] @ found).square().mean(), 7, generator(3),
            lambda done, of: told.append((done, of)), epochs=3, lr=0.1, batch_size=3, least=least,
        )  # fmt: skip
        random, adam = generator(3), torch.optim.Adam([expected], lr=0.1)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 3)
        for z in (passes[0], passes[1], passes[0]):
            for rows in torch.randperm(7, generator=random).split(3)[: 3 if least == 1 else 2]:
                adam.zero_grad()
                (z[rows] @ expected).square().mean().backward()
                adam.step()
            cosine.step()
    assert torch.equal(found, expected)
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_what_is_known_to_be_there_is_unwrapped() -> None:
    module = nn.Identity()
    assert unwrap(module) is module
    assert unwrap(0) == 0
    with pytest.raises(AssertionError):
        unwrap(None)
