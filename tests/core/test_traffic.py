"""Bytes counted are the bytes predicted, exactly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from splitfed.core.topology import Topology
from splitfed.costs.bytes import forward_bytes, weight_bytes
from splitfed.engines.local import LocalEngine
from splitfed.models.lenet import lenet
from splitfed.models.resnet8 import resnet8
from splitfed.schedules.base import Training
from splitfed.schedules.sequential import Sequential
from splitfed.topologies import u_shaped, vanilla
from tests.examples import InPlaceAfterCut, SmallUNet, engine_of, images
from tests.predicted_bytes import epoch_bytes, step_bytes
from tests.thinning import thin

TOPOLOGIES: dict[str, Callable[[], Topology]] = {
    "vanilla lenet": lambda: vanilla(lenet((1, 8, 8), 10), "pool1"),
    "vanilla unet": lambda: vanilla(SmallUNet(), "down2"),
    "vanilla resnet8": lambda: vanilla(resnet8((1, 8, 8), 10), resnet8((1, 8, 8), 10).cuts[1]),
    "u_shaped lenet": lambda: u_shaped(lenet((1, 8, 8), 10), ("conv2", "fc2")),
    "u_shaped unet": lambda: u_shaped(SmallUNet(), ("pool1", "up2")),
}


def sizes(rows: int, batch: int) -> list[int]:
    return [batch] * (rows // batch) + [rows % batch] * (rows % batch > 0)


def rounds_of(engine: LocalEngine, plan: Sequential, training: Training, rounds: int) -> None:
    state = plan.start(engine.replicas)
    for number in range(rounds):
        plan.round(engine, training, number, state)


@pytest.mark.parametrize("hand_over", ["peer", "server", "none"])
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("name", thin(TOPOLOGIES, 2))
def test_counted_equals_predicted(name: str, replicas: int, hand_over: str) -> None:
    """Two rounds of two local epochs, and a last batch of 3 (one client) or of 7 and 6 (three) beside those of 10."""
    topology, plan, training = TOPOLOGIES[name](), Sequential(hand_over=hand_over), Training(10, local_epochs=2)
    engine = engine_of(topology, *images(53 if replicas == 1 else 50), replicas=replicas)
    rounds_of(engine, plan, training, 2)
    epochs = [
        epoch_bytes(topology, engine.facts, sizes(engine.rows(replica, "train"), 10)) for replica in range(replicas)
    ]
    turns = 2 * replicas - 1 if replicas > 1 else 0
    handed_over = turns * {"none": 0, "peer": 1, "server": 2}[hand_over] * weight_bytes(topology, "client")
    assert engine.traffic.bytes() == 2 * 2 * sum(epochs) + handed_over
    assert engine.traffic.bytes(kind="weights") == handed_over


def test_one_step_by_hand() -> None:
    """6x8x8 floats a row there and back, and 8 bytes of label: 2 x 1536 + 8 = 3080 a row."""
    topology = vanilla(InPlaceAfterCut(), "conv")
    engine = engine_of(topology, *images(7))
    engine.train(0, 0, [torch.arange(7)])
    assert engine.traffic.bytes() == 7 * 3080 == 21560
    assert engine.traffic.messages() == 3
    assert engine.traffic.by_kind() == {"activation": 7 * 1536, "gradient": 7 * 1536, "label": 7 * 8}
    assert step_bytes(topology, engine.facts, 7) == 21560
    assert forward_bytes(topology, engine.facts, 7) == 7 * 1536


def test_one_hand_over_by_hand() -> None:
    """A convolution with 6 filters of 3x3 and 6 biases: 60 floats, 240 bytes; twice over through the server."""
    topology = vanilla(InPlaceAfterCut(), "conv")
    assert weight_bytes(topology, "client") == 240
    engine = engine_of(topology, *images(8), replicas=2)
    engine.hand_over(0, 1, "client", 0)
    assert engine.traffic.bytes() == 240
    engine.hand_over(0, 1, "client", 0, via="server")
    assert engine.traffic.bytes(kind="weights") == 3 * 240
    flows = [(f.sender, f.receiver, n) for f, n in engine.traffic.flows.items()]
    assert flows == [
        ("client0", "client1", (1, 240)),
        ("client0", "server", (1, 240)),
        ("server", "client1", (1, 240)),
    ]


def test_u_shaped_sends_no_label() -> None:
    engine = engine_of(u_shaped(SmallUNet(), ("pool1", "up2")), *images(8))
    engine.train(0, 0, [torch.arange(8)])
    assert set(engine.traffic.by_kind()) == {"activation", "gradient"}
    # pool1 goes up (4x4x4), up2 and the second skip come down (8x4x4 each): 320 floats, each with a gradient.
    assert engine.traffic.bytes() == 8 * 320 * 4 * 2


def test_evaluation_is_counted_apart() -> None:
    engine = engine_of(vanilla(InPlaceAfterCut(), "conv"), *images(7))
    engine.predict(0, "train", "evaluate")
    assert engine.traffic.bytes() == 0
    assert engine.traffic.bytes("evaluate") == engine.traffic.bytes(None) == 7 * 1536


def test_counts_go_back_to_a_state() -> None:
    engine = engine_of(vanilla(InPlaceAfterCut(), "conv"), *images(7))
    engine.train(0, 0, [torch.arange(7)])
    state, flows = engine.traffic.state(), engine.traffic.flows
    engine.train(0, 1, [torch.arange(7)])
    engine.predict(0, "train", "evaluate")
    engine.traffic.load_state(state)
    assert engine.traffic.flows == flows
