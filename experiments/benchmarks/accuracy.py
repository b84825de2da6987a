"""Accuracy of topologies and schedules on real data: `python -m experiments.benchmarks.accuracy`, resumable, an hour.

Every line of the tables is several seeds (split, weights and order anew); the learning rate of each line is the one
of RATES with the best mean validation accuracy on three seeds of their own, never on test rows. Results are appended to
`papers/accuracy.jsonl` as they come; what is there is not computed again. `--table` prints the tables.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import splitfed as sf
from splitfed import schedules, topologies
from splitfed.core.random import stream
from splitfed.data.dataset import ClientData, Federation
from splitfed.models.lenet import lenet
from splitfed.models.mlp import mlp
from splitfed.schedules.base import Schedule
from splitfed.stats.intervals import mean_interval

RATES = (0.01, 0.05, 0.1)
SEEDS = (1, 2, 3, 4, 5)
TUNING = (100, 101, 102)
PARTITIONS: dict[str, dict[str, Any]] = {"IID": {}, "Dirichlet .3": {"dirichlet": 0.3}}


@dataclass(frozen=True)
class Line:
    """One line of a table: what is trained on what, and how it is scored."""

    table: str
    name: str
    topology: Callable[[nn.Module], sf.Topology]
    schedule: Schedule
    data: Callable[[int], Federation]
    model: Callable[[], nn.Module]
    rounds: int
    batch_size: int
    alone: bool = False

    @property
    def key(self) -> str:
        """Its name in the results."""
        return f"{self.table} | {self.name}"


def uncut(model: nn.Module) -> sf.Topology:
    """The whole model at the client: nothing crosses in a step."""
    segment = sf.Segment("model", "client", model, ("x",), ("out",), "")
    return sf.Topology("uncut", (segment,), {"x": "client"}, (sf.Head("out", "client", "client"),))


def pooled(data: Federation) -> Federation:
    """All clients' rows at one client: the ceiling."""
    parts = {p: [getattr(c, p) for c in data.clients] for p in ("train", "validation", "test")}
    whole = {p: found[0].join(found[1:]) for p, found in parts.items()}
    return Federation(data.name, data.task, (ClientData("all", **whole),), data.auxiliary, data.victims, {})


def clients_of(dirichlet: float | None, *, pool: bool = False) -> Callable[[int], Federation]:
    def make(seed: int) -> Federation:
        options = {"auxiliary": 0, "victims": 1, "validation": 0.1, "test": 0.2, "seed": seed}
        data = sf.data.mnist5k().clients(10, dirichlet=dirichlet, **options)  # type: ignore[arg-type]
        return pooled(data) if pool else data

    return make


def horizontal() -> Iterator[Line]:
    """Ten clients of MNIST-5k, LeNet cut after its first pooling, 30 epochs in all."""

    def make() -> nn.Module:
        return lenet((1, 28, 28), 10, seed=None)

    shapes: dict[str, tuple[Callable[[nn.Module], sf.Topology], Schedule]] = {
        "vanilla, sequential": (lambda m: topologies.vanilla(m, "pool1"), schedules.Sequential()),
        "U-shaped, sequential": (lambda m: topologies.u_shaped(m, ("pool1", "fc2")), schedules.Sequential()),
        "multi-hop (3 hops), sequential": (
            lambda m: topologies.multi_hop(m, ("pool1", "pool2", "fc1", "fc2")),
            schedules.Sequential(),
        ),
        "vanilla, alternate": (lambda m: topologies.vanilla(m, "pool1"), schedules.Alternate()),
        "vanilla, splitfed_v1": (lambda m: topologies.vanilla(m, "pool1"), schedules.SplitFedV1()),
        "vanilla, splitfed_v2": (lambda m: topologies.vanilla(m, "pool1"), schedules.SplitFedV2()),
        "vanilla, splitfed_v3": (lambda m: topologies.vanilla(m, "pool1"), schedules.SplitFedV3()),
        "vanilla, blind": (lambda m: topologies.vanilla(m, "pool1"), schedules.Blind()),
        "vanilla, blind, clients averaged": (lambda m: topologies.vanilla(m, "pool1"), schedules.Blind(average=True)),
        "vanilla, local_loss": (lambda m: topologies.vanilla(m, "pool1"), schedules.LocalLoss()),
        "vanilla, sglr": (lambda m: topologies.vanilla(m, "pool1"), schedules.Sglr()),
        "uncut, federated averaging": (uncut, schedules.SplitFedV1()),
    }
    for table, options in PARTITIONS.items():
        alpha = options.get("dirichlet")
        yield Line(table, "uncut, centralised", uncut, schedules.Joint(), clients_of(alpha, pool=True), make, 30, 32)
        for name, (shape, plan) in shapes.items():
            yield Line(table, name, shape, plan, clients_of(alpha), make, 30, 32)
        own = schedules.Sequential(hand_over="none")
        yield Line(table, "uncut, one client alone", uncut, own, clients_of(alpha), make, 30, 32, alone=True)


