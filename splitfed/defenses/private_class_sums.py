"""Private class sums: differentially private class means of embeddings, which protect classes and counts too.

Paper: Dwork, McSherry, Nissim, Smith, "Calibrating noise to sensitivity in private data analysis", TCC 2006 (noisy sums
and counts); Balle, Wang, "Improving the Gaussian mechanism for differential privacy: analytical calibration and optimal
denoising", ICML 2018.

Neighbours differ in one example, of any class, that is added or taken away. Each row's embedding is clipped to L2 norm
C, and C is appended to it as one more number, so that a row is a vector v of norm sqrt(2) C at most. A client sums v
over its rows of each class of the task (zeros for a class without rows), and adds Gaussian noise of multiplier m to all
numbers of all classes. A row is in the sum of its own class alone and changes the whole message by sqrt(2) C at most:
one message is one use of a Gaussian mechanism of multiplier m, whatever the number of classes. The message has the
noisy counts, the last number over C, and the noisy means, a sum over max(count, 1): functions of the private sums.
Every class is always sent, so that the set of classes reveals nothing; the receiver drops counts below `least`.

This holds for embeddings that do not depend on other rows. In a segment that learns from the rows, or has batch norm in
training mode, one row changes every embedding, and the sensitivity of a sum is only bounded by the number of rows times
2 C: such segments are refused. `gaussian_release` on the same messages allows them: it clips the mean itself, and the
ledger then composes every mean of every round. The number of a client's rows is public, as everywhere here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from splitfed.core.errors import LARGEST_NORM, InvalidInput, check_fields, check_names, require_number
from splitfed.core.privacy_events import Event, Gaussian, Neighbours, Protects
from splitfed.core.random import wide_generator
from splitfed.core.row_independence import mixes_rows
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.defenses.clipping import clip_rows
from splitfed.defenses.private_noise import LARGEST_MULTIPLIER, add_gaussian, check_precision
from splitfed.privacy.charges import learns_from_rows
from splitfed.privacy.gaussian_mechanism import LARGEST_EPSILON, multiplier_of


class NoisyMeans(NamedTuple):
    """The noisy mean of every class, (classes, width), and its noisy count, (classes,), both float32."""

    means: Tensor
    counts: Tensor


@dataclass(frozen=True)
class PrivateClassSums:
    """Clips embeddings to `clip` and adds noise by `noise_multiplier`, or by `epsilon` and `delta` of one message.

    `least`: noisy count below which the receiver drops a class.
    """

    clip: float = field(default=1.0, metadata=require_number("private clip", low=0.0, high=LARGEST_NORM, open_low=True))
    noise_multiplier: float | None = field(
        default=None,
        metadata=require_number("private noise_multiplier", low=0.0, high=LARGEST_MULTIPLIER, open_low=True),
    )
    epsilon: float | None = field(
        default=None, metadata=require_number("private epsilon", low=0.0, high=LARGEST_EPSILON, open_low=True)
    )
    delta: float = field(
        default=1e-5, metadata=require_number("private delta", low=0.0, high=1.0, open_low=True, open_high=True)
    )
    least: float = field(default=1.0, metadata=require_number("private least", low=0.0, open_low=True))

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for parameters out of range, and for a target epsilon beside a multiplier."""
        check_fields(self)
        if (self.noise_multiplier is None) == (self.epsilon is None):
            raise InvalidInput("private takes a noise_multiplier, or the epsilon of one message; give one")

    @property
    def multiplier(self) -> float:
        """The noise's standard deviation per unit of sensitivity."""
        return multiplier_of(self.noise_multiplier, self.epsilon, self.delta)

    @property
    def sensitivity(self) -> float:
        """Largest L2 change of a message's sums when one row is added or removed."""
        return math.sqrt(2) * self.clip

    def event(self) -> Event:
        """Return the privacy event of one message for an example."""
        return Event(Gaussian(self.multiplier), Protects.MESSAGES, neighbours=Neighbours.ADD_REMOVE)

    def sums(self, z: Tensor, y: Tensor, classes: int) -> Tensor:
        """Return the sums before noise: (classes, width + 1) in float64, the last column `clip` times the counts.

        z: embeddings (rows, ...); y: (rows,) int64 below `classes`.
        """
        rows = clip_rows(z.detach().flatten(1).double(), self.clip, 2)
        rows = torch.cat([rows, torch.full_like(rows[:, :1], self.clip)], 1)
        return rows.new_zeros(classes, rows.shape[1]).index_add_(0, y.view(-1).long().to(rows.device), rows)

    def release(self, z: Tensor, y: Tensor, classes: int, random: torch.Generator) -> NoisyMeans:
        """Return the message's noisy means of embeddings z (rows, ...) with classes y (rows,); noise from `random`."""
        check_precision("private", "the embedding", z.dtype)
        sums = self.sums(z, y, classes)
        noisy = add_gaussian(sums.cpu(), self.sensitivity, self.multiplier, sums.numel(), random).to(z.device)
        counts = noisy[:, -1] / self.clip
        return NoisyMeans((noisy[:, :-1] / counts.clamp_min(1.0)[:, None]).float(), counts.float())


def private_of(given: object) -> PrivateClassSums | None:
    """Return the mechanism given by an instance, by a table of its parameters, or None for none."""
    if given is None or isinstance(given, PrivateClassSums):
        return given
    if not isinstance(given, Mapping):
        raise InvalidInput(f"private={given!r} is not allowed; expected a table such as {{clip = 1.0, epsilon = 2.0}}")
    for name in given:
        check_names("parameter of private", PrivateClassSums.__dataclass_fields__, name)
    return PrivateClassSums(**given)


def message_noise(seed: int, replica: int, number: int) -> torch.Generator:
    """Return the generator of the noise in a client's message of round `number`, independent of all others."""
    return wide_generator(seed, "private class sums", replica, number)


def check_rows_apart(who: str, topology: Topology, facts: TopologyFacts, value: str) -> None:
    """Raise `InvalidInput`, for method `who`, if a row of `value` depends on other rows, of any batch."""
    makers = set(topology.makers((value,)))
    if mixes_rows(topology, facts, makers):
        raise InvalidInput(
            f"{who} private bounds what a row changes by its own embedding, and before {value!r} the model mixes the "
            "rows of a batch, or keeps some: use layers that treat each row independently, or "
            "gaussian_release with on=['prototype->fed_server']"
        )


def check_frozen(who: str, topology: Topology, value: str) -> None:
    """Raise `InvalidInput`, for method `who`, if segments that compute `value` learn from the protected rows."""
    for name in topology.makers((value,)):
        if learns_from_rows(topology.segment(name).module):
            raise InvalidInput(
                f"{who} private bounds what a row changes by its own embedding, and segment {name!r} learns from all "
                f"rows, so that one of them moves every {value!r}: freeze it (pretrained on public data), or take "
                "gaussian_release with on=['prototype->fed_server']"
            )
