"""LeNet cut at every depth, in one piece or in halves, for the table of leakage by cut depth.

A half of an image is 28x14; its bottom is a LeNet of its own up to the cut. Joined releases lie side by side as
channels (or features), and the first weights behind them are as wide as that asks for; all else is LeNet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

import splitfed as sf
from splitfed.core.random import derive, stream
from splitfed.core.topology import Topology
from splitfed.models.lenet import LeNet, lenet
from splitfed.topologies import extended_vanilla, multi_hop, multi_task, u_shaped, vanilla, vertical

IMAGE, HALF, SIDES = (1, 28, 28), (1, 28, 14), ("left", "right")
DEPTHS = ("relu1", "pool1", "relu2", "pool2", "relu3", "relu4")


class Case(NamedTuple):
    """A topology to train, and the curious party at each depth: depth -> party."""

    topology: Topology
    curious: dict[str, str]


def _model(seed: int, shape: tuple[int, ...] = IMAGE) -> LeNet:
    with stream(derive(seed, "depth", *shape)):
        return lenet(shape, 10, seed=None)


def until(model: nn.Sequential, depth: str) -> nn.Sequential:
    """Return the steps of `model` up to `depth`, that one included."""
    names = [name for name, _ in model.named_children()]
    return model[: names.index(depth) + 1]


def after(seed: int, depth: str, shape: tuple[int, ...], last: str = "fc3", outputs: int = 10) -> nn.Sequential:
    """Return a fresh LeNet's steps behind `depth` to `last`, for inputs of `shape`; the first weights fit that."""
    with stream(derive(seed, "after", depth, last, outputs)):
        steps = list(lenet(IMAGE, outputs, seed=None).named_children())
        names = [name for name, _ in steps]
        x, found = torch.zeros(2, *shape), OrderedDict[str, nn.Module]()
        for name, step in steps[names.index(depth) + 1 : names.index(last) + 1]:
            found[name] = _fitted(step, x)
            x = found[name](x)
    return nn.Sequential(found)


def _fitted(step: nn.Module, x: torch.Tensor) -> nn.Module:
    if isinstance(step, nn.Conv2d) and step.in_channels != x.shape[1]:
        return nn.Conv2d(x.shape[1], step.out_channels, step.kernel_size, padding=step.padding)  # type: ignore[arg-type]
    if isinstance(step, nn.Linear) and step.in_features != x.shape[1]:
        return nn.Linear(x.shape[1], step.out_features)
    return step


def _bottoms(seed: int, depth: str) -> tuple[dict[str, nn.Module], tuple[int, ...]]:
    """Return both sides' bottoms up to `depth`, and the shape of what they release together."""
    bottoms: dict[str, nn.Module] = {side: until(_model(derive(seed, side), HALF), depth) for side in SIDES}
    with torch.no_grad():
        shape = bottoms["left"](torch.zeros(1, *HALF)).shape[1:]
    return bottoms, (2 * shape[0], *shape[1:])


def _vertical(seed: int, depth: str) -> Case:
    bottoms, shape = _bottoms(seed, depth)
    return Case(vertical(bottoms, after(seed, depth, shape), labels="left"), {depth: "server"})


def _extended(seed: int, depth: str) -> Case:
    """The relay joins what was released behind the first ReLU, which it sees itself, and goes on to `depth`."""
    bottoms, shape = _bottoms(seed, "relu1")
    middle = after(seed, "relu1", shape, depth)
    with torch.no_grad():
        released = tuple(middle(torch.zeros(2, *shape)).shape[1:])
    top = after(derive(seed, "top"), depth, released)
    curious = {"relu1": "relay", depth: "server"} if depth == "pool1" else {depth: "server"}
    return Case(extended_vanilla(bottoms, middle, top, labels="left"), curious)


def _multi_task(seed: int, depth: str) -> Case:
    bottoms, shape = _bottoms(seed, depth)
    tops: dict[str, nn.Module] = {
        "digit": after(seed, depth, shape), "parity": after(derive(seed, "parity"), depth, shape, outputs=2)
    }  # fmt: skip
    topology = multi_task(
        bottoms, tops, targets={"digit": None, "parity": "odd"}, labels=dict.fromkeys(tops, "left")
    )  # fmt: skip
    return Case(topology, {depth: "parity"})


def _hops(seed: int, depth: str) -> Case:
    """One chain with a hop behind every cut, whatever `depth` says."""
    parties = (*(f"hop{i}" for i in range(1, len(DEPTHS))), "server")
    return Case(multi_hop(_model(seed), DEPTHS), dict(zip(DEPTHS, parties, strict=True)))


BUILDERS: dict[str, Callable[[int, str], Case]] = {
    "vanilla": lambda seed, depth: Case(vanilla(_model(seed), depth), {depth: "server"}),
    "u_shaped": lambda seed, depth: Case(u_shaped(_model(seed), (depth, "relu4")), {depth: "server"}),
    "multi_hop": _hops,
    "vertical": _vertical,
    "extended_vanilla": _extended,
    "multi_task": _multi_task,
}

# At which depths a topology is trained. A chain is trained once, with a hop behind every cut; behind a relay the
# server's depth begins after the relay's; the last cut of a U is its way back.
TRAINED: dict[str, tuple[str, ...]] = {
    "vanilla": DEPTHS,
    "u_shaped": ("relu1", "pool1", "pool2", "relu3"),
    "multi_hop": ("every cut",),
    "vertical": ("relu1", "pool1", "pool2", "relu3"),
    "extended_vanilla": ("pool1", "pool2", "relu3", "relu4"),
    "multi_task": ("relu1", "pool1", "pool2", "relu3"),
}


def data(name: str, seed: int, auxiliary: int, victims: int) -> sf.data.Federation:
    """Return MNIST-5k for one client of the topology `name`: halves where it has two parties, parity for tasks."""
    images = sf.data.mnist5k()
    if name in ("vertical", "extended_vanilla", "multi_task"):
        images = images.halves(SIDES)
    if name == "multi_task":
        images = images.with_target("odd", images.y % 2, sf.classification(2))
    return images.clients(1, auxiliary=auxiliary, victims=victims, validation=0.0, test=0.1, seed=seed)
