"""Token decoder: predicts every token by a classifier over the vocabulary, trained on queries with auxiliary rows.

Paper: Song, Raghunathan, "Information leakage in embedding models", CCS 2020, whose classifier finds the words behind
an embedding of a text; Chen, Qin, Yang, Zhou, Fan, Du, Xu, "Unveiling the vulnerability of private fine-tuning in
split-based frameworks for large language models: a bidirectionally enhanced attack", CCS 2024, who train a decoder from
what crosses the cut to the token at every position.

Releases of the auxiliary rows go through the run's own defenses, drawn afresh in every pass. A release with a place for
every token, (rows, tokens, d), is decoded place by place, by one perceptron for all places; a release of any other
shape by a perceptron that reads all of it and predicts every position. A value is used for the inputs that it is
computed from. Loss: cross-entropy, over the tokens that are no padding if rows have the parts "input_ids" and
"attention_mask". Every position has a bias for every token, initialised by the token's frequency there. The networks
are ours: the second paper's decoder has a recurrent layer, and learns from models like the victim's where it has no
queries. An id that is in no auxiliary row is never predicted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.attacks.base import (
    FORWARD,
    Attack,
    Budgets,
    Knowledge,
    Needs,
    Progress,
    Releases,
    Space,
    Span,
    Target,
    unwrap,
)
from splitfed.attacks.networks.gradient_descent import descend
from splitfed.attacks.networks.tokens import Vocabulary, frequent_tokens, unpadded_positions
from splitfed.core.errors import require_count, require_number
from splitfed.core.messages import View

IGNORED = -100
"""Label of a token that is left out of the loss."""
SMOOTHING = 0.1
"""Pseudo-count added to every count of a token at a position."""


@dataclass(frozen=True)
class TokenDecoder(Attack):
    """Trains perceptrons of `width` for `epochs` in batches of `batch_size` with Adam at rate `lr`.

    `queries`: number of passes of the auxiliary rows through the victims' parties, used in turn.
    """

    target: ClassVar[Target] = Target.TOKENS
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES, Needs.QUERIES, Needs.AUXILIARY})
    adapts_to = FORWARD
    budgets: ClassVar[Budgets] = {
        "quick": {"epochs": 20, "width": 128},
        "full": {"epochs": 100, "width": 512},
    }

    space: ClassVar[Space] = {"lr": Span(3e-4, 1e-2, log=True), "width": (64, 128, 256, 512)}

    epochs: int = field(default=20, metadata=require_count("token_decoder epochs", low=1))
    batch_size: int = field(default=32, metadata=require_count("token_decoder batch_size", low=1))
    lr: float = field(default=3e-3, metadata=require_number("token_decoder lr", low=0.0, open_low=True))
    width: int = field(default=128, metadata=require_count("token_decoder width", low=1))
    queries: int = field(default=3, metadata=require_count("token_decoder queries", low=1))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the most likely tokens of every victim: (victims, *shape) int64."""
        released = view.select(kind="activation").tensors(knowledge.device)
        x, query = unwrap(knowledge.auxiliary), unwrap(knowledge.query)
        passes = [query(x) for _ in range(self.queries)]
        vocabulary = Vocabulary(x)
        counted = unpadded_positions(x, knowledge.places)
        tokens = torch.where(counted, vocabulary.encode(x.flatten(1)) - 1, IGNORED)
        decoders = self._decoders(passes[0], knowledge, tokens, len(vocabulary))

        def loss(z: Releases, rows: Tensor) -> Tensor:
            return torch.stack([d.loss({n: t[rows] for n, t in z.items()}, tokens[rows]) for d in decoders]).sum()

        descend(
            [p for decoder in decoders for p in decoder.parameters()], passes, loss, len(x), generator, progress,
            epochs=self.epochs, lr=self.lr, batch_size=self.batch_size, least=1,
        )  # fmt: skip
        # Where no release tells of a position, its most frequent token.
        prediction = frequent_tokens(x, counted).flatten().repeat(len(next(iter(released.values()))), 1)
        with torch.no_grad():
            for decoder in decoders:
                prediction[:, decoder.places] = vocabulary.decode(decoder(released).argmax(-1))
        return prediction.view(-1, *knowledge.shape)

    def _decoders(
        self, seen: Releases, knowledge: Knowledge, tokens: Tensor, vocabulary: int
    ) -> list[_TokenClassifier]:
        """Return untrained decoders, one for each input of the topology that a value in `seen` is computed from."""
        found = []
        for name, places in knowledge.places.items():
            told = {value: z for value, z in seen.items() if name in knowledge.origins.get(value, ())}
            if told:
                length = _aligned_length(told, len(places), knowledge.shape)
                decoder = _TokenClassifier(told, places, length, vocabulary, self.width)
                decoder.start_from(tokens)
                found.append(decoder.to(knowledge.device))
        return found


