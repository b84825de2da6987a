"""A substitute of the client that an attacker trains: in the client's own layout, or in a generic one.

Both map raw rows to releases through the run's defenses, drawn by the attacker, and return the penalty that these add
to the client's loss. During training a substitute in the client's layout is in training mode, so that batch
normalisation uses the batch as in the party's own training. A generic network lacks the layers that a defense adds to
the client's segment: the penalties of `mid`, `shredder` and `channel_pruning` are then left out, with a warning.
Losses and class scores of the task are computed whatever the model's last layer.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.attacks.base import FORWARD, Clone, DefenseEffect, DefenseStates, Needs, unwrap
from splitfed.attacks.networks.networks import Scale, Translator
from splitfed.attacks.training_time.attack_site import AttackSite
from splitfed.core.errors import InvalidInput

LAYOUTS = ("client", "generic")
"""Layouts of a substitute: that of the client, or one that fits any client."""


@runtime_checkable
class HasLayout(Protocol):
    """A training attack that trains a substitute of the client in a stated `layout`."""

    @property
    def layout(self) -> str:
        """Layout of the substitute, one of `LAYOUTS`."""
        ...


class ImitatedStep(NamedTuple):
    """A client's training step: its `release` (n, *shape of the value), and the effect of defenses on its loss.

    `penalty`: the defenses' term, a scalar whose gradient is exact; `weight`: factor of the task's loss.
    """

    release: Tensor
    penalty: Tensor
    weight: float

    def loss(self, task: Tensor) -> Tensor:
        """Return the client's defended loss, weight times `task` plus penalty."""
        return self.weight * task + self.penalty


class SameLayout(nn.Module):
    """Wraps `clone`, a copy of the client's segments with fresh weights; `value`: name of its release."""

    def __init__(self, clone: Clone, value: str) -> None:
        super().__init__()
        self._clone, self._value = clone, value
        self.parts = nn.ModuleList(clone.modules.values())
        self.train()

    def forward(self, x: Tensor, number: int) -> Tensor:
        """Return the release of raw rows x (n, *shape) at draw `number`: (n, *shape of the value)."""
        return self._clone.sample(x, number)[self._value]

    def expected(self, x: Tensor) -> Tensor:
        """Return the release of raw rows x with every defense at its mean, differentiable in x."""
        return self._clone(x)[self._value]

    def in_training(self, x: Tensor, number: int, epoch: int) -> ImitatedStep:
        """Return the release of raw rows x in a training step of `epoch`, and the effect of defenses on the loss."""
        releases, penalty, weight = self._clone.in_training(x, number, epoch)
        return ImitatedStep(releases[self._value], penalty, weight)

    @property
    def defenses(self) -> DefenseStates:
        """States of the imitated defenses."""
        return self._clone.defenses


class GenericLayout(nn.Module):
    """Wraps `net`, from rows in the unit of `scale` to the shape of the release at `site`; methods as `SameLayout`."""

    def __init__(self, net: nn.Module, site: AttackSite, scale: Scale) -> None:
        super().__init__()
        self.net, self._sender, self._scale = net, site.sender, scale

    def forward(self, x: Tensor, number: int) -> Tensor:
        """Return the release of raw rows x (n, *shape) at draw `number`: (n, *shape of the value)."""
        return self._sender.release(self.net(self._scale.down(x)), number)

    def expected(self, x: Tensor) -> Tensor:
        """Return the release of raw rows x with every defense at its mean, differentiable in x."""
        return self._sender.expected(self.net(self._scale.down(x)))

    def in_training(self, x: Tensor, number: int, epoch: int) -> ImitatedStep:
        """Return the release of raw rows x in a training step of `epoch`, and the effect of defenses on the loss."""
        return ImitatedStep(*self._sender.in_training(x, self.net(self._scale.down(x)), number, epoch))

    @property
    def defenses(self) -> DefenseStates:
        """States of the imitated defenses."""
        return self._sender.defenses


ClientModel = SameLayout | GenericLayout


def layout_needs(layout: str, labels_arrive: bool) -> frozenset[Needs]:
    """Return the needs of a substitute with `layout`: for "client" the architectures it copies.

    They include that of the head if no labels arrive.
    """
    if layout != "client":
        return frozenset()
    return frozenset({Needs.ARCHITECTURE}) if labels_arrive else frozenset({Needs.ARCHITECTURE, Needs.HEAD})


def imitated_effects(layout: str) -> frozenset[DefenseEffect]:
    """Return the effects of the sender's defenses that a substitute with `layout` is trained with."""
    return FORWARD if layout == "client" else FORWARD - {DefenseEffect.LAYER_PENALTY}


def build_client(who: str, site: AttackSite, width: int, blocks: int, end: nn.Module | None = None) -> ClientModel:
    """Return an untrained substitute of the client, in its own layout if `site` knows it, else a generic one.

    `end`: last module of a generic one. Weights come from torch's default generator. Raises `InvalidInput` for a client
    without weights.
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
    """Return an untrained substitute of the head at the party with labels, in its own layout or a generic one."""
    known = site.knowledge
    if known.head is not None:
        return known.head()
    return Translator(site.out_shape, (unwrap(known.classes),), width, blocks)


def loss_of(scores: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of `scores` (rows, classes), or of one logit a row, for labels y (rows,)."""
    if scores.dim() == 1 or scores.shape[1] == 1:
        return functional.binary_cross_entropy_with_logits(scores.flatten(), y.to(scores))
    return functional.cross_entropy(scores, y.long())


def class_scores(scores: Tensor) -> Tensor:
    """Return scores (rows, classes), also for outputs of one logit a row."""
    if scores.dim() == 1 or scores.shape[1] == 1:
        return torch.stack([torch.zeros_like(scores.flatten()), scores.flatten()], 1)
    return scores
