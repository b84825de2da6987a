"""Sums and products of encrypted tensors, with bookkeeping of levels, magnitudes and noise.

Scales are exact: a rescaling divides by a prime, not by the nearby power of two, and two ciphertexts are added only if
their scales are equal. TenSEAL's own vectors treat the two as equal, which causes an error of some 5e-7 at 2^40.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.encryption.backend import import_seal
from splitfed.encryption.ciphertexts import BATCH, EncryptedTensor
from splitfed.encryption.keys import PublicContext
from splitfed.encryption.noise import rounding_noise, vector_noise


def square(x: EncryptedTensor) -> EncryptedTensor:
    """Return the square of every number of `x`, one level lower; needs no rotation keys."""
    check_level(x, "a square")
    bound = check_bound(x.context, x.bound**2, "a square")
    ciphertexts = _each(x.context.evaluator.square, x.ciphertexts)
    for product in ciphertexts:
        finish_product(x.context, product)
    noise = math.hypot(2 * x.bound * x.noise, rounding_noise(x.context.parameters.degree, ciphertexts[0].scale))
    return replace(x, ciphertexts=ciphertexts, level=x.level - 1, bound=bound, noise=noise)


def multiply(x: EncryptedTensor, y: EncryptedTensor) -> EncryptedTensor:
    """Return the element-wise product of two encrypted tensors of the same shape, one level below the lower of the two.

    Both are in the layout "batch". Raises `InvalidInput` for different keys, shapes or layouts, and if no level is
    left.
    """
    _check_alike(x, y, "multiplied")
    if x.layout != BATCH:
        raise InvalidInput(f"ciphertexts in the layout {x.layout!r} cannot be multiplied; expected 'batch'")
    x, y = _level_alike(x, y)
    check_level(x, "a product of ciphertexts")
    bound = check_bound(x.context, x.bound * y.bound, "a product of ciphertexts")
    ciphertexts = _each(x.context.evaluator.multiply, x.ciphertexts, y.ciphertexts)
    for product in ciphertexts:
        finish_product(x.context, product)
    rounding = rounding_noise(x.context.parameters.degree, ciphertexts[0].scale)
    noise = math.hypot(x.bound * y.noise, y.bound * x.noise, rounding)
    return replace(x, ciphertexts=ciphertexts, level=x.level - 1, bound=bound, noise=noise)


def add_plain(x: EncryptedTensor, values: Tensor) -> EncryptedTensor:
    """Return `x` plus the plaintext `values`, (rows, features), at the level of `x`, which has the layout "batch".

    Raises `InvalidInput` for another layout or shape, and for sums beyond the scale.
    """
    if x.layout != BATCH or tuple(values.shape) != x.shape:
        raise InvalidInput(
            f"numbers of shape {tuple(values.shape)} cannot be added to a {x.layout!r} tensor of shape {x.shape}"
        )
    added = values.detach().double().cpu()
    bound = check_bound(x.context, x.bound + float(added.abs().max()), "a sum")
    plaintext = import_seal().Plaintext()

    def add_column(ciphertext: Any, column: list[float], result: Any) -> None:
        x.context.encoder.encode(column, ciphertext.parms_id(), ciphertext.scale, plaintext)
        x.context.evaluator.add_plain(ciphertext, plaintext, result)

    ciphertexts = _each(add_column, x.ciphertexts, added.T.tolist())
    rounding = vector_noise(x.context.parameters.degree, 1, 1.0, x.scale)
    return replace(x, ciphertexts=ciphertexts, bound=bound, noise=math.hypot(x.noise, rounding))


def add(x: EncryptedTensor, y: EncryptedTensor) -> EncryptedTensor:
    """Return the sum of two encrypted tensors of the same shape and layout, at the lower of their levels.

    If levels differ, the higher one is multiplied by 1 until level and scale agree, which is exact. Fresh weights and
    fresh updates of them are both at the top level, so their sum costs no level. Raises `InvalidInput` for different
    keys, shapes or layouts, and if no level is left to bring two scales together.
    """
    _check_alike(x, y, "added")
    bound = check_bound(x.context, x.bound + y.bound, "a sum")
    x, y = _level_alike(x, y)
    ciphertexts = _each(x.context.evaluator.add, x.ciphertexts, y.ciphertexts)
    return replace(x, ciphertexts=ciphertexts, bound=bound, noise=math.hypot(x.noise, y.noise))


def concatenate(x: EncryptedTensor, y: EncryptedTensor) -> EncryptedTensor:
    """Return the features of `x` and `y` joined, in the layout "batch", at the lower of their levels."""
    rows = replace(x, shape=(x.shape[0], 1)), replace(y, shape=(y.shape[0], 1))
    _check_alike(*rows, "put side by side")
    if x.layout != BATCH:
        raise InvalidInput(f"ciphertexts in the layout {x.layout!r} cannot be put side by side; expected 'batch'")
    x, y = _level_alike(x, y)
    shape = (x.shape[0], x.shape[1] + y.shape[1])
    bound, noise = max(x.bound, y.bound), max(x.noise, y.noise)
    return replace(x, ciphertexts=(*x.ciphertexts, *y.ciphertexts), shape=shape, bound=bound, noise=noise)


def take_features(x: EncryptedTensor, first: int, end: int) -> EncryptedTensor:
    """Return the features of `x` from `first` up to, not including, `end`; the layout is "batch"."""
    if x.layout != BATCH or not 0 <= first < end <= x.shape[1]:
        raise InvalidInput(f"features {first} to {end} cannot be taken of a {x.layout!r} tensor of shape {x.shape}")
    return replace(x, ciphertexts=x.ciphertexts[first:end], shape=(x.shape[0], end - first))


def lower(x: EncryptedTensor, level: int, scale: float) -> EncryptedTensor:
    """Return `x` at `level`, which must be lower than its own, and encoded at exactly `scale`."""
    if level >= x.level:
        raise InvalidInput(f"a ciphertext with {x.level} multiplications left cannot be brought to {level}")
    seal, evaluator, above = import_seal(), x.context.evaluator, x.context.levels[level + 1]
    one, ciphertexts = seal.Plaintext(), []
    x.context.encoder.encode(1.0, above.parms_id, scale * above.last_prime / x.scale, one)
    for ciphertext in x.ciphertexts:
        result = seal.Ciphertext()
        evaluator.mod_switch_to(ciphertext, above.parms_id, result)
        evaluator.multiply_plain_inplace(result, one)
        evaluator.rescale_to_next_inplace(result)
        # Equal up to the last bit of a float.
        result.scale = scale
        ciphertexts.append(result)
    noise = math.hypot(x.noise, rounding_noise(x.context.parameters.degree, scale))
    return replace(x, ciphertexts=tuple(ciphertexts), level=level, noise=noise)


def check_level(x: EncryptedTensor, what: str) -> None:
    """Raise `InvalidInput` if `x` has no multiplication left; `what` names the operation."""
    if x.level == 0:
        raise InvalidInput(
            f"{what} needs a multiplication and none is left of {x.context.parameters.depth}: the scale is exhausted; "
            "choose deeper parameters, or let the key holder encrypt anew"
        )


def check_bound(context: PublicContext, bound: float, what: str) -> float:
    """Return `bound`, the largest magnitude of a result; raise `InvalidInput` for one beyond the scale."""
    largest = context.parameters.largest
    if not bound <= largest:
        raise InvalidInput(
            f"{what} may reach magnitude {bound:g}, beyond the {largest:g} that the scale holds; declare a smaller "
            "bound of what goes in, or choose other parameters"
        )
    return bound


def finish_product(context: PublicContext, product: Any) -> None:
    """Relinearise a product of ciphertexts to two polynomials and rescale it, in place."""
    context.evaluator.relinearize_inplace(product, context.relinearization_keys)
    context.evaluator.rescale_to_next_inplace(product)


def _each(operation: Callable[..., None], *operands: Sequence[Any]) -> tuple[Any, ...]:
    """Apply SEAL's `operation` to each ciphertext, with the matching element of a second operand if there is one."""
    made = []
    for given in zip(*operands, strict=True):
        result = import_seal().Ciphertext()
        operation(*given, result)
        made.append(result)
    return tuple(made)


def _check_alike(x: EncryptedTensor, y: EncryptedTensor, how: str) -> None:
    """Raise `InvalidInput` for tensors of different keys, shapes or layouts; `how` names the refused operation."""
    if x.context.fingerprint != y.context.fingerprint:
        raise InvalidInput(f"two ciphertexts of different key pairs cannot be {how}")
    if (x.layout, x.shape, x.width) != (y.layout, y.shape, y.width):
        raise InvalidInput(
            f"a {x.layout!r} tensor of shape {x.shape} and a {y.layout!r} one of shape {y.shape} cannot be {how}"
        )


def _level_alike(x: EncryptedTensor, y: EncryptedTensor) -> tuple[EncryptedTensor, EncryptedTensor]:
    if x.level != y.level:
        if x.level > y.level:
            return lower(x, y.level, y.scale), y
        return x, lower(y, x.level, x.scale)
    if math.isclose(x.scale, y.scale, rel_tol=2**-50):
        return x, y
    check_level(x, "a sum of ciphertexts at different scales")
    scale, down = 2.0**x.context.parameters.scale_bits, x.level - 1
    return lower(x, down, scale), lower(y, down, scale)
