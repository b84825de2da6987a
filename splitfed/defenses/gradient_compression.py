"""Gradient compression: sends only the largest numbers of a gradient, with their positions.

Paper: Lin, Han, Mao, Wang, Dally, "Deep gradient compression: reducing the communication bandwidth for distributed
training", ICLR 2018; as a defense of labels: Fu et al., "Label inference attacks against vertical federated learning",
USENIX Security 2022.

The `share` of greatest magnitude among all numbers of the batch's gradient is kept, the rest is zero at the receiver;
what is left out is dropped, not carried over to the next step as in Lin et al. On the wire: the values and, for each,
its position as an int32; if that would not be shorter, the gradient is sent uncompressed. Fu et al. found little effect
on their attacks: no formal guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from splitfed.core.defense import Codec, GradientDefense, as_strength
from splitfed.core.defense_context import Context
from splitfed.core.errors import InvalidInput, require_number
from splitfed.defenses.label_edges import LabelGuard

_PLACE = torch.int32


@dataclass(frozen=True)
class GradientCompression(LabelGuard, GradientDefense, Codec):
    """Keeps the largest numbers of the returned gradient and sets the others to zero.

    `share`: share of a gradient's numbers that is kept, in (0, 1]; at least one number is.
    """

    share: float = field(
        default=0.25,
        metadata=require_number("gradient_compression share", low=0.0, high=1.0, open_low=True)
        | as_strength("of the numbers kept", rises=False),
    )

    def kept(self, numbers: int) -> int:
        """Return the number of kept numbers out of `numbers`."""
        return max(1, int(self.share * numbers))

    def gradient(self, name: str, g: Tensor, context: Context) -> Tensor:
        """Return the received gradient: `g` with all but its largest numbers zero."""
        return unpack(*pack(g, self.kept(g.numel())), g.shape)

    def packed(self, kind: str, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> int | None:
        """Return the bytes of the kept values and their positions."""
        if kind != "gradient":
            return None
        numbers = rows * prod(shape)
        return min(self.kept(numbers) * (dtype.itemsize + _PLACE.itemsize), numbers * dtype.itemsize)


def pack(g: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """Return the `kept` numbers of `g` of greatest magnitude and their positions in the flat tensor: (kept,) each."""
    if g.numel() > torch.iinfo(_PLACE).max:
        raise InvalidInput(f"a gradient of {g.numel()} numbers exceeds positions of 32 bits; use smaller batches")
    flat = g.detach().flatten()
    # A stable order, so that ties fall the same way on every device.
    places = flat.abs().sort(descending=True, stable=True).indices[:kept]
    return flat[places], places.to(_PLACE)


def unpack(values: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """Return the tensor of `shape` with `values` at `places` of the flat tensor and zeros elsewhere."""
    flat = values.new_zeros(shape.numel())
    flat[places.long()] = values
    return flat.view(shape)
