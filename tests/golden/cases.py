"""Golden cases: a small run of every choice in the registry, by name.

A case says which data, topology, schedule, defense and method, and what lives inside the training. Whatever is new in
the registry enters by itself; the tables below hold arguments for names that need some.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

import splitfed as sf
from splitfed.attacks.base import Attack
from splitfed.attacks.training_time.training_attack import TrainingAttack
from splitfed.core.messages import Recorder, Recording
from splitfed.core.random import stream
from splitfed.core.tasks import binary
from splitfed.data.dataset import Federation
from splitfed.registry import TABLES, load
from splitfed.topologies import custom, vertical
from splitfed.training.run import Run
from tests.defenses.test_every_defense import DEFENSES, TOPOLOGIES
from tests.models.tiny_transformers import WIDTH

NONE = "none"
ROWS, BATCH = 12, 8

ATTACKS: dict[str, dict[str, Any]] = {
    "ladder": {"widths": (4,), "epochs": (1, 2)},
    "strongest": {"widths": (4,), "passes": 4000, "prior": False},
    "attribute": {"attribute": "second"},
    "gaussian_mixture": {"hints": 1},
    "own_features": {"hints": 1},
    "co_training": {"hints": 1},
    "strongest_labels": {"hints": 1, "doublings": 1},
    "strongest_membership": {"copies": 4, "doublings": 1, "worlds": 1},
    "lira": {"online": False, "copies": 4},
    "upload_lira": {"copies": 4},
}
METHODS: dict[str, dict[str, Any]] = {"fedgen": {"steps": 3, "hidden": 16}, "pfedme": {"weight": 1.0, "steps": 2}}
MANIPULATIONS: dict[str, dict[str, Any]] = {
    "gradient_replacement": {"party": "right", "row": 0, "target": 1},
    "replay": {"party": "right", "row": 0, "target": 1},
    "malicious_optimizer": {"party": "right"},
}
DETECTORS: dict[str, dict[str, Any]] = {
    "splitguard": {"start": 1, "rate": 0.5, "window": 2},
    "splitout": {"share": 1.0, "epochs": 1, "servers": 2, "window": 2},
}
FUSIONS: dict[str, dict[str, Any]] = {"krum": {"f": 1}, "geometric_median": {"steps": 5}}

# The least of each kind of budget that attacks have; it takes the place of what the budget "quick" says.
BUDGETS: dict[str, Any] = dict.fromkeys(("epochs", "queries", "restarts", "classifier_epochs"), 1)
BUDGETS |= dict.fromkeys(("input_steps", "model_steps"), 1)
BUDGETS |= dict.fromkeys(("rounds", "copies", "inverse_steps", "refine"), 2)
BUDGETS |= {"iterations": 3, "width": 4, "start": 0}


def summed() -> sf.Topology:
    """Two parties whose logits a server adds up."""
    sides = {side: nn.Sequential(nn.Flatten(), nn.Linear(32, 10)) for side in ("left", "right")}
    return vertical(sides, nn.Identity(), labels="server", fusion="sum")


def active() -> sf.Topology:
    """Two parties of which one has the labels and joins what both make."""
    made = [
        sf.Segment(f"bottom_{side}", side, nn.Sequential(nn.Flatten(), nn.Linear(32, 8)), (side,), (f"z_{side}",))
        for side in ("left", "right")
    ]
    joined = sf.Segment("join", "right", sf.topologies.Fusion("concat"), ("z_left", "z_right"), ("joined",))
    top = sf.Segment("top", "right", nn.Linear(16, 10), ("joined",), ("out",))
    return custom([*made, joined, top], {"left": "left", "right": "right"}, [sf.Head("out", "right", "right")])


MODELS: dict[str, Mapping[str, Callable[[], sf.Topology]]] = {
    "digits": TOPOLOGIES["digits"],
    "parity": TOPOLOGIES["parity"],
    "single": TOPOLOGIES["digits"],
    "summed": {**TOPOLOGIES["digits"], "vertical": summed},
    "active": {**TOPOLOGIES["digits"], "custom": active},
}
"""Data of a case -> a builder for every topology; the last three are digits too."""


class Everybody(Recording):
    """Records every party, whichever there are."""

    def recorders(self, parties: tuple[str, ...], folder: Path | None) -> dict[str, Recorder]:
        """Make a recorder for each of `parties`."""
        return Recording(parties, self.every, self.budget).recorders(parties, folder)


@dataclass(frozen=True, order=True)
class Case:
    """A run by the names of its parts. `intruder`: the attack inside its training; `more`: (kind, name) beside them."""

    data: str
    topology: str
    schedule: str
    defense: str = NONE
    method: str = NONE
    intruder: str = NONE
    more: tuple[str, str] | None = None

    @property
    def name(self) -> str:
        """The case as `kind=name`, a space between them; what is absent is left out."""
        kinds = ("data", "topology", "schedule", "defense", "method", "intruder")
        said = [f"{kind}={getattr(self, kind)}" for kind in kinds if getattr(self, kind) != NONE]
        return " ".join([*said, *(["=".join(self.more)] if self.more else [])])


def clients_of(case: Case) -> int:
    """Return how many clients a case has: one where they train together, enough for a fusion that outvotes some."""
    return 1 if case.schedule == "joint" else 5 if case.more and case.more[0] == "fusion" else 2


@cache
def data(task: str, clients: int) -> Federation:
    """Return digits in two halves, with a second set of labels: all ten, their parity, or one row a client."""
    own = 1 if task == "single" else 2 * ROWS
    rows = sf.data.digits().rows(range(48 + own * clients))
    second = (rows.y >= 5).long()
    if task == "parity":
        rows = sf.data.from_arrays(rows.x, (rows.y % 2).long(), task=binary(), name="parity")
    parts = rows.halves().with_target("second", second, binary())
    if task == "single":
        return parts.clients(clients, auxiliary=42, victims=6, validation=0.0, test=0.0)
    return parts.clients(clients, auxiliary=24, victims=6, validation=0.2, test=0.2, public=0.2)


def made(kind: str, name: str, table: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return what is registered as `name` among `kind`, with the arguments that the table has for it."""
    return load(kind, name)(**table.get(name, {}))


