"""Erdogan, Kupcu, Cicek, "UnSplit: data-oblivious model inversion, model stealing, and label inference attacks against
split learning", WPES 2022: inversion and stealing on MNIST by the depth of the cut.

Network, depths, training of the victim and the attack's settings are those of the authors' public code.
"""  # fmt: skip

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import splitfed as sf
from experiments.papers.he_lenet import adam, he_lenet
from experiments.papers.table import Cell, Measured, Table, markdown
from splitfed.attacks.reconstruction.unsplit import Unsplit, stretch_rows
from splitfed.attacks.scoring.reconstruction_metrics import score_reconstruction
from splitfed.core.random import generator, stream
from splitfed.data.dataset import Dataset, Federation

SEEDS = (1,)
DEPTHS = ("ReLU1", "pool1", "conv2", "ReLU2", "pool2", "fc1")
ROUNDS, EPOCHS = 400, 10


@cache
def federation(seed: int) -> Federation:
    """Return MNIST-5k with one client; the victims are chosen from the 100 that are set aside."""
    return sf.data.mnist5k().clients(1, auxiliary=500, victims=100, validation=0.0, seed=seed)


def one_a_class(rows: Dataset) -> Dataset:
    """Return the first row of each class, in the order of the classes."""
    return rows.rows(torch.stack([(rows.y == label).nonzero()[0, 0] for label in rows.y.unique()]))


def measure(depth: str, seed: int, state: Path, rounds: int = ROUNDS, epochs: int = EPOCHS) -> dict[str, Any]:
    """Attack one image a class, all at once, and return what was found of images and of the client's segment."""
    with stream(seed):
        model = he_lenet()
    topology, data = sf.topologies.vanilla(model, depth), federation(seed)
    run = sf.train(
        topology,
        data,
        rounds=epochs,
        batch_size=64,
        optimizer=adam(1e-8),
        seed=seed,
        evaluation=sf.Evaluation(every=epochs),
    )
    victims = one_a_class(data.victims)
    attack = Unsplit.with_budget("full", rounds=rounds, stretch=False)
    (result,) = run.attack(attack, victims=victims, seed=seed)
    assert result.stolen is not None
    assert result.prediction is not None
    spread, limits = stretch_rows(result.prediction, victims.value_range), victims.value_range
    again = score_reconstruction(victims.x, spread, limits, run.data.auxiliary.x, generator(seed, "stretched"))
    scores = {**result.scores, "stretched": again["attack"]}
    images = {f"{who} {metric}": [v.mean, v.low, v.high] for who, own in scores.items() for metric, v in own.items()}
    clones = {f"{who} {metric}": v.mean for who, own in result.stolen.items() for metric, v in own.items()}
    return {"attack seconds": result.seconds, **images, **clones}


def _key(depth: str, seed: int) -> str:
    return f"{depth} | seed {seed}"


def _images(entry: dict[str, Any], who: str) -> list[str]:
    return [
        f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
        for mean, low, high, digits in (
            (*entry[f"{who} {metric}"], digits) for metric, digits in (("mse", 4), ("psnr", 1), ("ssim", 3))
        )
    ]


def show(done: Measured) -> str:
    """Return a line for each depth that is there, baselines, and what differs."""
    head = ["depth", "the client's last layer", "MSE", "PSNR [dB]", "SSIM"]
    head += ["accuracy with the clone", "with fresh weights", "with the client's own"]
    rows, last = [], {}
    for number, depth in enumerate(DEPTHS, 1):
        for seed in SEEDS:
            entry = dict(done.get(_key(depth, seed), {}))
            if entry:
                stolen = [f"{entry[f'{who} accuracy']:.3f}" for who in ("clone", "fresh", "trained")]
                rows.append([str(number), depth, *_images(entry, "stretched"), *stolen])
                rows.append(["", "as the authors print it", *_images(entry, "attack"), "", "", ""])
                last = entry
    baselines = (("mean_image", "baseline: mean image"), ("random_pairing", "baseline: another victim"))
    rows += [["", name, *_images(last, who), "", "", ""] for who, name in baselines if last]
    return f"{markdown(head, rows)}\n\n{NOTES}"


BUDGET = f"""The authors' LeNet and their numbering of depths; pixels in [0, 1]; the budget `full` of `unsplit` with
{ROUNDS} rounds of 100 + 100 steps where the authors have 1000, from one random clone. Ten images, one a class, that the
client never saw; they are searched at once and share one clone, where the authors take one after another and carry the
clone along. Victim: {EPOCHS} epochs of Adam (amsgrad, 1e-3, batch 64) on 3520 images of MNIST-5k, where they have
60,000; accuracy on 880 test images, 2000 there. One seed; intervals are 95 % bootstraps over the ten images. About 40
minutes on one free core."""

NOTES = """\
The paper's figures by depth could not be established, so none stand beside ours. Depth counts layers from 0 in
the authors' code, which is run for 1 to 6: depth 1 is the first ReLU. Their code prints the accuracy of the clone's
untrained last layers on the client's releases; here the clone's first layers go before the server's trained ones.
Fresh weights are the same layers drawn anew: what an accuracy above theirs is worth. The search leaves the scale of an
image open and asks for a small one, so its predictions are dark: the first line of each depth has them spread over the
value range, each by itself and without the truth, as the authors do with CIFAR; the second has them as they come, as
the authors print digits. By that one alone the attack would look harmless at every depth."""

TABLE = Table(
    "unsplit_depth",
    "UnSplit by the depth of the cut (Erdogan et al., WPES 2022) on MNIST",
    BUDGET,
    tuple(Cell(_key(depth, seed), partial(measure, depth, seed)) for seed in SEEDS for depth in DEPTHS),
    show,
)
