"""A network in the client's place that an attacker trains: in the client's own layout, or a generic one.

Both take raw rows, release through the run's defenses, drawn by the attacker, and tell what these add to the client's
loss. While it learns, a network in the client's layout is in training mode, so that batch normalisation sees the batch
as it does in the party's own training.

A generic network has no layers that a defense puts into the client's segment: the terms of `mid`, `shredder` and
`channel_pruning` are then left out, and a warning says so.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from splitfed.attacks.base import FORWARD, Clone, DefenseEffect, DefenseStates, Needs, unwrap
from splitfed.attacks.networks.networks import Translator
from splitfed.attacks.networks.scaling import Scale
from splitfed.attacks.training_time.attack_site import AttackSite
from splitfed.core.errors import InvalidInput

LAYOUTS = ("client", "generic")
"""Networks of the client's own layout, or of one that fits any client."""


@runtime_checkable
class HasLayout(Protocol):
    """A training attack that trains a network in the client's place, of the `layout` that it says."""

    @property
    def layout(self) -> str:
        """One of `LAYOUTS`."""
        ...


class ImitatedStep(NamedTuple):
    """What a client would send in a training step: `release` (n, *shape of the value), and how its loss is made.

    `penalty`: the term of its defenses, a scalar whose gradient is right; `weight`: what its task's loss is times.
    """

    release: Tensor
    penalty: Tensor
    weight: float

    def loss(self, task: Tensor) -> Tensor:
        """Return the loss that the client's defenses would make of the loss of the `task`."""
        return self.weight * task + self.penalty


class SameLayout(nn.Module):
    """Wraps `clone`, whose weights were drawn anew; `value` is what it makes."""

    def __init__(self, clone: Clone, value: str) -> None:
        super().__init__()
        self._clone, self._value = clone, value
        self.parts = nn.ModuleList(clone.modules.values())
        self.train()

    def forward(self, x: Tensor, number: int) -> Tensor:
        """Return what would arrive at draw `number` for raw rows x (n, *shape): (n, *shape of the value)."""
        return self._clone.sample(x, number)[self._value]

    def expected(self, x: Tensor) -> Tensor:
        """Return the same with every defense at its mean, differentiable in x."""
        return self._clone(x)[self._value]

    def in_training(self, x: Tensor, number: int, epoch: int) -> ImitatedStep:
        """Return what would arrive in a training step of `epoch`, and what the defenses make of the loss."""
        releases, penalty, weight = self._clone.in_training(x, number, epoch)
        return ImitatedStep(releases[self._value], penalty, weight)

    @property
    def defenses(self) -> DefenseStates:
        """What the imitated defenses keep and learn."""
        return self._clone.defenses


class GenericLayout(nn.Module):
    """Wraps `net`, from rows in the unit of `scale` to the shape of what arrives at `site`; methods as `SameLayout`."""

    def __init__(self, net: nn.Module, site: AttackSite, scale: Scale) -> None:
        super().__init__()
        self.net, self._sender, self._scale = net, site.sender, scale

    def forward(self, x: Tensor, number: int) -> Tensor:
        """Return what would arrive at draw `number` for raw rows x (n, *shape): (n, *shape of the value)."""
        return self._sender.release(self.net(self._scale.down(x)), number)

    def expected(self, x: Tensor) -> Tensor:
        """Return the same with every defense at its mean, differentiable in x."""
        return self._sender.expected(self.net(self._scale.down(x)))

    def in_training(self, x: Tensor, number: int, epoch: int) -> ImitatedStep:
        """Return what would arrive in a training step of `epoch`, and what the defenses make of the loss."""
        return ImitatedStep(*self._sender.in_training(x, self.net(self._scale.down(x)), number, epoch))

    @property
    def defenses(self) -> DefenseStates:
        """What the imitated defenses keep and learn."""
        return self._sender.defenses


ClientModel = SameLayout | GenericLayout


def layout_needs(layout: str, labels_arrive: bool) -> frozenset[Needs]:
    """Return what must be known of a client with `layout`: "client" its own, the head's too if no labels arrive."""
    if layout != "client":
        return frozenset()
    return frozenset({Needs.ARCHITECTURE}) if labels_arrive else frozenset({Needs.ARCHITECTURE, Needs.HEAD})


def imitated_effects(layout: str) -> frozenset[DefenseEffect]:
    """Return the effects of the sender's defenses that a network with `layout` is trained with."""
    return FORWARD if layout == "client" else FORWARD - {DefenseEffect.LAYER_PENALTY}


def build_client(who: str, site: AttackSite, width: int, blocks: int, end: nn.Module | None = None) -> ClientModel:
    """Return a network for the client's place: in its own layout where `site` knows that, or a generic one.

    `end`: what a generic one ends with. Weights come from torch's default generator; refuses a client without weights.
    """
    known = site.knowledge
    if known.architecture is None:
        if site.sender.omitted:
            warnings.warn(
                f"{who} with layout='generic' learns without what {', '.join(site.sender.omitted)} adds to the "
                "client's loss: only the client's own segments determine that; layout='client' has them",
                UserWarning,
                stacklevel=2,
            )
        net: nn.Module = Translator(known.shape, site.shape, width, blocks)
        return GenericLayout(net if end is None else nn.Sequential(net, end), site, Scale(known.value_range))
    client = SameLayout(known.architecture(int(torch.randint(2**62, ()))), site.value)
    if not list(client.parameters()):
        raise InvalidInput(f"{who} layout='client' needs segments with weights upstream; these have none")
    return client


def build_head(site: AttackSite, width: int, blocks: int) -> nn.Module:
    """Return a network for the place of the head that keeps the labels: in its own layout, or a generic one."""
    known = site.knowledge
    if known.head is not None:
        return known.head()
    return Translator(site.out_shape, (unwrap(known.classes),), width, blocks)
