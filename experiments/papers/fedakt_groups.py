"""FedAKT with the groups of models of its paper, and with 10 to 200 clients, on Fashion-MNIST.

Liu, Jin, Tang, Zhai, Lu, Yu, Bai, "Adapter-guided knowledge transfer for heterogeneous federated learning", Journal of
Systems Architecture 159, 2025: five CNNs or five ResNets take turns among the clients. Partitions, rows a client, rate
and rounds are those of the table `fedakt`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.papers.fedakt import EACH, RATE, ROUNDS, SEEDS, SETTINGS, scores_of, train
from experiments.papers.fedakt_models import CLASSES, CNNS, RESNETS, Group
from experiments.papers.fedakt_shown import ALONE, WHOLE, Seeds, minus
from experiments.papers.installed import WhereInstalled
from experiments.papers.table import PERCENT, Cell, Measured, markdown, mean, signed

METHODS = (ALONE, "FedProto", "FML", "FedKD", WHOLE)
WEIGHT, EVERY = 3.0, 5
GROUPS: dict[str, tuple[Group, tuple[int, ...]]] = {"CNNs": (CNNS, (20, 10, 50, 100, 200)), "ResNets": (RESNETS, (20,))}
PAPER: dict[tuple[str, int], dict[str, str]] = {
    ("CNNs", 20): {"2 classes a client": "+0.84 / +1.47 / +0.85", "Dirichlet .1": "+0.64 / +1.32 / +2.00"},
    ("CNNs", 50): {"2 classes a client": "- / +3.42 / -", "Dirichlet .1": "- / +1.59 / -"},
    ("CNNs", 100): {"2 classes a client": "- / +3.02 / -", "Dirichlet .1": "- / +2.31 / -"},
    ("CNNs", 200): {"2 classes a client": "- / +2.51 / -", "Dirichlet .1": "- / +3.20 / -"},
}
"""Group and number of clients -> partition -> points of FedAKT over the best of the others on CIFAR-10 / CIFAR-100 /
Tiny-ImageNet; the paper's partition of CIFAR-100 has ten classes a client."""


def measure(
    name: str, setting: str, group: str, clients: int, seed: int, state: Path, rounds: int = ROUNDS, every: int = EVERY
) -> dict[str, Any]:
    """Train; return test scores over clients in percent, and the bytes that a client exchanged in a round."""
    weight = WEIGHT if name == WHOLE else None
    makes, rows = GROUPS[group][0], EACH * clients
    run = train(name, weight, setting, seed, rounds, every, rows, clients, makes)
    return {**scores_of(run), "bytes": run.bytes / clients / rounds}


def expected(name: str, group: Group) -> tuple[str, float] | None:
    """Return what a client exchanges in a round, in words, and its bytes; "at most" where that depends on the data."""
    numbers = {
        "adapter": sum(t.numel() * t.element_size() for t in _extractor(group).values()),
        "model": sum(t.numel() * t.element_size() for t in group.model(group.makes[0]).state_dict().values()),
    }
    if name == WHOLE:
        return "2 times the adapter", 2.0 * numbers["adapter"]
    if name == "FML":
        return "2 times the meme", 2.0 * numbers["model"]
    if name == "FedKD":
        return "at most 2 times the mentee", 2.0 * numbers["model"]
    if name == "FedProto":
        return "at most a prototype a class, each way", 2.0 * CLASSES * group.features * 4
    return None


def _extractor(group: Group) -> dict[str, Any]:
    model = group.model(group.makes[0]).state_dict()
    return {name: tensor for name, tensor in model.items() if not name.startswith("head.")}


def keyed(name: str, setting: str, group: str, clients: int, seed: int) -> str:
    """Return the key of a cell."""
    return f"{name} | {group}, {clients} clients | {setting} | seed {seed}"


