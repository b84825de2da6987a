"""What each method's uploads give away: `python -m tests.federated.leak_table` writes it into docs/methods.md.

Rows are the methods of the registry, cells its attacks on what clients upload, as each is refused or not by a small
recorded run of whole models: so neither a new method nor a new attack can be left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import splitfed
from splitfed.attacks.base import Needs, Target
from splitfed.core.messages import Recording
from splitfed.core.optimizers import Optim
from splitfed.core.random import stream
from splitfed.engines.base import FED
from splitfed.models.mlp import mlp
from splitfed.registry import TABLES, load
from splitfed.topologies import local
from tests.pages import ROOT, read

PAGE = ROOT / "docs" / "methods.md"
BEGIN, END = "<!-- leaks -->\n", "<!-- end -->"
GOALS: Mapping[str, tuple[Target, ...]] = {
    "membership": (Target.MEMBERS,),
    "class shares": (Target.SHARES,),
    "inversion": (Target.INPUTS, Target.REPRESENTATIVES),
}
NOTHING = "nothing is sent"
SHOWN = "what is sent are rows that all may see"
HEAD = "the head reads features that never leave the client"
NO_ATTACK: Mapping[tuple[str, str], str] = {
    **{("standalone", goal): NOTHING for goal in GOALS},
    **{("aggregation", goal): SHOWN for goal in GOALS},
    **{("lg_fedavg", goal): HEAD for goal in GOALS},
}
"""(method, goal) -> why no attack reads its uploads for that."""


class Row(NamedTuple):
    """A method's kinds of uploads, and for every goal the attacks that read them."""

    method: str
    kinds: tuple[str, ...]
    attacks: Mapping[str, tuple[str, ...]]


@cache
def row(method: str) -> Row:
    """Return what `method` sends in two rounds of one step each on whole perceptrons, and what reads it."""
    with stream(0):
        model = mlp((1, 8, 8), 10, (12, 8), seed=None)
    data = splitfed.data.digits().rows(range(160))
    run = splitfed.train(
        local(model, ("relu2",)),
        data.clients(3, auxiliary=40, victims=40, validation=0.0, public=0.3),
        schedule="independent",
        method=load("methods", method)(),
        rounds=2,
        batch_size=100,
        optimizer=Optim("SGD", {"lr": 0.05}),
        evaluation=splitfed.Evaluation(every=2),
        logging=splitfed.Logging(record=Recording((FED,))),
    )
    sent = {flow.kind for flow in run.engine.traffic.flows if flow.receiver == FED and flow.phase == "train"}
    found = {
        goal: tuple(
            name
            for name in on_uploads()
            if load("attacks", name).target in targets
            and run.evaluator.refusal(name, load("attacks", name).with_budget("quick"), FED) is None
        )
        for goal, targets in GOALS.items()
    }
    return Row(method, tuple(sorted(sent)), found if FED in run.engine.parties else dict.fromkeys(GOALS, ()))


def on_uploads() -> list[str]:
    """Return the attacks on what clients upload: between steps, or weights before and after them."""
    kinds = {name: load("attacks", name) for name in TABLES["attacks"]}
    return [name for name, kind in kinds.items() if kind.reads or Needs.UPDATES in kind.requires]


def table() -> str:
    """Return the table in Markdown."""
    lines = [f"| method | what a client uploads | {' | '.join(GOALS)} |", "|---|---|" + "---|" * len(GOALS)]
    for method in TABLES["methods"]:
        found = row(method)
        cells = [
            ", ".join(f"`{name}`" for name in found.attacks[goal]) or f"none: {NO_ATTACK.get((method, goal), '')}"
            for goal in GOALS
        ]
        lines.append(f"| `{method}` | {', '.join(found.kinds) or 'nothing'} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


class Cell(NamedTuple):
    """An attack that the table names for a method's uploads and a goal."""

    method: str
    goal: str
    attack: str


def read_cells(text: str) -> list[Cell]:
    """Return every attack that stands in a table as `table` writes it, row by row."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    return [
        Cell(method.strip("`"), goal, attack.strip("`"))
        for method, _, *found in rows
        for goal, names in zip(GOALS, found, strict=True)
        for attack in (names.split(", ") if names.startswith("`") else [])
    ]


def written(text: str) -> str:
    """Return the table as it stands in the page."""
    return text.partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    before, _, rest = read(PAGE).partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}", "utf-8")
