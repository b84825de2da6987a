"""The attacks of `outsiders` against `strongest` and `strongest_labels`: same run, victims, knowledge and row passes.

Twenty-four cells of reconstruction (LeNet on MNIST-5k and a perceptron on breast cancer, two cuts, four defenses) and
six of labels (vertical and U-shaped, three defenses), five seeds each.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import nn

import splitfed as sf
from experiments.papers.outsiders import DecoderOutsider, LabelOutsider, LbfgsOutsider, TableOutsider
from experiments.papers.table import Cell, Measured, Table, markdown
from splitfed.attacks.base import Attack
from splitfed.core.defense import Defense
from splitfed.core.optimizers import Optim
from splitfed.core.random import stream
from splitfed.defenses import Dropout, Marvell, MaxNorm, Noise, Quantization
from splitfed.models import lenet, mlp
from splitfed.registry import load
from splitfed.stats.intervals import mean_interval
from splitfed.topologies import u_shaped, vanilla, vertical
from splitfed.training.run import Run

SEEDS = range(5)
BLACK, WHITE = "black_box", "white_box"
STRONGEST = "strongest"
LIMITS = {"psnr": 0.5, "r2": 0.02, "auc": 0.02}
"""Metric -> by how much an outsider may be ahead on average over seeds."""

DEFENSES: dict[str, tuple[Defense, ...]] = {
    "none": (),
    "noise": (Noise(scale=0.5, relative=True),),
    "dropout": (Dropout(rate=0.5),),
    "quantization": (Quantization(bits=2),),
}
TABLE_DEFENSES = {**DEFENSES, "noise": (Noise(scale=2.0, relative=True),)}
LABEL_DEFENSES: dict[str, tuple[Defense, ...]] = {"none": (), "marvell": (Marvell(),), "max_norm": (MaxNorm(),)}

# Data -> rounds, learning rate, auxiliary rows, victims.
WORLDS = {
    "digits": (1, 1e-3, 48, 6),
    "more digits": (2, 1e-3, 200, 32),
    "mnist": (4, 1e-3, 1500, 64),
    "small table": (10, 3e-3, 60, 12),
    "table": (30, 3e-3, 120, 64),
}


class Comparison(Hashable, Protocol):
    """A world in which outsiders are held against an attack of the package."""

    @property
    def metric(self) -> str:
        """What is compared."""

    @property
    def name(self) -> str:
        """Return data, cut, defense and threat model."""

    def scores(self, seed: int, **changes: Any) -> dict[str, dict[str, float]]:
        """Return score and CPU seconds of `strongest`, with `changes` to its arguments, and of each outsider."""


@dataclass(frozen=True)
class Reconstruction:
    """A world, a threat model, and the row passes that either side may take.

    `width`: of the outsider's decoder.
    """

    data: str
    cut: str
    defense: str
    threat_model: str
    passes: int
    width: int = 64

    @property
    def metric(self) -> str:
        """R2 for tables, dB for images."""
        return "r2" if self.data.endswith("table") else "psnr"

    @property
    def name(self) -> str:
        """Return what stands in the table."""
        return f"{self.data}, {self.cut}, {self.defense}, {self.threat_model}"

    def run(self, seed: int) -> Run:
        """Return the run that is attacked: images behind LeNet, or breast cancer behind a perceptron."""
        tabular = self.metric == "r2"
        rounds, rate, auxiliary, victims = WORLDS[self.data]
        rows = {"table": sf.data.breast_cancer, "digits": sf.data.digits, "mnist": sf.data.mnist5k}
        data = rows[self.data.split()[-1]]()
        model: nn.Module = mlp((30,), 1, (24, 16, 16), seed=seed) if tabular else lenet(data.x.shape[1:], 10, seed=seed)
        return sf.train(
            vanilla(model, cut=self.cut),
            data.clients(1, auxiliary=auxiliary, victims=victims, seed=seed),
            rounds=rounds,
            seed=seed,
            defenses=(TABLE_DEFENSES if tabular else DEFENSES)[self.defense],
            optimizer=Optim("Adam", {"lr": rate}),
            evaluation=sf.Evaluation(every=rounds),
        )

    def strongest(self, **changes: Any) -> Attack:
        """Return what is held against outsiders."""
        kind = load("attacks", "strongest")
        # With weights it takes twice as many: half of them here, for equal work.
        passes = self.passes // (2 if self.threat_model == WHITE else 1)
        found: Attack = kind.with_budget("quick", threat_model=self.threat_model, passes=passes, **changes)
        return found

    def outsiders(self) -> dict[str, Attack]:
        """Return what an adversary of this threat model may try: with weights all of it."""
        found: dict[str, Attack] = (
            {"table": TableOutsider(self.passes)}
            if self.metric == "r2"
            else {"decoder": DecoderOutsider(self.passes, self.width)}
        )
        if self.threat_model == WHITE:
            # In small worlds what a decoder finds is seen where no weights are known.
            found = {} if self.data.endswith("digits") else found
            found |= {"lbfgs": LbfgsOutsider(self.passes), "lbfgs, prior": LbfgsOutsider(self.passes, prior=True)}
        return found

    def scores(self, seed: int, **changes: Any) -> dict[str, dict[str, float]]:
        """Train once and ask everybody."""
        run = self.run(seed)
        attacks = {STRONGEST: self.strongest(**changes), **self.outsiders()}
        return {name: _measured(partial(score, run, attack, self.metric)) for name, attack in attacks.items()}


@dataclass(frozen=True)
class Labels:
    """Breast cancer, whose labels the left of two parties, or the server of a U, does not see; 150 victims.

    Everybody knows the labels of the same twelve victims, six of a class.
    """

    topology: str
    defense: str
    rounds: int = 5
    metric: str = "auc"

    @property
    def name(self) -> str:
        """Return what stands in the table."""
        return f"labels, {self.topology}, {self.defense}, {BLACK}"

    def run(self, seed: int) -> Run:
        """Return the run that is attacked."""
        rows = sf.data.breast_cancer()
        if self.topology == "vertical":
            rows = rows.vertical({"left": range(15), "right": range(15, 30)})
            with stream(seed):
                bottoms = {role: nn.Sequential(nn.Linear(15, 12), nn.ReLU()) for role in ("left", "right")}
                top = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 1))
            topology = vertical(bottoms, top, labels="server")
        else:
            topology = u_shaped(mlp((30,), 1, (24, 16, 16), seed=seed), ("relu1", "relu3"))
        return sf.train(
            topology,
            rows.clients(1, auxiliary=60, victims=150, seed=seed),
            rounds=self.rounds,
            seed=seed,
            defenses=LABEL_DEFENSES[self.defense],
            optimizer=Optim("Adam", {"lr": 3e-3}),
            evaluation=sf.Evaluation(every=self.rounds),
        )

    def scores(self, seed: int, **changes: Any) -> dict[str, dict[str, float]]:
        """Train once and ask everybody, as the attack whose name the known victims are drawn by."""
        run = self.run(seed)
        attacks = {
            STRONGEST: load("attacks", "strongest_labels").with_budget("quick", hints=6, **changes),
            "own columns": LabelOutsider(hints=6),
            "co-training": LabelOutsider(hints=6, co_training=True),
        }

        def ask(attack: Attack) -> float:
            adversary = "left" if self.topology == "vertical" else "server"
            (request,) = run.evaluator.requests([("strongest_labels", attack)], adversary, floors=False)
            result = run.evaluator.attack(request)
            found: float = result.scores["attack"]["auc"].mean
            return found

        return {name: _measured(partial(ask, attack)) for name, attack in attacks.items()}


def score(run: Run, attack: Attack, metric: str) -> float:
    """Return what `attack` recovers of the victims of `run`."""
    found: float = run.attack(attack, floors=False)[0].scores["attack"][metric].mean
    return found


def _measured(ask: partial[float]) -> dict[str, float]:
    before = time.process_time()
    found = ask()
    return {"score": found, "cpu": time.process_time() - before}


CELLS: tuple[Comparison, ...] = (
    *(Labels(topology, defense) for topology in ("vertical", "u_shaped") for defense in LABEL_DEFENSES),
    *(Reconstruction("table", cut, defense, BLACK, 60_000) for cut in ("relu1", "relu2") for defense in DEFENSES),
    *(
        Reconstruction("mnist", cut, defense, threat_model, passes, 32)
        for threat_model, passes in ((BLACK, 60_000), (WHITE, 120_000))
        for cut in ("pool1", "pool2")
        for defense in DEFENSES
    ),
)


def key(comparison: Comparison, seed: int) -> str:
    """Return the name of a measurement."""
    return f"{comparison.name}, seed {seed}"


def measure(comparison: Comparison, seed: int, place: Path) -> dict[str, Any]:
    """Return what everybody finds in one run, and at what cost."""
    return {"metric": comparison.metric, "found": comparison.scores(seed)}


def leads(cells: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return by how much each outsider is ahead of `strongest`, one number a measurement."""
    found = [cell["found"] for cell in cells]
    names = [name for name in found[0] if name != STRONGEST]
    return {name: [one[name]["score"] - one[STRONGEST]["score"] for one in found] for name in names}


