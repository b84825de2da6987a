"""Attacks of the table of hybrids: what a method's layer gives away, and what split replicas do with and without it.

Every figure stands beside that of somebody who knows nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

import splitfed as sf
from experiments.papers.hybrid_runs import Arm, Setting, plain_of, train
from splitfed.attacks import InverseNetwork
from splitfed.attacks.scoring.share_metrics import score_shares
from splitfed.engines.base import FED
from splitfed.federated import FML, MAFML, FedProto

ASKED = 4  # the clients 0, 1, 2, ... whose uploads are inverted and searched for members
Figures = dict[str, float]


def leaks(run: sf.Run, arm: Arm, seed: int, setting: Setting) -> Figures:
    """Return every figure that applies to `run` of a split arm, by name."""
    found = {**_members(run), **_inverted(run)}
    if isinstance(arm.method, FML):
        found |= _learnt(run, arm, seed, setting)
    if isinstance(arm.method, (FedProto, MAFML)):
        found |= _shares(run)
    if isinstance(arm.method, FedProto):
        found |= _prototypes(run)
    if isinstance(arm.method, MAFML):
        found |= _shown(run)
    return found


def _members(run: sf.Run) -> Figures:
    """Membership by the loss of the model that answers: the AUC, mean over the first clients' models."""
    found = [run.attack("membership_threshold", client=i)[0] for i in _asked(run)]
    return {"membership": _mean([one.scores["attack"]["auc"].mean for one in found])}


def _inverted(run: sf.Run) -> Figures:
    """A decoder of what crosses at the cut for new rows of client 0, trained on auxiliary rows that it sent through."""
    # Nothing is random on the way, so one pass of queries says all.
    (one,) = run.attack(InverseNetwork.with_budget("quick", epochs=10, queries=1, width=16))
    return {who: one.scores[key]["ssim"].mean for who, key in (("cut ssim", "attack"), ("cut blind", "mean_image"))}


def _learnt(run: sf.Run, arm: Arm, seed: int, setting: Setting) -> Figures:
    """How often the model that answers says what the client's private one says, on rows that nobody trained on.

    Beside it the same of a model that was trained without the private one: all that is asked of the latter is to be
    right as often.
    """
    other = train(plain_of(arm), seed, setting)
    x, found = run.data.victims.x, []
    for client in range(run.engine.replicas):
        private = run.predict(x, client, head=_private(run)).argmax(1)
        told = [one.predict(x, client).argmax(1) for one in (run, other)]
        found.append([float((prediction == private).double().mean()) for prediction in told])
    ours, blind = (_mean(list(values)) for values in zip(*found, strict=True))
    return {"agreement": ours, "agreement blind": blind}


def _shares(run: sf.Run) -> Figures:
    """How far the class shares read off uploads lie from the true ones: total variation, mean over clients."""
    scores = [run.attack("class_shares", client=i)[0].scores for i in range(run.engine.replicas)]
    names = {"attack": "shares", "uniform": "shares even", "prior": "shares prior"}
    return {name: _mean([g[who]["total_variation"].mean for g in scores]) for who, name in names.items()}


def _shown(run: sf.Run) -> Figures:
    """The same read off the labels of the public rows."""
    found = []
    for client, held in enumerate(run.data.clients):
        seen = run.engine.view(FED).select(kind="data").messages
        (shown,) = [m.tensors["y"] for m in seen if m.receiver == FED and m.stamp.replica == client]
        shares = torch.bincount(shown, minlength=10).double()
        _, scores = score_shares(held.train.y, shares, run.data.auxiliary.y)
        found.append(scores["attack"]["total_variation"].mean)
    return {"shares by public labels": _mean(found)}


def _prototypes(run: sf.Run) -> Figures:
    """Rows searched that fit the prototypes, and members told by the distance from them; mean over the first clients.

    Both are granted the weights of the client's extractor.
    """
    tried = ["prototype_inversion", "prototype_membership"]
    both = [run.attack(tried, client=i) for i in _asked(run)]
    images = {"prototype ssim": "attack", "prototype blind": "mean_image"}
    found = {name: _mean([one.scores[who]["ssim"].mean for one, _ in both]) for name, who in images.items()}
    return {**found, "prototype members": _mean([one.scores["attack"]["auc"].mean for _, one in both])}


def answered_by(run: sf.Run, value: str) -> dict[str, float]:
    """Return the mean accuracy of every client's output `value` on its "own" test rows and on the "union" of all."""
    held = [client.test for client in run.data.clients]
    union = held[0].join(held[1:])
    ends = torch.tensor([0, *(len(rows) for rows in held)]).cumsum(0).tolist()
    scores: dict[str, list[float]] = {"own": [], "union": []}
    for client in range(run.engine.replicas):
        right: Tensor = (run.predict(union.x, client, head=value).argmax(1) == union.y).double()
        scores["union"].append(float(right.mean()))
        scores["own"].append(float(right[ends[client] : ends[client + 1]].mean()))
    return {name: _mean(values) for name, values in scores.items()}


def private_scores(run: sf.Run) -> dict[str, float]:
    """Return what FML's private models score, which stay at their clients."""
    return answered_by(run, _private(run))


def _private(run: sf.Run) -> str:
    return run.engine.topology.heads[1].value


def _asked(run: sf.Run) -> range:
    return range(min(ASKED, run.engine.replicas))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
