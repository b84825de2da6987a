"""A generator of embeddings by class, its diversity loss, and how a server trains it on the heads of its clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.topology import Segment


class Generator(nn.Module):
    """Noise (rows, `noise`) and labels (rows,) to embeddings (rows, *`shape`): two layers, with batch norm between."""

    def __init__(self, noise: int, classes: int, hidden: int, shape: Sequence[int]) -> None:
        super().__init__()
        self.noise, self.classes, self.shape = noise, classes, tuple(shape)
        self.first = nn.Linear(noise + classes, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.last = nn.Linear(hidden, prod(self.shape))

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Return one embedding a row."""
        told = functional.one_hot(labels, self.classes).to(noise.dtype)
        flat: Tensor = self.last(torch.relu(self.norm(self.first(torch.cat([noise, told], 1)))))
        return flat.reshape(len(labels), *self.shape)


class ClientHead:
    """The segments of one client behind the embedding, as functions of it: `value` -> `out`."""

    def __init__(self, segments: Sequence[Segment], modules: Mapping[str, nn.Module], value: str, out: str) -> None:
        self._steps = [(s.inputs, s.outputs, modules[s.name]) for s in segments]
        self._value, self._out = value, out

    def __call__(self, z: Tensor) -> Tensor:
        """Return the class scores of embeddings z (rows, ...): (rows, classes)."""
        made = {self._value: z}
        for inputs, outputs, module in self._steps:
            # An operation in place may not touch what another head reads.
            result = module(*(made[name].clone() for name in inputs))
            made.update(zip(outputs, result if isinstance(result, (tuple, list)) else (result,), strict=True))
        return made[self._out]


def diversity(noise: Tensor, made: Tensor) -> Tensor:
    """Return exp of minus the mean, over all pairs of rows, of the distance of their noise times that of what is made.

    Distances are mean absolute differences; rows of noise (rows, n), made (rows, ...): a scalar in (0, 1].
    """
    flat = made.flatten(1)
    apart = (noise[:, None] - noise[None]).abs().mean(2) * (flat[:, None] - flat[None]).abs().mean(2)
    return torch.exp(-apart.mean())


def ensemble_loss(heads: Sequence[ClientHead], z: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    """Return the mean over rows of the heads' cross-entropies, each weighted by its client's share of the label's rows.

    z: (rows, ...) inputs of the heads; y: (rows,) labels; `counts`: (heads, classes), rows of each class at each
    head's client.
    """
    pairs = zip(heads, counts / counts.sum(0).clamp_min(1), strict=True)
    losses = [functional.cross_entropy(head(z), y, reduction="none") * part[y] for head, part in pairs]
    return torch.stack(losses).sum(0).mean()
