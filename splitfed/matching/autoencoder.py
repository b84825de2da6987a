"""The autoencoder of an expert: a low-dimensional code of the rows the expert was trained on.

Paper: Sharma, Vepakomma, Swedish, Chang, Kalpathy-Cramer, Raskar, "ExpertMatcher: Automating ML Model Selection for
Users in Resource Constrained Countries", 2019 (arXiv 1910.02312): one autoencoder for each expert's data.

Only the abstracts of the two papers were available. Others report a fully connected autoencoder with one hidden layer,
the code, 128 wide. Whether the code has a nonlinearity is not known: here it is linear, and so is the reconstruction;
ReLUs follow the `hidden` layers only. Other details of width, optimizer and stopping rule are ours.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.argument_kinds import guard_constructor
from splitfed.core.errors import InvalidInput, NonFinite, check_count, check_number
from splitfed.core.random import derive, generator, stream

Progress = Callable[[int, int, Mapping[str, Any]], None]


@guard_constructor
class Autoencoder(nn.Module):
    """Fully connected autoencoder: `encoder` maps flattened rows (n, inputs) to codes (n, code), `decoder` back."""

    def __init__(self, inputs: int, code: int, hidden: Sequence[int] = (), *, seed: int = 0) -> None:
        """Draw the weights from `seed`; `hidden`: widths between input and code, mirrored in the decoder.

        Raises `InvalidInput` for a code as wide as a row.
        """
        super().__init__()
        check_count("inputs", inputs, low=2)
        for width in hidden:
            check_count("hidden", width, low=1)
        check_count("code", code, low=1)
        if code >= inputs:
            raise InvalidInput(
                f"code={code} is not allowed for rows of {inputs} values; expected at most {inputs - 1}: "
                "a code as wide as a row can copy every row without error"
            )
        widths = (inputs, *hidden, code)
        with stream(derive(seed, "autoencoder")):
            self.encoder = layers(widths)
            self.decoder = layers(widths[::-1])

    def forward(self, x: Tensor) -> Tensor:
        """Return the reconstruction (n, inputs) of the rows `x` (n, ...)."""
        return reconstruct(self.encoder, self.decoder, x)


def layers(widths: Sequence[int]) -> nn.Sequential:
    """Return linear layers between `widths`, with ReLUs between them and none after the last."""
    found: list[nn.Module] = []
    for width, following in pairwise(widths):
        found += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*found[:-1])


def from_state(state: Mapping[str, Tensor]) -> nn.Sequential:
    """Return `layers` with a copy of the weights in `state`, which also determine their widths."""
    matrices = [tensor for name, tensor in state.items() if name.endswith("weight")]
    module = layers([matrices[0].shape[1], *(matrix.shape[0] for matrix in matrices)])
    module.load_state_dict(state)
    return module.eval()


def encode(encoder: nn.Module, x: Tensor) -> Tensor:
    """Return the codes (n, code) of the rows `x` (n, ...)."""
    codes: Tensor = encoder(x.flatten(1))
    return codes


def reconstruct(encoder: nn.Module, decoder: nn.Module, x: Tensor) -> Tensor:
    """Return the reconstructions (n, inputs) of the rows `x` (n, ...)."""
    rows: Tensor = decoder(encode(encoder, x))
    return rows


def row_errors(encoder: nn.Module, decoder: nn.Module, x: Tensor) -> Tensor:
    """Return the mean squared reconstruction error (n,) of each of the rows `x` (n, ...)."""
    return (reconstruct(encoder, decoder, x) - x.flatten(1)).square().mean(1)


class Fit(NamedTuple):
    """Validation loss (mean squared error) after each epoch, and the epoch, from 0, whose weights were kept."""

    losses: tuple[float, ...]
    best: int


def fit(
    autoencoder: Autoencoder,
    train: Tensor,
    validation: Tensor,
    *,
    epochs: int = 100,
    patience: int = 5,
    batch_size: int = 64,
    learning_rate: float = 3e-3,
    seed: int = 0,
    progress: Progress | None = None,
) -> Fit:
    """Train with Adam on the mean squared error until that on `validation` has not fallen for `patience` epochs.

    train, validation: (n, ...) rows. The weights of the best epoch are kept. `progress(epoch, epochs, metrics)` is
    called after every epoch, counted from 1. Raises `NonFinite` if the loss is not finite.
    """
    for name, count in (("epochs", epochs), ("patience", patience), ("batch_size", batch_size)):
        check_count(name, count, low=1)
    check_number("learning_rate", learning_rate, low=0.0, open_low=True)
    optimizer = torch.optim.Adam(autoencoder.parameters(), lr=learning_rate)
    losses: list[float] = []
    best, best_state = 0, copy.deepcopy(autoencoder.state_dict())
    for epoch in range(epochs):
        order = torch.randperm(len(train), generator=generator(seed, "autoencoder", "order", epoch))
        for rows in order.split(batch_size):
            optimizer.zero_grad()
            _loss(autoencoder, train[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            losses.append(float(_loss(autoencoder, validation)))
        if not math.isfinite(losses[-1]):
            raise NonFinite(f"the autoencoder's loss is {losses[-1]} after epoch {epoch}: lower the learning rate")
        if epoch == 0 or losses[-1] < losses[best]:
            best, best_state = epoch, copy.deepcopy(autoencoder.state_dict())
        if progress is not None:
            progress(epoch + 1, epochs, {"validation": losses[-1], "best": losses[best]})
        if epoch - best >= patience:
            break
    autoencoder.load_state_dict(best_state)
    return Fit(tuple(losses), best)


def _loss(autoencoder: Autoencoder, x: Tensor) -> Tensor:
    return functional.mse_loss(autoencoder(x), x.flatten(1))
