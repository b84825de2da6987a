"""Markov tokens: sequences of token ids, each drawn from the Markov chain of its class; for models that embed tokens.

Paper: Anderson, Goodman, "Statistical inference about Markov chains", Annals of Mathematical Statistics 1957, for the
likelihood of a chain, by which the best classifier decides.

Class k has the transition matrix softmax(2 (sqrt(1 - d^2) A + d B_k)), row by row, with A and all B_k of independent
standard normal numbers, and d the `difference` of the classes. The first token of a sequence is uniform. Token
frequencies carry some information on the class; the counts of neighbouring pairs are a sufficient statistic. Id 0 is
for padding, as in many vocabularies, and never drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_count, check_number
from splitfed.core.random import generator
from splitfed.core.tasks import classification
from splitfed.data.dataset import Dataset
from splitfed.data.from_python import from_arrays

SHARPNESS = 2.0
"""Factor on the logits of the transitions."""


@dataclass(frozen=True)
class MarkovChains:
    """The Markov chains of `classes` >= 2 over the ids 1 to `vocabulary` - 1, drawn from `seed`.

    `difference`, in [0, 1]: how much the chains of two classes differ; with 0 they are equal.
    """

    vocabulary: int = 17
    classes: int = 4
    difference: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for fewer than three ids or two classes, and for a difference outside [0, 1]."""
        check_count("vocabulary", self.vocabulary, low=3)
        check_count("classes", self.classes, low=2)
        check_number("difference", self.difference, low=0.0, high=1.0)

    @cached_property
    def transitions(self) -> Tensor:
        """Transition probabilities: (classes, vocabulary - 1, vocabulary - 1) float64, rows sum to 1."""
        random, size = generator(self.seed, "markov_tokens", "chains"), self.vocabulary - 1
        shared = torch.randn(size, size, generator=random, dtype=torch.float64)
        own = torch.randn(self.classes, size, size, generator=random, dtype=torch.float64)
        mixed = (1 - self.difference**2) ** 0.5 * shared + self.difference * own
        return torch.softmax(SHARPNESS * mixed, -1)

    def draw(self, y: Tensor, length: int, random: torch.Generator) -> Tensor:
        """Return a sequence of `length` ids for every class in y (n,): (n, length) int64, between 1 and the last id."""
        size = self.vocabulary - 1
        steps = self.transitions.cumsum(-1)
        token = torch.randint(size, (len(y),), generator=random)
        tokens = [token]
        for _ in range(length - 1):
            chance = torch.rand(len(y), 1, generator=random, dtype=torch.float64)
            # Rounding may leave the last sum below one.
            token = (steps[y, token] <= chance).sum(1).clamp(max=size - 1)
            tokens.append(token)
        return torch.stack(tokens, 1) + 1

    def log_likelihood(self, ids: Tensor) -> Tensor:
        """Return log P(ids | class) of every row of `ids` (n, length), zeros being padding: (n, classes) float64.

        The class with the largest value is the optimal prediction, as all classes are equally likely.
        """
        before, after = ids[:, :-1] - 1, ids[:, 1:] - 1
        there = (before >= 0) & (after >= 0)
        logs = self.transitions.log()[:, before.clamp(min=0), after.clamp(min=0)]
        return (logs * there).sum(-1).T


def markov_tokens(
    rows: int = 2000,
    length: int = 32,
    vocabulary: int = 17,
    classes: int = 4,
    difference: float = 0.3,
    shortest: int | None = None,
    seed: int = 0,
) -> Dataset:
    """Return x (rows, length) int64, ids 1 to `vocabulary` - 1, of `classes` alternating classes with a chain each.

    `length` >= 2 tokens. `difference`, in [0, 1]: how much the chains of two classes differ. With `shortest`, from 2 to
    `length`, the number of tokens of a sequence is uniform between them, followed by zeros; x is then (rows, 2,
    length), with the features "input_ids" and "attention_mask", of which the second is 1 for tokens.

    No classifier is better on average than the largest `MarkovChains.log_likelihood`, the exact likelihood. With the
    defaults it is right for 90.5 % of rows (76.2 % of those of 16 tokens, 98.3 % of 64), and the best one that only
    counts tokens for 55 %.
    """
    check_count("rows", rows, low=2)
    check_count("length", length, low=2)
    if shortest is not None:
        check_count("shortest", shortest, low=2)
        if shortest > length:
            raise InvalidInput(f"shortest={shortest} is not allowed; expected at most length={length}")
    chains = MarkovChains(vocabulary, classes, difference, seed)
    random = generator(seed, "markov_tokens", "rows")
    y = torch.arange(rows) % classes
    ids = chains.draw(y, length, random)
    if shortest is None:
        return Dataset("markov_tokens", ids, y, classification(classes))
    lengths = torch.randint(shortest, length + 1, (rows, 1), generator=random)
    mask = (torch.arange(length) < lengths).long()
    parts = {"input_ids": ids * mask, "attention_mask": mask}
    return from_arrays(parts, y, task=classification(classes), name="markov_tokens", dtype="int64")
