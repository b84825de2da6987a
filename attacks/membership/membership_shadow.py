"""Membership by shadow models: a classifier of members, trained on the outputs of copies of the model.

Paper: Shokri, Stronati, Song, Shmatikov, "Membership inference attacks against machine learning models", IEEE S&P 2017.

Every copy trains on a random half of the auxiliary rows; its outputs on that half and on the other are examples of
members and non-members. Two deviations: one classifier for all classes, with the class as an input, instead of one for
each class, since auxiliary rows are few; it reads log probabilities, the true label's first and the others in order, as
the order of classes holds no information about membership.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from splitfed.attacks.base import (
    IN_TRAINING,
    Attack,
    Budgets,
    Knowledge,
    Needs,
    Progress,
    Target,
    check_classes,
    unwrap,
)
from splitfed.attacks.membership.confidence import log_probabilities, margins
from splitfed.attacks.membership.copied_models import Copies, copies_work
from splitfed.attacks.scoring.classifier import Classifier, train_classifier
from splitfed.attacks.work import BATCHES, Work
from splitfed.core.errors import InvalidInput, require_count
from splitfed.core.messages import View

CLASSIFIER_BATCH = 64
_FLOOR = -30.0  # log probability


@dataclass(frozen=True)
class MembershipShadow(Attack):
    """Predicts membership by a classifier trained on the outputs of copies whose training rows are known.

    `copies`: number of models trained for `epochs` in batches of `batch_size` (None: as the run). The classifier has
    twice `width` hidden units and is trained for `classifier_epochs`.
    """

    target: ClassVar[Target] = Target.MEMBERS
    requires: ClassVar[frozenset[Needs]] = frozenset(
        {Needs.CANDIDATES, Needs.PREDICTIONS, Needs.IMITATION, Needs.AUXILIARY, Needs.AUXILIARY_LABELS}
    )
    adapts_to = IN_TRAINING
    budgets: ClassVar[Budgets] = {"quick": {"copies": 4}, "full": {"copies": 100}}

    copies: int = field(default=4, metadata=require_count("membership_shadow copies", low=1))
    epochs: int | None = field(default=None, metadata=require_count("membership_shadow epochs", low=1))
    batch_size: int | None = field(default=None, metadata=require_count("membership_shadow batch_size", low=1))
    width: int = field(default=32, metadata=require_count("membership_shadow width", low=1))
    classifier_epochs: int = field(default=30, metadata=require_count("membership_shadow classifier_epochs", low=1))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the classifier's log odds of membership: (candidates,)."""
        check_classes("membership_shadow", knowledge.classes)
        examples, members = self._examples(knowledge, generator, progress)
        values = {"features": examples}
        network = self._classifier(values, members, generator, self.classifier_epochs)
        with torch.no_grad():
            outputs = unwrap(knowledge.predict)(unwrap(knowledge.candidates))
            scores: Tensor = network({"features": features(outputs, unwrap(knowledge.candidate_labels))})
        return scores[:, 1] - scores[:, 0]

    def work(self, view: View, knowledge: Knowledge) -> list[Work]:
        """Return the work of the attack: copies of the model, each trained on half of the auxiliary rows."""
        rows = len(unwrap(knowledge.auxiliary))
        copies, examples = Copies(self.copies, self.copies, rows // 2, rows), [self.copies * rows]
        return [
            *copies_work(knowledge, self.epochs, self.batch_size, [copies]),
            self.classifier_work(knowledge, examples, examples),
        ]

    def classifier_work(self, knowledge: Knowledge, least: Collection[int], most: Collection[int]) -> Work:
        """Return the work of training classifiers; a unit is a few steps.

        `least`, `most`: number of examples of each classifier, in the shortest and in the longest case. An incomplete
        last batch counts as a full one.
        """
        few, classes = BATCHES * CLASSIFIER_BATCH, unwrap(knowledge.classes)
        values = {"features": torch.zeros(few, 2 * classes + 1, device=knowledge.device)}
        members = torch.arange(few, device=knowledge.device) % 2

        def run(size: int) -> None:
            self._classifier(values, members, torch.Generator().manual_seed(0), size)

        batches = [sum(-(-examples // CLASSIFIER_BATCH) for examples in counts) for counts in (least, most)]
        sizes = [self.classifier_epochs * count / BATCHES for count in batches]
        return Work(run, sizes[0], sizes[1], (len(least), len(most)), timed=2)

    def _classifier(
        self, values: dict[str, Tensor], members: Tensor, generator: torch.Generator, epochs: int
    ) -> Classifier:
        return train_classifier(
            values, [values], members, 2, generator,
            width=self.width, epochs=epochs, lr=3e-3, batch_size=CLASSIFIER_BATCH,
        )  # fmt: skip

    def _examples(self, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> tuple[Tensor, Tensor]:
        """Return the features of the auxiliary rows by every copy, and (rows,) int64, 1 for its training rows."""
        x, y = unwrap(knowledge.auxiliary), unwrap(knowledge.auxiliary_labels)
        if len(x) < 4:
            raise InvalidInput(f"membership_shadow needs at least 4 auxiliary rows, to train on half; found {len(x)}")
        examples, members = [], []
        for number in range(self.copies):
            order = torch.randperm(len(x), generator=generator).to(x.device)
            mine = order[: len(x) // 2]
            seed = int(torch.randint(2**62, (), generator=generator))
            copy = unwrap(knowledge.imitate)(x[mine], y[mine], self.epochs, self.batch_size, seed)
            examples.append(features(copy.predict(x[order]), y[order]))
            members.append((torch.arange(len(x), device=x.device) < len(mine)).long())
            progress(number + 1, self.copies)
        return torch.cat(examples), torch.cat(members)


def features(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the classifier's inputs for outputs (n, classes) on rows of `labels` (n,): (n, 2 classes + 1) float32.

    Log odds of the true label, its log probability, those of the other classes in descending order, and the one-hot
    label.
    """
    known = log_probabilities(outputs).clamp_min(_FLOOR)
    true = functional.one_hot(labels.long(), known.shape[1]).bool()
    others = known[~true].view(len(known), -1).sort(1, descending=True).values
    odds = margins(outputs, labels).clamp(_FLOOR, -_FLOOR)
    return torch.cat([odds[:, None], known[true][:, None], others, true.double()], 1).float()
