"""A model as a chain of its submodules, with the places where it can be cut and what would cross there.

Boxes stand in the order in which their submodules run, inside a frame for every submodule that holds them. A value that
is read again further down runs beside the chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from splitfed.core.cut_places import CutPlace
from splitfed.core.errors import InvalidInput
from splitfed.drawing.figure import GRID, INK, MUTED, PALETTE, STYLE
from splitfed.study.report.cut_table import describe_values, share

FORMATS = (".svg", ".png")
POSSIBLE, REFUSED, CHOSEN, SKIP = PALETTE[2], MUTED, PALETTE[1], PALETTE[0]
UNIT = 0.3  # inches of a line
BOX, PLACE, HEADER, FOOTER = 1.0, 1.0, 0.85, 0.25  # lines that a box, a place, the top and the end of a frame take
LEFT, INDENT, WIDE = 1.1, 0.22, 4.0  # inches: where boxes begin, how far each frame moves in, how wide boxes are
TEXT, BARS, BAR = 5.9, 10.6, 2.2  # inches: where what crosses is written, where its bar begins, the longest bar
LONGEST, WIDEST = 100, 46  # characters that are shown of a reason, and of what crosses
NAME, KIND = 0.1, 0.067  # inches that a character of a submodule's name takes, and of what it is, about


@dataclass
class Chain:
    """Everything placed from the top down, in lines: boxes, frames and places with their middle or their ends.

    `boxes`: label, class and weights, level, middle. `frames`: label, level, top, end. `places`: place, middle.
    """

    boxes: list[tuple[str, str, int, float]] = field(default_factory=list)
    frames: list[tuple[str, int, float, float]] = field(default_factory=list)
    places: list[tuple[CutPlace, float]] = field(default_factory=list)
    height: float = 0.0


def check_figure_file(path: Path) -> Path:
    """Return `path`, the file for a figure; refuse one of another format, and one in a folder that is not there."""
    if path.suffix.lower() not in FORMATS:
        raise InvalidInput(f"figure={str(path)!r} is not allowed; expected a file that ends in .svg or .png")
    if not path.absolute().parent.is_dir():
        raise InvalidInput(f"figure={str(path)!r}: there is no folder {str(path.parent)!r}")
    return path


def save_figure(path: Path, model: nn.Module, places: Sequence[CutPlace], chosen: tuple[str, ...]) -> None:
    """Draw `model` with its `places` into `path`, .svg or .png; `chosen` are marked as the choice of "auto"."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    chain = arrange(model, places)
    width, height = BARS + BAR + 1.3, (chain.height + 3.8) * UNIT
    with matplotlib.rc_context(STYLE):
        # No pyplot: a bare figure is known to nobody else, and goes when it is dropped.
        figure = Figure(figsize=(width, height))
        axis = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axis.set(xlim=(0, width), ylim=(chain.height + 1.4, -2.4))
        axis.axis("off")
        _draw_titles(axis, model)
        _draw_boxes(axis, chain)
        _draw_skips(axis, chain)
        _draw_places(axis, chain, chosen)
        _draw_legend(axis, chain, [place.name for place in places if not place.called], bool(chosen))
        for text in figure.findobj(Text):
            # Names are written as they are.
            text.set_parse_math(False)
        kind = path.suffix.lower().removeprefix(".")
        dated = {"metadata": {"Date": None, "Creator": None}} if kind == "svg" else {"dpi": 150}
        figure.savefig(path, format=kind, **dated)


