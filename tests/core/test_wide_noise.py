"""Noise of private mechanisms: of more states than torch's 32 bits of seed, the same again, and never used twice."""

from __future__ import annotations

import math

import torch

import splitfed.core.random as seeding
from splitfed.core.random import derive, generator, wide_generator


def test_torch_seeds_with_32_bits_and_the_wide_generator_does_not(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Two purposes whose seeds agree in their lower half: one noise for both, but not from the wide generator."""
    seeds = {"a": 7, "b": 7 + (5 << 32)}
    monkeypatch.setattr(seeding, "derive", lambda root, *purpose: seeds[purpose[0]])
    narrow = [torch.randn(8, generator=generator(0, name)) for name in "ab"]
    assert torch.equal(*narrow)
    wide = [torch.randn(8, generator=wide_generator(0, name)) for name in "ab"]
    assert not torch.equal(*wide)
    assert not torch.equal(wide[0], narrow[0])


def test_the_wide_generator_is_the_same_again_and_normal() -> None:
    first, again = (torch.randn(200_000, generator=wide_generator(3, "x", 1), dtype=torch.float64) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, torch.randn(200_000, generator=wide_generator(3, "x", 2), dtype=torch.float64))
    assert abs(float(first.mean())) < 4 / math.sqrt(200_000)
    assert abs(float(first.var()) - 1) < 4 * math.sqrt(2 / 200_000)
    assert derive(3, "x", 1) == wide_generator(3, "x", 1).initial_seed(), "what is told of it is the seed"
