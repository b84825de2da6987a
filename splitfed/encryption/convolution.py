"""A convolution on ciphertexts, computed as the linear layer whose matrix maps all inputs to all outputs.

Zero weights are left out of a product in the layout "batch", so that a convolution with k weights a patch costs k
products an output, as with one row a patch (im2col), but without im2col's copies of ciphertexts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from splitfed.core.errors import InvalidInput, check_count
from splitfed.encryption.ciphertexts import EncryptedTensor
from splitfed.encryption.linear import linear


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
