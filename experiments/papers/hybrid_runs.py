"""What the table of hybrids trains: two settings of few examples, and an arm for every way to train in them.

An arm is a topology, a schedule and a method or none. All arms of a setting and a seed have the same rows, layers,
first weights, rounds, batches and rates.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

import splitfed as sf
from splitfed.core.messages import Recording
from splitfed.core.optimizers import Optim
from splitfed.core.random import derive, generator, stream
from splitfed.core.topology import Topology
from splitfed.data.dataset import Dataset, Federation
from splitfed.data.partitions import dirichlet
from splitfed.data.rotation import ANGLES
from splitfed.engines.base import FED
from splitfed.federated import FML, MAFML, Aggregation, FedAKT, FedProto, Method
from splitfed.models.lenet import lenet
from splitfed.schedules import Independent, Sequential, SplitFedV1, SplitFedV3
from splitfed.schedules.base import Schedule
from splitfed.topologies import local, u_shaped, vanilla

CUT, CUTS = "pool2", ("pool2", "relu4")


class Setting(NamedTuple):
    """Images drawn from MNIST-5k, clients, and what they train with; `skew`: of the Dirichlet draw of labels."""

    images: int
    clients: int
    skew: float
    test: float
    auxiliary: int
    victims: int
    rounds: int
    batch: int
    public: float = 0.0
    domains: bool = False


SETTINGS = {
    "few": Setting(2700, 10, 0.5, 0.8, 500, 200, 50, 10),
    "domains": Setting(2300, 4, 1.0, 0.7, 200, 100, 50, 32, public=0.1, domains=True),
}


class Arm(NamedTuple):
    """One way to train in a setting."""

    name: str
    setting: str
    shape: str
    schedule: Schedule
    method: Method | None = None


ALONE = {name: Arm("alone", name, "whole", Independent()) for name in SETTINGS}
OWN = Sequential(hand_over="none")
PLAIN = (
    Arm("plain vanilla v1", "few", "vanilla", SplitFedV1()),
    Arm("plain U v1", "few", "U", SplitFedV1()),
    Arm("plain vanilla v3", "few", "vanilla", SplitFedV3()),
    Arm("plain U v3", "few", "U", SplitFedV3()),
    Arm("plain vanilla in turn", "domains", "vanilla", OWN),
)
HYBRIDS = (
    Arm("FML vanilla", "few", "vanilla", SplitFedV1(), FML()),
    Arm("FML U", "few", "U", SplitFedV1(), FML()),
    Arm("FedProto vanilla", "few", "vanilla", SplitFedV3(), FedProto()),
    Arm("FedProto U", "few", "U", SplitFedV3(), FedProto()),
    Arm("FedAKT vanilla", "few", "vanilla", SplitFedV1(), FedAKT(weight=0.5)),
    Arm("MAFML vanilla", "domains", "vanilla", OWN, MAFML()),
)
# Not a hybrid to be judged: others' public rows as rows of one's own, the plainest use of what MAFML shows.
SHARING = Arm("rows shared, vanilla", "domains", "vanilla", OWN, Aggregation())


def plain_of(arm: Arm) -> Arm:
    """Return the arm that trains as `arm` does, without its method."""
    return next(p for p in PLAIN if (p.setting, p.shape, p.schedule) == (arm.setting, arm.shape, arm.schedule))


@cache
def federation(setting: Setting, seed: int) -> Federation:
    """Return the clients' rows, drawn by `seed`."""
    everything = sf.data.mnist5k()
    drawn = generator(seed, "hybrids")
    images = everything.rows(torch.randperm(len(everything), generator=drawn)[: setting.images])
    minimum = setting.images // (4 * setting.clients)
    if setting.domains:
        return _turned(images, setting, minimum, drawn).clients(
            setting.clients,
            by_domain=True,
            auxiliary=setting.auxiliary,
            victims=setting.victims,
            validation=0.0,
            test=setting.test,
            public=setting.public,
            seed=seed,
        )
    return images.clients(
        setting.clients,
        dirichlet=setting.skew,
        minimum=minimum,
        auxiliary=setting.auxiliary,
        victims=setting.victims,
        validation=0.0,
        test=setting.test,
        seed=seed,
    )


def _turned(images: Dataset, setting: Setting, minimum: int, drawn: torch.Generator) -> Dataset:
    """Return every image once, in the domain that the Dirichlet draw puts it in, turned by that domain's angle."""
    parts = dirichlet(images.y, setting.clients, setting.skew, minimum, drawn)
    every = images.rotated(ANGLES[: setting.clients])
    return every.rows(torch.cat([i * len(images) + part for i, part in enumerate(parts)]))


def topology(shape: str, seed: int) -> Topology:
    """Return LeNet with maximum pooling, whole or cut: the same weights in every shape."""
    with stream(derive(seed, "hybrids", "weights")):
        model = lenet((1, 28, 28), 10, pool="max", seed=None)
    if shape == "whole":
        return local(model)
    return vanilla(model, CUT) if shape == "vanilla" else u_shaped(model, CUTS)


def train(arm: Arm, seed: int, setting: Setting) -> sf.Run:
    """Train; the aggregation server is recorded where it is the method's own party."""
    watched = isinstance(arm.method, (FedProto, MAFML))
    return sf.train(
        topology(arm.shape, seed),
        federation(setting, seed),
        schedule=arm.schedule,
        method=arm.method,
        rounds=setting.rounds,
        batch_size=setting.batch,
        optimizer=Optim("Adam", {"lr": 2e-3}),
        logging=sf.Logging(record=Recording((FED,)) if watched else None),
        evaluation=sf.Evaluation(every=setting.rounds, across_clients=True),
        seed=seed,
    )
