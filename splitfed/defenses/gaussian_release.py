"""Gaussian release: clips every released row in L2 and adds Gaussian noise, so that each release is private.

Paper: Balle, Wang, "Improving the Gaussian mechanism for differential privacy: analytical calibration and optimal
denoising", ICML 2018.

A row is scaled down to norm C. Replacing it by another row changes the release by up to 2 C, so noise of standard
deviation m 2 C is a Gaussian mechanism of multiplier m. Each row of each value and each query is a use of its own, and
all uses of a row compose; there is no amplification by sampling, since the receiver sees every release. The same
mechanism on an embedding is the usual private baseline for embeddings.

The privacy ledger states the cost of a run: per row only if the segments before the cut do not learn from private rows.
`freeze` prevents that, for segments that are pretrained or random. The noise is drawn in float64 on a grid
(`splitfed.defenses.private_noise`), from the run's seed: it does not protect from an adversary who knows the seed. A
row with a number that is not finite is released as zeros, and the ledger states the number of such rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from splitfed.core.defense import Accounted, LayerDefense, ReleaseDefense, Strength
from splitfed.core.defense_context import Context
from splitfed.core.errors import LARGEST_NORM, InvalidInput, require_number
from splitfed.core.privacy_events import Event, Gaussian, Protects
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.defenses.clipping import check_values, clip_rows, freeze_segments, noisy_release
from splitfed.defenses.private_noise import LARGEST_MULTIPLIER, add_gaussian, check_precision
from splitfed.privacy.gaussian_mechanism import LARGEST_EPSILON, multiplier_of


@dataclass(frozen=True)
class GaussianRelease(ReleaseDefense, LayerDefense, Accounted):
    """Clips rows to L2 norm `clip` and adds noise by `noise_multiplier`, or by `epsilon` and `delta` of one release.

    `freeze`: whether the segments before the guarded edges are frozen.
    """

    clip: float = field(
        default=1.0, metadata=require_number("gaussian_release clip", low=0.0, high=LARGEST_NORM, open_low=True)
    )
    noise_multiplier: float | None = field(
        default=None,
        metadata=require_number("gaussian_release noise_multiplier", low=0.0, high=LARGEST_MULTIPLIER, open_low=True),
    )
    epsilon: float | None = field(
        default=None, metadata=require_number("gaussian_release epsilon", low=0.0, high=LARGEST_EPSILON, open_low=True)
    )
    delta: float = field(
        default=1e-5,
        metadata=require_number("gaussian_release delta", low=0.0, high=1.0, open_low=True, open_high=True),
    )
    freeze: bool = False

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for parameters out of range, and for a target epsilon beside a multiplier."""
        super().__post_init__()
        if (self.noise_multiplier is None) == (self.epsilon is None):
            raise InvalidInput("gaussian_release takes a noise_multiplier, or the epsilon of one release; give one")

    @property
    def strength(self) -> Strength:
        """The target epsilon, or else the noise multiplier."""
        if self.epsilon is not None:
            return Strength("epsilon", self.epsilon, f"of a release, at delta {self.delta:g}", rises=False)
        return Strength("noise_multiplier", self.multiplier, "sensitivities")

    on_uploads = True
    """It can act on uploads too, as it accepts rows of any shape."""

    @property
    def multiplier(self) -> float:
        """The noise's standard deviation per unit of sensitivity."""
        return multiplier_of(self.noise_multiplier, self.epsilon, self.delta)

    @property
    def sensitivity(self) -> float:
        """Largest L2 change of a release when its row is replaced."""
        return 2 * self.clip

    @property
    def guarantee(self) -> str:
        """The guarantee of one release, in one line."""
        if self.epsilon is not None:
            return f"epsilon {self.epsilon:g} at delta {self.delta:g} for each release of a row, composed over them"
        return f"Gaussian mechanism of multiplier {self.multiplier:g} for each release of a row, composed over them"

    def check(self, topology: Topology, facts: TopologyFacts) -> None:
        """Raise `InvalidInput` for values of half precision."""
        check_values("gaussian_release", topology, facts, self.edges(topology))

    def fit(self, topology: Topology, facts: TopologyFacts, seed: int) -> Topology:
        """Return `topology`, with all segments before the guarded edges frozen if `freeze`."""
        return freeze_segments(topology, self.edges(topology)) if self.freeze else topology

    def event(self) -> Event:
        """Return the privacy event of one release of a row."""
        return Event(Gaussian(self.multiplier), Protects.RELEASES)

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        """Return the clipped rows plus noise drawn afresh: same shape as `z`."""
        check_precision("gaussian_release", repr(name), z.dtype)
        clipped = self.expected(name, z.double(), context)
        return noisy_release(z, clipped, add_gaussian, self.sensitivity, self.multiplier, context.noise(name, z))

    def expected(self, name: str, z: Tensor, context: Context) -> Tensor:
        """Return the clipped rows, as the noise has mean zero."""
        return clip_rows(z, self.clip, 2)
