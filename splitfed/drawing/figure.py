"""Figures as SVG for a page: panels described as data, drawn in one common style.

A figure is a list of `Panel`s, a panel a list of `Series`; callers describe the data, this module the appearance.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from markupsafe import Markup

from splitfed.drawing.inline_svg import inline_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette without its yellow; distinguishable with any common colour blindness.
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
"""Smallest share of a panel's width and height for its axes."""
CLIPPED = 0.15
"""Margin of a clipped panel around its points, as a fraction of their extent."""
CROWDED = 40
"""Number of characters from which on tick names are rotated."""
HANDLE, CHARACTER = 0.6, 0.078  # inches that a legend's handle and a character of its text take, about
ROW, LINE = 0.2, 0.17  # inches of a row with a name, and of each line of the name
_PANELS: WeakKeyDictionary[Any, tuple[float, float, int, int]] = WeakKeyDictionary()

Ends = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points (n,) of one series, in the `look` that matplotlib's `plot` takes: color, marker, ls, lw, ...

    `x_ends`, `y_ends`: the interval (low, high) of each point, drawn as whiskers, or as a shaded band if `band`.
    `notes`: text beside each point, `aside` in points of 1/72 inch. `bars`: vertical bars at x of height y ("high"), or
    horizontal ones at y of length x ("wide"), from `starts` on; otherwise points joined by a line.
    """

    x: Sequence[Any]
    y: Sequence[Any]
    label: str | None = None
    look: Mapping[str, Any] = field(default_factory=dict)
    x_ends: Sequence[Ends] = ()
    y_ends: Sequence[Ends] = ()
    band: bool = False
    notes: Sequence[str] = ()
    aside: Ends = (6, 5)
    bars: Literal["", "high", "wide"] = ""
    starts: Sequence[float] = ()


@dataclass(frozen=True)
class Rule:
    """A straight line through the whole panel: horizontal at `value`, or vertical there if `upright`."""

    value: float
    label: str | None = None
    look: Mapping[str, Any] = field(default_factory=dict)
    upright: bool = False


@dataclass(frozen=True)
class Panel:
    """Contents of one panel: `series` over `rules`; `axes` as for `Axes.set`: title, xlabel, ylabel, xlim, ...

    `x_axis`: "few ticks", "whole numbers", "log", or "powers of ten" for a logarithmic axis with only these ticks.
    `x_names`: position -> name, the ticks of an axis without numbers. `rows`: names of rows, the first (y = 0) at the
    top. `clipped`: intervals do not widen the panel; one far wider than the points leaves the frame.
    """

    series: Sequence[Series]
    rules: Sequence[Rule] = ()
    axes: Mapping[str, Any] = field(default_factory=dict)
    x_axis: Literal["", "few ticks", "whole numbers", "log", "powers of ten"] = ""
    x_names: Mapping[float, str] | None = None
    rows: Sequence[str] | None = None
    clipped: bool = False
    bare: bool = False
    """True if neither axis has ticks, for plots in which only relative positions matter."""


def draw_svg(panels: Sequence[Panel], name: str, width: float = 5.3, height: float = 3.9, columns: int = 2) -> Markup:
    """Return the figure of `panels` in rows of `columns`, `width` by `height` inches each, as an SVG element.

    `name` is the prefix of its ids, so that those of two figures differ. Without a panel it is empty.
    """
    if not panels:
        return Markup("")
    with canvas(len(panels), width, height, columns) as (figure, axes):
        fill_panels(figure, axes, panels)
        svg = as_svg(figure, name)
        figure.clear()
    return Markup(svg)


def make_figure(panels: Sequence[Panel], width: float = 5.0, height: float = 3.6) -> Figure:
    """Return the figure of `panels` as matplotlib's `Figure`, for a notebook or `savefig`."""
    with canvas(len(panels), width, height) as (figure, axes):
        fill_panels(figure, axes, panels)
    figure._repr_png_ = partial(_png, figure)
    shown: Figure = figure
    return shown


