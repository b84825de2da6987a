"""What clients' models score on rows that nobody trained on: by client, on the union of all, and crosswise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from splitfed.core.errors import check_names
from splitfed.core.random import generator
from splitfed.core.topology import Head, Topology
from splitfed.data.dataset import Federation
from splitfed.engines.base import Prediction
from splitfed.federated.base import Method
from splitfed.federated.groups import scores as further_scores
from splitfed.stats.utility import ConstantAnswer, constant_of, over_rows
from splitfed.threats.knowledge import KnowledgeGrants
from splitfed.training.client_scores import summarize_clients
from splitfed.training.round_trainer import RoundTrainer


def evaluate_part(
    trainer: RoundTrainer, grants: KnowledgeGrants, part: str, number: int, interval: bool, crosswise: bool
) -> dict[str, Any]:
    """Return the scores of `part` as `Run.evaluate` describes them; `number` is the draw of the defenses.

    `crosswise`: whether every client's model is scored on the others' rows too.
    """
    engine, method = trainer.engine, trainer.prepared.method
    heads = engine.topology.scored
    replicas, first = range(engine.replicas), heads[0].value
    made = {r: _predict_part(trainer, r, part, number) for r in replicas if engine.rows(r, part)}
    outputs = {head.value: [one.outputs[head.value] for one in made.values()] for head in heads}
    labels = {head.value: [one.labels[head.value] for one in made.values()] for head in heads}
    scores = [
        _score(heads[0], [made[r].outputs[first]], [made[r].labels[first]]) if r in made else None for r in replicas
    ]
    unions = {head.value: _score(head, outputs[head.value], labels[head.value]) for head in heads}
    task = heads[0].task
    assert task is not None
    several: dict[str, Any] = {"heads": unions} if len(heads) > 1 else {}
    if interval and made:
        several["interval"] = over_rows(
            task, torch.cat(outputs[first]), torch.cat(labels[first]), generator(grants.seed, "interval", part)
        )
    if len(scores) > 1:
        several["spread"] = summarize_clients(scores, task.higher_is_better)
    if method is not None:
        several |= _method_scores(trainer, method, part, made)
    if crosswise:
        several["across"] = evaluate_across(trainer, grants, part, number)
    return {"metric": task.metric_name, "clients": scores, "union": unions[first], **several}


def evaluate_across(
    trainer: RoundTrainer, grants: KnowledgeGrants, part: str, number: int
) -> dict[str, list[float | None]]:
    """Return the scores of every client's model on its own rows of `part`, on all others', and on the union."""
    check_names("part", ("validation", "test"), part)
    engine, names = trainer.engine, ("own", "others", "union")
    first, *others = parts = [getattr(client, part) for client in grants.data.clients]
    union, ends = first.join(others), torch.tensor([0, *(len(rows) for rows in parts)]).cumsum(0).tolist()
    scores: dict[str, list[float | None]] = {name: [] for name in names}
    if not len(union):
        return {name: [None] * engine.replicas for name in names}
    scored = [head.value for head in engine.topology.scored]
    for replica in range(engine.replicas):
        head = next(h for h in engine.topologies[replica].heads if h.value in scored)
        grants.lend(replica, "across", union.source)
        prediction = engine.predict(replica, "across", "evaluate", number, borrow=trainer.newest(replica))
        engine.drop(replica, "across")
        own = torch.zeros(len(union), dtype=torch.bool)
        own[ends[replica] : ends[replica + 1]] = True
        for name, rows in zip(names, (own, ~own, own | True), strict=True):
            some = [union.label(head.target)[rows]] if bool(rows.any()) else []
            scores[name].append(_score(head, [prediction.outputs[head.value][rows]], some) if some else None)
    return scores


def _predict_part(trainer: RoundTrainer, replica: int, part: str, number: int) -> Prediction:
    """Return predictions for a client's rows of `part`, with what the method's own inference computes of them."""
    source, engine = trainer.newest(replica), trainer.engine
    method = None if isinstance(source, Mapping) else trainer.prepared.method
    wanted = () if method is None else method.traits(engine.topologies[replica]).scored_values
    return engine.predict(replica, part, "evaluate", number, borrow=source, also=wanted)


def _method_scores(trainer: RoundTrainer, method: Method, part: str, made: Mapping[int, Prediction]) -> dict[str, Any]:
    """Return what the method's own inference scores, for every client that has rows in `part`, by name."""
    found: list[dict[str, float]] = [{} for _ in trainer.learners]
    schedule = trainer.prepared.schedule
    for replica, prediction in made.items():
        known = {(value, part): computed for value, computed in prediction.further_values.items()}
        # As the schedule would have it: handed on or averaged, where it does that.
        with trainer.engine.borrow_segments(replica, schedule.newest(replica, trainer.schedule_state)):
            learner = replace(trainer.learners[replica], known=known)
            found[replica] |= further_scores(method, learner, part, trainer.method_state)
    names = dict.fromkeys(name for scores in found for name in scores)
    return {"method": {name: [scores.get(name) for scores in found] for name in names}} if names else {}


def _score(head: Head, outputs: list[Tensor], labels: list[Tensor]) -> float | None:
    assert head.task is not None
    return float(head.task.metric(torch.cat(outputs), torch.cat(labels))) if outputs else None


def constant_answer(topology: Topology, data: Federation) -> ConstantAnswer | None:
    """Return what always giving one answer scores on all clients' test rows, as `Run.constant` describes it."""
    head = topology.scored[0]
    assert head.task is not None
    train, test = ([getattr(client, part).label(head.target) for client in data.clients] for part in ("train", "test"))
    return constant_of(head.task, train, test)
