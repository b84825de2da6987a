"""Methods of the accuracy table with one thing changed in each: what their gap to training alone is made of.

Each parameter has the method's own behaviour as its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from splitfed.core.local_objective import LocalObjective
from splitfed.core.messages import Stamp
from splitfed.federated import FML, MAFML, FedKD, FedMD, fedkd, fedmd, mafml
from splitfed.federated.base import ObjectivePlacement, State
from splitfed.federated.distillation import MutualDistillation, divergence
from splitfed.federated.learner import Learner
from splitfed.federated.topology_values import making_segment


@dataclass(frozen=True, kw_only=True)
class FedMDControl(FedMD):
    """`weight`: of the distance from the goal; `digests`: whether these steps are taken at all.

    `begin`: the first round that may have them; `informed`: whether the scores of a row are averaged over the clients
    alone that train on its class.
    """

    weight: float = 1.0
    digests: bool = True
    begin: int = 0
    informed: bool = False

    def objective(self, placement: ObjectivePlacement) -> LocalObjective | None:
        """Return the method's, with the weight."""
        value = placement.topology.heads[0].value
        return Follower(value, making_segment(placement.topology, value).name, self.distance, self.weight)

    def _reach_consensus(self, learners: Any, number: int, state: State) -> None:
        if self.digests and number >= self.begin:
            super()._reach_consensus([Informed(one) for one in learners] if self.informed else learners, number, state)

    def _digest(self, learner: Learner, rows: Tensor, goal: Tensor, number: int) -> None:
        """Take the method's steps; towards the mean over those that know the class, where it is `informed`."""
        if isinstance(learner, Informed):
            # Scores and, for every row, whether they count: the mean of one over the mean of the other.
            goal = goal[:, :-1] / goal[:, -1:].clamp_min(torch.finfo(goal.dtype).tiny)
            learner = learner.inner
        super()._digest(learner, rows, goal, number)


class Informed:
    """A client that tells class scores of rows of its own classes alone: zeros for others, and a mark of each."""

    def __init__(self, inner: Learner) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        """Return what the client itself has."""
        return getattr(self.inner, name)

    def consult(self, value: str, rows: Tensor, part: str, number: int) -> Tensor:
        """Return class scores and whether they count: (rows, classes + 1)."""
        own = self.inner.labels(value, "train").unique()
        counts = torch.isin(self.inner.labels(value, part).view(-1)[rows], own)[:, None]
        scores = self.inner.consult(value, rows, part, number)
        return torch.cat([scores, torch.ones_like(scores[:, :1])], 1) * counts


class Follower(fedmd.Follower):
    """The method's, with a weight of the distance."""

    def __init__(self, value: str, segment: str, distance: str, weight: float) -> None:
        super().__init__(value, segment, distance)
        self.weight = weight

    def terms(self, made: Mapping[str, Tensor], labels: Mapping[str, Tensor], stamp: Stamp) -> Mapping[str, Tensor]:
        """Return the weighted distance."""
        return {name: self.weight * term for name, term in super().terms(made, labels, stamp).items()}


@dataclass(frozen=True, kw_only=True)
class MAFMLControl(MAFML):
    """`divergence` and `entropy`: weights of the two terms of a mutual step."""

    divergence: float = 1.0
    entropy: float = 1.0

    def objective(self, placement: ObjectivePlacement) -> LocalObjective | None:
        """Return the method's, with the weight of the divergence."""
        value = placement.topology.heads[0].value
        return Peer(value, making_segment(placement.topology, value).name, self.projected, self.divergence)

    def _take_mutual_step(self, learner: Learner, taught: Any, number: int, state: State) -> None:
        led: Any = learner if self.entropy == 1 else Weighted(learner, self.entropy)
        super()._take_mutual_step(led, taught, number, state)


class Weighted:
    """A client whose own loss has a weight in every step."""

    def __init__(self, inner: Learner, task: float) -> None:
        self.inner, self.task = inner, task

    def __getattr__(self, name: str) -> Any:
        """Return what the client itself has."""
        return getattr(self.inner, name)

    def train(self, epoch: int, batches: Any, first: int = 0, part: str = "train", task: float = 1.0) -> list[float]:
        """Take the steps with the weight."""
        return self.inner.train(epoch, batches, first, part, task * self.task)


class Peer(mafml.MafmlObjective):
    """The method's, with a weight of the divergence."""

    def __init__(self, value: str, segment: str, projected: bool, divergence: float) -> None:
        super().__init__(value, segment, projected)
        self.divergence = divergence

    def terms(self, made: Mapping[str, Tensor], labels: Mapping[str, Tensor], stamp: Stamp) -> Mapping[str, Tensor]:
        """Return the weighted divergence."""
        return {name: self.divergence * term for name, term in super().terms(made, labels, stamp).items()}


@dataclass(frozen=True, kw_only=True)
class FMLControl(FML):
    """`own` and `divergence`: weights of the private model's two terms, in place of `alpha` and what is left of one."""

    own: float = 0.5
    divergence: float = 0.5

    def fit(self, topology: Any, facts: Any, seed: int) -> Any:
        """Return the method's topology, with the weight of the private model's own loss."""
        made = super().fit(topology, facts, seed)
        private, meme = made.heads
        return replace(made, heads=(replace(private, weight=topology.heads[0].weight * self.own), meme))

    def objective(self, placement: ObjectivePlacement) -> LocalObjective | None:
        """Return the method's, with the weight of the private model's divergence."""
        found, private = super().objective(placement), placement.topology.heads[0].value
        assert isinstance(found, MutualDistillation)
        pairs = [replace(one, weight=self.divergence) if one.student == private else one for one in found.pairs]
        return MutualDistillation(tuple(pairs))


@dataclass(frozen=True, kw_only=True)
class FedKDControl(FedKD):
    """`divergence` and `distance`: weights of what compares class scores, and of what compares hidden values.

    `divided`: whether the two are divided by the sum of the cross-entropies.
    """

    divergence: float = 1.0
    distance: float = 1.0
    divided: bool = True

    def objective(self, placement: ObjectivePlacement) -> LocalObjective | None:
        """Return the method's, with the weights."""
        found = super().objective(placement)
        assert isinstance(found, fedkd.MentorObjective)
        return MentorObjective(found, self)


class MentorObjective(fedkd.MentorObjective):
    """The method's, with weights of its terms."""

    def __init__(self, plain: fedkd.MentorObjective, control: FedKDControl) -> None:
        super().__init__(plain.outputs, plain.hidden, plain.segments)
        self.control = control

    def terms(self, made: Mapping[str, Tensor], labels: Mapping[str, Tensor], stamp: Stamp) -> Mapping[str, Tensor]:
        """Return the weighted terms."""
        (out, other), hidden, projected = self.outputs, self.hidden, fedkd.PROJECTION
        y = labels[out].view(-1).long()
        below = sum(cross_entropy(made[value].detach(), y) for value in (out, other)) if self.control.divided else 1.0
        kl, mse, flat = self.control.divergence, self.control.distance, made[hidden].flatten(1)
        return {
            self.segments[out]: kl * divergence(made[out], made[other]) / below,
            self.segments[other]: kl * divergence(made[other], made[out]) / below,
            self.segments[hidden]: mse * mse_loss(flat, made[projected].detach()) / below,
            self.segments[projected]: mse * mse_loss(made[projected], flat.detach()) / below,
        }
