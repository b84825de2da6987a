"""Writes a study's report: one HTML file with every picture, figure and number in it, for any browser, offline."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from splitfed.core import digests
from splitfed.study.report.data import check_report_links, read_study
from splitfed.study.report.metrics import METRICS
from splitfed.study.report.page import page_content, reproduction
from splitfed.study.report.search_data import read_search_outcome
from splitfed.study.report.search_page import search_content
from splitfed.study.report.summary import summary_of
from splitfed.study.report.text import format_score, format_utility, name_of, reversal_clause
from splitfed.study.report.units import format_bytes, format_seconds
from splitfed.training.checkpoint import write_atomic


@digests.reads_folder
def write_report(folder: Path, *, trust: bool = False) -> Path:
    """Write report.html into the study's `folder` and return its path.

    Runs that failed or have not finished are named in it and counted nowhere. Raises `InvalidInput` where `folder`
    holds no study, none of its runs has finished, or a link leads out of it and `trust` is not given.
    """
    check_report_links(folder, trust)
    outcome = read_search_outcome(folder)
    study = read_study(folder, trust=trust, only=() if outcome is None else outcome.runs)
    summary = summary_of(study)
    functions = {
        "utility": partial(format_utility, summary),
        "utility_interval": partial(_format_ends, write=partial(format_utility, summary)),
        "reversed": lambda attack, metric: bool(reversal_clause(attack, metric)),
        "name_of": partial(name_of, summary),
        "again": reproduction(study),
    }
    path, content = folder / "report.html", {**page_content(study, summary), **search_content(outcome)}
    write_atomic(path, _template().render(**functions, **content).encode())
    return path


@cache
def _template() -> Template:
    """Return the page's template; to compile it takes as long as to write a small report."""
    loader = FileSystemLoader(Path(__file__).parent)
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.filters |= {
        "size": format_bytes,
        "interval": format_interval,
        "breakable": break_before_parameters,
        "span": format_seconds,
        "shade": shade_percent,
        "stacked": stack_bars,
    }
    page.globals |= {"policy": security_policy, "score": _format_score}
    return page.get_template("report.html")


def format_interval(found: Mapping[str, Any], digits: int = 3) -> str:
    """Write the bounds of an estimate and, unless they are over seeds, over what; nothing where it has none."""
    return _format_ends(found, lambda value: f"{value:.{digits}f}")


def break_before_parameters(name: str) -> Markup:
    """Let a long name break before its parameters."""
    return Markup(str(escape(name)).replace("(", "<wbr>("))


def security_policy(style: str, script: str) -> str:
    """Return the policy of a page that loads nothing, and applies this style and runs this script alone."""
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii") for text in (style, script))
    named = [f"{kind}-src 'sha256-{digest}'" for kind, digest in zip(("style", "script"), hashes, strict=True)]
    return "; ".join(["default-src 'none'", *named, "img-src data:", "base-uri 'none'", "form-action 'none'"])


def shade_percent(value: float) -> int:
    """Return how dark a cell with this R2 is, in hundredths: 0 for no better than the mean, 75 for a perfect one."""
    return round(75 * min(1.0, max(0.0, value)))


def stack_bars(sizes: Mapping[str, float], kinds: Sequence[str], most: float) -> list[tuple[str, str]]:
    """Return left end and width of every kind's part in a bar of length 100 for `most` bytes."""
    widths = [100 * sizes.get(kind, 0) / most for kind in kinds]
    return [(f"{sum(widths[:i]):.2f}", f"{width:.2f}") for i, width in enumerate(widths)]


def _format_ends(found: Mapping[str, Any], write: Callable[[float], str]) -> str:
    source = "" if found["over"] == "seeds" else f" ({found['over']})"
    return "" if found["low"] is None else f"{write(found['low'])} to {write(found['high'])}{source}"


def _format_score(metric: str, found: Mapping[str, Any] | None) -> str:
    return "-" if found is None else format_score(metric, found["mean"], unit=METRICS[metric].unit == "")
