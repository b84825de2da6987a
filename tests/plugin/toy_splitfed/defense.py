"""Toy sign: of every number of the release only the sign is sent, and how much of the number is left beside it.

Paper: none; an example of a plug-in.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from splitfed.core.defense import ReleaseDefense
from splitfed.core.defense_context import Context
from splitfed.core.errors import check_number


@dataclass(frozen=True)
class ToySign(ReleaseDefense):
    """`share`: how much of the number itself stays, in [0, 1]."""

    share: float = 0.5

    def __post_init__(self) -> None:
        """Refuse a share outside [0, 1]."""
        check_number("share", self.share, low=0.0, high=1.0)

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        """Return a mixture of `z` and its sign: same shape."""
        return self.share * z + (1 - self.share) * z.sign()
