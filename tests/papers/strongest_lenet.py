"""The strongest reconstruction attack on LeNet's first pooling: with and without noise, over its budget and its rows.

MNIST-5k, 1500 auxiliary images. What the choice among members costs (`splitfed.attacks.reconstruction.strongest`), how
far more work and more auxiliary rows help, and what a server reaches that may query the client but not see its weights.
"""

from __future__ import annotations

from functools import partial
from math import log10
from pathlib import Path
from typing import Any

import splitfed as sf
from splitfed.attacks.base import unwrap
from splitfed.attacks.reconstruction.strongest import Strongest
from splitfed.attacks.threat_model import BLACK_BOX, WHITE_BOX
from splitfed.core.optimizers import Optim
from splitfed.defenses import Noise
from splitfed.models import lenet
from tests.papers.table import Cell, Measured, Table, markdown, mean

SEEDS = (0, 1, 2)
VICTIMS, AUXILIARY, ROUNDS, QUERIES = 200, 1500, 4, 5
NOISE = (0.0, 1.0)
AIMS = {0.0: 80.0, 1.0: 19.7}
"""Relative noise -> dB that the strongest attack with weights has to exceed with its budget "quick"."""
FEWER = (375, 750)
FLOORS = ("mean_image", "random_pairing", "linear_inverse", "nearest_1", "nearest_10")


def measure(budget: str, noise: float, auxiliary: int, white_box: bool, seed: int, place: Path) -> dict[str, Any]:
    """Train the client and attack it: dB by who, the member chosen, every attempt, and whether it has converged."""
    data = sf.data.mnist5k().clients(1, auxiliary=auxiliary, victims=VICTIMS, seed=seed)
    defenses = Noise(scale=noise, relative=True) if noise else ()
    run = sf.train(
        sf.topologies.vanilla(lenet((1, 28, 28), 10, seed=seed), "pool1"),
        data,
        rounds=ROUNDS,
        defenses=defenses,
        optimizer=Optim("Adam", {"lr": 1e-3}),
        seed=seed,
    )
    threat_model = WHITE_BOX if white_box else BLACK_BOX
    attack = Strongest.with_budget(budget, threat_model=threat_model, queries=QUERIES if noise else 1)
    (result,) = run.attack(attack)
    choice = unwrap(result.selection)
    return {
        "accuracy": run.accuracy,
        "psnr": {who: scores["psnr"].mean for who, scores in result.scores.items()},
        "ssim": result.scores["attack"]["ssim"].mean,
        **choice.to_json(),
    }


def key(budget: str, noise: float, auxiliary: int, white_box: bool, seed: int) -> str:
    """Return the name of a measurement."""
    return f"{budget}, noise {noise:g}, {auxiliary} rows, {'white' if white_box else 'black'} box, seed {seed}"


def _rows() -> list[tuple[str, float, int, bool]]:
    """Return budget, noise, auxiliary rows and whether weights are known, of every line, the first ones first."""
    return [
        *(("quick", noise, AUXILIARY, white) for white in (True, False) for noise in NOISE),
        *(("quick", noise, rows, True) for rows in FEWER for noise in NOISE),
        *(("standard", noise, AUXILIARY, white) for white in (True, False) for noise in NOISE),
    ]


def show(done: Measured) -> str:
    """Return dB by line with its baselines, and the curves of the first seed."""
    lines, curves = [], []
    for row in _rows():
        cells = [(seed, done[name]) for seed in SEEDS if (name := key(*row, seed)) in done]
        if not cells:
            continue
        budget, noise, auxiliary, white = row
        reached = [cell["psnr"]["attack"] for _, cell in cells]
        floors = [max(v for who, v in cell["psnr"].items() if who in FLOORS) for _, cell in cells]
        lines.append(
            [
                f"{noise:g}",
                "known" if white else "queries alone",
                auxiliary,
                budget,
                mean(reached),
                mean(floors),
                ", ".join(dict.fromkeys(cell["member"] for _, cell in cells)),
                f"{sum(cell['converged'] is True for _, cell in cells)} of {len(cells)}",
                len(cells),
            ]
        )
        if auxiliary == AUXILIARY and cells[0][0] == SEEDS[0]:
            name = f"noise {noise:g}, {'weights known' if white else 'queries alone'}, {budget}"
            curves.append(f"- {name}: {_curve(cells[0][1]['tried'])}")
    head = ["noise", "client's weights", "auxiliary rows", "budget", "PSNR in dB", "best floor", "member", "converged"]
    aims = "; ".join(f"above {aim} dB at relative noise {noise:g}" for noise, aim in AIMS.items())
    told = "Held-out dB of every decoder and search by the size of its work (epochs or iterations: dB), seed 0:"
    return "\n\n".join([f"Aims: {aims}.", markdown([*head, "seeds"], lines), told, "\n".join(curves)])


def _curve(tried: list[dict[str, Any]]) -> str:
    """Return the held-out error of every member that has steps, in dB, by size."""
    found: dict[str, list[str]] = {}
    for attempt in tried:
        if attempt["size"]:
            found.setdefault(attempt["member"], []).append(f"{attempt['size']}: {decibels(attempt['error']):.1f}")
    return "; ".join(f"{member} ({', '.join(sizes)})" for member, sizes in found.items() if len(sizes) > 1)


def decibels(error: float) -> float:
    """Return the PSNR of a mean squared error, for values in [0, 1]."""
    return -10 * log10(error)


BUDGET = f"""LeNet cut after its first pooling, {ROUNDS} rounds of Adam, {VICTIMS} victims, an interval over seeds.
Noise is Gaussian, in units of the deviation of what is released; under it the adversary asks for every auxiliary row
{QUERIES} times. The member is chosen on auxiliary rows held out, never on victims. Budgets are those of `strongest`;
"converged" counts the runs in which twice the work would have gained the chosen member less than .2 dB."""

TABLE = Table(
    "strongest_lenet",
    "The strongest attack on LeNet's first pooling",
    BUDGET,
    tuple(
        Cell(key(*row, seed), partial(measure, *row, seed))
        for rows in (_rows()[:2], _rows()[2:6], _rows()[6:])
        for seed in SEEDS
        for row in rows
    ),
    show,
)