def _aligned_length(told: Releases, count: int, shape: tuple[int, ...]) -> int | None:
    """Return the length of releases (length, d) with a place for each of `count` tokens; None without such releases."""
    lengths = [z.shape[1] for z in told.values() if z.dim() == 3 and z.shape[1] in (count, shape[-1])]
    return next((length for length in lengths if count % length == 0), None)


class _TokenClassifier(nn.Module):
    """Scores of all tokens at the `places` (k,) of a flattened row, from releases: (rows, k, vocabulary).

    `length`: number of places of releases that are decoded place by place, the others being ignored; None: all are read
    at once.
    """

    def __init__(self, seen: Releases, places: Tensor, length: int | None, vocabulary: int, width: int) -> None:
        super().__init__()
        self.places, self._length = places, length
        self._names = [n for n, z in seen.items() if length is None or (z.dim() == 3 and z.shape[1] == length)]
        known = self._read(seen)
        self.register_buffer("mean", known.flatten(0, -2).mean(0))
        self.register_buffer("scale", known.flatten(0, -2).std(0, correction=0).clamp_min(1e-6))
        size, tokens = known.shape[-1], len(places) // (length or 1)
        self._tokens = tokens
        self.inner = nn.Sequential(nn.Linear(size, 2 * width), nn.ReLU(), nn.Linear(2 * width, tokens * width))
        self.outer = nn.Linear(width, vocabulary)
        self.prior = nn.Parameter(torch.zeros(len(places), vocabulary))

    def start_from(self, tokens: Tensor) -> None:
        """Set the bias of each token at each position to the logarithm of its count in `tokens` (n, numbers)."""
        own = tokens[:, self.places].cpu()
        counts = torch.full_like(self.prior, SMOOTHING)
        rows, columns = (own != IGNORED).nonzero(as_tuple=True)
        counts.index_put_((columns, own[rows, columns]), torch.ones(len(rows)), accumulate=True)
        self.prior.data = (counts / counts.sum(1, keepdim=True)).log()

    def _read(self, releases: Releases) -> Tensor:
        """Return the releases concatenated: (rows, length, d), or (rows, 1, d) if they are read at once."""
        chosen = [releases[name].float() for name in self._names]
        return torch.cat([z if self._length else z.flatten(1).unsqueeze(1) for z in chosen], -1)

    def forward(self, releases: Releases) -> Tensor:
        """Return scores (rows, k, vocabulary), in the order of `places`."""
        z = (self._read(releases) - self.get_buffer("mean")) / self.get_buffer("scale")
        hidden = self.inner(z).unflatten(-1, (self._tokens, -1)).transpose(1, 2).flatten(1, 2)
        scores: Tensor = self.outer(functional.relu(hidden))
        return scores + self.prior

    def loss(self, releases: Releases, tokens: Tensor) -> Tensor:
        """Return the mean cross-entropy at the places, `tokens` being (rows, numbers of a row)."""
        scores, own = self(releases).flatten(0, 1), tokens[:, self.places].flatten()
        total = functional.cross_entropy(scores, own, ignore_index=IGNORED, reduction="sum")
        return total / (own != IGNORED).sum().clamp(min=1)
