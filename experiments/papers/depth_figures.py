"""The figures of the table of leakage by cut depth: PSNR against depth, and a grid of reconstructions."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.papers.table import DECIBELS, RESULTS
from splitfed.drawing.figure import DASHES, MARKERS, MUTED, PALETTE, add_legend, canvas
from splitfed.stats.intervals import mean_interval

Found = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]


def draw(found: Found, attacks: Sequence[str], depths: Sequence[str], folder: Path = RESULTS.parent) -> list[str]:
    """Draw `found`, (topology, depth) -> a seed each, into `folder`; return the Markdown that shows the pictures."""
    if not found:
        return []
    lines(found, attacks, depths, folder / "cut_depth.svg")
    text = ["![PSNR against depth, a line a topology, baselines dashed](cut_depth.svg)"]
    if grid(found, attacks, depths, folder / "cut_depth.png"):
        text.append("![Victims and what was reconstructed of them, by depth](cut_depth.png)")
    return text


def lines(found: Found, attacks: Sequence[str], depths: Sequence[str], path: Path) -> None:
    """Write the plot: a panel an attack, a line a topology with intervals over seeds, baselines dashed."""
    names = list(dict.fromkeys(name for name, _ in found))
    with canvas(len(attacks), 5.6, 4.2) as (figure, axes):
        for axis, attack in zip(axes, attacks, strict=True):
            for i, name in enumerate(names):
                there = [d for d in depths if (name, d) in found]
                values = [
                    mean_interval([one[attack]["psnr"] for one in found[name, d]], high=DECIBELS[1]) for d in there
                ]
                # Lines that coincide stand a little apart.
                x = [depths.index(d) + 0.05 * (i - (len(names) - 1) / 2) for d in there]
                y = [v.mean for v in values]
                bars = [
                    [v.mean - v.low if v.known else 0 for v in values],
                    [v.high - v.mean if v.known else 0 for v in values],
                ]
                look = {"color": PALETTE[i], "marker": MARKERS[i], "ls": DASHES[i % len(DASHES)], "ms": 5}
                axis.errorbar(x, y, bars, label=name, capsize=2.5, lw=1.4, **look)
            for who, dash in (("mean_image", (0, (5, 3))), ("random_pairing", (0, (1, 2)))):
                scores = [one[who]["psnr"] for seeds in found.values() for one in seeds]
                label = f"baseline: {who.replace('_', ' ')}"
                axis.axhline(sum(scores) / len(scores), color=MUTED, ls=dash, lw=1.2, label=label)
            axis.set_xticks(range(len(depths)), depths)
            axis.set_title(attack)
            axis.set_xlabel("received behind")
            axis.set_ylabel("PSNR [dB]: more is more leakage")
        add_legend(figure, axes[0])
        figure.savefig(path, format="svg", metadata={"Date": None})


def grid(found: Found, attacks: Sequence[str], depths: Sequence[str], path: Path) -> bool:
    """Write the reconstructions of the seed that kept some: a block an attack, a row a topology; False without any."""
    import numpy as np
    from PIL import Image

    kept = {place: next((one for one in seeds if "picture" in one[attacks[0]]), None) for place, seeds in found.items()}
    shown = {place: one for place, one in kept.items() if one is not None}
    if not shown:
        return False

    def pixels(text: str) -> Any:
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))

    names = list(dict.fromkeys(name for name, _ in shown))
    rows = [(attack, name) for attack in attacks for name in names]
    with canvas((len(rows) + 1) * len(depths), 1.35, 0.46, len(depths)) as (figure, axes):
        for axis in axes:
            axis.axis("off")
        truth = pixels(next(iter(shown.values()))["mean_image"]["truth"])
        for column, depth in enumerate(depths):
            axes[column].imshow(truth, cmap="gray", vmin=0, vmax=255)
            axes[column].set_title(depth, fontsize=9)
            for row, (attack, name) in enumerate(rows, 1):
                axis = axes[row * len(depths) + column]
                if (name, depth) in shown:
                    axis.imshow(pixels(shown[name, depth][attack]["picture"]), cmap="gray", vmin=0, vmax=255)
                if column == 0:
                    _beside(axis, f"{name}\n{attack}")
        _beside(axes[0], "victims")
        figure.savefig(path, format="png", dpi=110, metadata={"Software": None})
    return True


def _beside(axis: Any, text: str) -> None:
    axis.text(-0.06, 0.5, text, ha="right", va="center", fontsize=7, transform=axis.transAxes)
