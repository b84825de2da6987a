"""Privacy against accuracy: NoPeek, DISCO and noise at three strengths each, against attackers that adapt.

Papers: Vepakomma, Singh, Gupta, Raskar, "NoPeek", ICDM workshops 2020; Singh et al., "DISCO", CVPR 2021; He, Zhang,
Lee, "Attacking and protecting data privacy in edge-cloud collaborative inference systems", IEEE IoT Journal 2021. The
attacker is `ladder`: decoders of several sizes trained on releases that went through the same defense, the best of
which on rows of its own makes the prediction.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import splitfed as sf
from experiments.papers.table import ANY, BOUNDS, PERCENT, RESULTS, Cell, Measured, Table, markdown, mean
from experiments.papers.tradeoff_figure import draw
from splitfed.attacks import Ladder
from splitfed.core.defense import Defense
from splitfed.core.optimizers import Optim
from splitfed.core.random import generator, stream
from splitfed.defenses import ChannelPruning, DistanceCorrelation, Noise

SEEDS = (0, 1, 2, 3, 4)


class Setting(NamedTuple):
    """One strength of one family of defenses."""

    family: str
    strength: str
    defenses: tuple[Defense, ...]

    @property
    def name(self) -> str:
        """What the setting is called in keys and tables."""
        return f"{self.family} {self.strength}".strip()


SETTINGS = (
    Setting("none", "", ()),
    *(Setting("NoPeek", f"alpha {a}", (DistanceCorrelation(alpha=a),)) for a in (0.2, 0.5, 0.8)),
    *(Setting("DISCO", f"ratio {r}", (ChannelPruning(ratio=r, width=16, lr=1e-3),)) for r in (0.5, 0.75, 0.9)),
    *(Setting("noise", f"{s} deviations", (Noise(scale=s, relative=True),)) for s in (0.5, 1.0, 2.0)),
)


class Budget(NamedTuple):
    """What is computed on one data set; `rows` of it, rounds of training, and what the attacker has."""

    rows: int
    rounds: int
    auxiliary: int
    victims: int
    widths: tuple[int, ...] = (8, 16)
    epochs: tuple[int, ...] = (12,)


BUDGETS = {"digits": Budget(1797, 12, 400, 64), "mnist5k": Budget(3000, 3, 500, 64, epochs=(8,))}


def model(side: int) -> nn.Sequential:
    """Return two convolutions and two linear layers for (n, 1, side, side); the cut is behind the first pooling."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 16, 3, padding=1),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(16, 16, 3, padding=1),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(16 * (side // 4) ** 2, 64),
            relu3=nn.ReLU(),
            fc2=nn.Linear(64, 10),
        )
    )


def measure(name: str, setting: Setting, seed: int, state: Path, budget: Budget | None = None) -> dict[str, Any]:
    """Train on the data set `name` under `setting`, attack, and return accuracy and figures by predictor and metric."""
    plan = BUDGETS[name] if budget is None else budget
    data = {"digits": sf.data.digits, "mnist5k": sf.data.mnist5k}[name]()
    # Drawn, for MNIST-5k comes class by class.
    chosen = torch.randperm(len(data), generator=generator(seed, "tradeoff", name))[: plan.rows]
    rows = data.rows(chosen).clients(1, auxiliary=plan.auxiliary, victims=plan.victims, validation=0.0, seed=seed)
    with stream(seed):
        topology = sf.topologies.vanilla(model(data.x.shape[-1]), "pool1")
    run = sf.train(
        topology,
        rows,
        defenses=setting.defenses,
        rounds=plan.rounds,
        batch_size=32,
        optimizer=Optim("Adam", {"lr": 1e-3}),
        seed=seed,
        evaluation=sf.Evaluation(every=plan.rounds),
    )
    (found,) = run.attack(Ladder(widths=plan.widths, epochs=plan.epochs, queries=3))
    scores = {f"{who} {m}": value.mean for who, by in found.scores.items() for m, value in by.items()}
    return {"accuracy": run.accuracy, "attack seconds": found.seconds, **scores}


def gathered(done: Measured) -> dict[str, dict[str, list[Mapping[str, Any]]]]:
    """Return data set -> setting -> what was measured, one a seed."""
    found: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for name in BUDGETS:
        for setting in SETTINGS:
            seeds = [{**done[key], "seed": seed} for seed in SEEDS if (key := _key(name, setting, seed)) in done]
            if seeds:
                found.setdefault(name, {})[setting.name] = seeds
    return found


