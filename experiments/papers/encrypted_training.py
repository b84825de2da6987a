"""Training with an encrypted server layer beside the same steps in plain: accuracy, time and bytes over three seeds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

import splitfed as sf
from experiments.papers.table import AMOUNT, PERCENT, Cell, Measured, Table, markdown, mean, signed
from splitfed.models import ecg_cnn, mlp
from splitfed.topologies import u_shaped

SEEDS, ROUNDS, BATCH = (0, 1, 2), 10, 64
STEP = sf.Optim("SGD", {"lr": 0.05, "momentum": 0.9})
ALLOWED = 2.0
"""Points of accuracy that encryption may cost."""


@dataclass(frozen=True)
class Case:
    """One model on one data set: the server's layer as text, rows, and the submodules cut after."""

    layer: str
    data: Callable[[], sf.Dataset]
    model: Callable[[int], nn.Module]
    cuts: tuple[str, str]


CASES = {
    "digits": Case(
        "32 by 10, logits",
        sf.data.digits,
        lambda seed: mlp((1, 8, 8), 10, hidden=[32], identity_head=True, seed=seed),
        ("relu1", "fc2"),
    ),
    "digits, wider": Case(
        "64 by 32",
        sf.data.digits,
        lambda seed: mlp((1, 8, 8), 10, hidden=[64, 32], seed=seed),
        ("relu1", "fc2"),
    ),
    "beats": Case(
        "256 by 5, logits",
        partial(sf.data.beats, rows=4600),
        lambda seed: ecg_cnn((1, 128), 5, seed=seed),
        ("flatten", "fc1"),
    ),
}


def measure(case: Case, encrypted: bool, seed: int, folder: Path) -> dict[str, Any]:
    """Train one model; a run that was cut short goes on from its folder."""
    data = case.data().clients(
        1, auxiliary=0.1, validation=0.0, test=0.5 if case.cuts[0] == "flatten" else 0.3, seed=seed
    )
    settings = sf.Encryption(key_folder=folder / "keys") if encrypted else None
    topology = u_shaped(case.model(seed), case.cuts, encryption=settings)
    started = time.process_time()
    run = sf.train(
        topology,
        data,
        rounds=ROUNDS,
        batch_size=BATCH,
        optimizer=STEP,
        seed=seed,
        evaluation=sf.Evaluation(every=ROUNDS),
        logging=sf.Logging(folder=folder / "run", resume=True),
    )
    steps = sum(entry["steps"] for entry in run.history)
    used = run.engine.topology.computation
    return {
        "accuracy": 100 * run.accuracy,
        "steps": steps,
        "rows": len(data.clients[0].train),
        "test": len(data.clients[0].test),
        "cpu": time.process_time() - started,
        "bytes": sum(n for (phase, *_), (_, n) in run.engine.traffic.counters.items() if phase == "train"),
        "parameters": "" if used is None else used.parameters,
    }


def show(done: Measured) -> str:
    """Return one row a model: accuracy of both runs, their paired difference, seconds and bytes a step."""
    rows = []
    for name, case in CASES.items():
        pairs = [
            (done[f"{name} plain {seed}"], done[f"{name} encrypted {seed}"])
            for seed in SEEDS
            if f"{name} plain {seed}" in done and f"{name} encrypted {seed}" in done
        ]
        if not pairs:
            continue
        lost = [p["accuracy"] - e["accuracy"] for p, e in pairs]
        first, second = pairs[0]
        rows.append(
            (
                name,
                case.layer,
                f"{first['steps']} of {BATCH} ({first['rows']}, {first['test']} test)",
                second["parameters"],
                mean([p["accuracy"] for p, _ in pairs], PERCENT),
                mean([e["accuracy"] for _, e in pairs], PERCENT),
                signed(lost, 2),
                f"{mean([e['cpu'] / e['steps'] for _, e in pairs], AMOUNT)} s",
                f"{second['bytes'] / second['steps'] / 1e6:.1f} MB ({second['bytes'] / first['bytes']:.0f} x)",
            )
        )
    head = "data, server's layer, steps and rows, preset, plain %, encrypted %, points lost, CPU a step, bytes a step"
    return markdown(head.split(", "), rows)


TABLE = Table(
    "encrypted_training",
    "Training with an encrypted server layer",
    f"U-shape, protocol `weight_shares`, one client, {ROUNDS} rounds, SGD at .05 with momentum .9; mean of three seeds "
    f"with 95 % Student interval, differences paired; at most {ALLOWED:g} points are allowed. CPU of the whole run, "
    "scoring and both parties included, on a machine that did other work as well.",
    tuple(
        Cell(
            f"{name} {'encrypted' if encrypted else 'plain'} {seed}",
            lambda folder, case=case, encrypted=encrypted, seed=seed: measure(case, encrypted, seed, folder),
        )
        for seed in SEEDS
        for name, case in CASES.items()
        for encrypted in (False, True)
    ),
    show,
)
