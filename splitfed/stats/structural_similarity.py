"""Structural similarity of images, as a metric or as part of a loss; differentiable in both images.

Paper: Wang, Bovik, Sheikh, Simoncelli, "Image quality assessment: from error visibility to structural similarity", IEEE
Transactions on Image Processing 2004.

Gaussian windows of 11x11 with deviation 1.5, K1 = .01, K2 = .03; on smaller images the largest odd window that fits,
with the deviation in proportion; windows that reach over the border are left out, as in the paper.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def similarity_map(x: Tensor, y: Tensor, data_range: float) -> Tensor:
    """Return the structural similarity in every window, (n, c, h', w'), in [-1, 1]; x and y: (n, c, h, w).

    Its mean over an image is the image's similarity. `data_range`: width of the value range of the images.
    """
    channels, side = x.shape[1], min(11, x.shape[2], x.shape[3])
    side -= 1 - side % 2
    offsets = torch.arange(side, device=x.device, dtype=x.dtype) - side // 2
    bell = torch.exp(-(offsets / (1.5 * side / 11)).square() / 2)
    window = (bell[:, None] * bell / bell.sum() ** 2).expand(channels, 1, side, side)

    def smooth(t: Tensor) -> Tensor:
        return functional.conv2d(t, window, groups=channels)

    mean_x, mean_y = smooth(x), smooth(y)
    variance_x, variance_y = smooth(x * x) - mean_x**2, smooth(y * y) - mean_y**2
    shared = smooth(x * y) - mean_x * mean_y
    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    luminance = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    return luminance * (2 * shared + c2) / (variance_x + variance_y + c2)