def fill_panels(figure: Any, axes: Sequence[Any], panels: Sequence[Panel]) -> None:
    """Draw `panels` on the `axes` of `figure`, with one legend of all labels below them."""
    for axis, panel in zip(axes, panels, strict=True):
        _draw_panel(axis, panel)
    add_legend(figure, *axes)


def staircase(points: Sequence[tuple[float, float]], label: str | None = None) -> list[Series]:
    """Return the series of the steps through `points`, such as a front or a best-so-far curve; empty for one point."""
    look = {"drawstyle": "steps-post", "color": "#c3cad1", "lw": 6, "alpha": 0.55}
    return [Series([x for x, _ in points], [y for _, y in points], label, look)] if len(points) > 1 else []


def row_height(names: Sequence[str]) -> float:
    """Return the height in inches of a panel with rows of these names, with line breaks."""
    return 1.2 + sum(ROW + LINE * (name.count("\n") + 1) for name in names)


def numbered_look(number: int) -> dict[str, Any]:
    """Return colour, dashes and marker of line `number`, for lines without a look of their own."""
    dashes = DASHES[number // len(PALETTE) % len(DASHES)]
    return {"color": PALETTE[number % len(PALETTE)], "ls": dashes, "marker": MARKERS[number % len(MARKERS)]}


def wrap_label(text: str, width: int, lines: int = 3) -> str:
    """Return `text` in at most `lines` lines of `width` characters; the middle of a longer one is left out."""
    limit = width * lines
    if len(text) > limit:
        # Related names differ at their ends as often as at their beginnings.
        head = (limit - 3) // 2
        text = f"{text[:head]}...{text[len(text) - (limit - 3 - head) :]}"
    found = textwrap.wrap(text, width) or [""]
    # Words that do not fill their lines may need one line more than their characters.
    return "\n".join(
        found if len(found) <= lines else [text[i : i + width].strip() for i in range(0, len(text), width)]
    )


@contextmanager
def canvas(panels: int, width: float = 5.3, height: float = 3.9, columns: int = 2) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a figure with `panels` axes in rows of `columns`, in the style of all figures."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        across = min(panels, columns)
        down = -(-panels // across)
        # No pyplot: a bare figure has no other references, and is freed with the last one here.
        figure = Figure(figsize=(width * across, height * down), layout="constrained")
        axes = list(figure.subplots(down, across, squeeze=False).flat)
        for axis in axes[panels:]:
            axis.remove()
        _PANELS[figure] = (width, height, across, down)
        yield figure, axes[:panels]


def as_svg(figure: Any, name: str) -> str:
    """Return the figure as an SVG element for a page; `name` is the prefix of its ids, to make them unique.

    Its alternative text has the titles of panels and axes.
    """
    titles = [(axis.get_title(loc="left"), axis.get_ylabel(), axis.get_xlabel()) for axis in figure.axes]
    alt = "; ".join(dict.fromkeys(", ".join(filter(None, one)) for one in titles))
    _disable_math_text(figure)
    keep_room(figure)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return inline_svg(buffer.getvalue(), name, " ".join(alt.split()))


def add_legend(figure: Any, *axes: Any) -> None:
    """Add one legend, of the labels on `axes`, below all panels, in as many columns as fit; the figure grows by it."""
    shown: dict[str, Any] = {}
    for axis in axes:
        shown = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True)) | shown
    if shown:
        fitting = max(12, int((figure.get_figwidth() - HANDLE) / CHARACTER))
        labels = [wrap_label(label, fitting) for label in shown]
        inches = HANDLE + CHARACTER * max(len(line) for label in labels for line in label.split("\n"))
        columns = max(1, min(len(labels), int(figure.get_figwidth() / inches)))
        placed = figure.legend(shown.values(), labels, loc="outside lower center", ncols=columns)
        for text in placed.get_texts():
            # Before the measurement, in which a broken formula would raise.
            text.set_parse_math(False)
        figure.set_figheight(figure.get_figheight() + placed.get_window_extent().height / figure.dpi)