def tabular(parties: int) -> Callable[[int], Federation]:
    return lambda seed: sf.data.breast_cancer().vertical(parties).clients(1, auxiliary=0, victims=1, seed=seed)


def strips(parties: int) -> Callable[[int], Federation]:
    return lambda seed: sf.data.mnist5k().strips(parties).clients(1, auxiliary=0, victims=1, seed=seed)


def joined(shapes: list[tuple[int, ...]], hidden: int, outputs: int) -> Callable[[nn.Module], sf.Topology]:
    """Vertical: a small network a party, side by side, and one layer on top; labels at the last party."""

    def make(_: nn.Module) -> sf.Topology:
        bottoms = {f"party{i}": mlp(shape, hidden, (hidden,), seed=None) for i, shape in enumerate(shapes)}
        top = nn.Sequential(nn.ReLU(), nn.Linear(hidden * len(shapes), outputs))
        return topologies.vertical(bottoms, top, labels=f"party{len(shapes) - 1}")

    return make


def first_only(name: str, outputs: int, hidden: int, shape: tuple[int, ...]) -> Callable[[nn.Module], sf.Topology]:
    """The label party with its own part of each row alone."""

    def make(_: nn.Module) -> sf.Topology:
        segment = sf.Segment("model", name, mlp(shape, outputs, (hidden, hidden), seed=None), (name,), ("out",), "")
        return sf.Topology("alone", (segment,), {name: name}, (sf.Head("out", name, name),))

    return make


def by_columns() -> Iterator[Line]:
    """Two and four parties that hold parts of the same rows."""
    sets: dict[str, tuple[Any, Any, int, int, int]] = {
        "breast cancer": (sf.data.breast_cancer, tabular, 16, 1, 60),
        "MNIST-5k strips": (sf.data.mnist5k, strips, 64, 10, 30),
    }
    for label, (load, split, hidden, outputs, rounds) in sets.items():
        table = f"vertical {label}"
        whole = partial(mlp, load().shape, outputs, (hidden, hidden))
        rows = partial(undivided, load)
        yield Line(table, "uncut, all columns", uncut, schedules.Joint(), rows, whole, rounds, 32)
        for parties in (2, 4):
            held = split(parties)(0).victims.features
            shapes = [held[f"party{i}"].shape for i in range(parties)]
            make, last = joined(shapes, hidden, outputs), f"party{parties - 1}"
            name = f"vertical, {parties} parties"
            yield Line(table, name, make, schedules.Joint(), split(parties), whole, rounds, 32)
            one = first_only(last, outputs, hidden, held[last].shape)
            name = f"label party alone, of {parties}"
            yield Line(table, name, one, schedules.Joint(), split(parties), whole, rounds, 32)


def undivided(load: Callable[[], sf.Dataset], seed: int) -> Federation:
    """All columns at one party."""
    return load().clients(1, auxiliary=0, victims=1, seed=seed)


def measured(line: Line, seed: int, rate: float) -> dict[str, float]:
    """Train once; validation and test accuracy, each client's on its own rows and on everybody's."""
    data = line.data(seed)
    with stream(seed):
        topology = line.topology(line.model())
    optim = sf.Optim("SGD", {"lr": rate, "momentum": 0.9})
    try:
        run = sf.train(
            topology,
            data,
            schedule=line.schedule,
            rounds=line.rounds,
            batch_size=line.batch_size,
            optimizer=optim,
            seed=seed,
            evaluation=sf.Evaluation(every=line.rounds),
        )
    except sf.NonFinite:
        return {"validation": 0.0, "own": 0.0, "all": 0.0, "diverged": 1.0}
    last = run.history[-1]
    union = data.test_union()
    scores = [data.task.metric(run.predict(union.x, client=k), union.y) for k in _different(run, line)]
    return {
        "validation": last["validation"]["union"],
        "own": last["test"]["union"],
        "all": sum(scores) / len(scores),
        "megabytes": run.bytes / 1e6,
        "seconds": run.seconds,
    }


