"""Model completion: fine-tunes a party's trained bottom model with an inference head on a few labels.

Paper: Fu, Zhang, Ji, Chen, Wu, Guo, Zhou, Liu, Wang, "Label inference attacks against vertical federated learning",
USENIX Security 2022 (passive attack; the active one is this attack after training with the poisoning
`malicious_optimizer`).

The party owns a part of every row and the bottom that reads it, whose training had to separate the classes. It adds a
head (batch normalisation, ReLU, one layer that starts with ones, as the authors' does) and trains both by MixMatch:
`labelled` auxiliary rows a class have labels, the other auxiliary rows and the victims themselves have none. It sees
only its own part of any row. The paper trains the bottom on; the authors' published code makes the optimizer before it
puts the trained bottom in, so that only the head learns: `tune=False` is that. The bottom must be one segment that
reads one input of the party's own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

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
from splitfed.attacks.labels.mixmatch import MixMatch, mix
from splitfed.core.errors import InvalidInput, require_count, require_number
from splitfed.core.messages import View
from splitfed.core.rows import flat_rows


@dataclass(frozen=True)
class ModelCompletion(Attack):
    """Trains an inference head on the party's bottom by MixMatch, with `labelled` known labels of each class.

    The labels are those of auxiliary rows. `tune`: whether the bottom is trained on with the head. `iterations`,
    `batch_size`, `lr`, `temperature`, `alpha`, `weight` and `decay`: see `MixMatch`.
    """

    target: ClassVar[Target] = Target.LABELS
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.OWN_INPUTS, Needs.AUXILIARY_LABELS})
    adapts_to = IN_TRAINING
    budgets: ClassVar[Budgets] = {
        "quick": {"iterations": 400, "decay": 0.98},
        "full": {"iterations": 5 * 1024, "decay": 0.999},
    }

    labelled: int = field(default=4, metadata=require_count("model_completion labelled", low=1))
    iterations: int = field(default=400, metadata=require_count("model_completion iterations", low=1))
    # The classes of rows without labels are predicted by themselves, and batch normalisation needs two of them.
    batch_size: int = field(default=32, metadata=require_count("model_completion batch_size", low=2))
    lr: float = field(default=2e-3, metadata=require_number("model_completion lr", low=0.0, open_low=True))
    temperature: float = field(
        default=0.8, metadata=require_number("model_completion temperature", low=0.0, open_low=True)
    )
    alpha: float = field(default=0.75, metadata=require_number("model_completion alpha", low=0.0, open_low=True))
    weight: float = field(default=50.0, metadata=require_number("model_completion weight", low=0.0))
    decay: float = field(
        default=0.98, metadata=require_number("model_completion decay", low=0.0, high=1.0, open_high=True)
    )
    tune: bool = True

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return logits of the victims' labels: (victims, classes)."""
        classes = check_classes("model_completion", knowledge.classes)
        bottom = _bottom(view, knowledge)
        victims, auxiliary = _single_input(view, knowledge.own), _single_input(view, knowledge.own_auxiliary)
        labels = unwrap(knowledge.auxiliary_labels)
        labelled = self._draw_labelled(labels.cpu(), classes, generator)
        others = torch.ones(len(labels), dtype=torch.bool)
        others[labelled] = False
        settings = MixMatch(
            self.iterations, self.batch_size, self.lr, self.temperature, self.alpha, self.weight, self.decay
        )
        with torch.no_grad():
            width = flat_rows(bottom(victims[:1].clone())).shape[1]
        model = _Completed(bottom, width, classes, self.tune).to(knowledge.device)
        known, unlabelled = auxiliary[labelled], torch.cat([auxiliary[others], victims])
        if len(unlabelled) < 2:
            raise InvalidInput("model_completion has one unlabelled row; expected two or more")
        learnt = settings.fit(model, known, labels[labelled], unlabelled, generator, progress)
        with torch.no_grad():
            scores: Tensor = torch.cat([learnt(x) for x in victims.split(256)])
        return scores

    def _draw_labelled(self, labels: Tensor, classes: int, generator: torch.Generator) -> Tensor:
        """Return which auxiliary rows are known with their labels, `labelled` of each class: (rows,)."""
        drawn = []
        for number in range(classes):
            members = (labels == number).nonzero()[:, 0]
            if len(members) < self.labelled:
                raise InvalidInput(
                    f"model_completion labelled={self.labelled} is not allowed; there are {len(members)} auxiliary "
                    f"rows of class {number}"
                )
            drawn.append(members[torch.randperm(len(members), generator=generator)[: self.labelled]])
        return torch.cat(drawn)


def _bottom(view: View, knowledge: Knowledge) -> nn.Module:
    """Return a copy of the party's one segment, in evaluation mode."""
    if not knowledge.own:
        raise InvalidInput(f"model_completion is for a party with inputs of its own; {view.party} has none")
    if len(view.segments) != 1 or view.select(kind="activation").messages:
        raise InvalidInput(
            f"model_completion is for a party with one segment that reads its own input alone; {view.party} holds "
            f"{sorted(view.segments)}" + (" and receives releases" if view.select(kind="activation").messages else "")
        )
    return copy.deepcopy(next(iter(view.segments.values()))).to(knowledge.device).eval()


def _single_input(view: View, tensors: Mapping[str, Tensor] | None) -> Tensor:
    if tensors is None or len(tensors) != 1:
        raise InvalidInput(f"model_completion reads one input; {view.party} has {sorted(tensors or {})}")
    return next(iter(tensors.values()))


class _Completed(nn.Module):
    """The bottom with a head, from the party's part of a row to logits (rows, classes).

    The bottom is frozen unless `tune`.
    """

    def __init__(self, bottom: nn.Module, width: int, classes: int, tune: bool) -> None:
        super().__init__()
        self.bottom, self.tune = bottom, tune
        bottom.requires_grad_(tune)
        last = nn.Linear(width, classes)
        nn.init.ones_(last.weight)
        self.head = nn.Sequential(nn.BatchNorm1d(width), nn.ReLU(), last)

    def train(self, mode: bool = True) -> Self:
        """Set training mode on the modules that are trained."""
        super().train(mode)
        if not self.tune:
            self.bottom.eval()
        return self

    def forward(self, x: Tensor, order: Tensor | None = None, strength: float = 1.0) -> Tensor:
        """Return logits of rows x; with an `order` the bottom's outputs are mixed first, by `strength`."""
        # A segment may begin with an operation in place.
        inner = flat_rows(self.bottom(x.clone()))
        scores: Tensor = self.head(inner if order is None else mix(inner, order, strength))
        return scores
