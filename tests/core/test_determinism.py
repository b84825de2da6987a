"""Same seed, same bits, whatever order the parties are made in; another seed, other bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.optimizers import Optim
from splitfed.core.topology import Topology
from splitfed.defenses import DistanceCorrelation, Noise
from splitfed.engines.local import LocalEngine
from splitfed.schedules.base import Training
from splitfed.schedules.sequential import Sequential
from splitfed.topologies import u_shaped, vanilla
from tests.examples import Dropped, assert_same, engine_of, images

BUILDERS = {"vanilla": lambda m: vanilla(m, "relu1"), "u_shaped": lambda m: u_shaped(m, ("relu1", "drop2"))}


def model() -> Dropped:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Dropped()


def train(topology: Topology, seed: int, engine_type: type[LocalEngine] = LocalEngine) -> dict[str, object]:
    defenses = [Noise(scale=0.1), DistanceCorrelation(alpha=0.2)]
    options = {"optim": Optim("Adam", {"lr": 1e-2}), "seed": seed, "defenses": defenses}
    engine = engine_of(topology, *images(60), replicas=3, **options)  # type: ignore[arg-type]
    plan = Sequential()
    state = plan.start(3)
    losses = [plan.round(engine, Training(8, seed=seed), number, state).losses for number in range(2)]
    return {"losses": losses, "parties": engine.state()["parties"]}


@pytest.mark.parametrize("shape", BUILDERS)
def test_same_seed_same_bits_another_seed_others(shape: str) -> None:
    one, two, other = (train(BUILDERS[shape](model()), seed) for seed in (0, 0, 1))
    assert_same(one, two)
    assert one["losses"] != other["losses"]


@pytest.mark.parametrize("shape", BUILDERS)
def test_the_global_random_state_does_not_matter(shape: str) -> None:
    found = []
    for seed in (11, 12):
        torch.manual_seed(seed)
        found.append(train(BUILDERS[shape](model()), 0))
    assert_same(found[0], found[1])


@pytest.mark.parametrize("shape", BUILDERS)
def test_the_order_in_which_parties_are_made_does_not_matter(shape: str) -> None:
    """Roles follow from who owns data, who holds segments and who computes losses: put that the other way round."""
    topology = BUILDERS[shape](model())
    turned = replace(topology)
    turned.__dict__["roles"] = tuple(reversed(topology.roles))
    one, two = train(topology, 0), train(turned, 0)
    assert_same(one, two)


def test_clients_that_share_nothing_but_the_server_keep_their_streams() -> None:
    """What client 0 draws does not depend on how many other clients there are."""
    streams = []
    for replicas, rows in ((1, 20), (3, 60)):
        x, y = images(60)
        engine = engine_of(vanilla(model(), "relu1"), x[:rows], y[:rows], replicas=replicas, seed=4, defenses=[Noise()])
        with engine.record_party("server") as recorder:
            engine.train(0, 0, [torch.arange(20)])
        streams.append(recorder.view().select(kind="activation").tensors())
    assert_same(streams[0], streams[1])


class AlwaysDropped(nn.Module):
    """Drops in evaluation too, as those who average over dropout do."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom, self.top = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(functional.dropout(self.bottom(x.flatten(1)), 0.5, True))


def test_randomness_that_a_model_also_draws_in_evaluation_is_seeded() -> None:
    engine = engine_of(vanilla(AlwaysDropped(), "bottom"), *images(8))
    outputs = []
    for seed in (11, 12):
        torch.manual_seed(seed)
        outputs.append(engine.predict(0, "train", "evaluate").outputs["top"])
    assert torch.equal(outputs[0], outputs[1])
