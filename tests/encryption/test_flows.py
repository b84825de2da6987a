"""What is planned of an encrypted run is what it counts: every message, and its bytes within 1 %."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.optimizers import Optim
from splitfed.core.topology import Topology
from splitfed.costs.speeds import Machine, Speeds
from splitfed.data.dataset import Federation
from splitfed.data.sources.digits import digits
from splitfed.encryption import seconds as encrypted_seconds
from splitfed.encryption.ciphertext_counts import (
    CIPHERTEXT_PRODUCT,
    DECRYPTION,
    ENCRYPTION,
    LOADING,
    NUMBER_PRODUCT,
    PACKED_PRODUCT,
    RESCALING,
    ROTATION,
    SAVING,
    CiphertextOperation,
)
from splitfed.encryption.flows import EncryptedSteps
from splitfed.encryption.parameters import PRESETS
from splitfed.encryption.seconds import estimate_batch, unit_seconds
from splitfed.encryption.settings import Encryption
from splitfed.planning.computation import plan_of
from splitfed.planning.plan import cost
from splitfed.planning.validation import Prepared, prepare
from splitfed.schedules.base import Training
from splitfed.topologies import u_shaped
from splitfed.training.entry_point import train
from splitfed.training.settings import Evaluation
from tests.thinning import thin

IN, OUT = 4, 3
SGD = Optim("SGD", {"lr": 0.05})


class SquareBetween(nn.Module):
    """Two layers with a square between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(IN, OUT), nn.Linear(OUT, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) ** 2)


def topology(encryption: Encryption | None, squares: bool = False) -> Topology:
    torch.manual_seed(0)
    bottom = nn.Sequential(nn.Flatten(), nn.Linear(64, IN), nn.Tanh())
    middle = SquareBetween() if squares else nn.Linear(IN, OUT)
    head = nn.Sequential(nn.Tanh(), nn.Linear(OUT, 10))
    model = nn.Sequential(OrderedDict(bottom=bottom, middle=middle, head=head))
    return u_shaped(model, ["bottom", "middle"], encryption=encryption)


def rows(clients: int) -> Federation:
    return digits().rows(range(120)).clients(clients, seed=0, victims=4, auxiliary=4)


def ready(encryption: Encryption | None, clients: int = 1, squares: bool = False, **more: Any) -> Prepared:
    given: dict[str, Any] = {"schedule": "sequential", "defenses": (), "optimizer": SGD, "training": Training(32)}
    return prepare(topology(encryption, squares), rows(clients), **{**given, **more})


def settings(protocol: str, **more: Any) -> Encryption:
    given: dict[str, Any] = {"parameters": "depth_1_coarse", "bound": 4.0, "accept_leak": True, **more}
    return Encryption(protocol=protocol, **given)


CASES = [
    pytest.param(settings("weight_shares"), 2, "sequential", False, id="weight_shares"),
    pytest.param(settings("weight_shares", layout="rows", keys="shared"), 2, "splitfed_v1", False, id="rows, shared"),
    pytest.param(settings("plain_gradient"), 1, "sequential", False, id="plain_gradient"),
    pytest.param(settings("plain_gradient", layout="rows"), 1, "sequential", False, id="plain_gradient, rows"),
    pytest.param(settings("constant_mask"), 1, "sequential", False, id="constant_mask"),
    pytest.param(settings("weight_shares", parameters="depth_3"), 1, "sequential", True, id="a square between"),
]


@pytest.mark.parametrize(("encryption", "clients", "schedule", "squares"), thin(CASES, 2))
def test_planned_messages_are_those_counted(encryption: Encryption, clients: int, schedule: str, squares: bool) -> None:
    run = train(
        topology(encryption, squares), rows(clients), schedule=schedule, rounds=1, batch_size=32, optimizer=SGD, seed=0
    )
    counted = {flow: found for flow, found in run.engine.traffic.flows.items() if flow.phase == "train"}
    planned = cost(ready(encryption, clients, squares, schedule=schedule), 1).flows
    assert {flow: messages for flow, (messages, _) in planned.items()} == {f: n for f, (n, _) in counted.items()}
    for flow, (_, nbytes) in counted.items():
        assert planned[flow][1] == pytest.approx(nbytes, rel=0.01), flow
    kinds = {flow.kind for flow in counted}
    assert ("masked weights" in kinds) == (encryption.protocol == "constant_mask")
    contexts = [found for flow, found in planned.items() if flow.kind == "public context"]
    assert len(contexts) == (1 if encryption.keys == "shared" else clients)


def operations(encryption: Encryption, batch: int, squares: bool = False) -> dict[tuple[str, int], int]:
    prepared = ready(encryption, squares=squares)
    return dict(EncryptedSteps(prepared.topology, prepared.facts[0]).step(batch).operations)


