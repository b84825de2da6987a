"""Writes the pages of the board and their figures from its entries: one look first, then a page a study."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.board.detection import DetectionStudy, describe_detections
from experiments.board.entries import Entries
from experiments.board.heat_map import HeatCell, HeatSection, draw_heat_map
from experiments.board.scatter import Panel, Point, draw_scatter
from experiments.board.settings import ROWS, Leak, Setting, Summary, summarize
from experiments.board.studies import COLUMNS, BoardStudy
from experiments.papers.table import markdown
from splitfed.study.report.data import Estimate
from splitfed.study.report.metrics import METRICS
from splitfed.study.report.units import count_noun, format_bytes, format_seconds
from splitfed.training.checkpoint import write_atomic

WORST_LOSS, WORST_RATIO, WORST_AUC = 0.2, 4.0, 0.8
"""What is drawn as dark as can be: utility lost, times the cost of no defense, area under the curve."""
TEMPLATE = Path(__file__).with_name("first_page.md")
LONGEST_NAME = 13
"""Letters that fit above two columns."""
UNDONE = {"to do": "to do", "refused": "no", "failed": "failed", "not asked": "-"}
"""How a missing value begins -> what a small cell says of it."""


def write_pages(studies: Sequence[BoardStudy], folder: Path, detections: Sequence[DetectionStudy] = ()) -> list[Path]:
    """Write README.md, a page a study and the figures into `folder`; return what was written."""
    found = [summarize(study, Entries(folder / f"{study.name}.jsonl")) for study in studies]
    files = {"README.md": readme(found, describe_detections(detections, folder)), "board.svg": draw_overview(found)}
    for summary in found:
        name = summary.study.name
        files |= {f"{name}.md": study_page(summary), f"{name}.svg": draw_study(summary)}
        files[f"{name}-scatter.svg"] = draw_study_scatter(summary)
    for name, text in files.items():
        write_atomic(folder / name, text.encode())
    return [folder / name for name in files]


def readme(found: Sequence[Summary], detections: str) -> str:
    """Return the first page: the figure of one look, the same as tables, and how to read and extend it."""
    done, wanted = sum(one.done for one in found), sum(len(one.study.runs) for one in found)
    state = f"{done} of {wanted} runs are done." if done < wanted else f"All {wanted} runs are done."
    dates = sorted({date for one in found for date in one.dates})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "nothing yet"
    versions = {", ".join(f"{name} {v}" for name, v in told.items()): None for one in found for told in one.versions}
    pages = "\n".join(f"- [{_title(one)}]({one.study.name}.md): {_describe(one)}" for one in found)
    filled = {"state": state, "dates": when, "versions": "; ".join(versions) or "none yet"}
    tables = {"table": _overview_table(found), "labels": _label_table(found), "members": _member_table(found)}
    tables["detections"] = detections
    return TEMPLATE.read_text("utf-8").format(**filled, **tables, pages=pages)


def _overview_table(found: Sequence[Summary]) -> str:
    """Return of every study that attacks rows: utility lost, and what is left in the black and in the white box."""
    chosen = [one for one in found if _asks(one, *ROWS)]
    head = [f"{_title(one)}: {what}" for one in chosen for what in ("lost", *(_left(c) for c in ROWS))]
    return _table_of(
        chosen, head, lambda there: [_lost_text(there), *(_kept_text([s.leaks.get(c) for s in there]) for c in ROWS)]
    )


def _label_table(found: Sequence[Summary]) -> str:
    """Return of every study that attacks labels: what the attack scores, what own data alone score, and the excess."""
    chosen = [one for one in found if _asks(one, "labels")]
    head = [f"{_title(one)}: {what}" for one in chosen for what in (_metric(one, "labels"), "own data alone", "beyond")]

    def texts(there: Sequence[Setting]) -> list[str]:
        leaks = [leak for s in there if (leak := s.leaks.get("labels")) is not None and leak.score is not None]
        floors = _range([leak.floor for leak in leaks if leak.floor is not None], 3)
        said = [_range([leak.score.mean for leak in leaks if leak.score is not None], 3)]
        said += [floors if all(leak.own for leak in leaks) else f"none ({floors})"] if leaks else [""]
        said += [_range([leak.excess.mean for leak in leaks if leak.excess is not None], 3)]
        return said if leaks else [_undone(there, "labels")] * 3

    return _table_of(chosen, head, texts)


def _member_table(found: Sequence[Summary]) -> str:
    """Return of every study that attacks membership: utility lost, and the area under the curve."""
    chosen = [one for one in found if _asks(one, "members")]
    head = [f"{_title(one)}: {what}" for one in chosen for what in ("lost", _metric(one, "members"))]

    def texts(there: Sequence[Setting]) -> list[str]:
        scores = [leak.score.mean for s in there if (leak := s.leaks.get("members")) is not None and leak.score]
        return [_lost_text(there), _range(scores, 3) or _undone(there, "members")]

    return _table_of(chosen, head, texts)


def _table_of(chosen: Sequence[Summary], head: Sequence[str], texts: Callable[[Sequence[Setting]], list[str]]) -> str:
    """Return a row a defense, and as many cells of each study as its `head` has; blank where it lacks the defense."""
    if not chosen:
        return "to do"
    blank = [""] * (len(head) // len(chosen))
    rows = []
    for name in _defenses(chosen):
        by_study = [[s for s in one.settings if s.defense == name] for one in chosen]
        rows.append([name, *(text for there in by_study for text in (texts(there) if there else blank))])
    return markdown(["defense", *head], rows)


def _asks(summary: Summary, *columns: str) -> bool:
    return any(question.column in columns for question in summary.study.questions)


def _metric(summary: Summary, column: str) -> str:
    return _heading(summary.settings, column)[2:] or "score"


def _left(column: str) -> str:
    return f"left, {COLUMNS[column].partition(', ')[2]}"


def _lost_text(there: Sequence[Setting]) -> str:
    lost = [s.lost.mean for s in there if s.lost is not None]
    return _range([100 * v for v in lost], 1) or _short(there[0].why or "to do")


def _kept_text(leaks: Sequence[Leak | None]) -> str:
    """Return the range of what is left; where a ceiling has not converged the raw figures, and that it has not."""
    known = [leak for leak in leaks if leak is not None and leak.score is not None]
    shares = [100 * leak.kept.mean for leak in known if leak.kept is not None]
    rough = [leak for leak in known if leak.unshared]
    said = [_range(shares, 0, " %")] if shares else []
    for why in dict.fromkeys(leak.unshared.partition(" in ")[0] for leak in rough):
        same = [leak for leak in rough if leak.unshared.startswith(why)]
        kind = METRICS[same[0].metric]
        raw = _range([leak.score.mean for leak in same if leak.score is not None], kind.digits, kind.unit or " R²")
        said.append(f"{raw}: {why}")
    return "; ".join(said) or _short(next((leak.why for leak in leaks if leak is not None), "to do"))


def _undone(there: Sequence[Setting], column: str) -> str:
    leak = there[0].leaks.get(column)
    return _short(there[0].why or ("to do" if leak is None else leak.why) or "to do")


def _range(values: Sequence[float], digits: int, unit: str = "") -> str:
    ends = dict.fromkeys(f"{v + 0.0:.{digits}f}" for v in ((min(values), max(values)) if values else ()))
    return " to ".join(ends) + unit if ends else ""


def draw_overview(found: Sequence[Summary]) -> str:
    """Return the figure of one look: of each study the worst utility lost and the most that was left of the leak."""
    chosen = [one for one in found if _asks(one, *ROWS)]
    columns = [(_short_name(one), what) for one in chosen for what in ("lost", "black", "white")]
    rows = [(name, [cell for one in chosen for cell in _overview_cells(one, name)]) for name in _defenses(chosen)]
    return draw_heat_map("Which defense buys what, in the worst topology and cut", columns, [HeatSection("", rows)])


def _short_name(summary: Summary) -> str:
    """Return what fits above two columns: the name of the study, of a long one its last word."""
    name = summary.study.name.replace("_", " ")
    return name if len(name) <= LONGEST_NAME else name.rpartition(" ")[2]


def _overview_cells(summary: Summary, name: str) -> list[HeatCell]:
    there = [s for s in summary.settings if s.defense == name]
    if not there:
        return [HeatCell("")] * (1 + len(ROWS))
    lost = [s.lost.mean for s in there if s.lost is not None]
    first = HeatCell(_short(there[0].why or "to do"))
    if lost:
        first = HeatCell(f"{100 * max(lost) + 0.0:.1f}", max(lost) / WORST_LOSS)
    return [first, *(_worst_kept([s.leaks.get(column) for s in there]) for column in ROWS)]


def _worst_kept(leaks: Sequence[Leak | None]) -> HeatCell:
    """Return the most that is left; marked where another place has no share, and raw where none has."""
    known = [leak for leak in leaks if leak is not None and leak.score is not None]
    shares = [leak.kept.mean for leak in known if leak.kept is not None]
    if shares:
        mark = "+" if len(shares) < len(known) else ""
        return HeatCell(f"{100 * max(shares) + 0.0:.0f}%{mark}", max(shares), leak=True)
    if known:
        worst = max(leak.score.mean for leak in known if leak.score is not None)
        return HeatCell(f"{worst + 0.0:.{min(METRICS[known[0].metric].digits, 2)}f}")
    return HeatCell(_short(next((leak.why for leak in leaks if leak is not None), "to do")))


def draw_study(summary: Summary) -> str:
    """Return the heat map of a study: a section a topology and cut, a row a defense."""
    recovered = next((head for c in ROWS if (head := _heading(summary.settings, c)[2:].split(",")[0])), "")
    columns = [
        ("utility", "lost"),
        *((f"rows {recovered}".strip(), box) for box in ("black", "white")),
        *((f"labels {_heading(summary.settings, 'labels')[2:][:8]}".strip(), what) for what in ("score", "beyond")),
        ("member", _heading(summary.settings, "members")[2:][:8]),
        ("ε", "in all"),
        ("CPU", "time"),
        ("bytes", ""),
    ]
    sections = [HeatSection(place, [(s.defense, _cells(s)) for s in summary.at(place)]) for place in summary.places]
    return draw_heat_map(f"{_title(summary)}: what every defense costs and what it leaves", columns, sections)


def _cells(setting: Setting) -> list[HeatCell]:
    if setting.utility is None:
        return [HeatCell(_short(setting.why)), *([HeatCell("")] * 8)]
    lost, labels, members = setting.lost, setting.leaks["labels"], setting.leaks["members"]
    beyond = labels.excess
    return [
        HeatCell("to do") if lost is None else HeatCell(f"{100 * lost.mean + 0.0:.1f}", lost.mean / WORST_LOSS),
        *(_leak_cell(leak, leak.kept and leak.kept.mean) for leak in (setting.leaks[column] for column in ROWS)),
        _leak_cell(labels, _above_chance(labels)),
        HeatCell("" if beyond is None else f"{beyond.mean + 0.0:.2f}"),
        _leak_cell(members, _above_chance(members)),
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
    """Return utility against what is read of rows, or else of the study's first column, two panels a place for rows."""
    numbers = {name: i + 1 for i, name in enumerate(summary.defenses)}
    asked = [column for column in COLUMNS if _asks(summary, column)]
    panels = []
    for place in summary.places:
        for column in ROWS if _asks(summary, *ROWS) else asked[:1]:
            there = [(s, s.utility, s.leaks.get(column, Leak())) for s in summary.at(place)]
            points = [Point(numbers[s.defense], leak.score, u) for s, u, leak in there if u is not None and leak.score]
            first = next((leak for _, _, leak in there if leak.score is not None), Leak())
            metric = METRICS[first.metric] if first.metric else None
            unit = "" if metric is None else f", {metric.title}{metric.unit and f' [{metric.unit.strip()}]'}"
            up = next((s.metric for s, u, _ in there if u is not None), "utility")
            panels.append(Panel(place, f"{COLUMNS[column]}{unit}", up, points, first.floor, first.ceiling))
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
        there = summary.at(place)
        parts += [f"## {place[:1].upper()}{place[1:]}", _place_table(there)]
        parts += [_row_table(there)] if any(s.leaks[c].score for s in there if s.leaks for c in ROWS) else []
    said = [f"- {s.place}, `{s.label}`: {s.why}" for s in summary.settings if s.why.startswith(("refused", "failed"))]
    said += [
        f"- {s.place}, `{s.label}`, {COLUMNS[column]}: {leak.why}"
        for s in summary.settings
        for column, leak in s.leaks.items()
        if leak.why.startswith(("refused", "failed"))
    ]
    if said:
        parts += ["## Refused and failed", "\n".join(said)]
    return "\n\n".join(parts) + "\n"


