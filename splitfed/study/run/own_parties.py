"""The run's own parties in steps of an audit: its models, losses, clipping and noise, on rows of the audit's choice.

Paper: Nasr, Hayes, Steinke, Balle, Tramèr, Jagielski, Carlini, Terzis, "Tight auditing of differentially private
machine learning", USENIX Security 2023 (white-box audits of the private step itself).

No weight changes: a step ends where an optimizer would take it up. Two batches that differ in one row draw the same
noise at the same step, so that it cancels in their difference and what the row moves is seen exactly. What the noise's
deviation is comes from steps without rows, for every weight by itself, since one that gets less of it tells more; of
steps in a row their sum counts with alternating signs, in which noise that is repeated cancels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

from splitfed.core.executor import ClientReplica, exchange
from splitfed.core.messages import LocalLink
from splitfed.core.party import Party
from splitfed.core.random import generator
from splitfed.core.rows import RowSource
from splitfed.core.step_state import Batch
from splitfed.core.traffic import Traffic
from splitfed.planning.validation import labels_of, rows_of
from splitfed.training.run import Run

PART = "audit"
"""The name of the rows that an audit lends; they are in no count."""

TURNS = tuple((epoch, step) for epoch in range(5) for step in range(2))
SIGNS = tuple((-1) ** (epoch + step) for epoch, step in TURNS)
"""Steps in a row, (epoch, step), and signs by which noise cancels that is repeated over steps or over epochs."""

PAIRS = 30
_ROWS, _SCALES = 16, (1.0, 0.1, 10.0, 1e3)
_OTHERS = (0, 1, 24, 4, 24)
_LEAST, _MOST, _NUMBERS = 2, 32, 2**21
_CHANCE = 1e-5


@contextmanager
def lent_parties(run: Run, client: int) -> Iterator[ClientReplica]:
    """Lend the parties of `client`, who are afterwards as they were."""
    place = run.engine.run_parties.replicas[client]
    kept = [
        (p, p.state.state_dict(), {m: m.training for s in p.state.modules.values() for m in s.modules()})
        for p in place.members
    ]
    try:
        yield place
    finally:
        for party, state, modes in kept:
            party.forget(place.pseudonym)
            party.drop_gradients()
            party.state.drop(PART)
            party.state.load_state_dict(state)
            for module, training in modes.items():
                module.training = training


def noisy_targets(place: ClientReplica, holder: Party, head: str, y: Tensor, turn: tuple[int, int]) -> Tensor:
    """Return what `holder` compares with in the training step `turn`, (epoch, step), for labels `y` of `head`.

    It draws what it would draw in the run.
    """
    holder.state.own(PART, {}, {head: y}, relabel=False)
    stamp = place.stamp("train", *turn)
    holder.begin(Batch(PART, torch.arange(len(y))), stamp)
    (found,) = (h for h in place.topology.heads if h.value == head)
    targets = holder.give_labels(found, stamp, holder.name).tensors[head].clone()
    holder.forget(stamp.replica)
    holder.drop_gradients()
    return targets


class OwnSteps:
    """Private training steps of the parties of one client, of which those in `roles` are guarded.

    `replaced`: whether a neighbour has another row in place of one, or the row is not there.
    """

    def __init__(self, run: Run, client: int, roles: Sequence[str], replaced: bool) -> None:
        self._run, self._client, self._roles = run, client, tuple(roles)
        parties = run.engine.run_parties.replicas[client].parties
        # Where random numbers are drawn for a batch, one of another size draws others for all its rows.
        self._drawn = any(map(_draws_by_batch, parties.values()))
        self.replaced = replaced or self._drawn

    def loudest(self, times: int) -> tuple[float, int]:
        """Return how far apart `times` steps in a row, one or ten, of neighbours are at most, and of how many pairs.

        The distance is in deviations of the noise.
        """
        scales = self._scales[times]
        squares = [sum((times * d / s) ** 2 for d, s in zip(pair, scales, strict=True)) for pair in self._moved]
        return math.sqrt(max(squares)), len(squares)

    @cached_property
    def _moved(self) -> list[list[float]]:
        """How far two batches move the sum of each weight, for each pair of them."""
        engine = self._run.engine
        random = generator(self._run.seed, PART, "own steps", self._client)
        training = self._run.training
        # No more rows than a batch of the run has.
        most = max(0, training.of_client(self._client).batch_size - 1)
        with lent_parties(self._run, self._client) as place:
            inputs, labels = _lent_rows(self._run, self._client, random)
            engine.own(self._client, PART, inputs, labels)
            count, moved = len(next(iter(labels.values()))), []
            for number in range(PAIRS):
                chosen = torch.randperm(count, generator=random)[: 2 + min(most, _OTHERS[number % len(_OTHERS)])]
                loud, another, others = chosen[:1], chosen[1:2], chosen[2:]
                if number % 2:
                    # All of one direction, so that what moves them adds up.
                    others = others[:1].expand(len(others))
                second = torch.cat([others, another]) if self.replaced else others
                one, two = (self._sums(place, rows, (0, number)) for rows in (torch.cat([others, loud]), second))
                moved.append([float((a - b).norm()) for a, b in zip(one, two, strict=True)])
        return moved

    @cached_property
    def _scales(self) -> dict[int, list[float]]:
        """The noise's deviation at each weight, in one step and in the signed sum of ten, no smaller than it may be."""
        with lent_parties(self._run, self._client) as place:
            numbers = sum(w.numel() for role in self._roles for w in place.parties[role].state.parameters)
            repeats = max(_LEAST, min(_MOST, _NUMBERS // numbers))
            none = torch.zeros(0, dtype=torch.int64)
            one, ten = [], []
            for repeat in range(repeats):
                noises = [self._sums(place, none, (len(TURNS) * repeat + epoch, step)) for epoch, step in TURNS]
                one.append(noises[0])
                signed = (
                    torch.stack([sign * n for sign, n in zip(SIGNS, of, strict=True)])
                    for of in zip(*noises, strict=True)
                )
                ten.append([of.sum(0) for of in signed])
            sizes = [len(place.parties[role].state.parameters) for role in self._roles]
        return {1: _deviations(one, sizes), len(TURNS): _deviations(ten, sizes)}

    def _sums(self, place: ClientReplica, rows: Tensor, turn: tuple[int, int]) -> list[Tensor]:
        """Return what a step on `rows` leaves for an optimizer in each guarded weight: the noisy sum."""
        stamp = place.stamp("train", *turn)
        if len(rows):
            exchange(place, LocalLink(Traffic(), {}), Batch(PART, rows, 1.0), stamp)
        else:
            for party in place.members:
                if party.state.privatizer is not None:
                    party.state.privatizer.begin(0, 1.0, stamp, True)
        sums = []
        for role in self._roles:
            state = place.parties[role].state
            assert state.privatizer is not None
            state.privatizer.finish()
            sums += [torch.zeros_like(w) if w.grad is None else w.grad.detach() for w in state.parameters]
        sums = [one.double().cpu().flatten() for one in sums]
        for party in place.members:
            party.drop_gradients()
        return sums


def _draws_by_batch(party: Party) -> bool:
    plans = party.state.segment_plans.values()
    return (
        any(plan.stochastic or plan.plain_draws for plan in plans)
        or any(port.release_defenses for plan in plans for port in plan.departures)
        or any("step" in guard.counts for _, guards in party.state.relabelled.values() for guard in guards)
    )


def _lent_rows(run: Run, client: int, random: torch.Generator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return inputs and labels of rows of the client, and of the same with other labels, larger and smaller."""
    topology, data = run.engine.topologies[client], run.data.clients[client].train
    some = torch.randperm(len(data), generator=random)[:_ROWS]
    inputs, labels = {}, {}
    for name, x in rows_of(topology, data).items():
        x = x.take(some) if isinstance(x, RowSource) else x[some]
        inputs[name] = torch.cat([x * scale if x.is_floating_point() else x for scale in _SCALES])
    for name, y in labels_of(topology, data).items():
        orders = [torch.arange(len(some)), *(torch.randperm(len(some), generator=random) for _ in _SCALES[1:])]
        labels[name] = torch.cat([y[some][order] for order in orders])
    return inputs, labels


def _deviations(noises: Sequence[Sequence[Tensor]], sizes: Sequence[int]) -> list[float]:
    """Return the deviation of the noise in each weight: that of its party, or its own where that is surely smaller.

    `noises`: a step each, the noise in every weight, of the parties one after the other, which have so many weights
    each. An upper bound, so that a party which adds all its noise is not blamed for what few samples leave open.
    """
    found, first = [], 0
    for size in sizes:
        samples = [torch.cat([step[i] for step in noises]) for i in range(first, first + size)]
        together = _upper_deviation(torch.cat(samples))
        found += [min(together, _upper_deviation(own)) for own in samples]
        first += size
    return found


def _upper_deviation(samples: Tensor) -> float:
    from scipy.stats import chi2

    low = float(chi2.ppf(_CHANCE, len(samples)))
    return max(math.sqrt(float(samples.square().sum()) / low), 1e-100)
