"""A generator of embeddings by class, its diversity loss, and the loss that trains it on the clients' heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.topology import Segment


class Generator(nn.Module):
    """Two-layer generator with batch norm: noise (rows, `noise`), labels (rows,) -> embeddings (rows, *`shape`)."""

    def __init__(self, noise: int, classes: int, hidden: int, shape: Sequence[int]) -> None:
        super().__init__()
        self.noise, self.classes, self.shape = noise, classes, tuple(shape)
        self.first = nn.Linear(noise + classes, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.last = nn.Linear(hidden, prod(self.shape))

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Return one embedding for each row: (rows, *shape)."""
        told = functional.one_hot(labels, self.classes).to(noise.dtype)
        flat: Tensor = self.last(torch.relu(self.norm(self.first(torch.cat([noise, told], 1)))))
        return flat.reshape(len(labels), *self.shape)


class ClientHead:
    """Segments of one client behind the embedding, as a function from value `value` to output `out`."""

    def __init__(self, segments: Sequence[Segment], modules: Mapping[str, nn.Module], value: str, out: str) -> None:
        self._steps = [(s.inputs, s.outputs, modules[s.name]) for s in segments]
        self._value, self._out = value, out

    def __call__(self, z: Tensor) -> Tensor:
        """Return the class scores of embeddings z (rows, ...): (rows, classes)."""
        made = {self._value: z}
        for inputs, outputs, module in self._steps:
            # A copy: an in-place operation must not change the input of another head.
            result = module(*(made[name].clone() for name in inputs))
            made.update(zip(outputs, result if isinstance(result, (tuple, list)) else (result,), strict=True))
        return made[self._out]


def diversity(noise: Tensor, made: Tensor) -> Tensor:
    """Return exp(-mean over all pairs of rows of (distance of their noise * distance of their embeddings)).

    Distances are mean absolute differences; `noise`: (rows, n), `made`: (rows, ...). Returns a scalar in (0, 1].
    """
    flat = made.flatten(1)
    apart = (noise[:, None] - noise[None]).abs().mean(2) * (flat[:, None] - flat[None]).abs().mean(2)
    return torch.exp(-apart.mean())


def ensemble_loss(heads: Sequence[ClientHead], z: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    """Return the mean over rows of the heads' cross-entropies, weighted by each client's share of the label's rows.

    z: (rows, ...) inputs of the heads; y: (rows,) labels; `counts`: (heads, classes), rows of each class at each head's
    client.
    """
    pairs = zip(heads, counts / counts.sum(0).clamp_min(1), strict=True)
    losses = [functional.cross_entropy(head(z), y, reduction="none") * part[y] for head, part in pairs]
    return torch.stack(losses).sum(0).mean()