def _place_table(settings: Sequence[Setting]) -> str:
    """Return what every defense costs, and what it leaves of each leak."""
    labels, members = (f"{COLUMNS[c]}{_heading(settings, c)}" for c in ("labels", "members"))
    head = ["defense", "utility", "lost, points", *(_left(c) for c in ROWS)]
    head += [labels, "own data alone", "beyond", members, "ε", "CPU time", "bytes", "seeds"]
    return markdown(head, [_place_row(setting) for setting in settings])


def _row_table(settings: Sequence[Setting]) -> str:
    """Return what was recovered of rows in both threat models: over victims the mean, the median, the worst decile."""
    metric = next(METRICS[s.leaks[c].metric] for s in settings if s.leaks for c in ROWS if s.leaks[c].score)
    image = metric is METRICS["psnr"]
    more = ["dB of the mean", "SSIM"] if image else []
    head = ["defense", "floor"]
    for column in ROWS:
        first = f"{COLUMNS[column]}: {metric.title}{metric.unit.replace(' ', ', ')}"
        head += [first, "median, worst decile", *more, "ceiling", "won by"]
    rows = [[f"`{s.label}`", *_row_texts(s, len(more))] for s in settings if s.utility is not None]
    return markdown(head, rows)


def _row_texts(setting: Setting, more: int) -> list[str]:
    leaks = [setting.leaks[column] for column in ROWS]
    digits = next((METRICS[leak.metric].digits for leak in leaks if leak.metric), 2)
    said = [_number(next((leak.floor for leak in leaks if leak.floor is not None), None), digits)]
    for leak in leaks:
        if leak.score is None:
            said += [leak.why.partition(":")[0], *[""] * (3 + more)]
            continue
        won = ", ".join(f"{who}{f' ({n})' if len(leak.members) > 1 else ''}" for who, n in leak.members.items())
        said += [_said_leak(leak), f"{_number(leak.median, digits)}, {_number(leak.worst_decile, digits)}"]
        said += [_number(leak.decibels, digits), _number(leak.ssim, 3)] if more else []
        said += [_number(leak.ceiling, digits), won + ("; not converged" if leak.converged is False else "")]
    return said


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value + 0.0:.{digits}f}"


