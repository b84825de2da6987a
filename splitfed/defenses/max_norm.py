"""Max norm: adds noise along each example's gradient that raises all expected squared norms in a batch to the largest.

Paper: Li, Sun, Yang, Gao, Zhang, Xie, Smith, Wang, "Label leakage and protection in two-party split learning", ICLR
2022 (the heuristic that Marvell is compared with).

Row i is sent as g_i (1 + sigma_i N) with one standard normal N a row and sigma_i = sqrt(max‖g‖²/‖g_i‖² - 1), so that
its expected squared length is the batch's greatest. The direction is kept up to its sign, and a gradient of zero stays
zero: neither is hidden. No formal guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from splitfed.core.defense import GradientDefense, Strength
from splitfed.core.defense_context import Context
from splitfed.defenses.aligned_noise import add_aligned_noise
from splitfed.defenses.label_edges import LabelGuard


@dataclass(frozen=True)
class MaxNorm(LabelGuard, GradientDefense):
    """Adds noise along each gradient; has no parameters.

    If several values cross on an edge, each is treated separately.
    """

    @property
    def strength(self) -> Strength | None:
        """None, as it has no parameters."""
        return None

    def gradient(self, name: str, g: Tensor, context: Context) -> Tensor:
        """Return `g` with every row multiplied by a random factor of mean one: same shape."""
        return add_aligned_noise(g, context.generator(name, g.device))