def show(done: Measured) -> str:
    """Return one line a cell and outsider: both figures, the difference with its interval, and what both cost."""
    lines = []
    for comparison in CELLS:
        cells = [done[name] for seed in SEEDS if (name := key(comparison, seed)) in done]
        if not cells:
            continue
        digits = 1 if comparison.metric == "psnr" else 3

        def average(who: str, part: str, measured: Sequence[Mapping[str, Any]] = cells) -> float:
            return float(sum(cell["found"][who][part] for cell in measured) / len(measured))

        for name, each in leads(cells).items():
            lead = mean_interval(each)
            told = f"{lead.mean:+.{digits + 1}f}"
            if lead.known:
                told += f" ({lead.low:+.{digits + 1}f} to {lead.high:+.{digits + 1}f})"
            over = lead.mean is not None and lead.mean > LIMITS[comparison.metric]
            lines.append(
                [
                    comparison.name,
                    f"{average(STRONGEST, 'score'):.{digits}f}",
                    name,
                    f"{average(name, 'score'):.{digits}f}",
                    told + (": **ahead**" if over else ""),
                    str(len(cells)),
                    f"{average(STRONGEST, 'cpu'):.1f}",
                    f"{average(name, 'cpu'):.1f}",
                ]
            )
    head = ["world", STRONGEST, "outsider", "it finds", "outsider less strongest", "seeds", "CPU s", "outsider's CPU s"]
    return markdown(head, lines)


BUDGET = """Attacks in plain torch by somebody who had not read `strongest` (experiments/papers/outsiders.py, frozen),
with the same run, victims, knowledge and row passes as `strongest` with "quick" (labels: `strongest_labels`). LeNet on
MNIST-5k (dB of PSNR, 1500 auxiliary images, 64 victims) and a perceptron on breast cancer (R2, 120 auxiliary rows, 64
victims; labels: AUC over 150 victims with twelve labels known). noise: .5 of the standard deviation for images, 2 for
tables; dropout .5; quantization to 2 bits. "outsider less strongest" is paired by seed, with its 95 % interval over
seeds; an outsider is **ahead** where its mean is more than .5 dB, .02 R2 or .02 AUC above. Two to six minutes a
measurement of images, seconds of others. Cells of the black box were measured before `query_inversion` was a member of
`strongest`, and no outsider here searches by queries."""

TABLE = Table(
    "outsider_cells",
    "Outsiders in plain torch against `strongest` at equal work",
    BUDGET,
    tuple(Cell(key(comparison, seed), partial(measure, comparison, seed)) for seed in SEEDS for comparison in CELLS),
    show,
)
