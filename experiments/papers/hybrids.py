"""Federated layers on split replicas: what each gains over training alone and over the split, and what it gives away.

FML (Shen et al. 2020), FedProto (Tan et al., AAAI 2022), FedAKT (Liu et al. 2025) and MAFML (Zhou et al. 2023), each
over replicas that are cut between client and server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments.papers.hybrid_leaks import leaks, private_scores
from experiments.papers.hybrid_runs import ALONE, HYBRIDS, PLAIN, SETTINGS, SHARING, Arm, Setting, plain_of, train
from experiments.papers.table import PERCENT, SHARE, Cell, Measured, Table, markdown, mean, signed
from splitfed.federated import FML
from splitfed.stats.intervals import mean_interval

SEEDS = (0, 1, 2, 3, 4)
ARMS = (*ALONE.values(), *PLAIN, *HYBRIDS, SHARING)
WHERE = {"union": "all clients' test rows", "own": "the client's own test rows"}
# What is attacked of each layer: figure, what it is called, and the figure or the value of somebody who knows nothing.
ATTACKS: dict[str, tuple[tuple[str, str, str | float], ...]] = {
    "FML": (("agreement", "private model copied: agreement", "agreement blind"),),
    "FedProto": (
        ("shares", "class shares: distance", "shares even"),
        ("prototype ssim", "prototypes inverted: SSIM", "prototype blind"),
        ("prototype members", "members by prototypes: AUC", 0.5),
    ),
    "FedAKT": (("cut ssim", "features inverted: SSIM", "cut blind"),),
    "MAFML": (
        ("shares", "class shares by soft labels: distance", "shares even"),
        ("shares by public labels", "by public rows' labels", "shares even"),
    ),
}
Entries = Mapping[int, Mapping[str, Any]]


def measure(arm: Arm, seed: int, state: Path, setting: Setting | None = None) -> dict[str, Any]:
    """Train; return accuracy in percent, means over clients, after the last round, what was sent, and every leak."""
    plan = setting or SETTINGS[arm.setting]
    run = train(arm, seed, plan)
    across = run.history[-1]["test"]["across"]
    found = {where: 100 * sum(across[where]) / plan.clients for where in WHERE}
    if isinstance(arm.method, FML):
        found |= {f"private {where}": 100 * score for where, score in private_scores(run).items()}
    for name, values in run.history[-1]["test"].get("method", {}).items():
        found[f"own, {name}"] = 100 * sum(values) / plan.clients
    found["MiB"] = run.bytes / 2**20
    return {**found, **(leaks(run, arm, seed, plan) if arm.shape != "whole" else {})}


def show(done: Measured) -> str:
    """Return the gains beside what the layer gives away, what the split itself gives away, and what follows."""
    parts = []
    for where, rows in WHERE.items():
        head = ["hybrid", "alone", "plain split", "hybrid", "gain over alone", "gain over plain split"]
        head += ["attack on what it adds", "it adds, MiB"] if where == "union" else []
        lines = [line for arm in HYBRIDS for line in _lines(done, arm, where)]
        if lines:
            parts += [f"Accuracy on {rows}, percent:", markdown(head, lines), _verdicts(done, where)]
    parts += [text for text in (_split_leaks(done), _sharing(done)) if text]
    return "\n\n".join([*parts, REMARKS])


def _lines(done: Measured, arm: Arm, where: str) -> list[list[str]]:
    alone, plain, hybrid = (_of(done, a) for a in (ALONE[arm.setting], plain_of(arm), arm))
    lines = []
    for answer in _answers(arm) if hybrid else ():
        figure = f"{answer} {where}".strip()
        line = [f"{arm.name}, {answer}" if answer else arm.name]
        line += [_mean(alone, where), _mean(plain, where), _mean(hybrid, figure)]
        line += [change(paired(hybrid, figure, other, where)) for other in (alone, plain)]
        if where == "union":
            line += ["as above" if answer else _attacks(arm, hybrid), _added(hybrid, plain)]
        lines.append(line)
    return lines


def _answers(arm: Arm) -> tuple[str, ...]:
    """Return whose answer is scored: "" for the model that the run answers with, FML's private one beside it."""
    return ("", "private") if isinstance(arm.method, FML) else ("",)