def show(done: Measured, folder: Path | None = RESULTS.parent) -> str:
    """Return the tables, and draw the figure into `folder` where there is one."""
    found = gathered(done)
    parts = []
    for name, settings in found.items():
        lines = [
            [s.name, *_cells(settings[s.name], "attack"), len(settings[s.name])] for s in SETTINGS if s.name in settings
        ]
        every = [entry for seeds in settings.values() for entry in seeds]
        blind = [
            [who.replace("_", " "), "", *_cells(_one_a_seed(every, who), who)[1:], ""]
            for who in ("mean_image", "random_pairing")
        ]
        head = [name, "test accuracy, %", "PSNR, dB", "SSIM", "MSE", "seeds"]
        parts += [markdown(head, [*lines, *blind]), *_trends(settings)]
    if folder is not None and found:
        families = {s.name: s.family for s in SETTINGS}
        draw(found, families, folder / "tradeoff.svg")
        parts.append("![Test accuracy against SSIM of the reconstructions, a line a defense](tradeoff.svg)")
    return "\n\n".join([*parts, REMARKS])


def _cells(seeds: Sequence[Mapping[str, Any]], who: str) -> list[str]:
    accuracy = mean([100 * entry["accuracy"] for entry in seeds], PERCENT, 1)
    columns = (("psnr", 1), ("ssim", 2), ("mse", 4))
    return [
        accuracy,
        *(mean([entry[f"{who} {metric}"] for entry in seeds], BOUNDS[metric], digits) for metric, digits in columns),
    ]


def _one_a_seed(entries: Sequence[Mapping[str, Any]], who: str) -> list[Mapping[str, Any]]:
    """Blind guesses depend on the seed's victims alone, not on the setting."""
    return list({round(entry[f"{who} mse"], 12): entry for entry in entries}.values())


def _trends(settings: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Say what the strongest setting of each family does to the seeds that it shares with no defense."""
    if "none" not in settings:
        return []
    told, bare = [], {entry["seed"]: entry for entry in settings["none"]}
    for family in dict.fromkeys(s.family for s in SETTINGS[1:]):
        strongest = next((s.name for s in reversed(SETTINGS) if s.family == family and s.name in settings), None)
        pairs = [(bare[e["seed"]], e) for e in settings.get(strongest or "", ()) if e["seed"] in bare]
        if pairs:
            ssim = mean([b["attack ssim"] - a["attack ssim"] for a, b in pairs], ANY, 2)
            accuracy = mean([100 * (b["accuracy"] - a["accuracy"]) for a, b in pairs], ANY, 1)
            told.append(f"{strongest}: SSIM {ssim}, accuracy {accuracy} points")
    return [f"Against no defense, seed by seed: {'; '.join(told)}."] if told else []


def _key(name: str, setting: Setting, seed: int) -> str:
    return f"{name} | {setting.name} | seed {seed}"


REMARKS = """Published: He et al. need sigma below .8 (Gaussian) for 95 % accuracy on MNIST, where the SSIM of their
attack stays above .4. With NoPeek at alpha .8 the MSE of SDAR on CIFAR-100 is .0439, without it .0227. DISCO reports
curves for ratios up to .99, of which we know no numbers on these data. So only the direction can be compared: more of a
defense, less in the reconstructions, at a price in accuracy. Ours differ in data, network and budget from all three;
noise is in deviations of the batch's release, not absolute; the attacker trains on releases of the same defense, with
rows from the victims' distribution, and is stronger than an attacker who does not know of it. Nothing was tuned, on
victims or otherwise: strengths were written down before anything was measured; budgets were cut after one timed trial
on each data set, with a seed that is not reported.

What came out: noise does what is published, at a higher price on the smaller images. NoPeek and DISCO hardly help at
this cut: on the digits the MSE grows by a factor of 1.09 at alpha .8, where the published factor is 1.9 (another
attack, network and data), and by 1.22 at ratio .9 for 8 points of accuracy; on MNIST neither differs from no defense.
Likely reasons, not tested: what is left behind a single convolution still shows the image, and three rounds are few
for a client to learn to hide it."""

LADDERS = " and ".join(f"widths {b.widths}, epochs {b.epochs} ({n})" for n, b in BUDGETS.items())

BUDGET = f"""Test accuracy and what the strongest of several decoders reconstructs, {len(SEEDS)} seeds, means with 95 %
Student intervals over them; `ladder` with {LADDERS}.
One client, a CNN of two convolutions cut behind the first pooling (16 channels), Adam 1e-3, batches of 32, 12 rounds on
the digits (400 auxiliary rows) and 3 on 3000 rows of MNIST-5k, drawn by the seed (500), 64 victims that nobody trained
on. DISCO with alpha .5; its pruner and its adversary, of 16 channels, learn at 1e-3 like everything else. Chance is
10 % accuracy; the mean image and another victim's image are what a prediction scores that sees nothing. About an hour
on one shared core. With decoders that did not begin at the best linear inverse, no defense had 18.0 dB on the digits
and 23.6 on MNIST-5k."""

TABLE = Table(
    name="tradeoff",
    title="Defenses of inputs against an attacker who adapts",
    budget=BUDGET,
    cells=tuple(
        Cell(_key(name, setting, seed), partial(measure, name, setting, seed))
        for name in BUDGETS
        for seed in SEEDS
        for setting in SETTINGS
    ),
    show=show,
)