def arrange(model: nn.Module, places: Sequence[CutPlace]) -> Chain:
    """Place boxes, frames and cuts of `model` from the top down, in the order of `places`.

    Submodules that are never called by themselves have neither box nor place.
    """
    modules = dict(model.named_modules())
    called = [place for place in places if place.called]
    bases = {name.partition("#")[0] for place in called for name in (place.name, *place.aliases)}
    holders = {base[:i] for base in bases for i, sign in enumerate(base) if sign == "."}
    chain, open_frames, y = Chain(), list[tuple[str, float]](), 0.0

    def enter(path: Sequence[str]) -> None:
        nonlocal y
        same = sum(name in path for name, _ in open_frames)
        while len(open_frames) > same:
            name, top = open_frames.pop()
            chain.frames.append((f"{name.rpartition('.')[2]}  {_describe(modules[name])}", len(open_frames), top, y))
            y += FOOTER
        for name in path[same:]:
            open_frames.append((name, y))
            y += HEADER

    for place in called:
        names = (place.name, *place.aliases)
        for base in dict.fromkeys(name.partition("#")[0] for name in names):
            if base not in holders:
                enter(_parents(base))
                label = next(name for name in names if name.partition("#")[0] == base).rpartition(".")[2]
                chain.boxes.append((label, _describe(modules[base]), len(open_frames), y + BOX / 2))
                y += BOX
        enter(_parents(place.name))
        chain.places.append((place, y + PLACE / 2))
        y += PLACE
    enter(())
    chain.height = y
    return chain


def _parents(name: str) -> list[str]:
    parts = name.partition("#")[0].split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _describe(module: nn.Module) -> str:
    count = sum(weight.numel() for weight in module.parameters())
    return f"{type(module).__name__}{f', {count:,} weights' if count else ''}"


def _draw_titles(axis: Any, model: nn.Module) -> None:
    axis.text(0.25, -1.5, f"{type(model).__name__}: where it can be cut", fontsize=14, fontweight="bold")
    style = {"fontsize": 10, "color": MUTED, "va": "center"}
    axis.text(TEXT, -0.55, "crosses, a row", **style)
    axis.text(BARS - 0.15, -0.55, "multiply-adds before", ha="right", **style)
    axis.text(BARS, -0.55, "bytes a row, both ways", **style)


def _draw_boxes(axis: Any, chain: Chain) -> None:
    from matplotlib.patches import FancyBboxPatch

    def rectangle(left: float, top: float, width: float, height: float, **look: Any) -> None:
        style = "round,pad=0,rounding_size=0.08"
        axis.add_patch(FancyBboxPatch((left, top), width, height, boxstyle=style, mutation_aspect=1 / UNIT, **look))

    behind = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.0}
    for label, level, top, end in sorted(chain.frames, key=lambda frame: frame[1]):
        left = LEFT + INDENT * level
        rectangle(left, top, WIDE - 2 * INDENT * level, end - top, facecolor="#0072b2", alpha=0.07, edgecolor="none")
        rectangle(left, top, WIDE - 2 * INDENT * level, end - top, facecolor="none", edgecolor=GRID)
        axis.text(left + 0.1, top + HEADER / 2, label, fontsize=9, color=MUTED, va="center", zorder=4, bbox=behind)
    middle = LEFT + WIDE / 2
    if chain.boxes:
        axis.plot([middle, middle], [chain.boxes[0][3], chain.boxes[-1][3]], color=MUTED, lw=1.2, zorder=1)
    for label, kind, level, y in chain.boxes:
        left = LEFT + INDENT * level
        rectangle(
            left, y - 0.42, WIDE - 2 * INDENT * level, 0.84, facecolor="white", edgecolor=INK, linewidth=1.0, zorder=3
        )
        axis.text(left + 0.1, y, label, fontsize=10.5, fontweight="bold", va="center", zorder=4)
        right = LEFT + WIDE - INDENT * level - 0.1
        room = max(4, int((right - left - 0.3 - NAME * len(label)) / KIND))
        kind = kind if len(kind) <= room else _shorten(kind.partition(",")[0], room)
        axis.text(right, y, kind, fontsize=8.5, color=MUTED, va="center", ha="right", zorder=4)