def _attacks(arm: Arm, hybrid: Entries) -> str:
    found = []
    for figure, called, blind in ATTACKS[type(arm.method).__name__]:
        nothing = f"{blind:.2f}" if isinstance(blind, float) else _mean(hybrid, blind, 2)
        found.append(f"{called} {_mean(hybrid, figure, 2)}, knowing nothing {nothing}")
    return "; ".join(found)


def _added(hybrid: Entries, plain: Entries) -> str:
    return _text(paired(hybrid, "MiB", plain, "MiB"), lambda found: f"{sum(found) / len(found):.2f}")


def _verdicts(done: Measured, where: str) -> str:
    """Say for every hybrid whether its gains are settled."""
    found: dict[str, dict[str, list[str]]] = {"alone": {}, "the plain split": {}}
    for arm in HYBRIDS:
        hybrid = _of(done, arm)
        for answer in _answers(arm):
            for name, other in (("alone", ALONE[arm.setting]), ("the plain split", plain_of(arm))):
                gains = paired(hybrid, f"{answer} {where}".strip(), _of(done, other), where)
                if gains:
                    called = f"{arm.name}, {answer}" if answer else arm.name
                    found[name].setdefault(verdict(gains), []).append(called)
    told = []
    for name, by in found.items():
        told += [f"{what} {name}: {'; '.join(who)}" for what, who in sorted(by.items())]
    return f"{'. '.join(told)}." if told else ""


def _split_leaks(done: Measured) -> str:
    """Return what the main server gets from the split replicas with and without the layer."""
    lines = []
    for arm in HYBRIDS:
        hybrid, plain = _of(done, arm), _of(done, plain_of(arm))
        if hybrid and plain:
            line = [arm.name]
            for figure in ("membership", "cut ssim"):
                moved = change(paired(hybrid, figure, plain, figure), 3)
                line += [_mean(plain, figure, 3), _mean(hybrid, figure, 3), moved]
            lines.append([*line, _mean(plain, "cut blind", 3)])
    head = [
        "hybrid",
        "membership AUC: plain split",
        "hybrid",
        "change",
        "SSIM of the inverted cut: plain split",
        "hybrid",
        "change",
    ]
    text = "What the split replicas give away with the layer and without it (chance of membership: .500):"
    return f"{text}\n\n{markdown([*head, 'mean image'], lines)}" if lines else ""


def _sharing(done: Measured) -> str:
    """Compare MAFML with training on the rows that it shows."""
    mafml = next(arm for arm in HYBRIDS if arm.setting == SHARING.setting)
    other, hybrid = _of(done, SHARING), _of(done, mafml)
    if not other or not hybrid:
        return ""
    told = [
        f"on {rows} {_mean(other, where)}, which MAFML changes by {change(paired(hybrid, where, other, where))}"
        for where, rows in WHERE.items()
    ]
    return f"The same split, others' public rows trained on as one's own (`aggregation`): {'; '.join(told)}."


def paired(one: Entries, figure: str, other: Entries, theirs: str) -> list[float]:
    """Return `figure` of `one` less `theirs` of `other`, for every seed that both have."""
    return [one[seed][figure] - other[seed][theirs] for seed in one if seed in other]


def verdict(gains: Sequence[float]) -> str:
    """Say on which side of nothing the interval of `gains` lies."""
    found = mean_interval(gains)
    if not found.known:
        return "One seed, against"
    if found.low > 0:
        return "Better than"
    return "Worse than" if found.high < 0 else "Not settled against"


