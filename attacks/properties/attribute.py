"""Attribute inference: predicts a private attribute of victims by a classifier trained on auxiliary releases.

Paper: Melis, Song, De Cristofaro, Shmatikov, "Exploiting unintended feature leakage in collaborative learning", IEEE
S&P 2019 (property inference, here at the cut); Song, Shmatikov, "Overlearning reveals sensitive attributes", ICLR 2020,
who train a classifier on a model's representation.

The attribute is a label set of the data beside the main one (`Dataset.with_target`), which the adversary knows for its
auxiliary rows. These pass the victims' own parties, so the classifier is trained on defended releases, drawn afresh in
every query; the passes are used in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from splitfed.attacks.base import FORWARD, Attack, Budgets, Knowledge, Needs, Progress, Space, Span, Target, unwrap
from splitfed.attacks.scoring.classifier import train_classifier
from splitfed.core.errors import InvalidInput, check_names, require_count, require_number
from splitfed.core.messages import View


@dataclass(frozen=True)
class Attribute(Attack):
    """Predicts the label set called `attribute`, which must be named.

    `epochs` over the auxiliary rows in batches of `batch_size` with Adam at rate `lr`, classifier of `width`;
    `queries`: number of passes of the auxiliary rows through the victims' parties.
    """

    target: ClassVar[Target] = Target.LABELS
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES, Needs.QUERIES, Needs.AUXILIARY, Needs.ATTRIBUTES})
    adapts_to = FORWARD
    budgets: ClassVar[Budgets] = {
        "quick": {"epochs": 20, "width": 32},
        "full": {"epochs": 100, "width": 64},
    }

    space: ClassVar[Space] = {"lr": Span(3e-4, 1e-2, log=True), "width": (16, 32, 64)}

    attribute: str = ""
    epochs: int = field(default=20, metadata=require_count("attribute epochs", low=1))
    batch_size: int = field(default=32, metadata=require_count("attribute batch_size", low=1))
    lr: float = field(default=3e-3, metadata=require_number("attribute lr", low=0.0, open_low=True))
    width: int = field(default=32, metadata=require_count("attribute width", low=1))
    queries: int = field(default=3, metadata=require_count("attribute queries", low=1))

    @property
    def label_set(self) -> str:
        """Name of the predicted label set, the attribute."""
        return self.attribute

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return scores for the attribute's classes: (victims, classes)."""
        check_names("attribute of the data", knowledge.attributes, self.attribute)
        labels, classes = knowledge.attributes[self.attribute]
        if classes is None:
            raise InvalidInput(f"attribute {self.attribute!r} has no classes; expected a label set with classes")
        released = view.select(kind="activation").tensors(knowledge.device)
        x, query = unwrap(knowledge.auxiliary), unwrap(knowledge.query)
        passes = [query(x) for _ in range(self.queries)]
        network = train_classifier(
            released, passes, labels, classes, generator,
            width=self.width, epochs=self.epochs, lr=self.lr, batch_size=self.batch_size, progress=progress,
        )  # fmt: skip
        with torch.no_grad():
            scores: Tensor = network(released)
        return scores
