"""Controls of the accuracy table: each is its method at first, and training alone where its terms have no weight."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import splitfed as sf
from experiments.papers.method_controls import FedKDControl, FedMDControl, FMLControl, MAFMLControl
from splitfed.core.optimizers import Optim
from splitfed.federated import FML, MAFML, FedKD, FedMD
from splitfed.schedules import Independent
from splitfed.topologies import local
from tests.examples import assert_same
from tests.federated.methods import go, net, weights


def models(method: Any, data: Any = None, **changes: Any) -> list[dict[str, Tensor]]:
    """Return each client's own model after three rounds."""
    rows = data or sf.data.digits().rows(range(120)).clients(3, auxiliary=0, victims=0, public=0.2)
    topology = local(net(), ("relu1",))
    run = go("local", method, 3, data=rows, topology=topology, schedule=Independent(), **changes)
    own = [segment.name for segment in topology.segments]
    return [{n: t for n, t in weights(run, replica).items() if n.partition("/")[0] in own} for replica in range(3)]


def same(one: Any, other: Any, **changes: Any) -> None:
    for a, b in zip(models(one, **changes), models(other, **changes), strict=True):
        assert_same(a, b)


def differ(one: Any, other: Any, **changes: Any) -> bool:
    pairs = zip(models(one, **changes), models(other, **changes), strict=True)
    return all(any(not a[name].equal(b[name]) for name in a) for a, b in pairs)


PLAIN = [(FedMDControl(), FedMD()), (MAFMLControl(), MAFML()), (FMLControl(), FML()), (FedKDControl(), FedKD())]


@pytest.mark.parametrize(("control", "method"), PLAIN, ids=lambda one: type(one).__name__)
def test_a_control_is_the_method_at_first(control: Any, method: Any) -> None:
    same(control, method)


@pytest.mark.parametrize(
    "control",
    [
        FedMDControl(digests=False, transfer=0),
        FedMDControl(weight=0.0, separate=True, transfer=0),
        FMLControl(own=1.0, divergence=0.0),
        FedKDControl(divergence=0.0, distance=0.0),
    ],
    ids=str,
)
def test_terms_without_weight_leave_training_alone(control: Any) -> None:
    same(control, None)


def test_steps_without_a_gradient_move_what_has_momentum() -> None:
    """They do nothing without it, and use up the momentum of own steps that they share."""
    plain = Optim("SGD", {"lr": 0.05})
    for control in (FedMDControl(weight=0.0, transfer=0), MAFMLControl(entropy=0.0, divergence=0.0)):
        same(control, None, optimizer=plain)
        assert differ(control, None)


@pytest.mark.exhaustive
def test_each_change_of_a_method_is_one() -> None:
    assert differ(FedMDControl(separate=True), FedMD())
    assert differ(MAFMLControl(entropy=0.0), MAFML())
    assert differ(MAFMLControl(entropy=0.0), MAFMLControl(entropy=0.0, divergence=0.0))
    assert differ(FMLControl(divergence=0.0), FML())
    for one in (FedKDControl(divergence=0.0), FedKDControl(distance=0.0), FedKDControl(divided=False)):
        assert differ(one, FedKD())


def test_half_of_a_loss_without_momentum_is_half_the_rate() -> None:
    half, whole = (Optim("SGD", {"lr": rate}) for rate in (0.05, 0.1))
    for a, b in zip(models(FMLControl(divergence=0.0), optimizer=whole), models(None, optimizer=half), strict=True):
        for name, tensor in a.items():
            assert tensor.allclose(b[name], atol=1e-6)


def test_the_mean_of_those_that_know_a_class_is_that_of_all_where_all_do() -> None:
    base = sf.data.digits().rows(range(600))
    everybody = base.clients(3, auxiliary=0, victims=0, public=0.2)
    assert all(len(client.train.y.unique()) == 10 for client in everybody.clients)
    pairs = zip(models(FedMDControl(informed=True), everybody), models(FedMD(), everybody), strict=True)
    assert all(a[name].allclose(b[name], atol=1e-4) for a, b in pairs for name in a)
    few = base.clients(3, auxiliary=0, victims=0, classes_per_client=4, public=0.2)
    assert differ(FedMDControl(informed=True), FedMD(), data=few)
