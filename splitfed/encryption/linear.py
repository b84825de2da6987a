"""A linear layer on ciphertexts: layouts "batch" and "rows", with weights in plain or encrypted.

Batch layout: a result is a sum of ciphertexts, each times a number. Each result is rescaled once, after the sum, where
TenSEAL's own product rescales every term; the cost does not depend on the number of rows, up to the number of slots.

Rows layout: the hybrid of the diagonal method (Halevi, Shoup, "Algorithms in HElib", CRYPTO 2014) for matrices with
fewer results than features (Juvekar, Vaikuntanathan, Chandrakasan, "Gazelle", USENIX Security 2018), by baby steps and
giant steps. With b results, rounded up to a power of two, and f features it takes about 2 sqrt(b) + log2(f/b) rotations
a ciphertext. It sends fewer ciphertexts, but computes a single layer: its results are not laid out for a second one.

Weights are encoded at the prime by which the result is rescaled, so that the scale does not change, to the bit. The
time of a product reveals which weights are zero; these weights are the server's own.

A convolution is the linear layer whose matrix maps all inputs to all outputs. Zero weights are left out of a product in
the layout "batch", so that a convolution with k weights a patch costs k products an output, as with one row a patch
(im2col), but without im2col's copies of ciphertexts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from splitfed.core.errors import InvalidInput, check_count
from splitfed.encryption.arithmetic import add, check_bound, check_level, finish_product
from splitfed.encryption.backend import import_seal
from splitfed.encryption.ciphertexts import (
    BATCH,
    CONSTANTS,
    ROW_RESULTS,
    ROWS,
    EncryptedTensor,
    block_slots,
    next_power_of_two,
)
from splitfed.encryption.keys import PublicContext
from splitfed.encryption.noise import baby_steps, rotation_noise, rounding_noise, scalar_noise, vector_noise


def linear(x: EncryptedTensor, weight: Tensor, bias: Tensor | None = None) -> EncryptedTensor:
    """Return x W' + b, one level lower: (rows, results) in the layout of `x`, "row results" from "rows".

    `x`: (rows, features) in the layout "batch" or "rows". `weight`: plaintext (results, features). `bias`: (results,).
    Raises `InvalidInput` if no level is left, for results beyond the scale, and for shapes that do not match.
    """
    if x.layout not in (BATCH, ROWS):
        raise InvalidInput(f"a linear layer takes ciphertexts in the layout 'batch' or 'rows', not {x.layout!r}")
    check_level(x, "a linear layer")
    w, b = _checked(x, weight, bias)
    bound = check_bound(x.context, float((w.abs().sum(1) * x.bound + b.abs()).max()), "a linear layer")
    multiply = _multiply_batch if x.layout == BATCH else _multiply_rows
    ciphertexts, encoding, inner = multiply(x, w, b)
    spread = float(w.square().sum(1).max())
    variance = (
        spread * (x.noise**2 + inner**2) + encoding**2 + rounding_noise(x.context.parameters.degree, x.scale) ** 2
    )
    return replace(
        x,
        ciphertexts=ciphertexts,
        layout=BATCH if x.layout == BATCH else ROW_RESULTS,
        shape=(x.shape[0], len(w)),
        level=x.level - 1,
        bound=bound,
        noise=math.sqrt(variance),
    )


def linear_encrypted(
    x: EncryptedTensor, weight: EncryptedTensor, bias: EncryptedTensor | None = None
) -> EncryptedTensor:
    """Return x W' + b for weights encrypted under the same keys, one level below the lower of the two.

    `x`: (rows, features) in the layout "batch". `weight`: (results, features), `bias`: (results, 1), both in the layout
    "constants". Weights to which only fresh updates are added stay at the top level. Raises `InvalidInput` as `linear`.
    """
    if x.layout != BATCH or weight.layout != CONSTANTS or (bias is not None and bias.layout != CONSTANTS):
        raise InvalidInput(
            "a product with encrypted weights takes inputs in the layout 'batch', weights in 'constants'"
        )
    if any(part is not None and part.context.fingerprint != x.context.fingerprint for part in (weight, bias)):
        raise InvalidInput("encrypted weights of another key pair cannot be multiplied")
    results, features = weight.shape
    if features != x.shape[1] or (bias is not None and bias.shape != (results, 1)):
        raise InvalidInput(
            f"encrypted weights of shape {weight.shape}{'' if bias is None else f' with bias {bias.shape}'} do not fit "
            f"{x.shape[1]} features; expected (results, {x.shape[1]}), and a bias of (results, 1)"
        )
    low = x if x.level <= weight.level else weight
    check_level(low, "a product with encrypted weights")
    bound = features * x.bound * weight.bound + (0.0 if bias is None else bias.bound)
    check_bound(x.context, bound, "a product with encrypted weights")
    seal, evaluator, parms_id = import_seal(), x.context.evaluator, x.context.levels[low.level].parms_id
    inputs = [_switched(x.context, ciphertext, parms_id) for ciphertext in x.ciphertexts]
    ciphertexts, term = [], seal.Ciphertext()
    for result in range(results):
        total = seal.Ciphertext()
        for place, value in enumerate(inputs):
            factor = _switched(x.context, weight.ciphertexts[result * features + place], parms_id)
            evaluator.multiply(value, factor, term if place else total)
            if place:
                evaluator.add_inplace(total, term)
        # Relinearised once a result: a sum of products of three polynomials has three as well.
        finish_product(x.context, total)
        ciphertexts.append(total)
    variance = features * ((weight.bound * x.noise) ** 2 + (x.bound * weight.noise) ** 2)
    noise = math.sqrt(variance + rounding_noise(x.context.parameters.degree, ciphertexts[0].scale) ** 2)
    product = replace(
        x, ciphertexts=tuple(ciphertexts), shape=(x.shape[0], results), level=low.level - 1, bound=bound, noise=noise
    )
    if bias is None:
        return product
    # The same number in every slot of a result, like any bias.
    shift = replace(bias, layout=BATCH, shape=product.shape)
    return replace(add(product, shift), bound=bound)


def convolution(
    x: EncryptedTensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    shape: Sequence[int],
    stride: int = 1,
    padding: int = 0,
) -> EncryptedTensor:
    """Return the convolution of every row of `x`, one level lower: (rows, out channels * positions), flattened.

    `x`: (rows, features), each row a flattened tensor of `shape`, (channels, length) or (channels, height, width).
    `weight`: plaintext (out channels, channels, kernel sizes), `bias`: (out channels,). Raises `InvalidInput` as
    `linear` does, and for shapes that do not match.
    """
    shape = tuple(shape)
    if len(shape) not in (2, 3) or math.prod(shape) != x.shape[1]:
        raise InvalidInput(
            f"shape={shape} is not allowed; expected (channels, length) or (channels, height, width) of "
            f"{x.shape[1]} features"
        )
    check_count("stride", stride, low=1)
    check_count("padding", padding)
    kernel = tuple(weight.shape[2:])
    reaches = all(size <= there + 2 * padding for size, there in zip(kernel, shape[1:], strict=False))
    if weight.dim() != len(shape) + 1 or weight.shape[1] != shape[0] or not weight.numel() or not reaches:
        raise InvalidInput(
            f"weights of shape {tuple(weight.shape)} do not fit rows of shape {shape} with padding={padding}; expected "
            f"(out channels, {shape[0]}, {len(shape) - 1} kernel sizes no larger than the padded row)"
        )
    if bias is not None and bias.shape != (len(weight),):
        raise InvalidInput(f"a bias of shape {tuple(bias.shape)} does not fit; expected ({len(weight)},)")
    convolve = functional.conv1d if len(shape) == 2 else functional.conv2d
    features = torch.eye(x.shape[1], dtype=torch.float64).view(-1, *shape)
    # Column j of the matrix is the convolution of unit vector j.
    columns = convolve(features, weight.detach().double().cpu(), stride=stride, padding=padding)
    places = math.prod(columns.shape[2:])
    shift = None if bias is None else bias.detach().double().cpu().repeat_interleave(places)
    return linear(x, columns.flatten(1).T, shift)


def _checked(x: EncryptedTensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return weight (results, features) and bias (results,) in float64; raise `InvalidInput` for bad shapes and NaN."""
    features = x.shape[1]
    if weight.dim() != 2 or not len(weight) or weight.shape[1] != features:
        raise InvalidInput(f"weights of shape {tuple(weight.shape)} do not fit; expected (results, {features})")
    w = weight.detach().double().cpu()
    b = torch.zeros(len(w), dtype=torch.float64) if bias is None else bias.detach().double().cpu()
    if b.shape != (len(w),):
        raise InvalidInput(f"a bias of shape {tuple(b.shape)} does not fit; expected ({len(w)},)")
    if not (bool(torch.isfinite(w).all()) and bool(torch.isfinite(b).all())):
        raise InvalidInput("weights or biases that are not finite cannot be multiplied with ciphertexts")
    if x.layout == ROWS and next_power_of_two(len(w)) > x.width:
        raise InvalidInput(
            f"{len(w)} results do not fit rows of width {x.width}; encrypt with width={next_power_of_two(len(w))}"
        )
    return w, b


