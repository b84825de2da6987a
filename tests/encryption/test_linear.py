"""Layers on ciphertexts agree with the same layers on numbers, to the precision that travels with them."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear as plain_linear

from splitfed.core.errors import InvalidInput
from splitfed.encryption.arithmetic import add, lower, square
from splitfed.encryption.ciphertexts import (
    BATCH,
    CONSTANTS,
    ROW_RESULTS,
    ROWS,
    EncryptedTensor,
    decrypt,
    encrypt,
    load_ciphertexts,
)
from splitfed.encryption.key_search import find_secret_keys
from splitfed.encryption.keys import KeyHolder, load_public_context
from splitfed.encryption.linear import linear, linear_encrypted
from tests.encryption.examples import keys


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1


def assert_agrees(x: EncryptedTensor, truth: Tensor, holder: KeyHolder) -> None:
    """The error is within the stated one, which is no more than 250 times that of the preset."""
    assert x.shape == tuple(truth.shape)
    error = float((decrypt(x, holder) - truth).abs().max())
    assert error <= x.precision <= 250 * holder.parameters.precision
    assert float(truth.abs().max()) <= x.bound


@pytest.mark.parametrize("name", ["depth_1_coarse", "depth_2"])
@pytest.mark.parametrize(
    ("layout", "rows", "features", "results", "width"),
    [
        (BATCH, 9, 5, 3, None),
        (BATCH, 1, 1, 1, None),
        (BATCH, 6, 3, 7, None),
        (ROWS, 9, 20, 3, None),
        (ROWS, 5, 16, 16, None),
        (ROWS, 5, 7, 9, 16),
        (ROWS, 2, 1, 1, None),
        (ROWS, 2, 600, 2, None),
        (ROWS, 2, 1500, 1, None),
    ],
)
def test_a_layer_agrees_in_both_layouts(
    name: str, layout: str, rows: int, features: int, results: int, width: int | None
) -> None:
    holder = keys(name, rotations=True)
    x, w, b = (
        uniform(rows, features),
        uniform(results, features, seed=1) / math.sqrt(features),
        uniform(results, seed=2),
    )
    encrypted = encrypt(x, holder.public, bound=1.0, layout=layout, width=width)
    for bias in (b, None):
        out = linear(encrypted, w, bias)
        assert out.layout == (BATCH if layout == BATCH else ROW_RESULTS)
        assert (out.level, out.scale) == (encrypted.level - 1, encrypted.scale)
        assert_agrees(out, plain_linear(x, w, bias), holder)


def test_a_server_with_public_bytes_alone_computes_what_the_key_holder_reads() -> None:
    holder = keys("depth_1_coarse", rotations=True)
    x, w = uniform(4, 6), uniform(2, 6, seed=1)
    to_server = [holder.public.to_tensor(), encrypt(x, holder.public, bound=1.0, layout=ROWS).to_tensor()]
    context = load_public_context(to_server[0])
    received = load_ciphertexts(to_server[1], context)
    out = linear(received, w)
    held = {"messages": to_server, "context": context, "received": received, "out": out, "weights": w}
    assert find_secret_keys(held, holder.public) == []
    back = load_ciphertexts(out.to_tensor(), holder.public)
    assert_agrees(back, plain_linear(x, w), holder)


def test_weights_of_zero_are_left_out() -> None:
    holder = keys("depth_1_coarse", rotations=True)
    x, w = uniform(3, 4), torch.tensor([[0.5, 0.0, 0.0, 1e-30], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    b = torch.tensor([0.25, -0.5], dtype=torch.float64)
    for layout in (BATCH, ROWS):
        encrypted = encrypt(x, holder.public, bound=1.0, layout=layout)
        assert_agrees(linear(encrypted, w, b), plain_linear(x, w, b), holder)
        for bias in (None, b):
            out = linear(encrypted, torch.zeros(2, 4), bias)
            assert_agrees(out, plain_linear(x, torch.zeros(2, 4, dtype=torch.float64), bias), holder)
            # An encryption of zero, not zero itself, which anybody could read.
            assert not any(ciphertext.is_transparent() for ciphertext in out.ciphertexts)


def test_two_layers_with_a_square_between_them() -> None:
    holder = keys("depth_3")
    x, first, second = uniform(8, 4), uniform(3, 4, seed=1), uniform(2, 3, seed=2)
    b1, b2 = uniform(3, seed=3), uniform(2, seed=4)
    out = linear(square(linear(encrypt(x, holder.public, bound=1.0), first, b1)), second, b2)
    assert out.level == 0
    assert_agrees(out, plain_linear(plain_linear(x, first, b1) ** 2, second, b2), holder)
    with pytest.raises(
        InvalidInput, match=r"a linear layer needs a multiplication and none is left of 3.*encrypt anew"
    ):
        linear(out, torch.eye(2))


def test_encrypted_weights_agree_and_take_fresh_updates_without_a_level() -> None:
    holder = keys("depth_2")
    context = holder.public
    x, w, b = uniform(8, 4), uniform(3, 4, seed=1), uniform(3, 1, seed=2)
    weight = encrypt(w, context, bound=1.0, layout=CONSTANTS)
    bias = encrypt(b, context, bound=1.0, layout=CONSTANTS)
    inputs = encrypt(x, context, bound=1.0)
    for step in range(5):
        update = uniform(3, 4, seed=10 + step) / 10
        weight, w = add(weight, encrypt(update, context, bound=0.1, layout=CONSTANTS)), w + update
        # At the top still: the product is as deep after a hundred updates as after one.
        assert weight.level == 2
    assert_agrees(weight, w, holder)
    out = linear_encrypted(inputs, weight, bias)
    assert out.level == 1
    assert_agrees(out, plain_linear(x, w, b[:, 0]), holder)
    assert_agrees(linear_encrypted(inputs, weight), plain_linear(x, w), holder)


def test_an_update_from_below_takes_a_level_from_the_weights() -> None:
    holder = keys("depth_2")
    context = holder.public
    x, w, u = uniform(8, 3), uniform(2, 3, seed=1), uniform(2, 3, seed=2)
    weight = encrypt(w, context, bound=1.0, layout=CONSTANTS)
    update = square(encrypt(u, context, bound=1.0, layout=CONSTANTS))
    inputs = encrypt(x, context, bound=1.0)
    once = add(update, weight)
    assert once.level == 1
    assert_agrees(once, w + u**2, holder)
    used = linear_encrypted(inputs, once)
    assert used.level == 0
    assert_agrees(used, plain_linear(x, w + u**2), holder)
    lowest = add(once, square(update))
    with pytest.raises(InvalidInput, match="a product with encrypted weights needs a multiplication and none is left"):
        linear_encrypted(inputs, lowest)


def test_scales_that_differ_are_made_equal_or_refused() -> None:
    # Primes of 20 bits are far from powers of two: a square has another scale than a layer's result of that level.
    holder = keys("scale_21")
    x = uniform(4, 2)
    encrypted = encrypt(x, holder.public, bound=1.0)
    squared, kept = square(encrypted), linear(encrypted, torch.eye(2))
    assert squared.scale != kept.scale
    total = add(squared, kept)
    assert total.level == squared.level - 1
    assert_agrees(total, x**2 + x, holder)
    bottom = lower(squared, 0, squared.scale), lower(kept, 0, kept.scale)
    assert_agrees(bottom[0], x**2, holder)
    with pytest.raises(InvalidInput, match="a sum of ciphertexts at different scales needs a multiplication"):
        add(*bottom)
    with pytest.raises(InvalidInput, match="with 0 multiplications left cannot be brought to 0"):
        lower(bottom[0], 0, 1.0)


@pytest.mark.parametrize(
    ("options", "weight", "bias", "text"),
    [
        ({}, torch.ones(2, 4), None, "weights of shape (2, 4) do not fit; expected (results, 3)"),
        ({}, torch.ones(3), None, "weights of shape (3,) do not fit"),
        ({}, torch.ones(0, 3), None, "weights of shape (0, 3) do not fit"),
        ({}, torch.ones(2, 3), torch.ones(3), "a bias of shape (3,) does not fit; expected (2,)"),
        ({}, torch.full((1, 3), float("nan")), None, "weights or biases that are not finite"),
        ({}, torch.ones(1, 3), torch.tensor([float("inf")]), "weights or biases that are not finite"),
        ({}, torch.full((1, 3), 200.0), None, "a linear layer may reach magnitude 600, beyond the 512 that the scale"),
        ({}, torch.zeros(1, 3), torch.tensor([600.0]), "a linear layer may reach magnitude 600"),
        ({"layout": ROWS}, torch.ones(5, 3), None, "5 results do not fit rows of width 4; encrypt with width=8"),
        ({"layout": CONSTANTS}, torch.ones(2, 3), None, "in the layout 'batch' or 'rows', not 'constants'"),
    ],
)
def test_a_layer_that_does_not_fit_is_one_line(
    options: dict[str, Any], weight: Tensor, bias: Tensor | None, text: str
) -> None:
    x = encrypt(torch.ones(2, 3), keys("depth_1_coarse").public, bound=1.0, **options)
    with pytest.raises(InvalidInput, match=re.escape(text)):
        linear(x, weight, bias)


def test_rows_hold_one_layer_and_need_rotations() -> None:
    x = encrypt(torch.ones(2, 3), keys("depth_1_coarse").public, bound=1.0, layout=ROWS)
    with pytest.raises(InvalidInput, match="make the keys with rotations=True"):
        linear(x, torch.ones(2, 3))
    x = encrypt(torch.ones(2, 3), keys("depth_2", rotations=True).public, bound=1.0, layout=ROWS)
    with pytest.raises(InvalidInput, match="'batch' or 'rows', not 'row results'"):
        linear(linear(x, torch.ones(2, 3)), torch.ones(1, 2))


def test_what_does_not_fit_together_is_one_line() -> None:
    context, other = keys("depth_1_coarse").public, keys("depth_1_coarse", pair=1).public
    x = encrypt(torch.ones(2, 3), context, bound=1.0)
    weight = encrypt(torch.ones(2, 3), context, bound=1.0, layout=CONSTANTS)
    foreign = encrypt(torch.ones(2, 3), other, bound=1.0)
    with pytest.raises(InvalidInput, match="two ciphertexts of different key pairs cannot be added"):
        add(x, foreign)
    with pytest.raises(InvalidInput, match=r"a 'batch' tensor of shape \(2, 3\) and a 'constants' one"):
        add(x, weight)
    with pytest.raises(InvalidInput, match="a sum may reach magnitude 600, beyond the 512"):
        add(encrypt(torch.ones(1, 1), context, bound=300.0), encrypt(torch.ones(1, 1), context, bound=300.0))
    with pytest.raises(InvalidInput, match="a square may reach magnitude 1600, beyond the 512"):
        square(encrypt(torch.ones(1, 1), context, bound=40.0))
    with pytest.raises(InvalidInput, match="encrypted weights of another key pair"):
        linear_encrypted(foreign, weight)
    with pytest.raises(InvalidInput, match="in the layout 'batch', weights in 'constants'"):
        linear_encrypted(weight, weight)
    with pytest.raises(InvalidInput, match=re.escape("encrypted weights of shape (2, 3) do not fit 2 features")):
        linear_encrypted(encrypt(torch.ones(2, 2), context, bound=1.0), weight)
    with pytest.raises(InvalidInput, match="a product with encrypted weights may reach magnitude 768"):
        linear_encrypted(
            encrypt(torch.ones(2, 3), context, bound=16.0),
            encrypt(torch.ones(2, 3), context, bound=16.0, layout=CONSTANTS),
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "layout"), [("depth_2", BATCH), ("depth_2", ROWS), ("depth_7", BATCH)])
def test_a_wide_layer_agrees(name: str, layout: str) -> None:
    holder = keys(name, rotations=layout == ROWS)
    x, w, b = uniform(64, 256), uniform(10, 256, seed=1) / 16, uniform(10, seed=2)
    out = linear(encrypt(x, holder.public, bound=1.0, layout=layout), w, b)
    assert_agrees(out, plain_linear(x, w, b), holder)