def _draw_places(axis: Any, chain: Chain, chosen: tuple[str, ...]) -> None:
    middle = LEFT + WIDE / 2
    most = max((place.bytes for place, _ in chain.places), default=0) or 1
    for place, y in chain.places:
        if not place.possible:
            axis.plot([middle], [y], marker="x", color=REFUSED, ms=6, mew=1.6, zorder=5)
            reason = _shorten(str(place.refusal), LONGEST)
            axis.text(TEXT, y, f"no: {reason}", fontsize=8.5, color=REFUSED, va="center", style="italic")
            continue
        colour = CHOSEN if place.name in chosen else POSSIBLE
        axis.plot([LEFT - 0.15, TEXT - 0.15], [y, y], color=colour, lw=1.3, ls=(0, (4, 2)), zorder=2)
        axis.plot([middle], [y], marker="D" if place.name in chosen else "o", color=colour, ms=6, zorder=5)
        look = {"fontsize": 9.5, "va": "center", "fontweight": "bold" if place.name in chosen else "normal"}
        axis.text(
            TEXT, y, _crossing_text(place, place.name in chosen), color=colour if place.name in chosen else INK, **look
        )
        axis.text(BARS - 0.15, y, f"{share(place.multiply_adds):.1%}", ha="right", **look)
        length = BAR * place.bytes / most
        axis.barh(y, length, left=BARS, height=0.5, color=colour, zorder=3)
        axis.text(BARS + length + 0.08, y, f"{place.bytes:,}", **look)


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _crossing_text(place: CutPlace, chosen: bool) -> str:
    text = describe_values(place) + (", by replay" if place.method == "replay" else "")
    if len(text) > WIDEST:
        text = f"{len(place.values)} values, {text[: WIDEST - 18]}..."
    return f"{text}  (auto)" if chosen else text


def _draw_skips(axis: Any, chain: Chain) -> None:
    """Draw values that cross several places in a row beside the chain, each on the innermost track that is free."""
    spans: dict[str, tuple[float, float]] = {}
    for place, y in chain.places:
        for value in place.values:
            spans[value.name] = (spans.get(value.name, (y, y))[0], y)
    tracks: list[float] = []
    left_of = {y: LEFT + INDENT * level for _, _, level, y in chain.boxes}
    boxes = list(left_of)
    cuts = [y for place, y in chain.places if place.possible]
    for first, last in sorted(span for span in spans.values() if any(span[0] < y < span[1] for y in boxes)):
        # From the box that makes the value to the one before the next cut, which it no longer crosses.
        following = min((y for y in cuts if y > last), default=chain.height)
        start, end = (max((y for y in boxes if y < limit), default=limit) for limit in (first, following))
        track = next((i for i, free in enumerate(tracks) if free < start), len(tracks))
        tracks[track : track + 1] = [end]
        x = LEFT - 0.22 - 0.16 * track
        axis.plot(
            [left_of.get(start, LEFT), x, x],
            [start, start, end],
            color=SKIP,
            lw=1.4,
            zorder=1.5,
            solid_joinstyle="round",
        )
        axis.annotate(
            "",
            (left_of.get(end, LEFT), end),
            (x, end),
            arrowprops={"arrowstyle": "-|>", "color": SKIP, "lw": 1.4},
            zorder=1.5,
        )


def _draw_legend(axis: Any, chain: Chain, never: Sequence[str], chosen: bool) -> None:
    y, x = chain.height + 0.35, 0.35
    entries = [("o", POSSIBLE, "possible cut, trains exactly as the model", 3.1)]
    entries += [("D", CHOSEN, "cut = 'auto' for vanilla", 2.1)] if chosen else []
    entries += [("x", REFUSED, "refused", 0.9)] if any(not place.possible for place, _ in chain.places) else []
    for marker, colour, text, wide in entries:
        axis.plot([x], [y], marker=marker, color=colour, ms=6, mew=1.6, ls="none")
        axis.text(x + 0.15, y, text, fontsize=9, color=MUTED, va="center")
        x += wide + 0.15
    if never:
        names = _shorten(", ".join(never), 2 * LONGEST)
        axis.text(0.25, y + 0.75, f"never called by themselves: {names}", fontsize=8.5, color=MUTED, va="center")
