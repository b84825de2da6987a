"""The plots of a report as inline SVG: utility against leakage, leakage against strength, training curves."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from splitfed.study.report_data import METRICS, NO_DEFENSE, Setting

# Okabe and Ito's palette without its yellow; told apart by people with any common colour blindness.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, MUTED, GRID = "#1f2933", "#66727f", "#e4e8ec"
MARKERS, DASHES = ("o", "s", "D", "^", "v", "P"), ("-", "--", ":", "-.")
WHO = {"mean_image": ("mean image", (0, (5, 3))), "random_pairing": ("another victim's image", (0, (1, 2)))}
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "splitfed",
    "font.size": 10.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
}
Summary = Mapping[str, Any]


class Looks:
    """Gives every family of defenses a colour, every topology a marker and a dash, the same in all figures."""

    def __init__(self, summary: Summary) -> None:
        families = dict.fromkeys(s["family"] for s in summary["settings"] if s["family"] != NO_DEFENSE)
        self.colours = {NO_DEFENSE: INK, **dict(zip(families, itertools.cycle(PALETTE), strict=False))}
        self.markers = dict(zip(summary["topologies"], itertools.cycle(MARKERS), strict=False))
        self.dashes = dict(zip(summary["topologies"], itertools.cycle(DASHES), strict=False))

    def label(self, family: str, topology: str) -> str:
        """Name a line: the family, and the topology where there is more than one."""
        name = "undefended" if family == NO_DEFENSE else family
        return name if len(self.markers) == 1 else f"{name}, {topology}"


@contextmanager
def canvas(panels: int, width: float = 5.3, height: float = 3.9, columns: int = 2) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a figure with `panels` axes in rows of `columns`, in the report's style; nothing outlives the block."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        across = min(panels, columns)
        down = -(-panels // across)
        # No pyplot: a bare figure is known to nobody else, and goes when it is dropped.
        figure = Figure(figsize=(width * across, height * down), layout="constrained")
        axes = list(figure.subplots(down, across, squeeze=False).flat)
        for axis in axes[panels:]:
            axis.remove()
        yield figure, axes[:panels]
        figure.clear()


def as_svg(figure: Any, name: str) -> str:
    """Return the figure as an SVG element to stand in a page; `name` begins its ids, so that two never meet."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\b(id=")|(href="#)|(url\(#)', lambda found: f"{found.group(0)}{name}-", text)
    # The page's own type, which every machine has, in place of the one that the figure was measured with.
    return re.sub(r"(font:[^;\"]*?px) [^;\"]*", r"\1 system-ui, Helvetica, Arial, sans-serif", text)


def tradeoff(summary: Summary, attack: str, looks: Looks, name: str) -> str:
    """Plot utility against what `attack` recovered, a panel for PSNR and one for SSIM (tabular data: R2)."""
    metrics = [m for m in summary["metrics"] if _points(summary["settings"], attack, m)]
    metrics = [m for m in metrics if METRICS[m].up] or metrics
    with canvas(len(metrics[:2])) as (figure, axes):
        for axis, metric in zip(axes, metrics[:2], strict=True):
            points = _points(summary["settings"], attack, metric)
            _baselines(axis.axvline, summary["settings"], attack, metric)
            _front(axis, points, metric)
            _families(axis, points, looks)
            _frame(axis, points)
            axis.set_xlabel(f"{METRICS[metric].title}{METRICS[metric].unit and ' [dB]'} of the reconstruction")
            axis.set_ylabel(f"test {summary['utility']['metric']}")
            better = "left" if METRICS[metric].up else "right"
            axis.set_title(f"{METRICS[metric].title}: private and useful is top {better}")
        _legend(figure, axes[0])
        return as_svg(figure, name)


def by_strength(summary: Summary, metric: str, looks: Looks, name: str) -> str | None:
    """Plot what each attack recovered against the strength of each family of defenses; None without strengths."""
    families = [f for f in looks.colours if f != NO_DEFENSE]
    if not families:
        return None
    lines = {a: c for a, c in zip(summary["attacks"], itertools.cycle(PALETTE), strict=False)}
    with canvas(len(families), 4.4, 3.5, 3) as (figure, axes):
        for axis, family in zip(axes, families, strict=True):
            for attack, topology in itertools.product(lines, summary["topologies"]):
                chosen = [
                    s
                    for s in summary["settings"]
                    if s["family"] in (family, NO_DEFENSE) and s["topology"] == topology
                ]
                found = sorted(
                    (s["strength"], e) for s, e, _ in _points(chosen, attack, metric)
                )if chosen else []
                label = attack if len(summary["topologies"]) == 1 else f"{attack}, {topology}"
                look = {"color": lines[attack], "linestyle": looks.dashes[topology], "marker": looks.markers[topology]}
                _line(axis, found, label, look)
            _baselines(axis.axhline, summary["settings"], summary["attacks"][0], metric)
            axis.set_title(family)
            axis.set_xlabel("strength (0: undefended)")
            axis.set_ylabel(f"{METRICS[metric].title}{METRICS[metric].unit and ' [dB]'}")
        _legend(figure, axes[0])
        return as_svg(figure, name)


def curves(settings: Sequence[Setting], looks: Looks, metric: str, name: str) -> str:
    """Plot validation utility and training loss by round: the mean over seeds, and every seed as a thin line."""
    with canvas(2) as (figure, axes):
        shades = _shades(settings)
        for setting in settings:
            colour, look = looks.colours[setting.family], looks.dashes[setting.topology]
            for axis, read in zip(axes, (_validation, _loss), strict=True):
                each = [read(run["history"]) for run in setting.runs]
                style = {"color": colour, "linestyle": look, "alpha": shades[setting.topology, setting.defense]}
                for rounds in each if len(each) > 1 else []:
                    axis.plot(list(rounds), list(rounds.values()), **style | {"linewidth": 0.6})
                shared = [r for r in (each[0] if each else {}) if all(r in rounds for rounds in each)]
                mean = [sum(rounds[r] for rounds in each) / len(each) for r in shared]
                several = len(looks.markers) > 1
                label = f"{setting.defense}, {setting.topology}" if several else setting.defense
                axis.plot(shared, mean, **style, linewidth=2, marker="." if len(shared) < 20 else "", label=label)
        for axis, title in zip(axes, (f"validation {metric}", "training loss"), strict=True):
            axis.set_title(title)
            axis.set_xlabel("round")
            axis.xaxis.get_major_locator().set_params(integer=True)
        _legend(figure, axes[0])
        return as_svg(figure, name)


def _points(
    settings: Sequence[Mapping[str, Any]], attack: str, metric: str
) -> list[tuple[Mapping[str, Any], float, Mapping[str, Any]]]:
    """Return (setting, score, all scores) of every setting that has the attack and a utility."""
    found = []
    for setting in settings:
        scores = setting["attacks"].get(attack, {}).get("scores", {}).get(metric) or {}
        if scores.get("guess") and setting["utility"]:
            found.append((setting, float(scores["guess"]["mean"]), scores))
    return found


def _baselines(draw: Any, settings: Sequence[Mapping[str, Any]], attack: str, metric: str) -> None:
    """Draw what guessing without looking gets, the mean over the settings."""
    for who, (label, dashes) in WHO.items():
        known = [s[who]["mean"] for _, _, s in _points(settings, attack, metric) if s.get(who)]
        if known:
            draw(sum(known) / len(known), color=MUTED, linestyle=dashes, linewidth=1.2, label=f"baseline: {label}")


def _front(axis: Any, points: Sequence[tuple[Mapping[str, Any], float, Any]], metric: str) -> None:
    """Draw the settings that no other beats on both, as a staircase from the most private to the most useful."""
    front = sorted(
        ((x, s["utility"]["mean"]) for s, x, _ in points if metric in _fronts(s)), reverse=not METRICS[metric].up
    )
    if len(front) > 1:
        axis.step(*zip(*front, strict=True), where="post", color="#b8c0c8", linewidth=5, alpha=0.6, label="Pareto front")


def _fronts(setting: Mapping[str, Any]) -> set[str]:
    return {metric for attack in setting["attacks"].values() for metric in attack["front"]}
