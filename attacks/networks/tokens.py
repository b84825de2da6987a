"""Token ids as a network reads and writes them: the ids that an attacker has seen, and a reader of rows of them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional


def unpadded_positions(x: Tensor, places: Mapping[str, Tensor]) -> Tensor:
    """Return which numbers of the flattened rows x (n, ...) count: all but the ids of padding: (n, numbers) bool.

    `places`: part -> (k,) where in a flattened row it stands. Where rows have the parts "input_ids" and
    "attention_mask", as tokenizers make them, only ids whose mask is not 0 count; of other rows everything does.
    """
    flat, ids, mask = x.flatten(1), places.get("input_ids"), places.get("attention_mask")
    if ids is None or mask is None or len(ids) != len(mask):
        return torch.ones_like(flat, dtype=torch.bool)
    counted = torch.zeros_like(flat, dtype=torch.bool)
    counted[:, ids] = flat[:, mask] != 0
    return counted


def frequent_tokens(x: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return the most frequent token of every position of rows x (n, ...): shape (...).

    `counted`: (n, numbers) bool, which of them are looked at; where a position has none, all are.
    """
    flat = x.flatten(1)
    if counted is None or bool(counted.all()):
        return flat.mode(0).values.view(x.shape[1:])
    columns = [flat[rows, i] if bool(rows.any()) else flat[:, i] for i, rows in enumerate(counted.T)]
    return torch.stack([column.mode().values for column in columns]).view(x.shape[1:])


class Vocabulary(nn.Module):
    """The different ids in rows that are known, in order; 0 stands for every other id."""

    def __init__(self, known: Tensor) -> None:
        """Take rows of ids (n, ...), int64, at least one."""
        super().__init__()
        self.register_buffer("ids", known.unique())

    def __len__(self) -> int:
        """Return how many ids there are."""
        return len(self.get_buffer("ids"))

    def encode(self, rows: Tensor) -> Tensor:
        """Return the place of every id of `rows`, counted from 1; 0 for ids that are not known: same shape."""
        ids = self.get_buffer("ids")
        places = torch.searchsorted(ids, rows.contiguous()).clamp(max=len(ids) - 1)
        return torch.where(ids[places] == rows, places + 1, 0)

    def decode(self, places: Tensor) -> Tensor:
        """Return the ids at `places`, counted from 0: same shape."""
        return self.get_buffer("ids")[places]


class TokenReader(nn.Module):
    """Maps rows of ids (n, *shape) to `width` numbers (n, width): embeddings, a convolution over neighbors, a mean."""

    def __init__(self, known: Tensor, width: int) -> None:
        """Take the rows that are known, and how many numbers a row becomes."""
        super().__init__()
        self.vocabulary = Vocabulary(known)
        self.embedding = nn.Embedding(len(self.vocabulary) + 1, width)
        self.position = nn.Parameter(torch.zeros(prod(known.shape[1:]), width))
        self.neighbors = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, rows: Tensor) -> Tensor:
        """Return (n, width)."""
        read = self.embedding(self.vocabulary.encode(rows.flatten(1))) + self.position
        return functional.relu(self.neighbors(read.transpose(1, 2))).mean(2)
