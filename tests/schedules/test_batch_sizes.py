"""A batch size a client: which rows train, what is counted, promised and resumed, and what is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.local_update import LocalUpdate
from splitfed.defenses import DpSgd
from splitfed.planning import calibration
from splitfed.planning.calibration import calibrate_defenses
from splitfed.planning.plan import cost
from splitfed.planning.validation import prepare
from splitfed.schedules import Independent
from splitfed.schedules.base import Training
from splitfed.topologies import local, vanilla
from splitfed.training.entry_point import _expected_batch_sizes
from tests.federated.examples import check_planned, check_resumed, go, hand, model, own, pictures

SIZES = [5, 7, 30]
DATA = sf.data.digits().rows(range(160)).clients(2, auxiliary=5, victims=5, test=0.1, validation=0.1, seed=0)
ROWS = [len(client.train) for client in DATA.clients]
PLAIN = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4), torch.nn.ReLU(), torch.nn.Linear(4, 10))


def test_every_client_has_batches_of_its_own_size() -> None:
    training = Training.of(LocalUpdate(), SIZES, seed=3)
    assert training.batch_size == 30
    for client, size in enumerate(SIZES):
        alone = Training(size, seed=3)
        assert training.of_client(client) == alone
        found, expected = training.batches(33, 2, client), alone.batches(33, 2, client)
        assert [b.tolist() for b in found] == [b.tolist() for b in expected]
    turns = Independent(steps=4)._batches(training, 33, 1, 1)
    assert [b.tolist() for b in turns] == [
        b.tolist() for b in Independent(steps=4)._batches(Training(7, seed=3), 33, 1, 1)
    ]


def test_steps_by_hand() -> None:
    """One weight at 2, labels 1: a step takes w to .8 w + .2; of 4 rows, two steps in batches of 2, four of 1."""
    run = hand(None, 1, clients=((4, 1.0), (4, 1.0)), batch_size=[2, 1])
    assert own(run, 0) == pytest.approx(1.64)
    assert own(run, 1) == pytest.approx(1.4096)
    assert run.history[0]["steps"] == 6


def test_whoever_trains_alone_is_as_with_that_size_for_all() -> None:
    """Clients that share nothing: bit for bit."""
    mixed = go(None, batch_size=SIZES)
    for client, size in enumerate(SIZES):
        same = go(None, batch_size=size)
        for name, module in mixed.engine.modules(client).items():
            for key, value in module.state_dict().items():
                assert torch.equal(value, same.engine.modules(client)[name].state_dict()[key])


@pytest.mark.parametrize("case", ["fedavg", "splitfed_v3", "sequential", "sglr", "blind"])
def test_planned_bytes_are_those_counted(case: str) -> None:
    changes: dict[str, Any] = {"batch_size": SIZES}
    changes |= {} if case == "fedavg" else {"topology": vanilla(model(), "relu"), "schedule": case}
    method = "fedavg" if case == "fedavg" else None
    run = go(method, **changes)
    check_planned(run, method, **changes)
    rows = [len(client.train) for client in run.data.clients]
    if case in ("fedavg", "sequential"):
        steps = sum(-(-count // size) for count, size in zip(rows, SIZES, strict=True))
        assert run.history[0]["steps"] == steps


def test_memory_is_that_of_the_largest() -> None:
    def needed(size: Any) -> int:
        given: dict[str, Any] = {"schedule": "sequential", "defenses": (), "optimizer": None}
        ready = prepare(vanilla(model(), "relu"), pictures(), training=Training.of(LocalUpdate(), size), **given)
        return cost(ready, 1).memory["client"].total

    assert needed([9, 30, 9]) == needed(30) > needed(9)


def test_what_is_promised_follows_each_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """DP-SGD with rows drawn by chance: rates are each client's own, and a target is kept by whoever needs most.

    Noise is taken for ten times the rate here: to work it out takes seconds.
    """

    def multiplier(uses: Any, *target: Any) -> float:
        return 10 * max(float(event.sampling_rate) for event, _ in uses(1.0))

    monkeypatch.setattr(calibration, "calibrate", multiplier)

    def settled(size: Any, **how: Any) -> DpSgd:
        given: dict[str, Any] = {"schedule": "independent", "optimizer": None, "defenses": [DpSgd(**how)]}
        training = Training.of(LocalUpdate(sampling="poisson"), size)
        (defense,) = calibrate_defenses(prepare(local(PLAIN), DATA, training=training, **given), 2).defenses
        assert isinstance(defense, DpSgd)
        return defense

    mixed = settled([8, 32], noise_multiplier=2.0)
    for client, size in enumerate((8, 32)):
        event = settled(size, noise_multiplier=2.0).weight_uses(client, 10, 2)
        assert mixed.weight_uses(client, 10, 2) == event
        assert event is not None
        assert event[0].sampling_rate == pytest.approx(size / ROWS[client])
    # Equal rows and steps, 2 an epoch, at other rates: the client that needs less comes last, or first.
    assert ROWS[0] == ROWS[1]
    assert ROWS[0] / 2 <= 32
    for size in (40, [40, 32], [32, 40]):
        assert settled(size, epsilon=2.0, delta=1e-3).noise_multiplier == pytest.approx(400 / ROWS[0])


def test_batches_of_random_size_are_divided_by_each_clients_own() -> None:
    """Four rows each, at a chance of a half and of a quarter: two rows, and one, are expected in a step."""
    chance = LocalUpdate(sampling="poisson")
    run = hand(None, 1, clients=((4, 1.0), (4, 1.0)), batch_size=[2, 1], local=chance)
    assert run.plan is not None
    assert _expected_batch_sizes(run.plan.prepared) == [2.0, 1.0]
    # A step takes w - 1 to (1 - .2 rows / expected) (w - 1).
    for client, (size, steps) in enumerate(((2, 2), (1, 4))):
        batches = Training(size, sampling="poisson").batches(4, 0, client)
        assert len(batches) == steps
        shrinks = [1 - 0.2 * len(rows) / size for rows in batches]
        assert own(run, client) == pytest.approx(1 + math.prod(shrinks))


def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    check_resumed(go("fedavg", 4, batch_size=SIZES), "fedavg", tmp_path / "run", batch_size=SIZES)
    with pytest.raises(InvalidInput, match=r"holds another run: its training\.batch_sizes is \[5, 7, 30\], not \[\]"):
        go("fedavg", 4, batch_size=30, logging=sf.Logging(folder=tmp_path / "run", resume=True))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([5, 7], "batch_size has 2 entries for 3 clients; expected one a client, or one for all"),
        ([], "batch_size=[] is not allowed; expected a whole number, or one a client"),
        ([5, 0, 7], "batch_size of client 1=0 is not allowed; expected a whole number of at least 1"),
        ([5, 7, 1], "client2 has 30 training rows, so batch_size=1 leaves a batch of one, and batch norm in segment"),
    ],
    ids=str,
)
def test_what_is_refused(given: list[int], text: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(text)):
        go(None, 1, batch_size=given)
