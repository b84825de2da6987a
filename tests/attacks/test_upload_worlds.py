"""Every attack that docs/methods.md names for what a method's clients upload finds what is there, and nothing else.

One table for all pairs of a method and an attack, read from the page. In its planted world the attack must beat its
floor by four standard deviations of a guess that knows nothing; in its hopeless one, where the same uploads are asked
about rows, classes or names that they do not depend on, it must stay within four of the floor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from splitfed.attacks.base import Attack
from splitfed.attacks.gradients.inverting_gradients import InvertingGradients
from splitfed.attacks.scoring.share_metrics import score_shares
from splitfed.core.random import generator
from splitfed.data.dataset import Federation
from splitfed.engines.base import FED
from splitfed.registry import TABLES, load
from splitfed.threats.attack_result import AttackResult
from splitfed.threats.evaluator import Evaluator
from splitfed.training.run import Run
from tests.attacks.upload_worlds import (
    CLIENTS,
    ROWS,
    SKEWED_CLIENTS,
    about,
    grey_rows,
    held_labels,
    memorised,
    renamed,
    skewed,
    stepped,
    strangers,
)
from tests.examples import asked
from tests.federated.leak_table import NO_ATTACK, PAGE, Cell, read_cells, written
from tests.pages import read
from tests.thinning import thin

SIGMAS = 4.0
BLIND = 200
"""How many guesses that know nothing show how far such a guess may be from the mean of them."""


class Figure(NamedTuple):
    """What an attack achieved, more being better, its floor, and the standard deviation of a blind guess."""

    found: float
    floor: float
    deviation: float

    @property
    def sigmas(self) -> float:
        """By how many standard deviations it beats the floor."""
        return (self.found - self.floor) / self.deviation


def mean(values: Iterable[float]) -> float:
    """Return the mean over clients."""
    found = list(values)
    return sum(found) / len(found)


def spread(variances: Sequence[float]) -> float:
    """Return the standard deviation of the mean of independent clients with these variances."""
    return math.sqrt(sum(variances)) / len(variances)


def members(results: Sequence[AttackResult]) -> Figure:
    """The AUC. That of blind scores of m members and as many others has the variance (2 m + 1) / (12 m^2)."""
    counts = [int(result.truth.sum()) for result in results]
    assert all(len(result.truth) == 2 * m >= 60 for result, m in zip(results, counts, strict=True))
    found = mean(result.scores["attack"]["auc"].mean for result in results)
    return Figure(found, 0.5, spread([(2 * m + 1) / (12 * m * m) for m in counts]))


def distance_of_shares(results: Sequence[AttackResult]) -> Figure:
    """Minus the total variation from the true shares; a blind guess is this one, about clients drawn at random."""
    random, variances = generator(0, "blind shares"), []
    for result in results:
        others = (score_shares(held_labels(ROWS, random), result.prediction, torch.zeros(0))[1] for _ in range(BLIND))
        variances.append(float(torch.tensor([one["attack"]["total_variation"].mean for one in others]).var()))
    floor = mean(min(r.scores[name]["total_variation"].mean for name in ("uniform", "prior")) for r in results)
    return Figure(-mean(r.scores["attack"]["total_variation"].mean for r in results), -floor, spread(variances))


def held_classes(results: Sequence[AttackResult]) -> Figure:
    """How well the classes that a client holds are told from the others: the AUC of h among c classes."""
    counts = [(int((result.truth > 0).sum()), len(result.truth)) for result in results]
    found = mean(result.scores["attack"]["auc"].mean for result in results)
    return Figure(found, 0.5, spread([(c + 1) / (12 * h * (c - h)) for h, c in counts]))


def reconstruction(results: Sequence[AttackResult], drawn: Callable[[AttackResult, torch.Generator], Tensor]) -> Figure:
    """The PSNR over the better of the blind ones; `drawn`: a truth that a prediction has nothing to do with."""
    random, variances = generator(0, "blind reconstruction"), []
    for result in results:
        guesses = torch.stack([errors(result, drawn(result, random)) for _ in range(BLIND)])
        variances.append(float((-10 * guesses.log10().mean(1)).var()))
    floor = mean(max(r.scores[name]["psnr"].mean for name in ("mean_image", "random_pairing")) for r in results)
    return Figure(mean(r.scores["attack"]["psnr"].mean for r in results), floor, spread(variances))


def errors(result: AttackResult, truth: Tensor) -> Tensor:
    """Return the mean squared error of each of the first predictions."""
    return (result.prediction[: len(truth)] - truth).square().flatten(1).mean(1).double()


def other_rows(result: AttackResult, random: torch.Generator) -> Tensor:
    """Return rows that nobody trained on."""
    return grey_rows(torch.zeros(len(result.truth), dtype=torch.int64), random).x


def other_classes(result: AttackResult, random: torch.Generator) -> Tensor:
    """Return the class means in another order, each at the place of any class."""
    return result.truth[torch.randint(len(result.truth), (len(result.prediction),), generator=random)]


@dataclass(frozen=True)
class ShadowRun:
    """Where an attack must succeed, by the name of a method, and what is asked in vain about the same uploads.

    `unrelated`: from the clients that were trained to those who are asked about. `figures`: the first must beat its
    floor; where nothing can be found none may, and those of `chance` may not be far below theirs either.
    """

    trained: Callable[[str], Run]
    unrelated: Callable[[Federation, int], Federation]
    clients: int
    figures: tuple[Callable[[Sequence[AttackResult]], Figure], ...]
    chance: frozenset[int] = frozenset()
    attack: Attack | None = None


MEMBERS = ShadowRun(memorised, strangers, CLIENTS, (members,), frozenset({0}))
SHARES = ShadowRun(
    skewed, partial(strangers, same_classes=False), SKEWED_CLIENTS, (distance_of_shares, held_classes), frozenset({1})
)
CLASS_MEANS = ShadowRun(skewed, renamed, CLIENTS, (partial(reconstruction, drawn=other_classes),))
STEPS = ShadowRun(stepped, strangers, CLIENTS - 1, (partial(reconstruction, drawn=other_rows),))
WORLDS: dict[str, ShadowRun] = {
    "upload_membership": MEMBERS,
    "upload_lira": MEMBERS,
    "prototype_membership": MEMBERS,
    "update_shares": SHARES,
    "class_shares": SHARES,
    "upload_inversion": CLASS_MEANS,
    "prototype_inversion": CLASS_MEANS,
    "dlg": STEPS,
    "inverting_gradients": replace(STEPS, attack=InvertingGradients(iterations=150, lr=0.1)),
}
CELLS = read_cells(written(read(PAGE)))
QUICK = {
    Cell("mafml", "membership", "upload_membership"),
    Cell("fedavg", "membership", "upload_membership"),
    Cell("fedavg", "membership", "upload_lira"),
    Cell("fedsgd", "membership", "upload_lira"),
    Cell("fedakt", "class shares", "update_shares"),
    Cell("mafml", "class shares", "class_shares"),
    Cell("fedproto", "membership", "prototype_membership"),
    Cell("fedproto", "inversion", "prototype_inversion"),
    Cell("fml", "class shares", "update_shares"),
    Cell("fml", "inversion", "upload_inversion"),
    Cell("fml", "inversion", "dlg"),
    Cell("fedsgd", "inversion", "inverting_gradients"),
}
"""What every run of the tests tries: every attack, most kinds of uploads."""


def figures(cell: Cell, about_clients: Callable[[Run], Evaluator]) -> list[Figure]:
    """Run the attack of `cell` on the uploads of several clients; return what it achieved on average."""
    world = WORLDS[cell.attack]
    evaluator = about_clients(world.trained(cell.method))
    attack = world.attack or load("attacks", cell.attack)()
    results = [
        evaluator.attack(asked(evaluator, attack, FED, cell.attack, client=client, seed=0))
        for client in range(world.clients)
    ]
    return [figure(results) for figure in world.figures]


def planted(cell: Cell) -> list[Figure]:
    """Return what the attack of `cell` achieves where it must."""
    return figures(cell, lambda run: run.evaluator)


def hopeless(cell: Cell) -> list[Figure]:
    """Return what it achieves where it cannot."""
    unrelated = WORLDS[cell.attack].unrelated
    return figures(cell, lambda run: about(run, unrelated(run.data, 0)))


PARAMETERS = [
    pytest.param(cell, marks=[] if cell in QUICK else pytest.mark.exhaustive, id=f"{cell.method}-{cell.attack}")
    for cell in CELLS
]


@pytest.mark.parametrize("cell", thin(PARAMETERS, 2))
def test_the_attack_beats_its_floor_where_it_must(cell: Cell) -> None:
    assert planted(cell)[0].sigmas > SIGMAS


@pytest.mark.parametrize("cell", thin(PARAMETERS, 2))
def test_the_attack_falls_to_its_floor_where_it_must(cell: Cell) -> None:
    for number, figure in enumerate(hopeless(cell)):
        assert figure.sigmas < SIGMAS
        assert figure.sigmas > -SIGMAS or number not in WORLDS[cell.attack].chance


def test_every_cell_of_the_table_has_worlds() -> None:
    assert {cell.attack for cell in CELLS} == set(WORLDS)
    named = {cell.method for cell in CELLS} | {method for method, _ in NO_ATTACK}
    assert named == set(TABLES["methods"])
    tried = {parameter.values[0] for parameter in PARAMETERS}
    assert tried == set(CELLS)
    assert tried >= QUICK


def test_every_attack_is_tried_with_every_run_of_the_tests() -> None:
    assert {cell.attack for cell in QUICK} == set(WORLDS)
