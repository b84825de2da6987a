"""Similar: predicts for a row the class of the known row with the most similar gradient or release.

Paper: after Liu, Lyu, Cui, Tao, "Similarity-based label inference attack against training and inference of split
learning", IEEE Transactions on Information Forensics and Security 2024, which compares gradients by their cosine and
released values by their distance; the further details are not established, so those here are ours.

Rows are the gradients at the cut, or what the party itself sent, each brought to length one; rows shorter than a
thousandth of the median length are divided by that instead, as their direction is rounding (`short_rows`). With
`distance` the score of a class is the similarity of its most similar known row. With `k-means` as many clusters as
classes start at the mean known row of each (without known rows at rows far from one another), and are assigned to
classes by the known rows in them.

Similarity is the cosine, or the negated Euclidean distance of the rows as they are, which in gradients depends on the
model's confidence as well as on the class. Without `hints` clusters are not assigned to classes: the score then also
has the accuracy of the best assignment, beside its value by chance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitfed.attacks.base import DefenseEffect, Knowledge, Needs, Progress, check_classes
from splitfed.attacks.labels.known_labels import name_clusters
from splitfed.attacks.labels.label_attack import LabelAttack, gradient_rows
from splitfed.attacks.labels.own_data import own_steps
from splitfed.core.errors import InvalidInput, require_count, require_name
from splitfed.core.messages import View
from splitfed.core.rows import flat_rows

ROWS = ("gradients", "sent")
METHODS = ("distance", "k-means")
MEASURES = ("cosine", "euclidean")
FLOOR = 1e-3
"""Length, relative to the median length of rows, below which a row has no direction."""


@dataclass(frozen=True)
class Similar(LabelAttack):
    """Predicts classes by the similarity of rows to known victims, or by clusters.

    `hints`: known victims of each class (0: none, for k-means alone); `iterations`: maximum steps of k-means. `rows`:
    "gradients", or "sent", the party's own releases; `method`: "distance" or "k-means"; `measure`: "cosine" or
    "euclidean".
    """

    adapts_to = frozenset({DefenseEffect.TASK_WEIGHT})

    rows: str = field(default="gradients", metadata=require_name("similar rows", ROWS))
    method: str = field(default="distance", metadata=require_name("similar method", METHODS))
    measure: str = field(default="cosine", metadata=require_name("similar measure", MEASURES))
    hints: int = field(default=1, metadata=require_count("similar hints"))
    iterations: int = field(default=100, metadata=require_count("similar iterations", low=1))

    def __post_init__(self) -> None:
        """Also raise `InvalidInput` for the method "distance" without hints."""
        super().__post_init__()
        if self.method == "distance" and self.hints == 0:
            raise InvalidInput(
                "similar hints=0 is not allowed with method 'distance'; expected 1 or more, or 'k-means'"
            )

    @property
    def uses(self) -> frozenset[Needs]:
        """The party's own inputs, from which it computes what it sent."""
        return frozenset({Needs.OWN_INPUTS}) if self.rows == "sent" else frozenset()

    @property
    def names_classes(self) -> bool:
        """Whether known victims assign the clusters to classes."""
        return self.hints > 0

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the similarity of each victim to each class or cluster: (victims, classes)."""
        classes = check_classes("similar", knowledge.classes)
        hints = knowledge.hints if self.hints else {}
        if self.hints and any(len(hints.get(number, ())) == 0 for number in range(classes)):
            raise InvalidInput(
                f"similar needs a known victim of each of {classes} classes to assign clusters to classes"
            )
        rows = self._rows(view, knowledge).double()
        if self.measure == "cosine":
            rows = rows / _lengths(rows)[:, None]
        if self.method == "distance":
            known = [self._similarity(rows, rows[hints[number].to(rows.device)]) for number in range(classes)]
            return torch.stack([found.max(1).values for found in known], 1)
        if len(rows) < classes:
            raise InvalidInput(f"similar needs as many victims as clusters, {classes}; there are {len(rows)}")
        scores = self._cluster(rows, self._centers(rows, hints, classes, generator))
        return name_clusters(scores, hints) if hints else scores

    def _rows(self, view: View, knowledge: Knowledge) -> Tensor:
        if self.rows == "gradients":
            return gradient_rows(view, knowledge.device)
        module, steps = own_steps("similar", view, knowledge)
        with torch.no_grad():
            return flat_rows(torch.cat([module(step.inputs.clone()) for step in steps]))

    def _similarity(self, rows: Tensor, others: Tensor) -> Tensor:
        """Return how similar `rows` (n, numbers) are to `others` (m, numbers): (n, m)."""
        return rows @ others.T if self.measure == "cosine" else -torch.cdist(rows, others)

    def _centers(self, rows: Tensor, hints: Mapping[int, Tensor], classes: int, generator: torch.Generator) -> Tensor:
        """Return the initial centers of the clusters: (classes, numbers)."""
        if hints:
            return torch.stack([rows[hints[number].to(rows.device)].mean(0) for number in range(classes)])
        chosen = [int(torch.randint(len(rows), (), generator=generator))]
        for _ in range(classes - 1):
            # The next one is the row that is least similar to the nearest of those chosen.
            chosen.append(int(self._similarity(rows, rows[chosen]).max(1).values.argmin()))
        return rows[chosen].clone()

    def _cluster(self, rows: Tensor, centers: Tensor) -> Tensor:
        """Return the similarity of each row to the center of each cluster, after k-means converged: (n, clusters)."""
        nearest: Tensor | None = None
        for _ in range(self.iterations):
            scores = self._similarity(rows, self._bring_to_length(centers))
            found = scores.argmax(1)
            if nearest is not None and torch.equal(found, nearest):
                break
            nearest = found
            # A cluster that lost all of its rows stays where it was.
            held = [rows[nearest == k].mean(0) if bool((nearest == k).any()) else c for k, c in enumerate(centers)]
            centers = torch.stack(held)
        return self._similarity(rows, self._bring_to_length(centers))

    def _bring_to_length(self, centers: Tensor) -> Tensor:
        return torch.nn.functional.normalize(centers, dim=1, eps=1e-30) if self.measure == "cosine" else centers


def short_rows(rows: Tensor) -> float:
    """Return the share of `rows` (n, numbers) that are too short to have a direction, in [0, 1]."""
    lengths = rows.double().norm(dim=1)
    return float((lengths < _lengths(rows.double())).double().mean())


def _lengths(rows: Tensor) -> Tensor:
    """Return the divisor of each row: its length, at least `FLOOR` times the median length."""
    lengths: Tensor = rows.norm(dim=1)
    return lengths.clamp_min(max(FLOOR * float(lengths.median()), torch.finfo(rows.dtype).tiny))