def change(gains: Sequence[float], digits: int = 1) -> str:
    """Return the mean of `gains` with its sign and its interval, or that there are none."""
    return _text(gains, lambda found: signed(found, digits))


def _text(values: Sequence[float], of: Any) -> str:
    return str(of(values)) if values else "not measured"


def _mean(entries: Entries, figure: str, digits: int = 1) -> str:
    return _text(
        [entry[figure] for entry in entries.values()],
        lambda found: mean(found, PERCENT if digits == 1 else SHARE, digits),
    )


def _of(done: Measured, arm: Arm) -> Entries:
    return {seed: done[key] for seed in SEEDS if (key := _key(arm, seed)) in done}


def _key(arm: Arm, seed: int) -> str:
    return f"{arm.name} | {arm.setting} | seed {seed}"


FEW, TURNED = SETTINGS["few"], SETTINGS["domains"]
BUDGET = f"""Two settings with few examples of real images, drawn from MNIST-5k by the seed. FML, FedProto, FedAKT:
{FEW.images} images, {FEW.victims} set aside as rows that nobody trains on and {FEW.auxiliary} for the attacker; the
others go to {FEW.clients} clients by Dirichlet {FEW.skew}, and each trains on {100 * (1 - FEW.test):.0f} % of its rows,
40 on average (four a class), and is scored on the others; batches of {FEW.batch}. MAFML: {TURNED.images} images,
{TURNED.victims} and {TURNED.auxiliary} of them set aside likewise, each of the others in one of {TURNED.clients}
domains (by Dirichlet {TURNED.skew:.0f}), turned there by 0, 20, 40 or 60 degrees; a client a
domain, which trains on {100 * (1 - TURNED.test):.0f} % of its rows, 150 on average, and shows others
{100 * TURNED.public:.0f} % of its rows, with labels; batches of {TURNED.batch}. LeNet with maximum pooling, cut after
its second pooling (in the U again before the last layer); Adam at 2e-3, {FEW.rounds} rounds of one epoch, scored after
the last: nothing is selected, and there are no validation rows. Alone: the whole model at every client. Plain split:
the hybrid's schedule without its method. FML and FedAKT over v1, where both sides are averaged every round; FedProto
over v3, where every client keeps its own bottom (and head) and the server's copies are averaged; MAFML over clients in
turn that keep their own, through one server. Weights of the methods as they come, FedAKT's is .5. Means over clients,
with the 95 % Student interval over {len(SEEDS)} seeds of images, split, weights and order; gains are paired by seed.
The settings were chosen on another seed, 99.
Decoders begin at the best linear inverse; without that start, cuts were inverted at SSIM .55 to .61 (over MNIST's
clients) and FedAKT's features at .59."""
REMARKS = """The two gains are to be read together: what the plain split has already over training alone is owed to the
shared server or the averages, not to the layer. FML answers with the meme, which is averaged; its private model is
scored beside it. Its attack: how often the meme says what the client's private model says on rows that nobody trained
on, beside a model that was trained without it. In the U nothing crosses for FML but what the plain split sends, so that
it adds no bytes, and the meme carries all that is told; it is the same training as over vanilla, to the digit, so that
its two lines count once. Class shares: total variation from the true ones, 0 is
exact, against equal shares; FedProto's clients send counts by class. Prototypes are inverted, and searched for members,
by the aggregation server with the weights of the client's extractor, which under v3 it is not sent: a worst case. Their
mean image is that of the attacker's rows. FedAKT's features are inverted at the main server by a decoder trained on
queries, as the cut is in the last table, beside the plain split's. MAFML's public rows cross in the clear, with their
labels: no attack is needed to have them, and training on them together does as well or better (last line)."""

TABLE = Table(
    "hybrids",
    "Federated layers on split replicas: what they gain, and what they give away",
    BUDGET,
    tuple(Cell(_key(arm, seed), partial(measure, arm, seed)) for seed in SEEDS for arm in ARMS),
    show,
)
