"""Transforms of rows in training (augmentation), whose draws follow from the seed, the number of the row and the epoch.

So a resumed run sees the same rows as an uninterrupted one, for any batches, and a row remains one example of its
client: its gradient is clipped, noised and counted as one. Rows that are scored or attacked are not transformed.

Paper: none; after Krizhevsky, Sutskever, Hinton, "ImageNet classification with deep convolutional neural networks",
NIPS 2012, section 4.1, with draws derived for each row instead of taken from one stream.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, describe_error
from splitfed.core.random import derive, stream
from splitfed.core.rows import Draw, RowSource, layers, type_name

Transform: TypeAlias = Callable[..., Any]
"""Function of a row, or of a row and a `torch.Generator`, that returns a row of the same shape and type."""


class TransformedRows(RowSource):
    """The rows of `source`, with `transform` applied to each in a training step; `name` is the prefix of errors.

    A transform of one argument draws from the default generators of torch, NumPy and `random`, which are seeded for
    each row and restored. Raises `InvalidInput` for one that cannot be called, changes a row's shape or type, or draws
    from another source, so that its draws could not be repeated.
    """

    draws = True

    def __init__(self, name: str, source: RowSource, transform: Transform) -> None:
        if not callable(transform):
            raise InvalidInput(f"{name}: transform is a {type(transform).__name__}; expected a function of a row")
        if source.couples:
            raise InvalidInput(f"{name} has a mixup, which comes last: give the transform first")
        if source.draws:
            raise InvalidInput(f"{name} has a transform already; write one function that does both")
        self.name, self.source, self.transform = name, source, transform
        self.shape, self.dtype = source.shape, source.dtype
        self._takes_generator = _takes_two(transform)
        row, draw = torch.zeros(1, dtype=torch.int64), Draw(0, 0)
        if not torch.equal(self.take(row, draw), self.take(row, draw)):
            raise InvalidInput(
                f"{name}: transform returned two results for one row and one seed; it may draw from the generator in "
                "its second argument, or from torch, numpy.random and random, and keep no state"
            )

    def __len__(self) -> int:
        return len(self.source)

    def take(self, rows: Tensor, draw: Draw | None = None) -> Tensor:
        """Return the rows of these numbers, each transformed if `draw` is given."""
        found = self.source.take(rows)
        if draw is None or len(rows) == 0:
            return found
        for place, row in enumerate(rows.tolist()):
            seed = derive(draw.seed, "transform", draw.epoch, row)
            found[place] = self._apply(found[place], seed, f"{self.name}: transform of row {row}")
        return found

    def _apply(self, row: Tensor, seed: int, what: str) -> Tensor:
        try:
            if self._takes_generator:
                made = self.transform(row.clone(), torch.Generator().manual_seed(seed))
            else:
                with stream(seed, everywhere=True):
                    made = self.transform(row.clone())
        except InvalidInput:
            raise
        except Exception as error:  # the user's own function may raise anything
            raise InvalidInput(f"{what} failed: {describe_error(error)}") from error
        if not isinstance(made, Tensor) or made.shape != row.shape or made.dtype != row.dtype:
            got = f"{tuple(made.shape)} of {type_name(made.dtype)}" if isinstance(made, Tensor) else type(made).__name__
            raise InvalidInput(f"{what} returned {got}; expected {tuple(row.shape)} of {type_name(row.dtype)}")
        return made.detach()


def transform_of(rows: RowSource) -> Transform | None:
    """Return the transform of `rows`; None if there is none."""
    return next((one.transform for one in layers(rows) if isinstance(one, TransformedRows)), None)


def _takes_two(transform: Transform) -> bool:
    try:
        parameters = inspect.signature(transform).parameters.values()
    except (TypeError, ValueError):
        return False
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in named and p.default is inspect.Parameter.empty for p in parameters) == 2
