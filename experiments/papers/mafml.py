"""MAFML on rotated MNIST: four domains that teach each other by soft labels, beside other uses of public rows.

Zhou, Li, Chen, Ding, "Model agnostic federated mutual learning", 2023, table 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import splitfed as sf
from experiments.papers.table import PERCENT, Cell, Measured, Table, markdown, mean, signed, verdict
from splitfed.core.optimizers import Optim
from splitfed.core.random import derive, stream
from splitfed.federated import MAFML, Aggregation, FedMD, Method
from splitfed.models.lenet import lenet
from splitfed.registry import load
from splitfed.schedules import Independent
from splitfed.topologies import local

SEEDS = (0, 1, 2)
ROUNDS, EVERY, DOMAINS = 3000, 50, 4
SHARES = (0.05, 0.10, 0.15)
METRICS = {"ACC": "union", "BWT": "own", "FWT": "others"}
# As often as FedAvg may average for the bytes that MAFML sends, and how many local steps each client takes between.
AVERAGES = 33
BETWEEN = round(ROUNDS / AVERAGES)
FEW = f"FedAvg, {AVERAGES} averages"
# What the paper's table 1 says, in percent: ACC, BWT, FWT by method and share of public rows. Its FedAvg is the one at
# equal communication.
PAPER: dict[tuple[str, float | None], tuple[float, float, float] | None] = {
    ("IND", None): (68.45, 92.56, 60.47),
    (FEW, None): (86.50, 86.50, 86.50),
    ("FedAvg", None): None,
    ("AGG", 0.05): (85.13, 92.33, 82.73),
    ("AGG", 0.10): (85.25, 92.00, 83.00),
    ("AGG", 0.15): (87.83, 92.36, 86.22),
    ("FedMD", 0.05): (85.09, 91.50, 82.95),
    ("FedMD", 0.10): (85.09, 91.17, 83.06),
    ("FedMD", 0.15): (86.75, 91.33, 85.22),
    ("MAFML", 0.05): (87.79, 94.00, 86.00),
    ("MAFML", 0.10): (88.21, 92.67, 87.67),
    ("MAFML", 0.15): (89.21, 92.33, 88.17),
}


def method_of(name: str) -> Method | None:
    """Return the method that the table calls `name`; None for training alone."""
    if name in ("FedAvg", FEW):
        return load("methods", "fedavg")()  # type: ignore[no-any-return]
    return {"AGG": Aggregation(), "FedMD": FedMD(rows=32, transfer=20), "MAFML": MAFML()}.get(name)


def train(
    name: str, share: float | None, seed: int, rounds: int, every: int, per_class: int = 100, once: bool = True
) -> sf.Run:
    """Train four clients, one a domain, each from weights of its own (FedAvg: from the first one's).

    `once`: whether the images are divided into training and test once for all angles, or by each client for itself.
    """
    images = sf.data.rotated_mnist(per_class=per_class, seed=seed)
    images = images if once else replace(images, groups=None)
    rows = images.clients(
        DOMAINS, by_domain=True, auxiliary=0, victims=0, validation=0.1, test=0.15, public=share or 0.0, seed=seed
    )
    topologies = []
    for replica in range(DOMAINS):
        with stream(derive(seed, "mafml table", replica)):
            topologies.append(local(lenet((1, 28, 28), 10, seed=None)))
    return sf.train(
        topologies,
        rows,
        schedule=Independent(steps=BETWEEN if name == FEW else 1),
        method=method_of(name),
        optimizer=Optim("Adam", {"lr": 1e-3, "weight_decay": 1e-4}),
        rounds=rounds,
        batch_size=32,
        evaluation=sf.Evaluation(every=every, across_clients=True),
        seed=seed,
    )


def measure(
    name: str,
    share: float | None,
    seed: int,
    once: bool,
    state: Path,
    rounds: int = ROUNDS,
    every: int = EVERY,
) -> dict[str, Any]:
    """Train; return the test scores, means over domains in percent, of the round with the best validation ACC."""
    if name == FEW:
        rounds, every = AVERAGES, 1
    run = train(name, share, seed, rounds, every, once=once)
    scored = [entry for entry in run.history if "validation" in entry]
    best = max(scored, key=lambda entry: _means(entry["validation"])["ACC"])
    sent = run.bytes / 2**20
    return {**_means(best["test"]), "round": best["round"] + 1, "last": _means(scored[-1]["test"])["ACC"], "MiB": sent}


def _means(scores: Mapping[str, Any]) -> dict[str, float]:
    return {name: 100 * sum(scores["across"][key]) / DOMAINS for name, key in METRICS.items()}


def show(done: Measured) -> str:
    """Return a table and its claims for each way to divide the images, and what they mean."""
    parts = []
    for once, told in ((True, DIVIDED_ONCE), (False, DIVIDED_APART)):
        lines = [line for (name, share), paper in PAPER.items() if (line := _line(done, name, share, paper, once))]
        if lines:
            head = ["method (public rows)", *METRICS, "paper: ACC / BWT / FWT", "sent, MiB", "seeds"]
            parts += [told, markdown(head, lines)]
            head = ["MAFML's ACC minus that of", *(f"{100 * share:.0f} %" for share in SHARES)]
            rows = [[other, *(_claim(done, other, share, once) for share in SHARES)] for other in OTHERS]
            rows = [row for row in rows if any(row[1:])]
            parts += [markdown(head, rows)] if rows else []
    return "\n\n".join([*parts, REMARKS])


def _line(
    done: Measured, name: str, share: float | None, paper: tuple[float, float, float] | None, once: bool
) -> list[str]:
    """Return the row of a method and share: ours, the paper's, what was sent; nothing where it was not measured."""
    mine = [done[key] for seed in SEEDS if (key := _key(name, share, seed, once)) in done]
    if not mine:
        return []
    ours = [mean([entry[metric] for entry in mine], PERCENT, 1) for metric in METRICS]
    theirs = " / ".join(f"{value:.2f}" for value in paper or ())
    sent = sum(entry["MiB"] for entry in mine) / len(mine)
    return [_called(name, share), *ours, theirs, f"{sent:.1f}", str(len(mine))]


def _claim(done: Measured, other: str, share: float, once: bool) -> str:
    """Say whether MAFML is above another method, as the paper has it at every share, on the same seeds."""
    than = None if (other, None) in PAPER else share
    keys = [(_key("MAFML", share, seed, once), _key(other, than, seed, once)) for seed in SEEDS]
    found = [done[one]["ACC"] - done[two]["ACC"] for one, two in keys if one in done and two in done]
    return f"{signed(found)}: {verdict(found)}" if found else ""


def _called(name: str, share: float | None) -> str:
    return name if share is None else f"{name} ({100 * share:.0f} %)"


def _key(name: str, share: float | None, seed: int, once: bool = True) -> str:
    return f"{_called(name, share)} | {'divided once | ' if once else ''}seed {seed}"


def _cells() -> tuple[Cell, ...]:
    """Return what tells most first: FedAvg at equal communication both ways, then every method at 10 %, then others."""
    ways = [(name, share, once) for once in (True, False) for name, share in PAPER]

    def rank(way: tuple[str, float | None, bool], seed: int) -> tuple[bool, ...]:
        name, share, once = way
        return name != FEW, not once, share not in (None, 0.10)

    plans = sorted(((way, seed) for seed in SEEDS for way in ways), key=lambda plan: rank(*plan))
    return tuple(Cell(_key(n, s, seed, once), partial(measure, n, s, seed, once)) for (n, s, once), seed in plans)


OTHERS = ("IND", FEW, "FedAvg", "AGG", "FedMD")
BUDGET = f"""100 MNIST images of each digit, drawn by the seed from MNIST-5k, upright and turned clockwise by 20, 40 and
60 degrees; each angle is a client with 750 rows to train on (public ones among them), 100 to validate and 150 to test.
LeNet, Adam 1e-3 with weight decay 1e-4, batches of 32, {ROUNDS} iterations (the paper: 10 000), scored every {EVERY};
the round with the best mean validation ACC is reported. ACC: accuracy on the union of all test rows, BWT: on the
client's own, FWT: on the others'; means over the four clients, in percent, with the 95 % Student interval over
{len(SEEDS)} seeds of images, split, weights and order. Clients start from weights of their own (FedAvg: from the first
one's); optimizers keep their state from round to round. No search."""
DIVIDED_ONCE = "Images divided once for all angles: nobody trains on an image that anybody is tested on."
DIVIDED_APART = """Images divided by each client for itself, as far as the paper tells: a client's test image is, at
another angle, as a rule among the other clients' training rows."""
REMARKS = f"""The paper's FedAvg is one at equal communication, which is {AVERAGES} averages for the bytes that MAFML
sends. It has 86.5; ours has 93.5 there where each client divides the images for itself and 91.7 where they are divided
once. So that the test images were trained on at other angles accounts for about two points of the seven, not settled
with three seeds (-1.9, -4.4 to 0.6), and why ours is five points above the paper's is not known. Averaging after every
iteration costs 90 times the bytes and gains about a point; both FedAvgs end as one model, so that their three figures
agree but for where they are scored.

FedMD passes over all public rows with their labels twenty times, scores 32 of them an iteration, and takes one step
towards the mean and one on its own rows; how the paper adapts FedMD to iterations is not known, nor which of its
weights and images were drawn anew for each figure. AGG trains on as many rows an iteration as IND. With each client
dividing for itself IND and AGG come out where the paper has them, MAFML within about two points of it; FedAvg and FedMD
stand above MAFML here, where the paper has them below. How the authors ran the two is not told, so the order is not
reproduced, and MAFML's rule is not refuted: it is above AGG, which trains on the same rows and labels without soft
labels, by what its second table says."""

TABLE = Table("mafml", "Mutual learning across domains (MAFML) on rotated MNIST", BUDGET, _cells(), show)
