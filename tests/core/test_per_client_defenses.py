"""Defenses of some clients alone: who sends what, what is planned, what is promised, and what is refused."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.core.defense import Defense
from splitfed.core.errors import InvalidInput
from splitfed.core.own_values import compute_own_value
from splitfed.core.random import stream
from splitfed.core.topology import Topology
from splitfed.data.dataset import Federation
from splitfed.defenses import (
    Adversarial,
    ChannelPruning,
    DistanceCorrelation,
    DpSgd,
    GaussianRelease,
    LabelDp,
    Latent,
    MaxNorm,
    Noise,
    Quantization,
    TopK,
)
from splitfed.models.mlp import mlp
from splitfed.planning.calibration import calibrate_defenses
from splitfed.planning.plan import cost
from splitfed.planning.private import planned_ledger
from splitfed.planning.validation import Prepared, prepare
from splitfed.privacy.gaussian_mechanism import gaussian_epsilon
from splitfed.schedules.base import Training
from splitfed.topologies import u_shaped, vanilla
from splitfed.training.run import Run
from tests.examples import InPlaceAfterCut, toy_data


@cache
def federation() -> Federation:
    return toy_data(120).clients(3, auxiliary=10, victims=10)


def cut() -> Topology:
    with stream(0):
        return vanilla(InPlaceAfterCut(), "pool")


def ready(*defenses: Defense, topology: Topology | None = None, schedule: str = "splitfed_v3") -> Prepared:
    return prepare(
        topology or cut(),
        federation(),
        schedule=schedule,
        defenses=defenses,
        optimizer=None,
        training=Training(16),
    )


def trained(*defenses: Defense, **more: Any) -> Run:
    given = {"schedule": "splitfed_v3", "rounds": 2, "batch_size": 16, "defenses": defenses, **more}
    topology = given.pop("topology", None) or cut()
    return sf.train(topology, federation(), **given)


def arrived(run: Run, replica: int) -> Tensor:
    """What the server receives when this client predicts its training rows."""
    with run.engine.record_party("server") as recorder:
        run.engine.predict(replica, "train", "evaluate", 0)
    (value,) = recorder.view().select(kind="activation").tensors().values()
    return value


def made(run: Run, replica: int) -> Tensor:
    party = run.engine.party(replica, "client")
    return compute_own_value(party, "pool", "train")


def test_one_client_sends_noise_and_the_others_what_they_made() -> None:
    run = trained(Quantization(bits=8), Noise(scale=3.0, clients=(1,)), rounds=1)
    gaps = [float((arrived(run, replica) - made(run, replica)).std()) for replica in range(3)]
    assert gaps[1] == pytest.approx(3.0, rel=0.05)
    assert max(gaps[0], gaps[2]) < 0.02, "half a step of 8 bits"


def test_only_the_client_that_has_it_learns_otherwise() -> None:
    """In 'blind' nothing is handed on before the server's first step: one step, and only client 1's weights differ."""
    options: dict[str, Any] = {"rounds": 1, "batch_size": 64, "schedule": "blind"}
    bare, run = trained(**options), trained(Noise(scale=3.0, clients=(1,)), **options)
    first, second = ([r.engine.party(replica, "client").state.contents() for replica in range(3)] for r in (bare, run))
    same = [all(torch.equal(first[replica][n], second[replica][n]) for n in first[replica]) for replica in range(3)]
    assert same == [True, False, True]


def test_all_clients_named_is_the_same_as_none() -> None:
    one, two = (trained(Noise(scale=0.5, clients=c), rounds=1).engine for c in ((), (0, 1, 2)))
    for replica in range(3):
        for name, value in one.party(replica, "client").state.contents().items():
            assert torch.equal(two.party(replica, "client").state.contents()[name], value)


def test_bytes_of_a_codec_that_one_client_has() -> None:
    """96 numbers a row: 4 bytes each from two clients; 8 numbers and places of 7 bits from the third."""
    run = trained(TopK(k=8, clients=(2,)))
    counted = {flow: n for flow, n in run.engine.traffic.flows.items() if flow.phase == "train"}
    assert cost(ready(TopK(k=8, clients=(2,))), 2).flows == counted
    sent = {f.sender: n for f, (_, n) in counted.items() if f.kind == "activation"}
    rows = [len(c.train) for c in federation().clients]
    assert sent["client0"] == 2 * rows[0] * 96 * 4
    steps = [16] * (rows[2] // 16) + [rows[2] % 16] * bool(rows[2] % 16)
    assert sent["client2"] == 2 * sum(n * 8 * 4 + -(-n * 8 * 7 // 8) for n in steps)


def test_the_ledger_is_of_the_clients_that_have_it() -> None:
    """The clients' own segments learn: all releases of client 1 compose, and the others are said to be open."""
    defense = GaussianRelease(noise_multiplier=4.0, clients=(1,))
    run = trained(defense)
    (line,), (total,) = run.ledger.lines, run.ledger.totals
    own = federation().clients[1]
    uses = 2 * sum(len(part) for part in (own.train, own.validation, own.test))
    assert (line.clients, line.uses, total.client, total.only) == (1, uses, 1, (1,))
    assert total.epsilon == pytest.approx(gaussian_epsilon(4.0 / uses**0.5, run.ledger.delta))
    assert run.epsilon is None, "the other clients are promised nothing"
    assert ", for client 1 alone: " in str(run.ledger)
    assert "; without a promise: " in str(run.ledger)
    (edge,) = run.engine.topology.crossings
    assert f"releases on {edge.name} (client to server) of all clients but 1" in run.ledger.open
    assert planned_ledger(calibrate_defenses(ready(defense), 2), 2) == run.ledger


