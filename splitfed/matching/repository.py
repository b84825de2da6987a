"""The server's repository of experts: each a model with the autoencoder and the codes of its data.

Paper: Sharma et al., "ExpertMatcher: Automating ML Model Selection for Users in Resource Constrained Countries", 2019
(arXiv 1910.02312).

How the rows of an expert's data are divided is our choice, not the paper's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Concatenate, ParamSpec

import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput, check_count, check_names
from splitfed.core.random import derive, generator
from splitfed.core.topology import Topology
from splitfed.data.dataset import Dataset
from splitfed.matching.autoencoder import Autoencoder, Progress, encode, fit, row_errors
from splitfed.matching.measures import Reference
from splitfed.matching.similarity import median_bandwidth

P = ParamSpec("P")

# Fractions of an expert's rows: to train the autoencoder, to stop it, to compare with; the rest is held out.
_TRAIN, _STOP, _REFERENCE = 0.6, 0.1, 0.15


@dataclass(frozen=True, eq=False)
class Expert:
    """One entry of the repository, the server's own; it has no data of clients.

    `held_out`: (n, ...) rows that neither the autoencoder nor the reference was fitted to. `model`: the trained expert
    network, or None if only matching is wanted.
    """

    name: str
    autoencoder: Autoencoder
    reference: Reference
    held_out: Tensor
    model: nn.Module | None = None

    def topology(
        self, build: Callable[Concatenate[nn.Module, P], Topology], *args: P.args, **kwargs: P.kwargs
    ) -> Topology:
        """Return `build(model, *args, **kwargs)` on a copy of the expert's model, from which split training starts.

        `build` is a builder of `splitfed.topologies`, such as `vanilla`, with its own arguments.
        """
        if self.model is None:
            raise InvalidInput(f"expert {self.name!r} has no model; add it with model=...")
        return build(copy.deepcopy(self.model), *args, **kwargs)

    @torch.no_grad()
    def codes(self, x: Tensor) -> Tensor:
        """Return the codes (n, d) of the rows `x` (n, ...), computed at the server."""
        return encode(self.autoencoder.encoder, x)

    @torch.no_grad()
    def errors(self, x: Tensor) -> Tensor:
        """Return the mean squared reconstruction error (n,) of each of the rows `x` (n, ...)."""
        return row_errors(self.autoencoder.encoder, self.autoencoder.decoder, x)


class Repository:
    """Experts by name, in the order they were added; all have rows of one shape."""

    def __init__(self) -> None:
        self.experts: dict[str, Expert] = {}

    def __getitem__(self, name: str) -> Expert:
        """Return the expert called `name`."""
        check_names("expert", self.experts, name)
        return self.experts[name]

    def __len__(self) -> int:
        return len(self.experts)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row; `()` while there is no expert."""
        return next((tuple(expert.held_out.shape[1:]) for expert in self.experts.values()), ())

    def add(
        self,
        name: str,
        data: Dataset,
        model: nn.Module | None = None,
        *,
        code: int | None = None,
        hidden: Sequence[int] = (),
        epochs: int = 100,
        patience: int = 5,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> Expert:
        """Train an autoencoder on `data`, add the expert `name` with a copy of `model`, and return it.

        `data` needs class labels and at least 20 rows: 60 % train the autoencoder and give the class means, 10 % decide
        when to stop, 15 % are the reference, and 15 % are held out to calibrate a matcher. `code`: width of the code
        (default: 128, or half the values of a row if that is less). `progress` as in `autoencoder.fit`.
        """
        self._check(name, data)
        inputs = math.prod(data.shape)
        width = min(128, inputs // 2) if code is None else code
        check_count("code", width, low=2)
        module = Autoencoder(inputs, width, hidden, seed=derive(seed, "expert", name))
        order = torch.randperm(len(data), generator=generator(seed, "expert", name, "rows"))
        sizes = [int(fraction * len(data)) for fraction in (_TRAIN, _STOP, _REFERENCE)]
        train, stop, reference, held_out = order.split([*sizes, len(data) - sum(sizes)])
        x, y = data.x, data.y
        fit(
            module,
            x[train],
            x[stop],
            epochs=epochs,
            patience=patience,
            seed=derive(seed, "expert", name),
            progress=progress,
        )
        reference_codes = _reference(module, x[train], y[train], x[reference])
        self.experts[name] = Expert(name, module.eval(), reference_codes, x[held_out], copy.deepcopy(model))
        return self.experts[name]

    def _check(self, name: str, data: Dataset) -> None:
        if not name or "/" in name or "->" in name:
            raise InvalidInput(f"expert {name!r} is not allowed; expected a name without '/' and '->'")
        if name in self.experts:
            raise InvalidInput(f"expert {name!r} exists already; every expert needs a distinct name")
        if self.experts and data.shape != self.shape:
            raise InvalidInput(f"{data.name} has rows of {data.shape}; the repository's experts take {self.shape}")
        if data.y.dim() != 1 or data.y.dtype != torch.int64:
            raise InvalidInput(f"{data.name} is a {data.task.name} task; an expert needs class labels")
        if len(data) < 20:
            raise InvalidInput(f"{data.name} has {len(data)} rows; an expert needs at least 20")


@torch.no_grad()
def _reference(module: Autoencoder, x: Tensor, y: Tensor, unseen: Tensor) -> Reference:
    """Return the class means over the rows `x`, (n, ...), and the codes of the rows `unseen` in training."""
    codes = encode(module.encoder, x)
    labels = y.unique()
    means = torch.stack([codes[y == label].mean(0) for label in labels])
    others = encode(module.encoder, unseen)
    return Reference(others, means, labels, float(median_bandwidth(others)))