def _different(run: sf.Run, line: Line) -> list[int]:
    """The clients whose models differ: one where segments are shared, else all of them."""
    own = [run.schedule.newest(client, run.trainer.schedule_state) for client in range(run.engine.replicas)]
    return list(range(run.engine.replicas)) if own == list(range(run.engine.replicas)) else [0]


def complete(path: Path, only: str = "") -> None:
    """Measure what is missing in `path`, of the lines whose key holds `only`."""
    torch.set_num_threads(1)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {(e["key"], e["seed"], e["rate"]): e for e in entries(path)}
    for line in (*horizontal(), *by_columns()):
        if only not in line.key:
            continue
        for rate in RATES:
            for seed in TUNING:
                _once(path, done, line, seed, rate)
        best = max(RATES, key=partial(_validated, done, line.key))
        for seed in SEEDS:
            _once(path, done, line, seed, best)


def _validated(done: dict[tuple[str, int, float], dict[str, Any]], key: str, rate: float) -> float:
    return sum(float(done[key, seed, rate]["validation"]) for seed in TUNING)


def _once(path: Path, done: dict[tuple[str, int, float], dict[str, Any]], line: Line, seed: int, rate: float) -> None:
    if (line.key, seed, rate) in done:
        return
    entry = {"key": line.key, "seed": seed, "rate": rate, **measured(line, seed, rate)}
    done[line.key, seed, rate] = entry
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
        file.flush()
        os.fsync(file.fileno())
    print(entry, flush=True)


def entries(path: Path) -> list[dict[str, Any]]:
    """Return what is in `path`; a line that was cut short is left out."""
    found = []
    for text in path.read_text("utf-8").splitlines() if path.is_file() else []:
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return found


def tables(path: Path) -> str:
    """Return the tables as Markdown; a line with fewer seeds than wanted says so."""
    by_line: dict[str, dict[float, list[dict[str, Any]]]] = {}
    for entry in entries(path):
        if entry["seed"] not in TUNING:
            by_line.setdefault(entry["key"], {}).setdefault(entry["rate"], []).append(entry)
    text, table = [], ""
    done = {(e["key"], e["seed"], e["rate"]): e for e in entries(path)}
    order = list(dict.fromkeys(map(_head, by_line)))
    for key in sorted(by_line, key=lambda key: order.index(_head(key))):
        rates = by_line[key]
        tuned = all((key, seed, rate) in done for seed in TUNING for rate in RATES)
        best = max(RATES, key=partial(_validated, done, key)) if tuned else next(iter(rates))
        found = rates.get(best, [])
        if not found:
            continue
        head, name = _head(key), key.split(" | ")[1]
        if head != table:
            table = head
            text += ["", f"### {head}", "", "| | own test rows | all test rows | rate | MB sent | seeds |"]
            text += ["|---|---|---|---|---|---|"]
        cells = [_interval([e[k] for e in found]) for k in ("own", "all")]
        sent = found[0].get("megabytes", float("nan"))
        text.append(f"| {name} | {' | '.join(cells)} | {found[0]['rate']} | {sent:.1f} | {len(found)} |")
    return "\n".join(text)


def _head(key: str) -> str:
    return key.split(" | ")[0]


def _interval(values: list[float]) -> str:
    found = mean_interval(values, low=0.0, high=1.0)
    return f"{found.mean:.3f} ({found.low:.3f} to {found.high:.3f})" if found.known else f"{found.mean:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="papers")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--only", default="", help="lines whose name holds this text")
    options = parser.parse_args()
    path = Path(options.folder) / "accuracy.jsonl"
    if options.table:
        print(tables(path))
    else:
        complete(path, options.only)


if __name__ == "__main__":
    main()
