"""Prototype membership: scores a row by its distance from the class mean, which is smaller for members.

Paper: after Yeom, Giacomelli, Fredrikson, Jha, "Privacy risk in machine learning: analyzing the connection to
overfitting", CSF 2018 (adversary 2: a member is what the model fits better), with the distance to the client's class
mean instead of the loss.

The adversary is the aggregation server of a run that was recorded, with candidate rows, their labels, and the weights
of the client's extractor (as `prototype_inversion`). The score of a row is minus the squared distance of its embedding
from the mean sent for its class. Members are nearer because the extractor was trained on them, the more so if the
method pulls their embeddings to the mean (FedProto), and because each is a part of the mean. The candidates are of
classes that the client holds; `class_shares` predicts which these are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from splitfed.attacks.base import (
    Attack,
    DefenseEffect,
    Knowledge,
    Needs,
    Phase,
    Progress,
    Target,
    check_classes,
    unwrap,
)
from splitfed.attacks.uploads.upload_attack import goals
from splitfed.core.messages import View


@dataclass(frozen=True)
class PrototypeMembership(Attack):
    """Scores members by their distance from a class mean; has no parameters."""

    target = Target.MEMBERS
    phase = Phase.TRAINING
    reads = ("prototype", "soft labels")
    requires = frozenset({Needs.UPLOADS, Needs.EXTRACTOR, Needs.CANDIDATES})
    adapts_to = frozenset[DefenseEffect]()

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return minus the squared distance of every candidate from its class's mean: (candidates,)."""
        check_classes("prototype_membership", knowledge.classes)
        with torch.no_grad():
            embedded = unwrap(knowledge.extractor)(unwrap(knowledge.candidates))
        kind, labels, means = goals("prototype_membership", view, embedded)
        z = embedded[kind].flatten(1).double()
        own = unwrap(knowledge.candidate_labels).view(-1, 1).to(z.device) == torch.tensor(labels, device=z.device)
        distances = torch.cdist(z, means.to(z)).square()
        # A class that no mean was sent for: further than anything.
        return -torch.where(own, distances, distances.max() + 1).amin(1)
