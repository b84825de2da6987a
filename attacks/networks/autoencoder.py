"""A variational autoencoder of rows: a prior, learned from the adversary's own rows, with a searchable latent space.

Paper: Kingma, Welling, "Auto-encoding variational Bayes", ICLR 2014; the variance of its decoder is the mean squared
error itself, as in Rybkin, Daniilidis, Levine, "Simple and effective VAE training with calibrated sigma-VAEs", ICML
2021, so that fit and prior need no weight between them.

Encoder and decoder are perceptrons of one hidden layer on flattened rows of any shape. Trained on some hundred rows
they generalise better than convolutions, which overfit so few.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn

from splitfed.attacks.base import Progress
from splitfed.attacks.networks.gradient_descent import descend
from splitfed.attacks.networks.networks import Translator

FIRST_LOG_VARIANCE = -6.0
"""Initial log variance of the latent posterior; if large, the decoder learns to ignore the latent numbers."""
LEAST_ERROR = 1e-6
"""Added to the mean squared error, relative to the rows' variance, so that its logarithm is bounded below."""
LEAST_UNIT = 1e-6


class VariationalAutoencoder(nn.Module):
    """Maps rows (n, *shape) to `latent` numbers with a standard normal prior, and back.

    `width`: number of hidden units of encoder and decoder. Decoded rows lie inside `value_range` if given.
    """

    base: Tensor
    unit: Tensor

    def __init__(
        self, shape: tuple[int, ...], latent: int, width: int, value_range: tuple[float, float] | None = None
    ) -> None:
        super().__init__()
        self.shape, self.latent, self._range = shape, latent, value_range
        self.encoder = Translator((prod(shape),), (2 * latent,), width, blocks=0)
        decoder = Translator((latent,), (prod(shape),), width, blocks=0)
        # Flattening and the first linear layer; what follows begins with the activation function.
        self.first, self.rest = decoder.net[:2], decoder.net[2:]
        layers = [m for part in (self.encoder, decoder) for m in part.modules() if isinstance(m, nn.Linear)]
        for layer in layers:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        with torch.no_grad():
            layers[1].bias[latent:] = FIRST_LOG_VARIANCE
        self.register_buffer("base", torch.zeros(shape))
        self.register_buffer("unit", torch.tensor(1.0))

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log variance of the latent posterior of rows x (n, *shape): (n, latent) each."""
        mean, log_variance = self.encoder(((x - self.base) / self.unit).flatten(1)).chunk(2, 1)
        return mean, log_variance

    def show(self, hidden: Tensor) -> Tensor:
        """Return rows (n, *shape) from the hidden activations of the decoder, (n, width).

        Beyond the value range the result is its bound, with the gradient of the unclamped number.
        """
        x: Tensor = self.base + self.unit * self.rest(hidden).unflatten(1, self.shape)
        return x if self._range is None else x + (x.clamp(*self._range) - x).detach()

    def decode(self, latent: Tensor) -> Tensor:
        """Return rows (n, *shape) from latent numbers (n, latent)."""
        return self.show(self.first(latent))

    def hidden_variance(self) -> Tensor:
        """Return the mean variance of the decoder's hidden activations for standard normal latent numbers: a scalar."""
        layer = next(m for m in self.first.modules() if isinstance(m, nn.Linear))
        return layer.weight.square().sum(1).mean()

    def fit(
        self,
        x: Tensor,
        generator: torch.Generator,
        progress: Progress | None = None,
        *,
        epochs: int,
        batch_size: int,
        lr: float,
    ) -> None:
        """Train on rows x (n, *shape) for `epochs` by Adam from rate `lr`: minimise d/2 log(mse) + KL, d numbers a row.

        KL: divergence of the latent posterior from the standard normal prior; `generator` draws from the posterior.
        """
        self.base.copy_(x.mean(0))
        self.unit.copy_((x - self.base).square().mean().sqrt().clamp_min(LEAST_UNIT))

        def loss(_: None, rows: Tensor) -> Tensor:
            mean, log_variance = self.encode(x[rows])
            drawn = torch.randn(mean.shape, generator=generator).to(mean.device)
            again = self.decode(mean + (log_variance / 2).exp() * drawn)
            error = (again - x[rows]).square().mean() / self.unit**2
            divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
            return (error + LEAST_ERROR).log() / 2 + divergence / prod(self.shape)

        descend(
            self.parameters(), [None], loss, len(x), generator, progress, epochs=epochs, lr=lr, batch_size=batch_size,
            least=1,
        )  # fmt: skip
