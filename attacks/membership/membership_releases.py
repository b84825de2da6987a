"""Membership from releases: a row's label is easier to predict from its release if the row was trained on.

Paper: after Watson, Guo, Cormode, Sablayrolles, "On the importance of difficulty calibration in membership inference
attacks", ICLR 2022 (a score minus what a model without the row would give); applied to releases by us.

A bottom segment trained on a row maps it to a release from which its label can be predicted. The adversary fits a
classifier of labels to auxiliary releases, which pass the victims' parties and defenses, and another to the clean
auxiliary rows; the score is the true label's log odds by the first, minus those by the second, which calibrate for the
row's difficulty and do not depend on the model. No output of the model is needed, so a server in the middle of a
U-shaped topology can run it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from splitfed.attacks.base import (
    IN_TRAINING,
    Attack,
    Budgets,
    Knowledge,
    Needs,
    Progress,
    Releases,
    Target,
    check_classes,
    unwrap,
)
from splitfed.attacks.membership.confidence import margins
from splitfed.attacks.scoring.classifier import train_classifier
from splitfed.core.errors import require_count, require_number
from splitfed.core.messages import View


@dataclass(frozen=True)
class MembershipReleases(Attack):
    """Trains classifiers of `width` for `epochs` in batches of `batch_size` with Adam at rate `lr`.

    `queries`: number of passes of the auxiliary rows through the victims' parties, used in turn.
    """

    target: ClassVar[Target] = Target.MEMBERS
    requires: ClassVar[frozenset[Needs]] = frozenset(
        {Needs.CANDIDATES, Needs.RELEASES, Needs.QUERIES, Needs.AUXILIARY, Needs.AUXILIARY_LABELS}
    )
    adapts_to = IN_TRAINING
    budgets: ClassVar[Budgets] = {"quick": {"epochs": 20}, "full": {"epochs": 100}}

    epochs: int = field(default=20, metadata=require_count("membership_releases epochs", low=1))
    batch_size: int = field(default=32, metadata=require_count("membership_releases batch_size", low=1))
    lr: float = field(default=3e-3, metadata=require_number("membership_releases lr", low=0.0, open_low=True))
    width: int = field(default=32, metadata=require_count("membership_releases width", low=1))
    queries: int = field(default=3, metadata=require_count("membership_releases queries", low=1))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the calibrated log odds of every candidate's label: (candidates,)."""
        check_classes("membership_releases", knowledge.classes)
        x, query = unwrap(knowledge.auxiliary), unwrap(knowledge.query)
        released = view.select(kind="activation").tensors(knowledge.device)
        by_release = self._odds([query(x) for _ in range(self.queries)], released, knowledge, generator)
        progress(1, 2)
        return by_release - self._odds([{"x": x}], {"x": unwrap(knowledge.candidates)}, knowledge, generator)

    def _odds(
        self, passes: list[Releases], asked: Releases, knowledge: Knowledge, generator: torch.Generator
    ) -> Tensor:
        """Return the log odds of the candidates' labels by a classifier trained on `passes`; it reads `asked`."""
        labels, classes = unwrap(knowledge.auxiliary_labels), unwrap(knowledge.classes)
        network = train_classifier(
            asked, passes, labels, classes, generator,
            width=self.width, epochs=self.epochs, lr=self.lr, batch_size=self.batch_size,
        )  # fmt: skip
        with torch.no_grad():
            return margins(network(asked), unwrap(knowledge.candidate_labels))
