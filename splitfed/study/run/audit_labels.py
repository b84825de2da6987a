"""Audits of training labels: a row of one class beside the same row of another, as the run's own holder trains on them.

Of steps in a row, labels alternate between the two classes, so that noise which comes again cancels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from splitfed.core.defense import LabelDefense, privacy_event
from splitfed.core.per_client_defenses import of_client
from splitfed.core.tasks import Task
from splitfed.core.topology import Head
from splitfed.core.usage_counts import counted_labels, labels_of_head
from splitfed.privacy.audit import LowerBound, outcomes_bound
from splitfed.study.run.audit_game import Game, Scores, class_names
from splitfed.study.run.own_parties import PART, TURNS, lent_parties, noisy_targets
from splitfed.training.run import Run

SEQUENCES = {
    "labels of one step": TURNS[:1],
    "labels of two steps of an epoch": TURNS[:2],
    "labels of one step of two epochs": TURNS[:3:2],
    "labels of ten steps in a row": TURNS,
}
"""Few steps show at once what comes again, many what little is too much in each."""


def label_games(run: Run, client: int) -> Iterator[Game]:
    """Yield what is to be audited of the labels of `client`."""
    engine, topology = run.engine, run.engine.topologies[client]
    for head in topology.heads:
        assert head.task is not None
        changing = [d for d in of_client(engine.defenses, client) if isinstance(d, LabelDefense)]
        for defense in (d for d in changing if head.value in d.heads(topology)):
            acts, event = counted_labels(defense, head.task), privacy_event(defense)
            if not acts or event is None:
                continue
            party = engine.party(client, head.labels).name
            place, mechanism = labels_of_head(head.value), class_names([defense])
            if "once" in acts:
                judge = partial(_bound_fixed_labels, run, client, head)
                pairs, claim = "every pair of classes", ((event, 1),)
                yield Game(party, place, mechanism, "labels drawn once", pairs, claim, None, judge)
            if "step" in acts:
                for audited, turns in SEQUENCES.items():
                    draw = partial(_sample_targets, run, client, head, turns)
                    yield Game(party, place, mechanism, audited, "classes 0 and 1", ((event, len(turns)),), draw)


def classes(task: Task) -> int:
    """Return the number of classes of the labels of `task`."""
    return 2 if task.name == "binary" else int(task.outputs or 2)


def _bound_fixed_labels(run: Run, client: int, head: Head, trials: int, confidence: float, delta: float) -> LowerBound:
    """Count what each class becomes in `trials` rows of it, as the run's own holder takes them."""
    assert head.task is not None
    count = classes(head.task)
    chosen, tested = (np.zeros((count, count), dtype=np.int64) for _ in range(2))
    with lent_parties(run, client) as place:
        state = place.parties[head.labels].state
        for label in range(count):
            state.own(PART, {}, {head.value: _labels(head.task, label, trials)})
            noisy_labels = state.labels(PART)[head.value].long().cpu()
            for table, part in ((chosen, noisy_labels[: trials // 4]), (tested, noisy_labels[trials // 4 :])):
                table[label] = torch.bincount(part, minlength=count)[:count].numpy()
    return outcomes_bound(chosen, tested, delta, confidence)


def _sample_targets(
    run: Run, client: int, head: Head, turns: Sequence[tuple[int, int]], which: int, trials: int
) -> Scores:
    """Return the scores of the noisy targets of the run's own holder in the steps `turns` of rows: name -> (trials,).

    Rows are of class `which`, 0 or 1, in the first step, and of the other one wherever noise may be the same again; in
    the neighbouring sequence the other way round.
    """
    assert head.task is not None
    scores = {"absolute": np.zeros(trials), "linear": np.zeros(trials)}
    with lent_parties(run, client) as place:
        for turn in turns:
            sign = (-1) ** sum(turn)
            y = _labels(head.task, which if sign > 0 else 1 - which, trials)
            targets = noisy_targets(place, place.parties[head.labels], head.value, y, turn).double().cpu()
            scores["absolute"] += sign * _distance_difference(targets).numpy()
            scores["linear"] += sign * (targets if targets.dim() == 1 else targets[:, 1] - targets[:, 0]).numpy()
    return scores


def _labels(task: Task, label: int, count: int) -> Tensor:
    return torch.full((count,), label, dtype=torch.float32 if task.name == "binary" else torch.int64)


def _distance_difference(targets: Tensor) -> Tensor:
    """Return, of noisy targets, how much nearer they are to class 1 than to class 0 in L1: (rows,)."""
    if targets.dim() == 1:
        return targets.abs() - (targets - 1).abs()
    zero, one = (torch.nn.functional.one_hot(torch.tensor(c), targets.shape[1]).double() for c in (0, 1))
    return (targets - zero).abs().sum(1) - (targets - one).abs().sum(1)