def _multiply_batch(x: EncryptedTensor, w: Tensor, b: Tensor) -> tuple[tuple[Any, ...], float, float]:
    """Return one ciphertext a result, the noise from encoding the weights, and the noise added before rescaling."""
    seal, context, level = import_seal(), x.context, x.context.levels[x.level]
    evaluator, encoder, scale = context.evaluator, context.encoder, float(level.last_prime)
    plaintext, term, ciphertexts = seal.Plaintext(), seal.Ciphertext(), []
    for row, shift in zip(w.tolist(), b.tolist(), strict=True):
        total = None
        for value, ciphertext in zip(row, x.ciphertexts, strict=True):
            if abs(value) * scale < 1:
                # It would be encoded as zero, and SEAL refuses a product with zero, which would not be encrypted.
                continue
            encoder.encode(value, level.parms_id, scale, plaintext)
            total = _add_product(evaluator, total, ciphertext, plaintext, term)
        ciphertexts.append(_finish(x, total, shift or None))
    return tuple(ciphertexts), scalar_noise(x.shape[1], x.bound, scale), 0.0


def _add_product(evaluator: Any, total: Any, ciphertext: Any, plaintext: Any, term: Any) -> Any:
    """Return `total` plus the product, added in place; the product alone if `total` is None. `term` is overwritten."""
    if total is None:
        total = import_seal().Ciphertext()
        evaluator.multiply_plain(ciphertext, plaintext, total)
    else:
        evaluator.multiply_plain(ciphertext, plaintext, term)
        evaluator.add_inplace(total, term)
    return total


