"""Clients of several makes with features of one width, and what the methods of the tables share between them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from splitfed.core.random import derive, stream
from splitfed.core.topology import Topology
from splitfed.federated import FML, FedAKT, FedDistill, FedKD, FedProto, LgFedAvg, Method
from splitfed.models.residual import Block, stem
from splitfed.topologies import local

CLASSES = 10


@dataclass(frozen=True)
class Group:
    """Makes of a model: `extractor(make)` returns layers, images to `features` numbers a row, the last one `features`.

    The first of the `makes` is the smallest, of which adapters, memes and mentees are.
    """

    makes: tuple[str, ...]
    features: int
    extractor: Callable[[str], OrderedDict[str, nn.Module]]

    def model(self, make: str) -> nn.Sequential:
        """Return the extractor of this make with a head of one layer: (n, 10)."""
        return nn.Sequential(OrderedDict(**self.extractor(make), head=nn.Linear(self.features, CLASSES)))


def topologies(clients: int, seed: int, group: Group | None = None) -> list[Topology]:
    """Return a whole model a client, cut where its features are; makes in turn, weights drawn for each.

    `group`: of the makes (None: `FOUR`).
    """
    found, group = [], group or FOUR
    for replica in range(clients):
        with stream(derive(seed, "fedakt table", replica)):
            found.append(local(group.model(group.makes[replica % len(group.makes)]), ("features",)))
    return found


def method_of(name: str, weight: float | None, rounds: int, seed: int, group: Group | None = None) -> Method | None:
    """Return the method that the table calls `name`, what it shares drawn by the seed; None for training alone.

    `weight`: of the mutual distillation, lambda, for those that have one. `group`: as in `topologies`.
    """
    group = group or FOUR
    with stream(derive(seed, "fedakt table", "shared")):
        adapter, small = nn.Sequential(group.extractor(group.makes[0])), group.model(group.makes[0])
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


def _small(make: str) -> OrderedDict[str, nn.Module]:
    layers: list[nn.Module]
    if make == "thin":
        layers, width = [nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(2)], 8 * 7 * 7
    elif make == "lenet":
        layers, width = [*_stage(1, 6, 5), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)], 16 * 5 * 5
    elif make == "wide":
        layers, width = [*_stage(1, 16, 3), *_stage(16, 32, 3)], 32 * 7 * 7
    else:
        layers, width = [*_stage(1, 8, 3), *_stage(8, 16, 3), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()], 32 * 7 * 7
    return _named([*layers, nn.Flatten()], width, FOUR.features)


def _cnn(make: str) -> OrderedDict[str, nn.Module]:
    filters, width = _CNNS[make]
    layers = [nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, filters, 5), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(filters * 4 * 4, width), nn.ReLU()]
    return _named(layers, width, CNNS.features)


def _resnet(make: str) -> OrderedDict[str, nn.Module]:
    """Return the stem of `splitfed.models.residual`, stages of 64, 128, ... channels, and the mean over places.

    A block has two layers: 4 to 10 layers are 1 to 4 stages of one block, 18 are 4 stages of two.
    """
    depth = int(make)
    stages, blocks = (4, 2) if depth > 10 else ((depth - 2) // 2, 1)
    layers: list[nn.Module] = list(stem(1, 64).values())
    width = 64
    for stage in range(stages):
        wide = 64 * 2**stage
        layers += [Block(width, wide, 1 + bool(stage)), *(Block(wide, wide) for _ in range(blocks - 1))]
        width = wide
    return _named([*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()], width, RESNETS.features)


def _named(layers: list[nn.Module], width: int, features: int) -> OrderedDict[str, nn.Module]:
    named = OrderedDict((f"layer{i}", layer) for i, layer in enumerate(layers))
    return OrderedDict(**named, fc=nn.Linear(width, features), features=nn.ReLU())


def _stage(channels: int, wide: int, kernel: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, wide, kernel, padding=kernel // 2), nn.ReLU(), nn.MaxPool2d(2)]


FOUR = Group(("thin", "lenet", "wide", "deep"), 64, _small)
"""26 000 to 107 000 weights: one convolution, LeNet's two, two wider ones, three."""
_CNNS = {"CNN-5": (32, 500), "CNN-4": (32, 800), "CNN-3": (32, 1000), "CNN-2": (16, 2000), "CNN-1": (32, 2000)}
"""Filters of the second convolution, and width of the first linear layer."""
CNNS = Group(tuple(_CNNS), 500, _cnn)
"""Five CNNs after Yi, Wang, Liu, Shi, Yu, "FedGH: heterogeneous federated learning with generalized global header",
ACM MM 2023: two convolutions of 5x5 and two linear layers before the head."""
RESNETS = Group(("4", "6", "8", "10", "18"), 512, _resnet)
"""ResNets of 4, 6, 8, 10 and 18 layers, by their depths."""
