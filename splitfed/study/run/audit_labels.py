"""Audits of training labels: a row of one class beside the same row of another, as its holder trains on them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from splitfed.core.defense import LabelDefense, privacy_event
from splitfed.core.party_state import relabel_for_training
from splitfed.core.per_client_defenses import of_client
from splitfed.core.privacy_events import Event
from splitfed.core.random import derive, wide_generator
from splitfed.core.step_plan import EdgeDefense
from splitfed.core.tasks import Task
from splitfed.core.topology import Head
from splitfed.core.usage_counts import counted_labels, labels_of_head
from splitfed.privacy.audit import LowerBound, outcomes_bound
from splitfed.study.run.audit_game import Game, Scores, class_names
from splitfed.training.run import Run

STEPS = 10


def label_games(run: Run, client: int) -> Iterator[Game]:
    """Yield what is to be audited of the labels of `client`."""
    engine, topology = run.engine, run.engine.topologies[client]
    for head in topology.heads:
        assert head.task is not None
        changing = [(i, d) for i, d in enumerate(of_client(engine.defenses, client)) if isinstance(d, LabelDefense)]
        for position, defense in [(i, d) for i, d in changing if head.value in d.heads(topology)]:
            acts, event = counted_labels(defense, head.task), privacy_event(defense)
            if not acts or event is None:
                continue
            party = engine.party(client, head.labels).name
            guard = EdgeDefense(defense, position, 1.0)
            place, mechanism = labels_of_head(head.value), class_names([defense])
            if "once" in acts:
                judge = partial(_bound_fixed_labels, run.seed, party, head, guard, head.task)
                pairs, claim = "every pair of classes", ((event, 1),)
                yield Game(party, place, mechanism, "labels drawn once", pairs, claim, None, judge)
            if "step" in acts:
                for times, audited in ((1, "labels of one step"), (STEPS, "labels of ten steps in a row")):
                    yield _step_game(run.seed, party, head, guard, head.task, event, times, audited)


def classes(task: Task) -> int:
    """Return the number of classes of the labels of `task`."""
    return 2 if task.name == "binary" else int(task.outputs or 2)


def _bound_fixed_labels(
    seed: int,
    party: str,
    head: Head,
    guard: EdgeDefense[LabelDefense],
    task: Task,
    trials: int,
    confidence: float,
    delta: float,
) -> LowerBound:
    """Count what each class becomes in `trials` rows of it."""
    count, dtype = classes(task), torch.float32 if task.name == "binary" else torch.int64
    chosen, tested = (np.zeros((count, count), dtype=np.int64) for _ in range(2))
    for label in range(count):
        true_labels, guarded = {head.value: torch.full((trials,), label, dtype=dtype)}, {head.value: (head, (guard,))}
        noisy = relabel_for_training(true_labels, guarded, derive(seed, "audit", label), party, "train")
        noisy_labels = noisy[head.value].long()
        for table, part in ((chosen, noisy_labels[: trials // 4]), (tested, noisy_labels[trials // 4 :])):
            table[label] = torch.bincount(part, minlength=count)[:count].numpy()
    return outcomes_bound(chosen, tested, delta, confidence)


def _step_game(
    seed: int,
    party: str,
    head: Head,
    guard: EdgeDefense[LabelDefense],
    task: Task,
    event: Event,
    times: int,
    audited: str,
) -> Game:
    """The noisy targets of a row in `times` steps, of class 0 or of class 1."""

    def draw(which: int, trials: int) -> Scores:
        y = torch.full((trials,), which, dtype=torch.float32 if task.name == "binary" else torch.int64)
        total = np.zeros(trials)
        for step in range(times):
            stamp = ("train", 0, step // 2, step % 2, "train")
            random = wide_generator(derive(seed, "audit", which), "targets", party, head.value, guard.position, *stamp)
            total += _distance_difference(guard.defense, y, task, random).numpy()
        return {"absolute": total}

    place, mechanism = labels_of_head(head.value), class_names([guard.defense])
    return Game(party, place, mechanism, audited, "classes 0 and 1", ((event, times),), draw)


def _distance_difference(defense: LabelDefense, y: Tensor, task: Task, random: torch.Generator) -> Tensor:
    """Return, of noisy targets, how much nearer they are to class 1 than to class 0 in L1: (rows,)."""
    targets = defense.targets(y, task, random).double()
    if targets.dim() == 1:
        return targets.abs() - (targets - 1).abs()
    zero, one = (torch.nn.functional.one_hot(torch.tensor(c), targets.shape[1]).double() for c in (0, 1))
    return (targets - zero).abs().sum(1) - (targets - one).abs().sum(1)
