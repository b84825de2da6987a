"""The summary of a run: what was trained how, how well it does, and what that cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitfed.core.topology import Topology
from splitfed.data.dataset import Federation
from splitfed.drawing.html_table import html_table
from splitfed.engines.engine import Engine
from splitfed.planning.held_rows import lines_held
from splitfed.privacy.ledger import Ledger
from splitfed.registry import name_of
from splitfed.stats.utility import ConstantAnswer, below_constant
from splitfed.training.evaluation import constant_answer
from splitfed.training.run_plan import RunPlan


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


def describe_run(
    engine: Engine, data: Federation, history: Sequence[Mapping[str, Any]], entry: Mapping[str, Any]
) -> str:
    """Return in a line what a run has trained and how well it does, beside whoever always gives the same answer.

    `entry`: of the round whose model the run answers with.
    """
    last = entry.get("test")
    sent = f"{len(history)} round{'' if len(history) == 1 else 's'}, {engine.traffic.bytes('train'):,} bytes"
    if last is None or last["union"] is None:
        return f"Run({sent}, no test score)"
    said = f"Run({sent}, test {last['metric']} {last['union']:.4g}"
    found, task = constant_answer(engine.topology, data), engine.topology.scored[0].task
    below = found and task and below_constant(last["metric"], last["union"], found, task.higher_is_better)
    return f"{said}: {below})" if below else f"{said})"


def summarize(
    plan: RunPlan,
    engine: Engine,
    history: Sequence[Mapping[str, Any]],
    entry: Mapping[str, Any],
    ledger: Ledger | None,
) -> RunSummary:
    """Return the summary of the run of `plan` on `engine`, trained or not yet.

    `entry`: of the round whose model the run answers with; `ledger`: None for nothing promised.
    """
    prepared, topology, traffic = plan.prepared, engine.topology, engine.traffic
    data, method = prepared.data, prepared.method
    train = sum(len(client.train) for client in data.clients)
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in traffic.by_kind().items()) or "nothing"
    rows = [
        ("topology", f"{topology.name}: {_pieces(topology)}"),
        *_rounding(topology),
        *([("arrays", "\n".join(held))] if (held := lines_held(topology)) else []),
        ("schedule", _name("schedules", prepared.schedule)),
        ("method", "none" if method is None else _name("methods", method)),
        ("defenses", ", ".join(map(repr, engine.defenses)) or "none"),
        ("data", f"{data.name}, {_count(len(data), 'client')}, {_count(train, 'training row')}"),
        ("rounds", _rounds(plan.rounds, history)),
        *([("model", text)] if (text := _chosen(plan, entry)) else []),
        *_scores(constant_answer(topology, data), history, entry),
        ("crossed", f"{traffic.bytes('train'):,} bytes in {traffic.messages():,} messages: {kinds}"),
        ("time", f"{sum(entry['seconds'] for entry in history):.3g} s of training"),
    ]
    if ledger is not None:
        rows.append(("privacy", str(ledger)))
    return RunSummary(describe_run(engine, data, history, entry), tuple(rows))


def _pieces(topology: Topology) -> str:
    return ", ".join(
        f"{role} ({' '.join(s.name for s in topology.segments_of(role)) or 'no segment'})" for role in topology.roles
    )


def _rounding(topology: Topology) -> list[tuple[str, str]]:
    """Tell of a topology that cannot have every bit of the uncut model's weights."""
    count = len(frozenset().union(*(segment.reordered for segment in topology.segments)))
    text = f"equal to the uncut model up to rounding: gradients of {_count(count, 'weight')} are added in another order"
    return [("rounding", text)] if count else []


def _rounds(planned: int, history: Sequence[Mapping[str, Any]]) -> str:
    of = f" of {planned}" if planned != len(history) else ""
    stopped = history[-1].get("stopped") if history else None
    return f"{len(history)}{of}{'' if stopped is None else f', ended early: {stopped}'}"


def _chosen(plan: RunPlan, entry: Mapping[str, Any]) -> str:
    """Tell by what the model of an earlier round was chosen; nothing where the last round's answers."""
    if plan.evaluation.keep == "last" or "validation" not in entry:
        return ""
    return f"of round {entry['round'] + 1}, chosen by the best {entry['validation']['metric']} of validation rows"


def _scores(
    constant: ConstantAnswer | None, history: Sequence[Mapping[str, Any]], entry: Mapping[str, Any]
) -> list[tuple[str, str]]:
    said = []
    scored: Mapping[str, Any] = next((one for one in (entry, *reversed(history)) if "test" in one), {})
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
    if said and constant is not None:
        said.append(("constant answer", f"{constant.score:.4g}: {constant.name}"))
    return said


def _name(kind: str, thing: object) -> str:
    return name_of(kind, type(thing))


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
