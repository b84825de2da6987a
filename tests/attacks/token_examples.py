"""Runs on token ids that attacks are tried on: an embedding crosses, or what is left of it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

import splitfed
from splitfed.core.defense import Defense
from splitfed.core.optimizers import Optim
from splitfed.core.random import stream
from splitfed.core.tasks import binary
from splitfed.data.dataset import Dataset, Federation
from splitfed.topologies import vanilla, vertical
from splitfed.training.run import Run


class Encoder(nn.Module):
    """Embeds tokens, looks at pairs of neighbors, and takes the mean of those that are no padding."""

    def __init__(self, vocabulary: int = 17, classes: int = 4, width: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.pairs = nn.Conv1d(width, width, 2, padding=1)
        self.act, self.pooled = nn.ReLU(), nn.Identity()
        self.head = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return scores (rows, classes)."""
        weight = (attention_mask != 0).unsqueeze(1).to(self.embedding.weight.dtype)
        hidden = self.embedding(input_ids).transpose(1, 2)
        hidden = self.act(self.pairs(hidden))[..., 1:] * weight
        return self.head(self.pooled(hidden.sum(2) / weight.sum(2).clamp(min=1)))


class Bag(nn.Module):
    """Embeds tokens and takes a mean of what a layer makes of them."""

    def __init__(self, outputs: int, vocabulary: int = 17) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(vocabulary, 8), nn.Linear(8, outputs)

    def forward(self, ids: Tensor) -> Tensor:
        """Return (rows, outputs)."""
        return self.out(torch.relu(self.embedding(ids)).mean(1))


@cache
def padded(clients: int = 1) -> Federation:
    """Sequences of 5 to 10 tokens, padded, with their masks."""
    data = splitfed.data.markov_tokens(320, length=10, shortest=5)
    return data.clients(clients, auxiliary=160, victims=40)


@cache
def embedded(*defenses: Defense, cut: str = "embedding") -> Run:
    """The encoder cut behind its embedding, or deeper."""
    with stream(0):
        model = Encoder()
    return splitfed.train(
        vanilla(model, cut), padded(), rounds=2, optimizer=Optim("Adam", {"lr": 1e-2}), defenses=defenses
    )


@cache
def two_bags(outputs: int = 8, fusion: str = "concat") -> Run:
    """Two parties with six tokens each, of which those of the first tell the class."""
    random = torch.Generator().manual_seed(0)
    y = torch.arange(360) % 2
    told = torch.randint(1, 6, (360, 6), generator=random) + 8 * y[:, None]
    x = torch.cat([told, torch.randint(1, 17, (360, 6), generator=random)], 1)
    task = binary() if fusion == "concat" else splitfed.classification(2)
    data = Dataset("bags", x, y, task).vertical({"left": range(6), "right": range(6, 12)})
    with stream(0):
        bottoms = {"left": Bag(outputs), "right": Bag(outputs)}
        top = nn.Linear(2 * outputs, 1) if fusion == "concat" else nn.Identity()
    return splitfed.train(
        vertical(bottoms, top, labels="server", fusion=fusion),
        data.clients(1, auxiliary=80, victims=64),
        schedule="joint",
        rounds=4,
        optimizer=Optim("Adam", {"lr": 1e-2}),
    )