def _heading(settings: Sequence[Setting], column: str) -> str:
    """Return the metric of the attacks of a `column`, with its unit, "" where none has a score."""
    leaks = (s.leaks[column] for s in settings if s.leaks)
    metric = next((METRICS[leak.metric] for leak in leaks if leak.score is not None), None)
    return "" if metric is None else f": {metric.title}{metric.unit.replace(' ', ', ')}"


def _place_row(setting: Setting) -> list[str]:
    seeds = f"{setting.seeds}/{setting.wanted}"
    if setting.utility is None:
        return [f"`{setting.label}`", setting.why.partition(":")[0], *([""] * 10), seeds]
    labels = setting.leaks["labels"]
    floor = _number(labels.floor, 3) if labels.own or labels.floor is None else f"none ({_number(labels.floor, 3)})"
    return [
        f"`{setting.label}`",
        _said(setting.utility, 3),
        "to do" if setting.lost is None else _said(setting.lost, 1, 100),
        *(_said_kept(setting.leaks[column]) for column in ROWS),
        _said_leak(labels),
        floor,
        "-" if labels.excess is None else _said(labels.excess, 3),
        _said_leak(setting.leaks["members"]),
        _said_epsilon(setting, f" for {setting.protects}"),
        format_seconds(setting.seconds or 0.0),
        format_bytes(setting.bytes or 0.0),
        seeds,
    ]


def _said_kept(leak: Leak) -> str:
    """Write the share that is left, with the decibels of the mean error; raw figures and why where there is none."""
    if leak.score is None:
        return leak.why.partition(":")[0]
    kind = METRICS[leak.metric]
    raw = f"{leak.score.mean + 0.0:.{kind.digits}f}{kind.unit}" if leak.decibels is None else f"{leak.decibels:.1f} dB"
    said = f"{raw}: {leak.unshared}" if leak.kept is None else f"{_said(leak.kept, 0, 100)} %; {raw}"
    return said + _said_open(leak)


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
    return _said(leak.score, digits) + _said_open(leak)


def _said_open(leak: Leak) -> str:
    return f", {leak.open} to do" if leak.open else ""


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
