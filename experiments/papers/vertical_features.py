"""Features of a vertical run's peer, by three attacks of the active party: what correlated features of its own add.

Luo, Wu, Xiao, Ooi, "Feature inference attack on model predictions in vertical federated learning" (ICDE 2021) beside
the two attacks of He, Zhang, Lee (ACSAC 2019), which look at every row by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import splitfed as sf
from experiments.papers.table import AMOUNT, Cell, Measured, Table, markdown, mean
from splitfed.attacks import Attack, Grn, InverseNetwork, Rmle
from splitfed.core.optimizers import Optim
from splitfed.core.topology import Topology
from tests.topologies.vertical_examples import convolution, perceptron, with_active

SEEDS = (0, 1, 2)
ATTACKS: dict[str, Attack] = {
    "grn": Grn.with_budget("quick"),
    "rmle": Rmle.with_budget("quick"),
    "inverse_network": InverseNetwork.with_budget("quick", queries=1),
}
# Setting -> how many numbers the peer releases of how many features.
SETTINGS = {
    "tumours, wide": "10 columns, an MLP 10-16-16",
    "tumours, narrow": "10 columns, an MLP 10-16-4",
    "strips, MLP": "the left half, an MLP 392-128-64",
    "strips, convolution": "the left half, a 3x3 convolution to 4 channels and pooling: 392 numbers",
}


def place(setting: str, seed: int, rows: int = 5000) -> tuple[Topology, sf.data.Federation]:
    """Return the topology and the data of `setting`; of the images the first `rows`."""
    if setting.startswith("tumours"):
        return _tumours(16 if setting.endswith("wide") else 4, seed)
    images = sf.data.mnist5k().rows(range(rows)).halves(("peer", "active"))
    data = images.clients(1, auxiliary=min(800, rows // 5), victims=256, validation=0.0, test=0.1, seed=seed)
    if setting.endswith("MLP"):
        bottoms = {role: perceptron((392, 128, 64), seed + i) for i, role in enumerate(("peer", "active"))}
        return with_active(dict(bottoms), perceptron((128, 10), seed)), data
    filters = {role: convolution(seed + i) for i, role in enumerate(("peer", "active"))}
    return with_active(dict(filters), perceptron((784, 64, 10), seed)), data


def _tumours(released: int, seed: int) -> tuple[Topology, sf.data.Federation]:
    """The standard errors at the peer, means and worst cells at the active party; every column scaled to (0, 1)."""
    raw = sf.data.breast_cancer()
    low, high = raw.x.min(0).values, raw.x.max(0).values
    scaled = sf.Dataset(raw.name, ((raw.x - low) / (high - low)).clamp(0, 1), raw.y, raw.task, (0.0, 1.0))
    parts = {"peer": range(10, 20), "active": [*range(10), *range(20, 30)]}
    data = scaled.vertical(parts).clients(1, auxiliary=100, victims=200, validation=0.0, test=0.1, seed=seed)
    bottoms = {"peer": perceptron((10, 16, released), seed), "active": perceptron((20, 16, 8), seed + 1)}
    return with_active(dict(bottoms), perceptron((released + 8, 1), seed)), data


def measure(
    setting: str,
    seed: int,
    place_of_state: Path,
    attacks: Mapping[str, Attack] = ATTACKS,
    rows: int = 5000,
    rounds: int = 5,
) -> dict[str, Any]:
    """Train `setting` and let the active party attack it: mean squared error of the peer's features, by predictor."""
    topology, data = place(setting, seed, rows)
    run = sf.train(topology, data, rounds=rounds, optimizer=Optim("Adam", {"lr": 1e-3}), seed=seed)
    found: dict[str, Any] = {"accuracy": run.accuracy}
    for name, attack in attacks.items():
        (result,) = run.attack(attack, adversary="active0")
        found[name] = result.scores["attack"]["mse"].mean
        found |= {who: result.scores[who]["mse"].mean for who in ("mean_image", "random_pairing")}
    return found


def show(done: Measured) -> str:
    """Return a row a setting: errors of the three attacks and of the baselines, in thousandths."""
    lines = []
    for setting, peer in SETTINGS.items():
        mine = [entry for key, entry in done.items() if key.startswith(f"{setting} seed")]
        if mine:
            errors = [
                mean([1000 * e[who] for e in mine], AMOUNT, 1) for who in (*ATTACKS, "mean_image", "random_pairing")
            ]
            lines.append([f"{setting}: {peer}", f"{100 * sum(e['accuracy'] for e in mine) / len(mine):.1f} %", *errors])
    head = ["peer's features and bottom", "accuracy", *(f"`{name}`" for name in ATTACKS), "mean row", "other victim"]
    return markdown(head, lines)


BUDGET = f"""Mean squared error, times 1000, of the peer's features as the active party predicts them; data in (0, 1).
Two parties, the active one with features, labels and top; {len(SEEDS)} seeds, means with 95 % Student intervals; 5
rounds of training, Adam 1e-3. Victims: 200 tumours, 256 images, none trained on. `grn` knows the weights of the peer's
bottom and its own features of the same rows, `rmle` the weights alone, `inverse_network` asks queries and has 100
auxiliary tumours or 800 auxiliary images, as has the mean row. Only the peer's part is scored. Fast budgets: `grn` 200
epochs in batches of 32 at 5e-3 (the paper's 60 epochs in batches of 64 are over thousands of rows), `rmle` 300
iterations, `inverse_network` 5 epochs. Luo et al. (ICDE 2021) observe the joint model's prediction,
here the peer's release is seen: their figures (plots over the share of unknown features, on other data) have no cell to
set beside these."""


TABLE = Table(
    "vertical_features",
    "Vertical feature inference: `grn` beside attacks row by row",
    BUDGET,
    tuple(Cell(f"{setting} seed {seed}", partial(measure, setting, seed)) for seed in SEEDS for setting in SETTINGS),
    show,
)
