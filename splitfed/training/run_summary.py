"""The summary of a run: what was trained how, how well it does, and what that cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitfed.drawing.html_table import html_table
from splitfed.planning.held_rows import lines_held
from splitfed.registry import name_of
from splitfed.stats.utility import below_constant
from splitfed.training.run_state import RunState


@dataclass(frozen=True)
class RunSummary:
    """Pairs of a name and what is to be said of it, in the order they are shown."""

    title: str
    rows: Sequence[tuple[str, str]]

    def __str__(self) -> str:
        """Return a line a pair."""
        width = max((len(name) for name, _ in self.rows), default=0)
        lines = [f"{name:{width}}  {line}" for name, text in self.rows for line in text.splitlines() or [""]]
        return "\n".join([self.title, *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return a table for a notebook."""
        return html_table(self.title, (), self.rows)


def describe_run(run: RunState) -> str:
    """Return in a line what `run` has trained and how well it does, beside whoever always gives the same answer."""
    last = run.history[-1].get("test") if run.history else None
    rounds = f"{len(run.history)} round{'' if len(run.history) == 1 else 's'}"
    if last is None or last["union"] is None:
        return f"Run({rounds}, {run.bytes:,} bytes, no test score)"
    said = f"Run({rounds}, {run.bytes:,} bytes, test {last['metric']} {last['union']:.4g}"
    found, task = run.constant, run.engine.topology.scored[0].task
    below = found and task and below_constant(last["metric"], last["union"], found, task.higher_is_better)
    return f"{said}: {below})" if below else f"{said})"


def summarize(run: RunState) -> RunSummary:
    """Return the summary of `run`, trained or not yet."""
    engine, data = run.engine, run.data
    train = sum(len(client.train) for client in data.clients)
    rows = [
        ("topology", f"{engine.topology.name}: {_pieces(run)}"),
        *_rounding(run),
        *([("arrays", "\n".join(held))] if (held := lines_held(engine.topology)) else []),
        ("schedule", _name("schedules", run.schedule)),
        ("method", "none" if run.method is None else _name("methods", run.method)),
        ("defenses", ", ".join(map(repr, engine.defenses)) or "none"),
        ("data", f"{data.name}, {_count(len(data), 'client')}, {_count(train, 'training row')}"),
        ("rounds", _rounds(run)),
        *_scores(run),
        ("crossed", f"{run.bytes:,} bytes in {engine.traffic.messages():,} messages: {_kinds(run)}"),
        ("time", f"{run.seconds:.3g} s of training"),
    ]
    if run.history and "epsilon" in run.history[-1]:
        rows.append(("privacy", str(run.ledger)))
    return RunSummary(repr(run), tuple(rows))


def _pieces(run: RunState) -> str:
    return ", ".join(
        f"{role} ({' '.join(s.name for s in run.engine.topology.segments_of(role)) or 'no segment'})"
        for role in run.engine.topology.roles
    )


def _rounding(run: RunState) -> list[tuple[str, str]]:
    """Tell of a topology that cannot have every bit of the uncut model's weights."""
    count = len(frozenset().union(*(segment.reordered for segment in run.engine.topology.segments)))
    text = f"equal to the uncut model up to rounding: gradients of {_count(count, 'weight')} are added in another order"
    return [("rounding", text)] if count else []


def _rounds(run: RunState) -> str:
    rounds = run.evaluator.grants.rounds
    planned = f" of {rounds}" if rounds and rounds != len(run.history) else ""
    ended = "" if run.stopped is None else f", ended early: {run.stopped}"
    return f"{len(run.history)}{planned}{ended}"


def _scores(run: RunState) -> list[tuple[str, str]]:
    said = []
    scored: Mapping[str, Any] = next((entry for entry in reversed(run.history) if "test" in entry), {})
    for part in ("validation", "test"):
        found = scored.get(part) or {}
        if found.get("union") is None:
            continue
        text = f"{found['metric']} {found['union']:.4g}"
        if (bounds := found.get("interval")) and bounds["low"] is not None:
            text += f" [{bounds['low']:.4g}, {bounds['high']:.4g}] ({bounds['kind']})"
        if spread := found.get("spread"):
            text += f"; clients from {spread['min']:.4g} to {spread['max']:.4g}"
        said.append((part, text))
    if said and (constant := run.constant) is not None:
        said.append(("constant answer", f"{constant.score:.4g}: {constant.name}"))
    return said


def _kinds(run: RunState) -> str:
    return ", ".join(f"{kind} {count:,}" for kind, count in run.engine.traffic.by_kind().items()) or "nothing"


def _name(kind: str, thing: object) -> str:
    return name_of(kind, type(thing))


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
