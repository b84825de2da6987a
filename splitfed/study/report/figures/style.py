"""What the plots of a report share: palette, markers, one style, and the way a figure becomes inline SVG."""

from __future__ import annotations

import io
import itertools
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from splitfed.study.report.data import NO_DEFENSE, Summary
from splitfed.study.report.inline_svg import inline_svg

# Okabe and Ito's palette without its yellow; told apart by people with any common colour blindness.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, MUTED, GRID = "#1f2933", "#66727f", "#e4e8ec"
MARKERS, DASHES = ("o", "s", "D", "^", "v", "P"), ("-", "--", ":", "-.")
STYLE: dict[Any, Any] = {
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
LEAST_SHARE = (0.6, 0.6)
"""The least share of a panel's width and height that its axes have."""
HANDLE, CHARACTER = 0.6, 0.078  # inches that a legend's handle and a character of its text take, about
_PANELS: WeakKeyDictionary[Any, tuple[float, float, int, int]] = WeakKeyDictionary()


class SeriesStyles:
    """Gives every family of defenses a colour, every place (topology, schedule) a marker and a dash, in all figures."""

    def __init__(self, summary: Summary) -> None:
        families = dict.fromkeys(s["family"] for s in summary["settings"] if s["family"] != NO_DEFENSE)
        self.names: Mapping[str, str] = summary["names"]
        self.colours = {NO_DEFENSE: INK, **dict(zip(families, itertools.cycle(PALETTE), strict=False))}
        self.markers = dict(zip(summary["places"], itertools.cycle(MARKERS), strict=False))
        self.dashes = dict(zip(summary["places"], itertools.cycle(DASHES), strict=False))

    def label(self, name: str, place: str) -> str:
        """Name a line: a family, a defense or an attack by its short name, and the place where there are several."""
        known = self.names.get(name, name)
        return known if len(self.markers) == 1 else f"{known}, {self.names[place]}"


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
        _PANELS[figure] = (width, height, across, down)
        yield figure, axes[:panels]
        figure.clear()


def keep_room(figure: Any) -> None:
    """Widen and heighten the figure until every panel has its share of it, whatever stands around the panels.

    Labels, titles and the legend take what they need; a figure of fixed size would take it from the axes. The panels
    stay where they are then: saving would lay them out once more, which takes longer than to draw them.
    """
    width, height, across, down = _PANELS[figure]
    for _ in range(3):  # an axis of another size may take fewer ticks, so that once is not always enough
        figure.draw_without_rendering()
        sizes = [axis.get_position().size * figure.get_size_inches() for axis in figure.axes]
        wider = across * max(0.0, LEAST_SHARE[0] * width - min(size[0] for size in sizes))
        higher = down * max(0.0, LEAST_SHARE[1] * height - min(size[1] for size in sizes))
        if max(wider, higher) < 0.02:
            figure.set_layout_engine("none")
            return
        figure.set_size_inches(figure.get_figwidth() + wider, figure.get_figheight() + higher)


def wrap_label(text: str, width: int, lines: int = 3) -> str:
    """Break `text` into at most `lines` lines of `width` characters; of a longer one the middle is left out."""
    limit = width * lines
    if len(text) > limit:
        # Names of one family differ at their ends as often as at their beginnings.
        head = (limit - 3) // 2
        text = f"{text[:head]}...{text[len(text) - (limit - 3 - head) :]}"
    found = textwrap.wrap(text, width) or [""]
    # Words that do not fill their lines may need one more than the characters do.
    return "\n".join(
        found if len(found) <= lines else [text[i : i + width].strip() for i in range(0, len(text), width)]
    )


def numbered_look(number: int) -> dict[str, Any]:
    """Return colour, dashes and marker of the line with this number, where no family or place gives it any."""
    dashes = DASHES[number // len(PALETTE) % len(DASHES)]
    return {"color": PALETTE[number % len(PALETTE)], "ls": dashes, "marker": MARKERS[number % len(MARKERS)]}


def as_svg(figure: Any, name: str, legend: Any = None) -> str:
    """Return the figure as an SVG element to stand in a page; `name` begins its ids, so that two never meet.

    `legend`: the axis whose legend goes below all panels.
    """
    if legend is not None:
        add_legend(figure, legend)
    _disable_math_text(figure)
    keep_room(figure)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return inline_svg(buffer.getvalue(), name)


def _disable_math_text(figure: Any) -> None:
    """Show every name as it is written; only the powers of ten at a logarithmic axis are formulas."""
    from matplotlib.text import Text

    axes = [axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis) if axis.get_scale() == "log"]
    ticks = [tick for axis in axes for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())]
    powers = {id(label) for tick in ticks for label in (tick.label1, tick.label2)}
    for text in figure.findobj(Text):
        if id(text) not in powers:
            text.set_parse_math(False)


def add_legend(figure: Any, axis: Any) -> None:
    """Put one legend, of what `axis` shows, below all panels, in as many columns as fit; the figure grows by it."""
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        fitting = max(12, int((figure.get_figwidth() - HANDLE) / CHARACTER))
        labels = [wrap_label(label, fitting) for label in labels]
        inches = HANDLE + CHARACTER * max(len(line) for label in labels for line in label.split("\n"))
        columns = max(1, min(len(labels), int(figure.get_figwidth() / inches)))
        placed = figure.legend(handles, labels, loc="outside lower center", ncols=columns)
        for text in placed.get_texts():
            # Before it is measured: a broken formula raises there.
            text.set_parse_math(False)
        figure.set_figheight(figure.get_figheight() + placed.get_window_extent().height / figure.dpi)
