"""Audits of class means that a method itself makes private: messages with a canary row in a class, and without it.

Every class has noise of its own and a row of it is in no other, so that one message of many classes, a canary in each,
is as many samples. In ten messages in a row canaries alternate their sign, so that noise which is repeated over rounds
cancels in their direction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from splitfed.core.defense import UPLOAD
from splitfed.core.random import derive, generator
from splitfed.defenses.private_class_sums import PrivateClassSums, message_noise
from splitfed.study.run.audit_game import ONE, TEN, Game, Scores, SensitivityCheck
from splitfed.training.run import Run

WIDTH = 8
"""Numbers of a canary's embedding."""

OTHERS = 3
"""Rows of each class that are there either way."""

TIMES = 10
PAIRS = 200
SIZE = 1e3
"""The norm of a canary's embedding before it is clipped."""


def class_sum_games(run: Run, client: int) -> Iterator[Game]:
    """Yield what is to be audited of the class means of `client`; nothing where the method has no such mechanism."""
    mechanism = getattr(run.method, "private", None)
    if not isinstance(mechanism, PrivateClassSums) or run.method is None:
        return
    topology, event = run.engine.topologies[client], mechanism.event()
    party = run.engine.party(client, topology.data_roles[0]).name
    for kind in run.method.traits(topology).message_events:
        for times, audited in ((1, ONE), (TIMES, TEN)):
            draw = partial(_scores, mechanism, run.seed, client, times)
            measure = partial(_measure_sensitivity, mechanism, run.seed) if times == 1 else None
            claim = ((event, times),)
            name = type(mechanism).__name__
            yield Game(party, f"{kind}{UPLOAD}", name, audited, "a row more in its class", claim, draw, None, measure)


def _scores(mechanism: PrivateClassSums, seed: int, client: int, times: int, which: int, trials: int) -> Scores:
    """Return what `times` messages have of a canary in each of `trials` classes (input 0), or of none (input 1)."""
    along, whole = (torch.zeros(trials, dtype=torch.float64) for _ in range(2))
    drawn = derive(seed, "audit", which)
    for turn in range(times):
        sign = (-1.0) ** turn
        z, y = _rows(trials, sign, which == 0)
        noisy = mechanism.release(z, y, trials, message_noise(drawn, client, turn))
        counts = noisy.counts.double()
        sums = noisy.means.double() * counts.clamp_min(1.0)[:, None]
        along += sign * sums[:, 0]
        whole += sign * sums[:, 0] + mechanism.clip * counts
    # The count of a row has one sign: where noise is repeated, its embedding alone shows it.
    return {"embedding and count": whole.numpy(), "embedding": along.numpy()}


def _rows(classes: int, sign: float, present: bool) -> tuple[Tensor, Tensor]:
    """Return embeddings (rows, WIDTH) and classes: a few rows at zero in each class, and a canary if `present`."""
    every = torch.arange(classes)
    z, y = torch.zeros(OTHERS * classes, WIDTH), every.repeat(OTHERS)
    if not present:
        return z, y
    canaries = torch.zeros(classes, WIDTH)
    canaries[:, 0] = sign * SIZE
    return torch.cat([z, canaries]), torch.cat([y, every])


def _measure_sensitivity(mechanism: PrivateClassSums, seed: int) -> SensitivityCheck:
    """Return the largest change of the sums that one row more made, over rows of many sizes."""
    random, largest = generator(seed, "sensitivity"), 0.0
    for _ in range(PAIRS):
        size = 10 ** float(torch.empty(1).uniform_(-3, 4, generator=random))
        z, y = size * torch.randn(6, WIDTH, generator=random), torch.randint(3, (6,), generator=random)
        change = mechanism.sums(z, y, 3) - mechanism.sums(z[1:], y[1:], 3)
        largest = max(largest, float(torch.linalg.vector_norm(change)))
    assert math.isfinite(mechanism.sensitivity)
    return SensitivityCheck("sensitivity L2", largest, mechanism.sensitivity, PAIRS)
