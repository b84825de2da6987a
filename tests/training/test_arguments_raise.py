"""Values of every kind in place of every argument of `train` and of its groups: taken, or refused in one sentence."""

from __future__ import annotations

from dataclasses import fields
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.random import derive
from splitfed.topologies import vanilla
from tests.examples import refusal


class Stranger:
    """An object that nobody knows."""


WRONG: tuple[Any, ...] = (
    *(None, -1, 1.5, "x", b"x", [0, 1], {"a": 1}, Stranger(), Stranger, float("nan"), torch.tensor(1.0), {1, 2}),
    *(np.array([1, 2]), np.float64(0.5), (1, "a"), [Stranger()], sf.Optim, "\n", "a" * 1000),
)
FINE = {
    ("method", 0),
    ("optimizer", 0),
    ("starts", 0),
    ("speeds", 0),
    ("delta", 0),
    ("delta", 13),
    ("folder", 0),
    ("folder", 3),
    ("folder", 17),
    ("folder", 18),
    ("record", 0),
    ("progress", 0),
    ("progress", 8),
    ("progress", 16),
    ("scheduler", 0),
    ("evaluate_every", 6),  # whether there is such a party, `train` sees
    ("scheduler_options", 6),  # without a scheduler
    ("clip_norm", 0),
    ("clip_norm", 2),
    ("clip_norm", 13),
}
"""Arguments and the numbers of values in `WRONG` that are right there, or are seen to be wrong when they are used."""
GROUPS = (sf.LocalUpdate, sf.Adversaries, sf.Evaluation, sf.Logging, sf.Optim)


def world() -> tuple[Any, Any]:
    """Return a topology, and data of two clients."""
    torch.manual_seed(0)
    data = sf.data.from_arrays(torch.rand(24, 3), torch.arange(24) % 2)
    return vanilla(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), "0"), data.clients(
        2, auxiliary=4, victims=4, seed=0
    )


@pytest.mark.parametrize("name", signature(sf.train).parameters)
def test_train_refuses_in_a_sentence(name: str) -> None:
    topology, data = world()
    for number, value in enumerate(WRONG):
        if (name, number) in FINE:
            continue
        given = {"topology": topology, "data": data, "rounds": 1, name: value}
        with pytest.raises(InvalidInput) as caught:
            sf.train(**given)
        assert len(str(caught.value).splitlines()) == 1, (name, value)


@pytest.mark.parametrize(
    ("group", "name"),
    [pytest.param(g, f.name, id=f"{g.__name__}-{f.name}") for g in GROUPS for f in fields(g) if f.init],
)
def test_groups_refuse_in_a_sentence(group: type, name: str) -> None:
    for number, value in enumerate(WRONG):
        if (name, number) in FINE:
            continue
        with pytest.raises(InvalidInput) as caught:
            group(**{name: value})
        assert len(str(caught.value).splitlines()) == 1, (name, value)


def test_a_seed_is_a_whole_number_of_any_make() -> None:
    topology, data = world()
    runs = [sf.train(topology, data, rounds=1, seed=seed) for seed in (3, np.int64(3), torch.tensor(3))]  # type: ignore[arg-type]
    states = [run.state_dict() for run in runs]
    assert all(torch.equal(states[0][n], other[n]) for other in states[1:] for n in states[0])
    assert derive(np.int64(3), "a") == derive(3, "a")  # type: ignore[arg-type]
    for wrong in ([0, 1], True, 0.0, "0", None, -1):
        text = refusal(sf.train, topology, data, rounds=1, seed=wrong)
        assert text == f"seed={wrong!r} is not allowed; expected a whole number of at least 0"
