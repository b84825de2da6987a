"""Clients of four makes with features of one width, and what the methods of the table share between them."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from splitfed.core.random import derive, stream
from splitfed.core.topology import Topology
from splitfed.federated import FML, FedAKT, FedDistill, FedKD, FedProto, LgFedAvg, Method
from splitfed.topologies import local

FEATURES, CLASSES, SMALLEST = 64, 10, "thin"
MAKES = (SMALLEST, "lenet", "wide", "deep")


def extractor(make: str) -> OrderedDict[str, nn.Module]:
    """Return layers that make features of images (n, 1, 28, 28): (n, 64), the last one called `features`."""
    layers: list[nn.Module]
    if make == "thin":
        layers, width = [nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(2)], 8 * 7 * 7
    elif make == "lenet":
        layers, width = [*_stage(1, 6, 5), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)], 16 * 5 * 5
    elif make == "wide":
        layers, width = [*_stage(1, 16, 3), *_stage(16, 32, 3)], 32 * 7 * 7
    else:
        layers, width = [*_stage(1, 8, 3), *_stage(8, 16, 3), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()], 32 * 7 * 7
    named = OrderedDict((f"layer{i}", layer) for i, layer in enumerate(layers))
    return OrderedDict(**named, flatten=nn.Flatten(), fc=nn.Linear(width, FEATURES), features=nn.ReLU())


def model(make: str) -> nn.Sequential:
    """Return the extractor of this make with a head of one layer: (n, 10)."""
    return nn.Sequential(OrderedDict(**extractor(make), head=nn.Linear(FEATURES, CLASSES)))


def topologies(clients: int, seed: int) -> list[Topology]:
    """Return a whole model a client, cut where its features are; makes in turn, weights drawn for each."""
    found = []
    for replica in range(clients):
        with stream(derive(seed, "fedakt table", replica)):
            found.append(local(model(MAKES[replica % len(MAKES)]), ("features",)))
    return found


def method_of(name: str, weight: float | None, rounds: int, seed: int) -> Method | None:
    """Return the method that the table calls `name`, what it shares drawn by the seed; None for training alone.

    `weight`: of the mutual distillation, lambda, for those that have one.
    """
    with stream(derive(seed, "fedakt table", "shared")):
        adapter, small = nn.Sequential(extractor(SMALLEST)), model(SMALLEST)
    if weight is not None:
        return FedAKT(weight=weight, adapter=adapter, dual_use=name != "no dual use")
    known: dict[str, Method] = {
        "FedProto": FedProto(),
        "FML": FML(meme=small),
        "FedKD": FedKD(mentee=local(small, ("features",)), over=rounds),
        "LG-FedAvg": LgFedAvg(),
        "FedDistill": FedDistill(),
        "no mutual distillation": FedAKT(weight=0.0, adapter=adapter),
    }
    return None if name == "standalone" else known[name]


def _stage(channels: int, wide: int, kernel: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, wide, kernel, padding=kernel // 2), nn.ReLU(), nn.MaxPool2d(2)]