def test_operations_of_a_step_by_hand() -> None:
    """One layer, 4 by 3: there and back 4 and 3 fresh ciphertexts, 12 products each way, 3 and 4 results."""
    assert operations(settings("weight_shares"), 32) == {
        (ENCRYPTION, 1): IN + OUT,
        (NUMBER_PRODUCT, 1): 2 * IN * OUT,
        (RESCALING, 1): IN + OUT,
        (SAVING, 1): IN + OUT,
        (LOADING, 1): IN + OUT,
        (SAVING, 0): IN + OUT,
        (LOADING, 0): IN + OUT,
        (DECRYPTION, 0): IN + OUT,
    }
    # Gradients in plain; the batch across once more, for the gradient of the weights, 4 by 3 from 5 rows.
    masked = operations(settings("constant_mask"), 5)
    assert masked[ENCRYPTION, 1] == IN + 5
    assert masked[NUMBER_PRODUCT, 1] == IN * OUT + 5 * OUT
    assert masked[DECRYPTION, 0] == OUT + OUT
    # Width 4: blocks of 8 slots, 256 rows a ciphertext. Four diagonals by 2 baby and 2 giant steps.
    packed = operations(settings("weight_shares", layout="rows"), 300)
    assert packed[ENCRYPTION, 1] == packed[DECRYPTION, 0] == 2 * 2
    assert packed[PACKED_PRODUCT, 1] == 2 * 2 * 4
    assert packed[ROTATION, 1] == 2 * 2 * 2


def test_operations_around_a_square_by_hand() -> None:
    """Layer, square, layer: the result is three levels down, its input two, which is where the client's share goes.

    What arrives fresh is brought down by a product with 1 for every ciphertext: the share forward, its slope back.
    """
    found = operations(settings("weight_shares", parameters="depth_3"), 8, squares=True)
    assert found[CIPHERTEXT_PRODUCT, 2] == 2 * OUT
    assert found[NUMBER_PRODUCT, 3] == IN * OUT + OUT * OUT + 2 * OUT
    assert found[NUMBER_PRODUCT, 1] == OUT * OUT + IN * OUT
    assert (found[DECRYPTION, 1], found[DECRYPTION, 0]) == (2 * OUT, OUT + IN)


def test_a_batch_is_estimated_from_what_operations_take_here() -> None:
    prepared = ready(settings("weight_shares"))
    found = estimate_batch(prepared.topology, prepared.facts[0], 32)
    costs = unit_seconds(PRESETS["depth_1_coarse"], frozenset(operations(settings("weight_shares"), 32)))
    times = operations(settings("weight_shares"), 32)
    assert found["seconds"] == pytest.approx(sum(costs[CiphertextOperation(*one)] * n for one, n in times.items()))
    assert all(seconds > 0 for seconds in costs.values())
    assert (found["rows"], found["parameters"], found["operations"][NUMBER_PRODUCT]) == (32, "depth_1_coarse", 24)
    assert found["bytes"] == sum(m["ciphertext_bytes"] + m["plain_bytes"] for m in found["messages"])
    # Without TenSEAL all but the seconds is known.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encrypted_seconds, "import_tenseal", _not_installed)
        assert estimate_batch(prepared.topology, prepared.facts[0], 32) == {**found, "seconds": None}
    plain = ready(None)
    assert plan_of(plain.topology).estimate_batch(plain.topology, plain.facts[0], 32) is None


def _not_installed() -> None:
    raise InvalidInput("encryption needs the package tenseal")


def test_server_reads_plain_numbers_only_where_a_protocol_leaks() -> None:
    for protocol, plain in (("weight_shares", set()), ("plain_gradient", {"gradient"})):
        prepared = ready(settings(protocol))
        messages = EncryptedSteps(prepared.topology, prepared.facts[0]).step(32).messages
        assert {m.kind for m in messages if m.receiver == "server" and m.plain_bytes} == plain
    # The gradient of 32 rows of the layer's result, and of its weights and bias.
    (gradient,) = [m for m in messages if m.receiver == "server" and m.kind == "gradient"]
    assert gradient == ("gradient", "client", "server", 0, 4 * (32 * OUT + OUT * IN + OUT), False)


def test_a_simulated_clock_is_refused_beside_encryption() -> None:
    speeds = Speeds(Machine(1e9, 1e6, 1e6, 0.01))
    with pytest.raises(InvalidInput, match="speeds count arithmetic in plain, and an encrypted run spends its time"):
        cost(ready(settings("weight_shares")), 1, speeds)
    with pytest.raises(InvalidInput, match="speeds count arithmetic in plain"):
        train(
            topology(settings("weight_shares")),
            rows(1),
            rounds=1,
            batch_size=32,
            optimizer=SGD,
            evaluation=Evaluation(speeds=speeds),
        )
