"""Toy nearest release: guess the auxiliary row whose release is closest to the one seen.

Paper: none; an example of a plug-in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from splitfed.attacks.base import Attack, Knowledge, Needs, Progress
from splitfed.core.messages import View


@dataclass(frozen=True)
class ToyNearest(Attack):
    """Compares flattened releases by their Euclidean distance."""

    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES, Needs.QUERIES, Needs.AUXILIARY})

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return one auxiliary row a victim: (victims, *shape)."""
        assert knowledge.query is not None
        assert knowledge.auxiliary is not None
        seen = view.select(kind="activation").tensors()
        known = knowledge.query(knowledge.auxiliary)
        distance = torch.stack([torch.cdist(z.flatten(1), known[name].flatten(1)) for name, z in seen.items()]).sum(0)
        return knowledge.auxiliary[distance.argmin(1)]
