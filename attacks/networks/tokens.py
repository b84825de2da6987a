"""Token ids for networks: a vocabulary of the ids that an attacker has seen, and a reader of rows of ids."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional


def unpadded_positions(x: Tensor, places: Mapping[str, Tensor]) -> Tensor:
    """Return which numbers of the flattened rows x (n, ...) are not padding ids: (n, numbers) bool.

    `places`: part -> (k,) its positions in a flattened row. If rows have the parts "input_ids" and "attention_mask", as
    tokenizers make them, these are the ids whose mask is not 0; of other rows all numbers.
    """
    flat, ids, mask = x.flatten(1), places.get("input_ids"), places.get("attention_mask")
    if ids is None or mask is None or len(ids) != len(mask):
        return torch.ones_like(flat, dtype=torch.bool)
    counted = torch.zeros_like(flat, dtype=torch.bool)
    counted[:, ids] = flat[:, mask] != 0
    return counted


def frequent_tokens(x: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return the most frequent token at every position of rows x (n, ...): shape (...).

    `counted`: (n, numbers) bool, which tokens count; if none of a position does, all count.
    """
    flat = x.flatten(1)
    if counted is None or bool(counted.all()):
        return flat.mode(0).values.view(x.shape[1:])
    columns = [flat[rows, i] if bool(rows.any()) else flat[:, i] for i, rows in enumerate(counted.T)]
    return torch.stack([column.mode().values for column in columns]).view(x.shape[1:])


class Vocabulary(nn.Module):
    """The distinct ids in known rows, in ascending order; 0 encodes every other id."""

    def __init__(self, known: Tensor) -> None:
        """Collect the ids of the rows `known` (n, ...), int64, at least one row."""
        super().__init__()
        self.register_buffer("ids", known.unique())

    def __len__(self) -> int:
        """Return the number of distinct ids."""
        return len(self.get_buffer("ids"))

    def encode(self, rows: Tensor) -> Tensor:
        """Return the index of every id of `rows`, counted from 1, and 0 for unknown ids: same shape."""
        ids = self.get_buffer("ids")
        places = torch.searchsorted(ids, rows.contiguous()).clamp(max=len(ids) - 1)
        return torch.where(ids[places] == rows, places + 1, 0)

    def decode(self, places: Tensor) -> Tensor:
        """Return the ids at the indices `places`, counted from 0: same shape."""
        return self.get_buffer("ids")[places]


class TokenReader(nn.Module):
    """Maps rows of ids (n, *shape) to features (n, width): embeddings, a convolution over neighbours, and a mean."""

    def __init__(self, known: Tensor, width: int) -> None:
        """Build the reader for ids in the rows `known`; `width`: number of features of a row."""
        super().__init__()
        self.vocabulary = Vocabulary(known)
        self.embedding = nn.Embedding(len(self.vocabulary) + 1, width)
        self.position = nn.Parameter(torch.zeros(prod(known.shape[1:]), width))
        self.neighbors = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the features of `rows`: (n, width)."""
        read = self.embedding(self.vocabulary.encode(rows.flatten(1))) + self.position
        return functional.relu(self.neighbors(read.transpose(1, 2))).mean(2)
