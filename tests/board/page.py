"""Writes the pages of the board and their figures from its entries: one look first, then a page a study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from splitfed.study.report.data import Estimate
from splitfed.study.report.metrics import METRICS
from splitfed.study.report.units import count_noun, format_bytes, format_seconds
from splitfed.training.checkpoint import write_atomic
from tests.board.entries import Entries
from tests.board.heat_map import HeatCell, HeatSection, draw_heat_map
from tests.board.scatter import Panel, Point, draw_scatter
from tests.board.settings import TARGETS, Leak, Setting, Summary, summarize
from tests.board.studies import BoardStudy
from tests.papers.table import markdown

WORST_LOSS, WORST_RATIO, WORST_AUC = 0.2, 4.0, 0.8
"""What is drawn as dark as can be: utility lost, times the cost of no defense, area under the curve."""
TEMPLATE = Path(__file__).with_name("first_page.md")
LONGEST_NAME = 13
"""Letters that fit above two columns."""
UNDONE = {"to do": "to do", "refused": "no", "failed": "failed", "not asked": "-"}
"""How a missing value begins -> what a small cell says of it."""


def write_pages(studies: Sequence[BoardStudy], folder: Path) -> list[Path]:
    """Write README.md, a page a study and the figures into `folder`; return what was written."""
    found = [summarize(study, Entries(folder / f"{study.name}.jsonl")) for study in studies]
    files = {"README.md": readme(found), "board.svg": draw_overview(found)}
    for summary in found:
        name = summary.study.name
        files |= {f"{name}.md": study_page(summary), f"{name}.svg": draw_study(summary)}
        files[f"{name}-scatter.svg"] = draw_study_scatter(summary)
    for name, text in files.items():
        write_atomic(folder / name, text.encode())
    return [folder / name for name in files]


def readme(found: Sequence[Summary]) -> str:
    """Return the first page: the figure of one look, the same as a table, and how to read and extend it."""
    done, wanted = sum(one.done for one in found), sum(len(one.study.runs) for one in found)
    state = f"{done} of {wanted} runs are done." if done < wanted else f"All {wanted} runs are done."
    dates = sorted({date for one in found for date in one.dates})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "nothing yet"
    versions = {", ".join(f"{name} {v}" for name, v in told.items()): None for one in found for told in one.versions}
    pages = "\n".join(f"- [{_title(one)}]({one.study.name}.md): {_describe(one)}" for one in found)
    filled = {"state": state, "dates": when, "versions": "; ".join(versions) or "none yet"}
    return TEMPLATE.read_text("utf-8").format(**filled, table=_overview_table(found), pages=pages)


def _overview_table(found: Sequence[Summary]) -> str:
    head = ["defense", *(f"{_title(one)}: {what}" for one in found for what in ("lost", "left"))]
    rows = [[name, *(text for one in found for text in _overview_texts(one, name))] for name in _defenses(found)]
    return markdown(head, rows)


def _overview_texts(summary: Summary, name: str) -> tuple[str, str]:
    there = [s for s in summary.settings if s.defense == name]
    if not there:
        return "", ""
    lost = [s.lost.mean for s in there if s.lost is not None]
    kept = [k.mean for s in there if (k := _rows(s).kept) is not None]
    said = _short(there[0].why or _rows(there[0]).why or "to do")
    return _range([100 * v for v in lost], 1) or said, _range([100 * v for v in kept], 0, " %") or said


def _range(values: Sequence[float], digits: int, unit: str = "") -> str:
    ends = dict.fromkeys(f"{v + 0.0:.{digits}f}" for v in ((min(values), max(values)) if values else ()))
    return " to ".join(ends) + unit if ends else ""


def draw_overview(found: Sequence[Summary]) -> str:
    """Return the figure of one look: of each study the worst utility lost and the most that was left of the leak."""
    columns = [(_short_name(one), what) for one in found for what in ("lost", "left")]
    rows = [(name, [cell for one in found for cell in _overview_cells(one, name)]) for name in _defenses(found)]
    return draw_heat_map("Which defense buys what, in the worst topology and cut", columns, [HeatSection("", rows)])


def _short_name(summary: Summary) -> str:
    """Return what fits above two columns: the name of the study, of a long one its last word."""
    name = summary.study.name.replace("_", " ")
    return name if len(name) <= LONGEST_NAME else name.rpartition(" ")[2]


def _overview_cells(summary: Summary, name: str) -> list[HeatCell]:
    there = [s for s in summary.settings if s.defense == name]
    if not there:
        return [HeatCell(""), HeatCell("")]
    lost = [s.lost.mean for s in there if s.lost is not None]
    kept = [k.mean for s in there if (k := _rows(s).kept) is not None]
    said = HeatCell(_short(there[0].why or _rows(there[0]).why or "to do"))
    return [
        HeatCell(f"{100 * max(lost) + 0.0:.1f}", max(lost) / WORST_LOSS) if lost else said,
        HeatCell(f"{100 * max(kept) + 0.0:.0f} %", max(kept), leak=True) if kept else said,
    ]


def draw_study(summary: Summary) -> str:
    """Return the heat map of a study: a section a topology and cut, a row a defense."""
    leaks = [(name[:6], _heading(summary.settings, target)[2:].split(",")[0][:8]) for target, name in TARGETS.items()]
    columns = [("utility", "lost"), *leaks, ("ε", "in all"), ("CPU", "time"), ("bytes", "")]
    sections = [HeatSection(place, [(s.defense, _cells(s)) for s in summary.at(place)]) for place in summary.places]
    return draw_heat_map(f"{_title(summary)}: what every defense costs and what it leaves", columns, sections)


def _cells(setting: Setting) -> list[HeatCell]:
    if setting.utility is None:
        return [HeatCell(_short(setting.why)), *([HeatCell("")] * 6)]
    rows, lost = _rows(setting), setting.lost
    return [
        HeatCell("to do") if lost is None else HeatCell(f"{100 * lost.mean + 0.0:.1f}", lost.mean / WORST_LOSS),
        _leak_cell(rows, None if rows.kept is None else rows.kept.mean),
        *(_leak_cell(leak, _above_chance(leak)) for leak in (setting.leaks["labels"], setting.leaks["members"])),
        HeatCell(_said_epsilon(setting, "")),
        _price_cell(format_seconds(setting.seconds or 0.0), setting.slower),
        _price_cell(format_bytes(setting.bytes or 0.0), setting.larger),
    ]


def _leak_cell(leak: Leak, bad: float | None) -> HeatCell:
    if leak.score is None:
        return HeatCell(_short(leak.why))
    digits = min(METRICS[leak.metric].digits, 2)
    return HeatCell(f"{leak.score.mean + 0.0:.{digits}f}", bad, leak=True)


def _above_chance(leak: Leak) -> float | None:
    """Return how dark a score of labels or members is drawn; an AUC below chance leaks as one above."""
    if leak.score is None or leak.floor is None:
        return None
    kind = METRICS[leak.metric]
    return (kind.leak(leak.score.mean) - leak.floor) / (WORST_AUC - kind.centre if kind.centre else 1 - leak.floor)


def _price_cell(text: str, ratio: float | None) -> HeatCell:
    return HeatCell(text.replace(" ", ""), None if ratio is None else (ratio - 1) / (WORST_RATIO - 1))


def draw_study_scatter(summary: Summary) -> str:
    """Return utility against what is read of rows, a panel a topology and cut."""
    numbers = {name: i + 1 for i, name in enumerate(summary.defenses)}
    panels = []
    for place in summary.places:
        there = [(s, s.utility, _rows(s)) for s in summary.at(place)]
        points = [Point(numbers[s.defense], leak.score, u) for s, u, leak in there if u is not None and leak.score]
        first = next((leak for _, _, leak in there if leak.score is not None), Leak())
        metric = METRICS[first.metric] if first.metric else None
        across = (
            "leakage" if metric is None else f"{metric.title}{metric.unit and f' [{metric.unit.strip()}]'}: leakage"
        )
        up = next((s.metric for s, u, _ in there if u is not None), "utility")
        panels.append(Panel(place, across, up, points, first.floor, first.ceiling))
    return draw_scatter(f"{_title(summary)}: utility (up) against leakage (across)", panels, summary.defenses)


def study_page(summary: Summary) -> str:
    """Return the page of a study: its figures, a table a topology and cut, and what was refused."""
    name = summary.study.name
    lines = f", a line a run is in [{name}.jsonl]({name}.jsonl)" if summary.dates else ""
    parts = [
        f"# The board: {_title(summary)}",
        f"{_describe(summary)} The study is [{name}.toml]({name}.toml){lines}; how to read all of it is on the"
        " [first page](README.md).",
        f"![What every defense costs and what it leaves on {_title(summary)}]({name}.svg)",
        f"![Utility against leakage on {_title(summary)}]({name}-scatter.svg)",
    ]
    for place in summary.places:
        parts += [f"## {place[:1].upper()}{place[1:]}", _place_table(summary.at(place))]
    said = [f"- {s.place}, `{s.label}`: {s.why}" for s in summary.settings if s.why.startswith(("refused", "failed"))]
    said += [
        f"- {s.place}, `{s.label}`, {target}: {leak.why}"
        for s in summary.settings
        for target, leak in s.leaks.items()
        if leak.why.startswith(("refused", "failed"))
    ]
    if said:
        parts += ["## Refused and failed", "\n".join(said)]
    return "\n\n".join(parts) + "\n"


def _place_table(settings: Sequence[Setting]) -> str:
    leaks = [f"{name}{_heading(settings, target)}" for target, name in TARGETS.items()]
    head = ["defense", "utility", "lost, points", leaks[0], "floor, ceiling", "left", "won by", *leaks[1:]]
    return markdown([*head, "ε", "CPU time", "bytes", "seeds"], [_place_row(setting) for setting in settings])


def _heading(settings: Sequence[Setting], target: str) -> str:
    """Return the metric that the attacks on `target` are scored by, with its unit, "" where none has a score."""
    leaks = (s.leaks[target] for s in settings if s.leaks)
    metric = next((METRICS[leak.metric] for leak in leaks if leak.score is not None), None)
    return "" if metric is None else f": {metric.title}{metric.unit.replace(' ', ', ')}"


def _place_row(setting: Setting) -> list[str]:
    if setting.utility is None:
        return [
            f"`{setting.label}`",
            setting.why.partition(":")[0],
            *([""] * 10),
            f"{setting.seeds}/{setting.wanted}",
        ]
    rows = _rows(setting)
    digits = METRICS[rows.metric].digits if rows.metric else 2
    floor, ceiling = (f"{v:.{digits}f}" if v is not None else "-" for v in (rows.floor, rows.ceiling))
    won = ", ".join(f"{who}{f' ({n})' if len(rows.members) > 1 else ''}" for who, n in rows.members.items())
    return [
        f"`{setting.label}`",
        _said(setting.utility, 3),
        "to do" if setting.lost is None else _said(setting.lost, 1, 100),
        _said_leak(rows),
        f"{floor}, {ceiling}",
        "-" if rows.kept is None else f"{_said(rows.kept, 0, 100)} %",
        won + ("; not converged" if rows.converged is False else ""),
        *(_said_leak(setting.leaks[target]) for target in ("labels", "members")),
        _said_epsilon(setting, f" for {setting.protects}"),
        format_seconds(setting.seconds or 0.0),
        format_bytes(setting.bytes or 0.0),
        f"{setting.seeds}/{setting.wanted}",
    ]


def _said_epsilon(setting: Setting, what: str) -> str:
    """Write the promise for `what` is protected; one that has no bound is none."""
    if not setting.protects:
        return ""
    if setting.epsilon is None:
        return "none"
    unit, sign = next(((u, s) for u, s in ((1e6, "M"), (1e3, "k")) if setting.epsilon >= u), (1.0, ""))
    return f"{setting.epsilon / unit:.3g}{sign}{what}"


def _said_leak(leak: Leak) -> str:
    if leak.score is None:
        return leak.why.partition(":")[0]
    digits = METRICS[leak.metric].digits
    said = _said(leak.score, digits)
    if leak.excess is not None and leak.floor is not None:
        said += f", beyond own data ({leak.floor:.{digits}f}) {leak.excess + 0.0:.{digits}f}"
    return said + (f", {leak.open} to do" if leak.open else "")


def _said(value: Estimate, digits: int, unit: float = 1.0) -> str:
    """Write a mean with its interval; one over rows or victims of a single seed is marked."""
    mean = f"{unit * value.mean + 0.0:.{digits}f}"
    if value.low is None or value.high is None:
        return mean
    mark = "" if value.over == "seeds" else "*"
    return f"{mean} ({unit * value.low + 0.0:.{digits}f} to {unit * value.high + 0.0:.{digits}f}){mark}"


def _defenses(found: Sequence[Summary]) -> list[str]:
    """Return the defenses of all studies, each once: those of the same name one after the other."""
    every = list(dict.fromkeys(name for one in found for name in one.defenses))
    families = list(dict.fromkeys(name.partition(" ")[0] for name in every))
    return sorted(every, key=lambda name: families.index(name.partition(" ")[0]))


def _rows(setting: Setting) -> Leak:
    return setting.leaks.get("inputs", Leak(why=setting.why))


def _title(summary: Summary) -> str:
    return summary.study.name.replace("_", " ")


def _describe(summary: Summary) -> str:
    """Return in a line what a study has."""
    cell, study = summary.study.grid.cells[0], summary.study
    done = "" if summary.done == len(study.runs) else f" {summary.done} of {len(study.runs)} are done."
    return (
        f"{cell.data.name} with {cell.model_label}, {cell.training.rounds} rounds,"
        f" {count_noun(len(summary.places), 'place')} (topology and cut),"
        f" {count_noun(len(summary.defenses), 'defense')} with none, {count_noun(len(study.seeds), 'seed')}:"
        f" {count_noun(len(study.runs), 'run')}.{done}"
    )


def _short(why: str) -> str:
    return next((said for start, said in UNDONE.items() if why.startswith(start)), why[:6])
