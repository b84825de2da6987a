"""The strongest attack on LeNet, with the client's weights: what each budget finds, beside an adversary in plain torch.

MNIST-5k, 1500 auxiliary images, 64 victims. The adversary who tried it first had the same runs, victims and knowledge,
and one afternoon: second-order searches where a release determines the row, wide decoders where it does not.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import splitfed as sf
from experiments.papers.table import AMOUNT, DECIBELS, Cell, Measured, Table, markdown, mean
from splitfed.attacks.base import unwrap
from splitfed.attacks.reconstruction.strongest import Strongest
from splitfed.attacks.threat_model import WHITE_BOX
from splitfed.core.defense import Defense
from splitfed.core.optimizers import Optim
from splitfed.defenses import DistanceCorrelation, Dropout, Noise, Quantization, TopK
from splitfed.models import lenet

SEEDS = {"quick": (0, 1, 2), "standard": (0,)}
VICTIMS, AUXILIARY, ROUNDS = 64, 1500, 4
DEFENSES: dict[str, tuple[Defense, ...]] = {
    "none": (),
    "distance correlation .5": (DistanceCorrelation(0.5),),
    "noise .5": (Noise(scale=0.5, relative=True),),
    "dropout .5": (Dropout(rate=0.5),),
    "2 bits": (Quantization(bits=2),),
    "top_k 64": (TopK(k=64),),
}
FOUND = {
    ("pool1", "none"): 89.0,
    ("pool1", "distance correlation .5"): 83.9,
    ("pool2", "none"): 34.0,
    ("pool2", "distance correlation .5"): 27.5,
    ("fc1", "none"): 22.9,
    ("pool1", "noise .5"): 22.6,
    ("pool1", "dropout .5"): 22.3,
    ("pool1", "2 bits"): 24.0,
    ("pool1", "top_k 64"): 23.6,
    ("pool2", "noise .5"): 18.8,
}
"""Cut and defense -> dB that the adversary in plain torch found, on one seed."""


def measure(budget: str, cut: str, defense: str, seed: int, place: Path) -> dict[str, Any]:
    """Train the client and attack it: dB of the victims, the member chosen, every attempt, whether it has converged."""
    guards = DEFENSES[defense]
    run = sf.train(
        sf.topologies.vanilla(lenet((1, 28, 28), 10, seed=seed), cut),
        sf.data.mnist5k().clients(1, auxiliary=AUXILIARY, victims=VICTIMS, seed=seed),
        rounds=ROUNDS,
        defenses=guards,
        optimizer=Optim("Adam", {"lr": 1e-3}),
        seed=seed,
    )
    (result,) = run.attack(Strongest.with_budget(budget, threat_model=WHITE_BOX))
    psnr = result.scores["attack"]["psnr"]
    return {
        "accuracy": run.accuracy,
        "psnr": {who: scores["psnr"].mean for who, scores in result.scores.items()},
        "median": psnr.median,
        "worst decile": psnr.worst_decile,
        "mse": result.scores["attack"]["mse"].mean,
        **unwrap(result.selection).to_json(),
    }


def key(budget: str, cut: str, defense: str, seed: int) -> str:
    """Return the name of a measurement."""
    return f"{budget}, {cut}, {defense}, seed {seed}"


def show(done: Measured) -> str:
    """Return dB by cut, defense and budget, beside what the adversary in plain torch found."""
    lines = []
    for (cut, defense), other in FOUND.items():
        for budget, seeds in SEEDS.items():
            cells = [done[name] for seed in seeds if (name := key(budget, cut, defense, seed)) in done]
            if not cells:
                continue
            reached = [cell["psnr"]["attack"] for cell in cells]
            lines.append(
                [
                    cut,
                    defense,
                    budget,
                    mean(reached, DECIBELS, 1),
                    *(mean([cell[part] for cell in cells], DECIBELS, 1) for part in ("median", "worst decile")),
                    mean([cell["mse"] for cell in cells], AMOUNT, 5),
                    mean([cell["psnr"]["mean_image"] for cell in cells], DECIBELS, 1),
                    f"{other:.1f}" + (": **below**" if sum(reached) / len(reached) < other else ""),
                    ", ".join(dict.fromkeys(cell["member"] for cell in cells)),
                    f"{sum(cell['converged'] is True for cell in cells)} of {len(cells)}",
                    f"{sum(cell['seconds'] for cell in cells) / len(cells):.0f}",
                ]
            )
    head = ["cut", "defense", "budget", "PSNR in dB", "median", "worst tenth", "MSE", "mean image", "plain torch"]
    return markdown([*head, "member", "converged", "seconds"], lines)


BUDGET = f"""LeNet on MNIST-5k, {ROUNDS} rounds of Adam at .001, {VICTIMS} victims, {AUXILIARY} auxiliary rows;
the adversary has the client's weights. PSNR is the mean over victims, of 100 dB at most; an interval over seeds. "plain
torch": what an adversary without this package found in an afternoon, with the same knowledge, on one seed. "converged"
counts the runs in which twice the work would have gained the chosen member less than .2 dB. About two minutes a
measurement with "quick", twenty with "standard"."""

TABLE = Table(
    "strongest_lenet",
    "The strongest attack on LeNet, with its weights",
    BUDGET,
    tuple(
        Cell(key(budget, *world, seed), partial(measure, budget, *world, seed))
        for budget, seeds in SEEDS.items()
        for seed in seeds
        for world in FOUND
    ),
    show,
)
