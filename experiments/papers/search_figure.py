"""The figure of samplers against a grid: hypervolume after so many trials, and differences from the grid by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from splitfed.drawing.figure import DASHES, INK, MARKERS, MUTED, PALETTE, add_legend, canvas
from splitfed.stats.intervals import mean_interval

Curves = Mapping[str, Mapping[int, Sequence[float]]]


def draw(curves: Curves, base: str, path: Path) -> None:
    """Write `curves` (sampler -> seed -> hypervolume after each trial, in percent) to `path`; `base`: the grid's name.

    Points of a grid have no order of their own, so it is shown by what it came to.
    """
    others = [name for name in curves if name != base]
    with canvas(2, 5.4, 4.0) as (figure, (left, right)):
        ends = {seed: curve[-1] for seed, curve in curves.get(base, {}).items()}
        if ends:
            left.axhline(fmean(ends.values()), color=INK, ls=(0, (5, 3)), lw=1.4, label=f"{base}, all 40 points")
        for i, name in enumerate(others):
            look = {"color": PALETTE[i % len(PALETTE)], "ls": DASHES[i % len(DASHES)]}
            # Where trials failed, or the trials of a seed are fewer, the curve ends with the shortest.
            lines = list(zip(*curves[name].values(), strict=False))
            left.plot(range(1, len(lines) + 1), [fmean(one) for one in lines], lw=1.6, label=name, **look)
            shared = [curves[name][seed][-1] - end for seed, end in ends.items() if seed in curves[name]]
            if not shared:
                continue
            look = {"color": look["color"], "marker": MARKERS[i % len(MARKERS)]}
            found = mean_interval(shared)
            right.plot([i] * len(shared), shared, ls="", ms=4, alpha=0.45, **look)
            if found.known:
                bars = [[found.mean - found.low], [found.high - found.mean]]
                right.errorbar([i + 0.18], [found.mean], bars, ms=7, capsize=4, lw=1.6, **look)
        right.axhline(0.0, color=MUTED, lw=1.2)
        right.set_xticks(range(len(others)), [name.replace(", ", ",\n") for name in others], fontsize=8)
        left.set_title("Means over seeds")
        left.set_xlabel("trials")
        left.set_ylabel("hypervolume, validation rows [%]")
        right.set_title("Seed by seed")
        right.set_ylabel(f"more than {base} [points]")
        add_legend(figure, left)
        figure.savefig(path, format="svg", metadata={"Date": None})
