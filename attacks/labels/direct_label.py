"""Direct label: reads the class off the sign of the gradient, if the parties' logits are only added up.

Paper: Fu, Zhang, Ji, Chen, Wu, Guo, Zhou, Liu, Wang, "Label inference attacks against vertical federated learning",
USENIX Security 2022. With cross-entropy on a sum (or mean) of logits, the gradient at the cut is a positive multiple of
p - onehot(y): only the entry of the true class is negative. The score of a class is its negated gradient, so the most
negative entry wins; under noise on the gradient that is still the most likely class. With one logit for two classes
(logistic loss) the gradient is negative for positives.

The same holds if a server in a U-shape returns the logits: a plain gradient of them, as in the published protocols of
encrypted split learning, reveals all labels, whatever else is encrypted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from splitfed.attacks.base import DefenseEffect, Knowledge, Progress, check_classes
from splitfed.attacks.labels.label_attack import LabelAttack, only_gradient
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import View


@dataclass(frozen=True)
class DirectLabel(LabelAttack):
    """Requires a released value as wide as the number of classes (or one logit for two); has no parameters."""

    adapts_to = frozenset({DefenseEffect.TASK_WEIGHT})

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the negated gradient: (victims, classes), or (victims,) for one logit."""
        classes = check_classes("direct_label", knowledge.classes)
        g = only_gradient("direct_label", view, knowledge.device)
        width = tuple(g.shape[1:])
        if width not in [(classes,), (1,)] or (width == (1,) and classes != 2):
            raise InvalidInput(
                f"direct_label needs logits of {classes} classes at the cut, summed without weights; "
                f"the released value has shape {width}"
            )
        return -g[:, 0] if width == (1,) else -g
