"""Labels from a training attack: the victims' classes as predicted by the state of sdar or pcat.

Paper: Zhu, Luo, Wu, Xiao, "Passive inference attacks on split learning via adversarial regularization", NDSS 2025; Gao,
Zhang, "PCAT: functionality and data stealing from split learning by pseudo-client attack", USENIX Security 2023. In a
U-shaped run labels never reach the server; the attack's own head, trained on the server's segments, predicts them from
the releases. If labels do reach the server, its own model predicts them as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from splitfed.attacks.base import Attack, DefenseEffect, Knowledge, Needs, Progress, Target, unwrap
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import View


@dataclass(frozen=True)
class InsiderLabels(Attack):
    """Predicts labels by the training attack that was at the adversary's party."""

    target = Target.LABELS
    requires = frozenset({Needs.RELEASES, Needs.TRAINING_ATTACK, Needs.AUXILIARY_LABELS})
    adapts_to = frozenset({DefenseEffect.RELEASE, DefenseEffect.PENALTY, DefenseEffect.TASK_WEIGHT})

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return scores of labels, (victims, classes).

        Raises `InvalidInput` for a training attack that learns no labels.
        """
        state = unwrap(knowledge.training_attack)
        if Needs.AUXILIARY_LABELS not in getattr(state.plan, "learns_from", frozenset()):
            raise InvalidInput(
                f"{type(state.plan).__name__} learns no labels; train with sdar or pcat as the training attack"
            )
        return state.predict(view, self.target)
