"""Random runs whose ledgers are held to an accountant of its own, which hooks every draw of noise and composes by FFT.

Runs over methods, topologies, clients of different make, public shares, schedules and mechanisms, alone and beside each
other. The ledger may say more, never less; what it knows exactly it must not exceed by much either.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from typing import Any

import dp_accounting as dp
import pytest
from torch import nn

import splitfed as sf
from splitfed.core.defense import Defense
from splitfed.core.errors import InvalidInput
from splitfed.core.random import stream
from splitfed.core.topology import Topology
from splitfed.defenses import DpSgd, GaussianRelease, LabelDp, LaplaceRelease
from splitfed.federated import FedProto
from splitfed.models.mlp import mlp
from splitfed.privacy.gaussian_mechanism import gaussian_epsilon
from splitfed.schedules import Independent, Sequential
from splitfed.topologies import heterogeneous, local, u_shaped, vanilla, vertical
from splitfed.training.run import Run
from tests.federated.examples import shared_probes
from tests.privacy.independent_accountant import Seen, Use, client_costs, spent, uses_by_place, watched

RUNS = 40
DISCRETISATION = 1e-3
METHODS = (None, "fedavg", "fedprox", "feddistill", "fedmd", "aggregation", "mafml", "fedproto", "fedgen", "fedper")
MECHANISMS = ("release", "steps", "upload", "release", "steps", "laplace", "targets", "steps", "release", "labels")
QUICK = (5, 11)


@pytest.mark.parametrize(("times", "sigma"), [(1, 1.0), (30, 4.0), (900, 20.0)])
def test_the_accountant_agrees_with_the_formula_of_gaussians(times: int, sigma: float) -> None:
    exact = gaussian_epsilon(sigma / times**0.5, 1e-4)
    assert spent({Use("gaussian", sigma): times}, 1e-4) == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize(
    ("uses", "event"),
    [
        ({Use("gaussian", 1.1, 0.2): 40}, dp.PoissonSampledDpEvent(0.2, dp.GaussianDpEvent(1.1))),
        ({Use("laplace", 4.0): 40}, dp.LaplaceDpEvent(4.0)),
    ],
)
def test_the_accountant_agrees_with_another_one(uses: dict[Use, int], event: Any) -> None:
    theirs = dp.pld.PLDAccountant(value_discretization_interval=1e-4)
    theirs.compose(event, 40)
    assert spent(uses, 1e-4) == pytest.approx(theirs.get_epsilon(1e-4), rel=DISCRETISATION)


def test_a_pure_mechanism_is_its_epsilon() -> None:
    assert spent({Use("pure", 2.0): 1}, 1e-9) == pytest.approx(2.0, rel=1e-4)


def bottom(width: int, learns: bool) -> nn.Module:
    made = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 6))
    return made.requires_grad_(learns)


def draw(drawn: random.Random, method: Any, mechanism: str) -> dict[str, Any]:
    """Return the arguments of a run with this method and this mechanism; not every one can be."""
    clients = drawn.choice((1, 2, 3))
    shape = drawn.choice(("vanilla", "u_shaped", "local", "makes", "makes"))
    net = mlp((1, 8, 8), 10, (6, 6), seed=0)
    topology: Topology | Sequence[Topology]
    if shape == "makes":
        top = nn.Linear(6, 10)
        bottoms = [bottom(drawn.choice((4, 7)), drawn.random() < 0.5) for _ in range(clients)]
        topology = heterogeneous([vertical({"client": one}, top, labels="client") for one in bottoms])
    else:
        build = {"vanilla": lambda: vanilla(net, "relu1"), "u_shaped": lambda: u_shaped(net, ("relu1", "relu2"))}
        topology = build.get(shape, lambda: local(net, ("relu1",)))()
    freezes, sigma, public = drawn.random() < 0.6, drawn.choice((2.0, 4.0, 8.0)), drawn.choice((0.0, 0.2))
    sampling = drawn.choice(("shuffle", "poisson"))
    on = drawn.choice(((), ("soft labels->fed_server",), ("prototype->fed_server",)))
    kinds: dict[str, Defense] = {
        "release": GaussianRelease(noise_multiplier=sigma, freeze=freezes),
        "laplace": LaplaceRelease(epsilon=1 / (4 * sigma), freeze=freezes),
        "upload": GaussianRelease(noise_multiplier=sigma, on=on),
        "steps": DpSgd(noise_multiplier=sigma, clip=drawn.choice(("party", "joint"))),
        "labels": LabelDp(1 / sigma, "labels"),
        "targets": LabelDp(1 / sigma, "gradient"),
    }
    chosen = [mechanism, *drawn.sample(sorted(kinds.keys() - {mechanism}), drawn.choice((0, 0, 1)))]
    if method == "fedproto" and drawn.random() < 0.7:
        (topology if isinstance(topology, Topology) else topology[0]).segments[0].module.requires_grad_(False)
        method = FedProto(private={"noise_multiplier": sigma})
    schedule = drawn.choice(("sequential", "splitfed_v1", "splitfed_v3", Sequential(hand_over="none")))
    return {
        "topology": topology,
        "data": sf.data.digits()
        .rows(range(90 + 30 * clients))
        .clients(clients, auxiliary=10, victims=8, public=public, validation=0.0, seed=drawn.randrange(100)),
        "schedule": Independent() if shape == "local" else schedule,
        "method": method,
        "defenses": [kinds[name] for name in chosen],
        "batch_size": drawn.choice((8, 16)),
        "rounds": drawn.choice((1, 2)),
        "local": sf.LocalUpdate(sampling=sampling, local_epochs=drawn.choice((1, 2))),
        "optimizer": sf.Optim("SGD", {"lr": 0.01}),
        "seed": drawn.randrange(100),
    }


def trained(number: int, seen: Seen) -> Run:
    """Train the first run that can be, of those that are drawn from the seed `number`.

    Methods and mechanisms take turns; a pair that cannot be gives way to others.
    """
    drawn = random.Random(number)
    for attempt in range(200):
        wanted = METHODS[number // 4], MECHANISMS[number % 10]
        arguments = draw(drawn, *(wanted if attempt < 20 else (drawn.choice(METHODS), wanted[1])))
        try:
            with shared_probes(), stream(0), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run = sf.train(**arguments)
        except InvalidInput:
            seen.__init__()  # type: ignore[misc]
            continue
        if run.ledger.totals:
            return run
        seen.__init__()  # type: ignore[misc]
    raise AssertionError("nothing can be trained")


@pytest.mark.parametrize(
    "number", [pytest.param(i, marks=() if i in QUICK else pytest.mark.exhaustive) for i in range(RUNS)]
)
def test_no_epsilon_is_too_small(number: int) -> None:
    seen = Seen()
    with watched(seen):
        run = trained(number, seen)
    check(run, seen)


def check(run: Run, seen: Seen) -> None:
    """Hold what the ledger of `run` says to what was `seen`."""
    ledger = run.ledger
    totals = {(total.protects, total.neighbours): total.epsilon for total in ledger.totals}
    # Steps without a promise have no total, nor labels that nothing depends on which crosses.
    optional = {"weights", "labels"}
    for what, of_client in client_costs(run, seen, ledger.delta).items():
        if what in totals or what[0] not in optional:
            assert max(of_client.values()) <= totals[what] * (1 + DISCRETISATION), (what, of_client)
    for place, uses in uses_by_place(seen).items():
        assert uses <= max(line.uses for line in ledger.lines if line.place == place), place
