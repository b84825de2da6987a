"""Convolutions on ciphertexts agree with those on numbers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from splitfed.core.errors import InvalidInput
from splitfed.encryption.ciphertexts import BATCH, ROWS, decrypt, encrypt
from splitfed.encryption.linear import convolution
from tests.encryption.examples import keys


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1


@pytest.mark.parametrize("layout", [BATCH, ROWS])
@pytest.mark.parametrize(
    ("shape", "kernel", "options"),
    [
        ((2, 7), (3, 2, 3), {}),
        ((2, 6), (1, 2, 4), {"stride": 2, "padding": 1}),
        ((1, 4, 5), (2, 1, 3, 2), {"padding": 1, "stride": 2}),
        ((2, 3, 3), (1, 2, 3, 3), {}),
    ],
)
def test_a_convolution_agrees(
    layout: str, shape: tuple[int, ...], kernel: tuple[int, ...], options: dict[str, Any]
) -> None:
    holder = keys("depth_1_coarse", rotations=True)
    x, w, b = uniform(3, *shape), uniform(*kernel, seed=1) / 4, uniform(kernel[0], seed=2)
    encrypted = encrypt(x.flatten(1), holder.public, bound=1.0, layout=layout, width=32 if layout == ROWS else None)
    convolve = functional.conv1d if len(shape) == 2 else functional.conv2d
    for bias in (None, b):
        out = convolution(encrypted, w, bias, shape=shape, **options)
        truth = convolve(x, w, bias, **options).flatten(1)
        assert out.shape == tuple(truth.shape)
        assert out.level == 0
        error = float((decrypt(out, holder) - truth).abs().max())
        assert error <= out.precision < (1e-4 if layout == BATCH else 2e-2)


@pytest.mark.parametrize(
    ("weight", "bias", "options", "text"),
    [
        (torch.ones(1, 1, 2), None, {"shape": (1, 5)}, "shape=(1, 5) is not allowed; expected (channels, length) or"),
        (torch.ones(1, 1, 2), None, {"shape": (6,)}, "shape=(6,) is not allowed"),
        (torch.ones(1, 2, 2), None, {"shape": (1, 6)}, "weights of shape (1, 2, 2) do not fit rows of shape (1, 6)"),
        (torch.ones(1, 1, 2, 2), None, {"shape": (1, 6)}, "do not fit rows of shape (1, 6)"),
        (torch.ones(1, 1, 7), None, {"shape": (1, 6)}, "do not fit rows of shape (1, 6) with padding=0"),
        (torch.ones(0, 1, 2), None, {"shape": (1, 6)}, "do not fit rows of shape (1, 6)"),
        (torch.ones(2, 1, 2), torch.ones(3), {"shape": (1, 6)}, "a bias of shape (3,) does not fit; expected (2,)"),
        (torch.ones(1, 1, 2), None, {"shape": (1, 6), "stride": 0}, "stride=0 is not allowed"),
        (torch.ones(1, 1, 2), None, {"shape": (1, 6), "padding": -1}, "padding=-1 is not allowed"),
        (torch.ones(1, 1, 2) * 300, None, {"shape": (1, 6)}, "may reach magnitude 600, beyond the 512"),
    ],
)
def test_what_does_not_fit_is_one_line(weight: Tensor, bias: Tensor | None, options: dict[str, Any], text: str) -> None:
    x = encrypt(torch.ones(2, 6), keys("depth_1_coarse").public, bound=1.0)
    with pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        convolution(x, weight, bias, **options)
    assert "\n" not in str(caught.value)
