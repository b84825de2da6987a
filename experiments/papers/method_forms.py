"""Every federated method on every topology: under which schedule it works and what it learns, or why it does not.

No single paper: the same rows, networks and rounds for all methods of a topology, each method as it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn

import splitfed as sf
from experiments.papers.table import SHARE, Cell, Measured, Table, markdown, mean
from splitfed.core.optimizers import Optim
from splitfed.core.random import stream
from splitfed.core.topology import Topology
from splitfed.data.dataset import Federation
from splitfed.federated import Method, PFedMe
from splitfed.models.mlp import mlp
from splitfed.registry import TABLES, load
from splitfed.schedules import Independent, Sequential, SplitFedV1, SplitFedV3
from splitfed.schedules.base import Schedule
from splitfed.topologies import extended_vanilla, local, multi_hop, multi_task, u_shaped, vanilla, vertical

SEEDS = (0, 1, 2)
NONE = "none"
SCHEDULES: Mapping[str, Callable[[], Schedule]] = {
    "splitfed_v3": lambda: SplitFedV3(by_examples=True),
    "independent": Independent,
    "sequential, hand_over none": lambda: Sequential(hand_over="none"),
    "splitfed_v1": SplitFedV1,
}
"""In the order in which they are tried; a method is shown under the first that takes it."""


@dataclass(frozen=True)
class Form:
    """A topology with the rows that its clients or groups hold, and the rounds and rate of its runs."""

    topology: Callable[[int], Topology]
    data: Callable[[int], Federation]
    rounds: int
    rate: float


def _digits(seed: int) -> Federation:
    rows = sf.data.digits()
    return rows.clients(4, dirichlet=0.5, auxiliary=0, victims=0, validation=0.0, test=0.3, public=0.15, seed=seed)


def _groups(seed: int) -> Federation:
    rows = sf.data.breast_cancer().vertical({"left": range(15), "right": range(15, 30)})
    return rows.clients(3, auxiliary=0, victims=0, validation=0.0, test=0.3, seed=seed)


def _net(seed: int) -> nn.Module:
    return mlp((1, 8, 8), 10, (32, 16), seed=seed)


def _bottoms() -> dict[str, nn.Module]:
    return {role: nn.Sequential(nn.Linear(15, 8), nn.ReLU()) for role in ("left", "right")}


def _drawn(seed: int, build: Callable[[], Topology]) -> Topology:
    with stream(seed):
        return build()


def _two_tasks() -> Topology:
    tops = {"first": nn.Linear(16, 1), "second": nn.Linear(16, 1)}
    return multi_task(_bottoms(), tops, targets=dict.fromkeys(tops), labels={"first": "right", "second": "left"})


FORMS: Mapping[str, Form] = {
    "local": Form(lambda seed: local(_net(seed), ("relu1",)), _digits, 12, 0.003),
    "vanilla": Form(lambda seed: vanilla(_net(seed), "relu1"), _digits, 12, 0.003),
    "u_shaped": Form(lambda seed: u_shaped(_net(seed), ("relu1", "relu2")), _digits, 12, 0.003),
    "multi_hop": Form(lambda seed: multi_hop(_net(seed), ("relu1", "relu2")), _digits, 12, 0.003),
    "vertical, a server a group": Form(
        lambda seed: _drawn(seed, lambda: vertical(_bottoms(), nn.Linear(16, 1), labels="server")), _groups, 12, 0.01
    ),
    "vertical, one server": Form(
        lambda seed: _drawn(seed, lambda: vertical(_bottoms(), nn.Linear(16, 1), labels="right")), _groups, 12, 0.01
    ),
    "extended_vanilla": Form(
        lambda seed: _drawn(
            seed, lambda: extended_vanilla(_bottoms(), nn.Linear(16, 8), nn.Linear(8, 1), labels="right")
        ),
        _groups,
        12,
        0.01,
    ),
    "multi_task": Form(lambda seed: _drawn(seed, _two_tasks), _groups, 12, 0.01),
}
SGD = ("scaffold", "fednova", "fedsgd")
"""Methods whose formula asks for plain SGD, which all others of a form take Adam for; at thirty times the rate."""


def _method(name: str) -> Method | None:
    if name == NONE:
        return None
    return PFedMe(weight=1.0, rate=0.1) if name == "pfedme" else load("methods", name)()


def measure(form: Form, name: str, seed: int, place: Path) -> dict[str, Any]:
    """Return the schedule and the mean accuracy over clients, or why no schedule takes the method."""
    data, reasons = form.data(seed), []
    optimizer = Optim("SGD", {"lr": 30 * form.rate}) if name in SGD else Optim("Adam", {"lr": form.rate})
    for called, schedule in SCHEDULES.items():
        try:
            run = sf.train(
                form.topology(seed),
                data,
                schedule=schedule(),
                method=_method(name),
                rounds=form.rounds,
                batch_size=16,
                optimizer=optimizer,
                evaluation=sf.Evaluation(every=form.rounds),
                seed=seed,
            )
        except sf.InvalidInput as error:
            reasons.append(str(error))
            continue
        return {"schedule": called, "accuracy": fmean(run.history[-1]["test"]["clients"])}
    # The method's own reason says more than that of a schedule which goes with no method.
    own = [reason for reason in reasons if reason.startswith((f"{name} ", f"method {type(_method(name)).__name__}"))]
    return {"reason": (own or reasons)[0]}


def key(form: str, name: str, seed: int) -> str:
    """Return the name of a measurement."""
    return f"{form}, {name}, seed {seed}"


def show(done: Measured) -> str:
    """Return a row a method and a column a form, and below it the reasons of those that do not go together."""
    reasons: dict[str, int] = {}
    lines = []
    for name in (NONE, *TABLES["methods"]):
        line = [f"`{name}`"]
        for form in FORMS:
            found = [done[one] for seed in SEEDS if (one := key(form, name, seed)) in done]
            scores = [one["accuracy"] for one in found if "accuracy" in one]
            if scores:
                line.append(f"{mean(scores, SHARE)} {found[0]['schedule']}")
            elif found:
                line.append(f"no ({reasons.setdefault(found[0]['reason'], len(reasons) + 1)})")
            else:
                line.append("to do")
        lines.append(line)
    told = "\n".join(f"{number}. {reason}" for reason, number in reasons.items())
    return f"{markdown(['method', *FORMS], lines)}\n\n{told}\n"


BUDGET = """Mean accuracy over clients on their own test rows, three seeds with their 95 % interval, and the first
schedule that takes the method. A perceptron on digits at four clients (Dirichlet .5; `local`, `vanilla`, `u_shaped`,
`multi_hop`), and pieces of one on breast cancer in three groups (the others), twelve rounds, batches of 16, Adam;
`scaffold`, `fednova` and `fedsgd` take SGD, which their formulas ask for, and `pfedme` a weight of 1. `none` is the
split by itself. Nothing was tuned: the table says what works and learns, not which method is best. Numbers in brackets
point to the reasons below, in the words of the refusal. Two to five seconds a measurement."""

TABLE = Table(
    "method_forms",
    "Every federated method on every topology",
    BUDGET,
    tuple(
        Cell(key(form, name, seed), partial(measure, FORMS[form], name, seed))
        for seed in SEEDS
        for name in (NONE, *TABLES["methods"])
        for form in FORMS
    ),
    show,
)