def _multiply_rows(x: EncryptedTensor, w: Tensor, b: Tensor) -> tuple[tuple[Any, ...], float, float]:
    """Return as many ciphertexts as `x` has, and the two noises that `_multiply_batch` returns."""
    context, level = x.context, x.context.levels[x.level]
    results = next_power_of_two(len(w))
    steps = baby_steps(results)
    diagonals = _diagonals(x, w, results, steps)
    bias = torch.zeros(block_slots(context.parameters, x.width), dtype=torch.float64)
    bias[: len(b)] = b
    shift = bias.repeat(context.parameters.slots // len(bias)).tolist() if bool(b.any()) else None
    ciphertexts = tuple(_finish(x, _rotate_sum(x, c, diagonals, results, steps), shift) for c in x.ciphertexts)
    degree = context.parameters.degree
    encoding = vector_noise(degree, x.width, x.bound, float(level.last_prime))
    inner = math.sqrt(steps - 1) * rotation_noise(degree, x.scale)
    return ciphertexts, encoding, inner


def _diagonals(x: EncryptedTensor, w: Tensor, results: int, steps: int) -> list[list[Any]]:
    """Return the encoded diagonals of the padded weights, one a giant step and a baby step; None for zeros.

    Diagonal d has W[i mod results, (i + d) mod width] at position i, shifted by the number of slots that its giant step
    rotates back after the product.
    """
    parameters, level, width = x.context.parameters, x.context.levels[x.level], x.width
    padded = torch.zeros(results, width, dtype=torch.float64)
    padded[: w.shape[0], : w.shape[1]] = w
    place, block = torch.arange(width), block_slots(parameters, width)
    scale, found = float(level.last_prime), []
    for start in range(0, results, steps):
        row: list[Any] = []
        for diagonal in range(start, min(start + steps, results)):
            slots = torch.zeros(block, dtype=torch.float64)
            slots[(place + start) % block] = padded[place % results, (place + diagonal) % width]
            plaintext = None
            if float(slots.abs().max()) * scale >= 1:
                plaintext = import_seal().Plaintext()
                x.context.encoder.encode(
                    slots.repeat(parameters.slots // block).tolist(), level.parms_id, scale, plaintext
                )
            row.append(plaintext)
        found.append(row)
    return found


def _rotate_sum(x: EncryptedTensor, ciphertext: Any, diagonals: list[list[Any]], results: int, steps: int) -> Any:
    """Return the sum of the rotated products of one ciphertext with all diagonals, not rescaled; None for zero."""
    seal, evaluator, keys = import_seal(), x.context.evaluator, x.context.rotation_keys
    rotated = [ciphertext]
    for _ in range(1, min(steps, results)):
        rotated.append(seal.Ciphertext())
        evaluator.rotate_vector(rotated[-2], 1, keys, rotated[-1])
    total, term = None, seal.Ciphertext()
    for row in reversed(diagonals):
        if total is not None:
            evaluator.rotate_vector_inplace(total, steps, keys)
        for value, plaintext in zip(rotated, row, strict=False):
            if plaintext is None:
                continue
            total = _add_product(evaluator, total, value, plaintext, term)
    stride = x.width // 2
    while total is not None and stride >= results:
        evaluator.rotate_vector(total, stride, keys, term)
        evaluator.add_inplace(total, term)
        stride //= 2
    return total


def _finish(x: EncryptedTensor, total: Any, bias: list[float] | float | None) -> Any:
    """Rescale a sum of products and add the bias of every slot; an encryption of zero if there is no product."""
    seal, context = import_seal(), x.context
    below = context.levels[x.level - 1]
    if total is None:
        total = seal.Ciphertext()
        context.make_encryptor().encrypt_zero(below.parms_id, total)
    else:
        context.evaluator.rescale_to_next_inplace(total)
    # Equal to the scale of the input up to the last bit of a float.
    total.scale = x.scale
    if bias is not None:
        plaintext = seal.Plaintext()
        context.encoder.encode(bias, below.parms_id, x.scale, plaintext)
        context.evaluator.add_plain_inplace(total, plaintext)
    return total


def _switched(context: PublicContext, ciphertext: Any, parms_id: Any) -> Any:
    """Return `ciphertext` switched to the moduli of `parms_id`; the same object if it has them already."""
    if ciphertext.parms_id() == parms_id:
        return ciphertext
    result = import_seal().Ciphertext()
    context.evaluator.mod_switch_to(ciphertext, parms_id, result)
    return result
