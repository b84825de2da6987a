"""LATENT: encodes releases as bits and randomises each bit at the sender (local differential privacy).

Paper: Arachchige, Bertok, Khalil, Liu, Camtepe, Atiquzzaman, "Local differential privacy for deep learning", IEEE
Internet of Things Journal 2019.

The r numbers of a row become r l bits: a sign, `whole` and `fraction` bits each. With x = epsilon / (r l) and
`coefficient` a, a bit is sent as 1 with chance

form where it is 1 where it is 0 "symmetric" e^x / (1 + e^x) 1 / (1 + e^x) "unary" 1/2 1 / (1 + e^x) (optimised unary
encoding) "modified" 1 / (1 + a) 1 / (1 + a e^x) "utility" a / (1 + a) even, 1 / (1 + a^3) odd bits 1 / (1 + a e^x) (the
paper's utility-enhancing form)

Two rows may differ in every bit, so the cost of a release is the sum over bits of the largest log-ratio of the two
chances of an outcome. It is epsilon for "symmetric", less for "unary" and "modified". For "utility" and a > e^(x/2) it
is (r l / 2) log(a (a^2 - a + 1)), whatever the requested epsilon: the paper claims epsilon, the privacy ledger states
the valid figure. The bits of a release are independent given the row, so no smaller figure is valid.

As in the paper the receiver reads bits, through a dense layer of its own: `dense` adds one before the receiving segment
that restores the release's shape; without it the segment must accept (batch, r l). The guarantee is for the release of
a row by segments that do not learn from private rows; see the privacy ledger, and `freeze`. Gradients pass the bits as
those of smooth waves; the paper does not train the segments before the cut through them.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, replace as changed

import torch
from torch import Tensor, nn

from splitfed.core.defense import Accounted, Calibrated, Codec, LayerDefense, ReleaseDefense, Terms, as_strength
from splitfed.core.defense_context import Context
from splitfed.core.errors import InvalidInput, require_count, require_name, require_number
from splitfed.core.payload import without_infinite_rows
from splitfed.core.privacy_events import Event, Protects, Pure
from splitfed.core.random import derive
from splitfed.core.topology import Segment, Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.defenses.binary_encoding import ToBits, bit_reader
from splitfed.defenses.clipping import freeze_segments
from splitfed.defenses.fitted_layers import OutputLayers, check_readers, prepend_layers, values_of

FORMS = ("symmetric", "unary", "modified", "utility")


@dataclass(frozen=True)
class Latent(ReleaseDefense, LayerDefense, Codec, Accounted, Calibrated):
    """Randomises the bits of each row: `epsilon` > 0 of a release as the paper counts it, in one of `FORMS`.

    `whole` and `fraction`: bits before and after the binary point. `coefficient`: a in the head of this module.
    `dense`: whether the receiver gets a dense layer. `freeze`: whether the segments before the guarded edges are
    frozen.
    """

    epsilon: float = field(
        default=1.0,
        metadata=require_number("latent epsilon", low=0.0, open_low=True)
        | as_strength("of a release, as the paper counts it", rises=False),
    )
    whole: int = field(default=4, metadata=require_count("latent whole"))
    fraction: int = field(default=5, metadata=require_count("latent fraction"))
    form: str = field(default="symmetric", metadata=require_name("latent form", FORMS))
    coefficient: float = field(default=5.0, metadata=require_number("latent coefficient", low=0.0, open_low=True))
    dense: bool = True
    freeze: bool = False
    _bits: int | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for parameters out of range, and for an unknown form."""
        super().__post_init__()
        if self.whole + self.fraction > 24:
            raise InvalidInput(f"latent whole + fraction = {self.whole + self.fraction} is not allowed; at most 24")

    @property
    def length(self) -> int:
        """Number of bits for each released number."""
        return 1 + self.whole + self.fraction

    @property
    def guarantee(self) -> str:
        """The guarantee of one release, with its valid epsilon if the number of bits is known."""
        if self._bits is None:
            return f"a pure epsilon for each release of a row ({self.form} form, {self.epsilon:g} as the paper counts)"
        true = self.true_epsilon(self._bits)
        return (
            f"epsilon {true:.4g} for each release of a row ({self.epsilon:g} as the paper counts), composed over them"
        )

    def chances(self, bits: int) -> tuple[Tensor, Tensor]:
        """Return the probabilities that each of the `bits` = r l bits of a row is sent as 1, for a 1 and for a 0."""
        # Written with e^-x, so that a large epsilon does not overflow.
        down, a = math.exp(-self.epsilon / bits), self.coefficient
        odd = torch.arange(bits) % 2 == 1
        ones, zeros = {
            "symmetric": (1 / (1 + down), down / (1 + down)),
            "unary": (0.5, down / (1 + down)),
            "modified": (1 / (1 + a), down / (down + a)),
            "utility": (a / (1 + a), down / (down + a)),
        }[self.form]
        sent = torch.full((bits,), ones, dtype=torch.float64)
        if self.form == "utility":
            sent[odd] = 1 / (1 + a**3)
        return sent, torch.full((bits,), zeros, dtype=torch.float64)

    def true_epsilon(self, bits: int) -> float:
        """Return the cost of one release of a row of `bits` bits: the largest log-ratio of any outcome and pair."""
        ones, zeros = self.chances(bits)
        ratios = torch.stack([(ones / zeros).log().abs(), ((1 - ones) / (1 - zeros)).log().abs()])
        return float(ratios.amax(0).sum())

    def fit(self, topology: Topology, facts: TopologyFacts, seed: int) -> Topology:
        """Return `topology` with bit encoders at the senders and, with `dense`, dense layers at the receivers."""
        edges = self.edges(topology)
        values = set(values_of(topology, edges, facts))
        check_readers("latent turns {value!r} into bits", topology, edges, facts)
        made = freeze_segments(topology, edges) if self.freeze else topology
        return changed(made, segments=tuple(self._with_bits(s, values, facts, seed) for s in made.segments))

    def calibrate(self, terms: Terms) -> Latent:
        """Return this defense with the number of bits of the guarded value that has the greatest cost."""
        topology = terms.topologies[0]
        edges = self.edges(topology)
        made = changed(self)
        # Not the largest number: "unary" and "modified" cost more the fewer bits share the epsilon.
        sizes = sorted({facts.shapes[v][0] for facts in terms.facts for v in values_of(topology, edges, facts)})
        object.__setattr__(made, "_bits", max(sizes, key=self.true_epsilon))
        return made

    def event(self) -> Event:
        """Return the privacy event of one release of a row; unbounded while the number of bits is unknown."""
        return Event(
            Pure(sys.float_info.max if self._bits is None else self.true_epsilon(self._bits)), Protects.RELEASES
        )

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        """Return randomised bits in place of the bits `z`: (batch, r l); the gradient is passed unchanged."""
        z = without_infinite_rows(z)
        drawn = torch.rand(z.shape, generator=context.noise(name, z), device=z.device, dtype=torch.float64)
        ones, zeros = (chance.to(z.device) for chance in self.chances(z.shape[1]))
        sent = (drawn < torch.where(z > 0.5, ones, zeros)).to(z.dtype)
        # In this order z cancels exactly: no rounding carries what another defense has left of it besides bits.
        return sent + (z - z.detach())

    def expected(self, name: str, z: Tensor, context: Context) -> Tensor:
        """Return the probability of each bit to be sent as 1."""
        ones, zeros = (chance.to(z.device, z.dtype) for chance in self.chances(z.shape[1]))
        return zeros + (ones - zeros) * z

    def packed(self, kind: str, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> int | None:
        """Return the bytes of the bits, each row padded to a whole byte."""
        return rows * -(-shape[0] // 8) if kind == "activation" else None

    def _with_bits(self, segment: Segment, values: set[str], facts: TopologyFacts, seed: int) -> Segment:
        def reader(value: str) -> nn.Module:
            return bit_reader(facts.shapes[value], self.length)

        if self.dense:
            segment = prepend_layers(segment, values, derive(seed, "latent", segment.name), reader)
        made = [i for i, v in enumerate(segment.outputs) if v in values]
        if not made:
            return segment
        return changed(
            segment, module=OutputLayers(segment.module, dict.fromkeys(made, ToBits(self.whole, self.fraction)))
        )