def test_weights_that_travel_to_clients_without_it_leave_no_bound() -> None:
    defense = GaussianRelease(noise_multiplier=4.0, clients=(1,))
    run = trained(defense, schedule="splitfed_v1")
    assert math.isinf(run.ledger.totals[0].epsilon)
    assert "shown by clients without the mechanism, for client 1 alone: " in str(run.ledger)
    assert planned_ledger(calibrate_defenses(ready(defense, schedule="splitfed_v1"), 2), 2) == run.ledger


def test_labels_of_one_client() -> None:
    """Randomised at client 0 alone, once; its own rows are private whoever learns from them."""
    with stream(0):
        topology = vanilla(InPlaceAfterCut(), "pool")
    run = trained(
        LabelDp(epsilon=0.1, clients=(0,)),
        topology=topology,
        rounds=1,
        logging=sf.Logging(record=sf.Recording(("server",))),
    )
    labels = run.engine.view("server").select(kind="label").messages
    for replica, name in enumerate(("client0", "client1", "client2")):
        sent = torch.cat([t for m in labels if m.sender == name for t in m.tensors.values()])
        true = federation().clients[replica].train.y
        equal = torch.equal(sent.sort().values, true.sort().values)
        assert equal == (replica > 0)
    assert run.ledger.totals[0].only == (0,)
    assert 0.09 < run.ledger.totals[0].epsilon <= 0.1, "a little less than pure, at a delta"


def test_a_penalty_of_one_client() -> None:
    """Where clients compute their own loss they can weigh it, each as it likes."""
    with stream(0):
        topology = u_shaped(mlp((1, 8, 8), 10, (16, 12), seed=None), ("relu1", "relu2"))
    defense = DistanceCorrelation(alpha=0.9, on=("bottom->middle",), clients=(1,))
    options: dict[str, Any] = {"rounds": 1, "batch_size": 64, "schedule": "blind", "topology": topology}
    bare, run = trained(**options), trained(defense, **options)
    first, second = ([r.engine.party(replica, "client").state.contents() for replica in range(3)] for r in (bare, run))
    same = [all(torch.equal(first[replica][n], second[replica][n]) for n in first[replica]) for replica in range(3)]
    assert same == [True, False, True]


def test_what_an_adversary_models_is_what_its_victim_has() -> None:
    """The mean of a quantized release is quantized: the model of client 1's has no more than 4 values."""
    run = trained(Quantization(bits=2, clients=(1,)), rounds=1)
    x = federation().clients[0].train.x[:16]
    modelled = [run.evaluator.grants.knowledge("server", replica, 0).upstream(x)["pool"] for replica in range(2)]
    assert len(modelled[1].unique()) <= 4
    assert len(modelled[0].unique()) > 100


REFUSED: dict[str, tuple[Defense, str]] = {
    "unknown client": (Noise(clients=(3,)), "Noise client=3 is not allowed: there are 3 clients, numbered from 0"),
    "negative": (Noise(clients=(-1,)), "Noise client=-1 is not allowed; expected a whole number of at least 0"),
    "twice": (Noise(clients=(1, 1)), "Noise clients=(1, 1) is not allowed; expected each client once"),
    "weights": (
        DpSgd(noise_multiplier=1.0, clients=(0,)),
        "DpSgd for some clients alone is not allowed: it is accounted for the weights of all clients together; give it "
        "to all of them",
    ),
    "weighed loss": (
        DistanceCorrelation(clients=(0,)),
        "DistanceCorrelation for some clients alone is not allowed: it weighs the loss of 'fc2', which 'server' "
        "computes for all",
    ),
    "layers": (
        ChannelPruning(clients=(0,)),
        "ChannelPruning for some clients alone is not allowed: it changes segments, and all clients have the same",
    ),
    "bits": (
        Latent(clients=(0,)),
        "Latent for some clients alone is not allowed: it changes segments, and all clients have the same",
    ),
    "bottleneck": (
        Adversarial(bottleneck=2, clients=(0,)),
        "Adversarial for some clients alone is not allowed: it changes segments, and all clients have the same",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    defense, text = REFUSED[name]
    with pytest.raises(InvalidInput, match=f"^{re.escape(text)}$"):
        ready(defense)


def test_gradients_of_a_shared_party_are_refused() -> None:
    """With the labels at the head the client sends the gradient itself; a shared server sends it to everybody."""
    u = u_shaped(mlp((1, 8, 8), 10, (16, 12)), ("relu1", "relu2"))
    assert ready(MaxNorm(clients=(0,)), topology=u).defenses[0].clients == (0,)
    halves = toy_data(120).halves().clients(2, auxiliary=10, victims=10)
    bottoms = {side: nn.Sequential(nn.Flatten(), nn.Linear(32, 6)) for side in ("left", "right")}
    topology = sf.topologies.vertical(bottoms, nn.Linear(12, 10), labels="right")
    with pytest.raises(InvalidInput, match="the gradient on 'bottom_left->fusion' leaves 'server', whom all clients"):
        sf.train(topology, halves, schedule="splitfed_v3", defenses=MaxNorm(clients=(0,)))
