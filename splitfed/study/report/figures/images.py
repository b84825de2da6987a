"""Reconstructions to look at: strips of victims as PNG inside a data address, and errors by feature for tables."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from splitfed.core import digests
from splitfed.study.report.data import Setting
from splitfed.study.trust import path_inside

SHOWN, GAP, TILE, FEATURES = 10, 1, 72, 40


class Pair(NamedTuple):
    """What an attack predicted and what was true, (victims, ...)."""

    setting: Setting
    prediction: Tensor
    truth: Tensor


class Strip(NamedTuple):
    """Pictures side by side: a data address, and the size at which every pixel is a whole number of pixels wide."""

    source: str
    width: int
    height: int


def read_pairs(settings: Sequence[Setting], attack: str, seed: int) -> list[Pair]:
    """Return what the attack labelled `attack` left behind at `seed`, for every setting that has it."""
    found = []
    for setting, run in [(one, run) for one in settings for run in one.runs if run.seed == seed]:
        if (entry := run.attack(attack)) is None:
            continue
        # Elsewhere on this machine lie files that are no business of a folder from somebody else.
        path = path_inside(run.place, entry.file)
        if path is not None and path.is_file():
            advice = f"delete it, {path.stem}.json beside it and result.json, {digests.AGAIN}"
            digests.check_file(path, entry.sha256, advice)
            tensors = load_file(path)
            found.append(Pair(setting, tensors["prediction"], tensors["truth"]))
    return found


def is_image(truth: Tensor) -> bool:
    """Return whether rows of `truth` can be looked at: (victims, 1 or 3, height, width)."""
    return truth.dim() == 4 and truth.shape[1] in (1, 3)


def image_strip(images: Tensor, low: float, high: float) -> Strip:
    """Return `images` (n, 1 or 3, height, width) in a row; `low` is black, `high` white, what is beyond is cut off."""
    from PIL import Image

    count, channels, height, width = images.shape
    levels = ((images.float().nan_to_num(low) - low) / max(high - low, 1e-12)).clamp(0, 1).mul(255).round().byte()
    row = torch.full((channels, height, count * (width + GAP) - GAP), 255, dtype=torch.uint8)
    for i, image in enumerate(levels):
        row[:, :, i * (width + GAP) : i * (width + GAP) + width] = image
    pixels = row[0].numpy() if channels == 1 else row.permute(1, 2, 0).contiguous().numpy()
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", optimize=True)
    scale = max(1, round(TILE / width))
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return Strip(f"data:image/png;base64,{data}", row.shape[2] * scale, height * scale)


def brightness_range(truth: Tensor) -> tuple[float, float]:
    """Return what is black and what is white: 0 and 1 where the true images keep to that, else their extremes."""
    low, high = float(truth.min()), float(truth.max())
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def feature_scores(found: Sequence[Pair]) -> tuple[list[list[float | None]], int]:
    """Return R2 by feature (rows, the first 40) and setting (columns), and how many features are left out.

    1 is a perfect reconstruction, 0 what guessing the victims' mean would get; None where a feature never varies.
    """
    columns = []
    for pair in found:
        truth, prediction = pair.truth.flatten(1).double(), pair.prediction.flatten(1).double()
        total, error = ((truth - other).square().sum(0) for other in (truth.mean(0), prediction))
        columns.append([1 - float(e / t) if t > 0 else None for e, t in zip(error, total, strict=True)])
    rows = [list(row) for row in zip(*columns, strict=True)]
    return rows[:FEATURES], max(0, len(rows) - FEATURES)
