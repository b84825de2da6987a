"""The figure of privacy against accuracy: a panel a data set, a line a family of defenses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.papers.table import BOUNDS
from splitfed.drawing.figure import DASHES, INK, MARKERS, MUTED, PALETTE, add_legend, canvas
from splitfed.stats.intervals import Interval, mean_interval

Found = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]


def draw(found: Found, families: Mapping[str, str], path: Path) -> None:
    """Write `found` (data set -> setting -> a seed each) to `path`.

    `families`: setting -> the line it stands on; "none" starts every line.
    """
    with canvas(len(found), 5.2, 4.2) as (figure, axes):
        for axis, (name, settings) in zip(axes, found.items(), strict=False):
            for i, family in enumerate(dict.fromkeys(f for f in families.values() if f != "none")):
                there = [s for s in settings if families[s] in (family, "none")]
                points = [(_over(settings[s], "attack ssim"), _over(settings[s], "accuracy", 100)) for s in there]
                x, y = ([point[k].mean for point in points] for k in (0, 1))
                bars = [_bars([point[k] for point in points]) for k in (0, 1)]
                look = {"color": PALETTE[i], "marker": MARKERS[i], "ls": DASHES[i], "ms": 5}
                axis.errorbar(x, y, xerr=bars[0], yerr=bars[1], label=family, capsize=2.5, lw=1.4, **look)
            if "none" in settings:
                start = _over(settings["none"], "attack ssim").mean, _over(settings["none"], "accuracy", 100).mean
                axis.plot(*start, "*", color=INK, ms=11, label="no defense", zorder=5)
            for who, dash in (("mean_image", (0, (5, 3))), ("random_pairing", (0, (1, 2)))):
                scores = [entry[f"{who} ssim"] for seeds in settings.values() for entry in seeds]
                label = f"baseline: {who.replace('_', ' ')}"
                axis.axvline(sum(scores) / len(scores), color=MUTED, ls=dash, lw=1.2, label=label)
            axis.set_title(name)
            axis.set_xlabel("SSIM of reconstructions: more is more leakage")
            axis.set_ylabel("test accuracy [%]")
        add_legend(figure, axes[0])
        figure.savefig(path, format="svg", metadata={"Date": None})


def _over(seeds: Sequence[Mapping[str, Any]], what: str, unit: float = 1.0) -> Interval:
    low, high = BOUNDS.get(what.split()[-1], (0.0, unit))
    return mean_interval([unit * entry[what] for entry in seeds], low=low, high=high)


def _bars(values: Sequence[Interval]) -> list[list[float]]:
    low = [v.mean - v.low if v.known else 0.0 for v in values]
    return [low, [v.high - v.mean if v.known else 0.0 for v in values]]
