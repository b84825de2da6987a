"""Laplace release: clips every released row in L1 and adds Laplace noise, so that each release is private.

Paper: Dwork, McSherry, Nissim, Smith, "Calibrating noise to sensitivity in private data analysis", TCC 2006.

A row is scaled down to L1 norm C. Replacing it by another row changes the release by up to 2 C, so noise of scale b = 2
C / epsilon makes each release of a row epsilon-private, without a delta. Each value and each query is a use of its own,
and all uses of a row compose. The privacy ledger, `freeze`, the drawing of the noise, and rows that are not finite are
treated as in gaussian_release.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from splitfed.core.defense import Accounted, LayerDefense, ReleaseDefense, as_strength
from splitfed.core.defense_context import Context
from splitfed.core.errors import LARGEST_NORM, require_number
from splitfed.core.privacy_events import Event, Laplace, Protects
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.defenses.clipping import check_values, clip_rows, freeze_segments, noisy_release
from splitfed.defenses.private_noise import LARGEST_MULTIPLIER, add_laplace, check_precision


@dataclass(frozen=True)
class LaplaceRelease(ReleaseDefense, LayerDefense, Accounted):
    """Clips rows to L1 norm `clip`, and adds noise for `epsilon` > 0 of each release.

    `freeze`: whether the segments before the guarded edges are frozen.
    """

    clip: float = field(
        default=1.0, metadata=require_number("laplace_release clip", low=0.0, high=LARGEST_NORM, open_low=True)
    )
    epsilon: float = field(
        default=1.0,
        metadata=require_number("laplace_release epsilon", low=1 / LARGEST_MULTIPLIER, high=LARGEST_NORM)
        | as_strength("of a release", rises=False),
    )
    freeze: bool = False

    on_uploads = True
    """It can act on uploads too, as it accepts rows of any shape."""

    @property
    def sensitivity(self) -> float:
        """Largest L1 change of a release when its row is replaced."""
        return 2 * self.clip

    @property
    def scale(self) -> float:
        """The noise's scale b; its standard deviation is b √2."""
        return self.sensitivity / self.epsilon

    @property
    def guarantee(self) -> str:
        """The guarantee of one release, in one line."""
        return f"epsilon {self.epsilon:g} for each release of a row, composed over them"

    def check(self, topology: Topology, facts: TopologyFacts) -> None:
        """Raise `InvalidInput` for values of half precision."""
        check_values("laplace_release", topology, facts, self.edges(topology))

    def fit(self, topology: Topology, facts: TopologyFacts, seed: int) -> Topology:
        """Return `topology`, with all segments before the guarded edges frozen if `freeze`."""
        return freeze_segments(topology, self.edges(topology)) if self.freeze else topology

    def event(self) -> Event:
        """Return the privacy event of one release of a row: Laplace noise of scale 1 / epsilon times sensitivity."""
        return Event(Laplace(1 / self.epsilon), Protects.RELEASES)

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        """Return the clipped rows plus noise drawn afresh: same shape as `z`."""
        check_precision("laplace_release", repr(name), z.dtype)
        clipped = self.expected(name, z.double(), context)
        return noisy_release(z, clipped, add_laplace, self.sensitivity, 1 / self.epsilon, context.noise(name, z))

    def expected(self, name: str, z: Tensor, context: Context) -> Tensor:
        """Return the clipped rows, as the noise has mean zero."""
        return clip_rows(z, self.clip, 1)