def show(done: Measured) -> str:
    """Return a table of scores with the margins over the best other method, and one of what is exchanged."""
    lines, exchanged = list[list[object]](), list[list[object]]()
    for group, (models, counts) in GROUPS.items():
        places = [(setting, group, clients) for clients in sorted(counts) for setting in SETTINGS]
        lines += [_line(rows, *place) for place in places if (rows := _found(done, *place))]
        for name in METHODS:
            told = expected(name, models)
            counted = [float(done[key]["bytes"]) for key in _keys(name, group) if key in done]
            if told and counted:
                words, size = told
                exchanged.append([group, name, words, f"{size / 2**20:.3f}", f"{fmean(counted) / 2**20:.3f}"])
    head = ["models", "clients", "partition", *METHODS, f"{WHOLE} minus the best other", "paper", "seeds"]
    parts = [markdown(head, lines)]
    if exchanged:
        head = ["models", "method", "a client exchanges in a round", "MiB by that", "MiB counted"]
        parts.append(markdown(head, exchanged))
    return "\n\n".join([*parts, REMARKS])


def _keys(name: str, group: str) -> list[str]:
    places = [(setting, clients, seed) for clients in GROUPS[group][1] for setting in SETTINGS for seed in SEEDS]
    return [keyed(name, setting, group, clients, seed) for setting, clients, seed in places]


def _found(done: Measured, setting: str, group: str, clients: int) -> dict[str, Seeds]:
    keys = {name: {seed: keyed(name, setting, group, clients, seed) for seed in SEEDS} for name in METHODS}
    found = {name: {seed: done[key] for seed, key in one.items() if key in done} for name, one in keys.items()}
    return {name: one for name, one in found.items() if one}


def _line(rows: dict[str, Seeds], setting: str, group: str, clients: int) -> list[object]:
    """Return a row of the table; of the others the best is the one with the best mean here."""
    scores = [mean([e["accuracy"] for e in rows[n].values()], PERCENT, 1) if n in rows else "to do" for n in METHODS]
    others = [name for name in METHODS if name != WHOLE and name in rows]
    best = max(others, key=lambda name: fmean(float(e["accuracy"]) for e in rows[name].values()), default=None)
    pairs = minus(rows[WHOLE], rows[best]) if best and WHOLE in rows else []
    margin = f"{signed(pairs, 1)} ({best})" if pairs else "to do"
    partition = setting.split(", ")[1]
    paper = PAPER.get((group, clients), {}).get(partition, "")
    return [group, clients, partition, *scores, margin, paper, min(len(one) for one in rows.values())]


def _cells() -> tuple[Cell, ...]:
    plans = [
        (name, setting, group, clients, seed)
        for seed in SEEDS
        for group, (_, counts) in GROUPS.items()
        for clients in counts
        for setting in SETTINGS
        for name in METHODS
    ]
    return tuple(Cell(keyed(*plan), partial(measure, *plan)) for plan in plans)


BUDGET = f"""As the table above: Fashion-MNIST in place of CIFAR-10, CIFAR-100 and Tiny-ImageNet, {EACH} rows a client,
35 % of them to train on, {ROUNDS} rounds of one local epoch, batches of 10, SGD at {RATE}, the round with the best mean
validation accuracy; lambda {WEIGHT:g}, the paper's for CIFAR. Of each group the makes take turns: five CNNs of
{CNNS.features} features (after FedGH, whose group the paper's own table of models is taken to be; it is not established
that they are the same), ResNets of 4, 6, 8, 10 and 18 layers of {RESNETS.features}. Adapter, meme and mentee are of the
smallest make. Three seeds; half a minute (10 clients) to twenty minutes (200 clients, ResNets) a measurement."""
REMARKS = """The paper's margins are over the best of all that it compares with, here over that of those in the table
with the best mean over the same seeds, training alone among them. What FedKD exchanges depends on the rank that its
updates have; of FedProto on the classes that a client holds."""

TABLE = WhereInstalled("fedakt_groups", "FedAKT by group of models and number of clients", BUDGET, _cells(), show)