@cache
def attack(name: str) -> Attack:
    """Return the attack `name` with the least budgets."""
    kind = load("attacks", name)
    own = {f.name for f in fields(kind)}
    return kind.with_budget("quick", **{k: v for k, v in {**BUDGETS, **ATTACKS.get(name, {})}.items() if k in own})  # type: ignore[no-any-return]


def lives_inside(name: str) -> bool:
    """Tell whether the attack `name` takes part in training."""
    return issubclass(load("attacks", name), TrainingAttack)


def train(case: Case, rounds: int = 1) -> Run:
    """Train `case`; raises what the library does."""
    with stream(3):
        topology = MODELS[case.data][case.topology]()
    options: dict[str, Any] = {}
    schedule = load("schedules", case.schedule)
    kind, name = case.more or (NONE, NONE)
    plan = schedule(aggregation={"name": name, **FUSIONS.get(name, {})}) if kind == "fusion" else schedule()
    if kind == "manipulation":
        options["adversaries"] = sf.Adversaries(poisoning=made("poisoning", name, MANIPULATIONS))
    if kind == "detector":
        watching = dict.fromkeys(topology.data_roles, made("detectors", name, DETECTORS))
        options["adversaries"] = sf.Adversaries(detectors=watching)
    if case.intruder != NONE:
        without = [role for role in topology.roles if role not in topology.data_roles]
        options["adversaries"] = sf.Adversaries({(*without, *topology.roles)[0]: attack(case.intruder)})
    if case.defense != NONE:
        options["defenses"] = DEFENSES[case.defense]
    if case.method != NONE:
        options["method"] = made("methods", case.method, METHODS)
    return sf.train(
        topology,
        data(case.data, clients_of(case)),
        schedule=plan,
        rounds=rounds,
        batch_size=BATCH,
        logging=sf.Logging(record=Everybody()),
        **options,
    )


def tensors_of(kind: str, name: str) -> list[Any]:
    """Return the tensors of a data set that is built in, or of a model's first weights."""
    if kind == "data":
        found = load("data", name)()
        return [found.x, found.y]
    given = {"architecture": "ViTForImageClassification", "config": WIDTH} if name == "transformers" else {}
    shape = {"resnet8": (3, 32, 32), "ecg_cnn": (1, 128)}.get(name, (1, 28, 28))
    model: nn.Module = load("models", name)(shape, 10, seed=0, **given)
    return list(model.state_dict().values())


KINDS: dict[str, str] = {
    "topology": "topologies",
    "schedule": "schedules",
    "defense": "defenses",
    "method": "methods",
    "attack": "attacks",
    "fusion": "aggregation",
    "manipulation": "poisoning",
    "detector": "detectors",
    "data": "data",
    "model": "models",
}
"""Kind as cases call it -> table of the registry."""

CHOICES: dict[str, Callable[[], set[str]]] = {
    "topology": lambda: set.intersection(*map(set, MODELS.values())),
    "defense": lambda: set(DEFENSES),
}
"""Where a name needs a line of its own in a table: which names have one."""


def without_case() -> list[str]:
    """Return what the registry has and no case can be made of: `kind=name`."""
    absent = [f"{k}={n}" for k, found in CHOICES.items() for n in TABLES[KINDS[k]] if n not in found()]
    return absent + [f"table {table}" for table in TABLES if table not in KINDS.values()]