def keep_room(figure: Any) -> None:
    """Enlarge the figure until every panel has its share of it, beside all labels, titles and the legend.

    A figure of fixed size would take their space from the axes. The layout is fixed afterwards: saving would repeat it,
    which takes longer than drawing.
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


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_panel(axis: Any, panel: Panel) -> None:
    for rule in panel.rules:
        draw = axis.axvline if rule.upright else axis.axhline
        draw(rule.value, label=rule.label, **{"color": MUTED, "lw": 1.2, **rule.look})
    for series in panel.series:
        _draw_points(axis, series)
    limits = axis.get_xlim(), axis.get_ylim()
    for series in panel.series:
        _draw_ends(axis, series)
    if panel.clipped:
        for (low, high), narrow in zip(limits, (axis.set_xlim, axis.set_ylim), strict=True):
            narrow(low - CLIPPED * (high - low), high + CLIPPED * (high - low))
    axis.set(**panel.axes)
    _set_ticks(axis, panel)


def _draw_points(axis: Any, series: Series) -> None:
    if series.bars == "high":
        axis.bar(series.x, series.y, label=series.label, **series.look)
    elif series.bars == "wide":
        axis.barh(series.y, series.x, left=series.starts or 0, label=series.label, **series.look)
    else:
        axis.plot(series.x, series.y, label=series.label, **series.look)
    colour = series.look.get("color", INK)
    for x, y, note in zip(series.x, series.y, series.notes, strict=False):
        axis.annotate(note, (x, y), series.aside, textcoords="offset points", color=colour, fontsize=9)


def _draw_ends(axis: Any, series: Series) -> None:
    """Draw the intervals of the points."""
    colour = series.look.get("color", INK)
    if series.band and series.y_ends:
        axis.fill_between(series.x, *zip(*series.y_ends, strict=True), color=colour, alpha=0.14, lw=0)
    elif series.x_ends or series.y_ends:
        look = {"ecolor": colour, "elinewidth": 1.2, "alpha": 0.7, "capsize": 2.5, "fmt": "none"}
        bars = [_bars(*pair) for pair in ((series.x, series.x_ends), (series.y, series.y_ends))]
        axis.errorbar(series.x, series.y, xerr=bars[0], yerr=bars[1], **look)


def _bars(values: Sequence[float], ends: Sequence[Ends]) -> list[list[float]] | None:
    """Return the extent of each interval below and above its value; a percentile interval need not contain it."""
    if not ends:
        return None
    pairs = list(zip(values, ends, strict=True))
    return [[max(0.0, value - low) for value, (low, _) in pairs], [max(0.0, top - value) for value, (_, top) in pairs]]


def _set_ticks(axis: Any, panel: Panel) -> None:
    if panel.x_axis in ("log", "powers of ten"):
        axis.set_xscale("log")
    match panel.x_axis:
        case "few ticks":
            axis.locator_params(axis="x", nbins=5)
        case "whole numbers":
            axis.xaxis.get_major_locator().set_params(integer=True)
        case "powers of ten":
            axis.xaxis.set_minor_formatter("")
    if (names := panel.x_names) is not None:
        turned = {"rotation": 30, "ha": "right"} if sum(map(len, names.values())) > CROWDED else {}
        axis.set_xticks(list(names), list(names.values()), **turned)
    if panel.rows is not None:
        axis.set_yticks(range(len(panel.rows)), panel.rows)
        axis.set_ylim(len(panel.rows) - 0.4, -0.6)
        axis.grid(visible=False, axis="y")
    if panel.bare:
        axis.set(xticks=[], yticks=[])


def _disable_math_text(figure: Any) -> None:
    """Show every name literally; only the powers of ten at a logarithmic axis are formulas."""
    from matplotlib.text import Text

    axes = [axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis) if axis.get_scale() == "log"]
    ticks = [tick for axis in axes for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())]
    powers = {id(label) for tick in ticks for label in (tick.label1, tick.label2)}
    for text in figure.findobj(Text):
        if id(text) not in powers:
            text.set_parse_math(False)
