"""Generative regression network: a generator, trained across rows, predicts a peer's features from the adversary's.

Paper: Luo, Wu, Xiao, Ooi, "Feature inference attack on model predictions in vertical federated learning", ICDE 2021
(the attack on neural networks, there GRNA).

The active party of a vertical run knows the models before it and what arrived for the victims' rows. One generator, a
perceptron 600-200-100 with layer norms, maps [own features, noise], as much noise as there are unknown features, to the
unknown ones, so that the models' release of them equals the received one: it minimises, over batches of victims,
sum((f(own, prediction) - z)^2) + variance * (variances of the predicted features within the batch, added up). The
second term limits the spread of unknown features where many fit. If the data have a range, a sigmoid keeps predictions
in it. Unlike a search row by row, the generator has one set of weights for all rows, so it learns the relation between
own and unknown features across rows; but it learns only from the rows that the adversary sees, and has no other
knowledge of the peer's data. The generator never reads the releases, so rows with similar own features get similar
predictions: from a blank margin of images it learns little, from a strip through their middle nearly all.

Deviates: the paper observes the joint model's prediction, this attack whatever arrives at the party (a prediction where
that is what arrives); f includes the run's defenses at their mean. Where the data have no range, features are taken as
they are and the adversary standardises its own by the victims' rows; predictions are then unbounded and may have a
larger error than the mean row, so scale the data as the authors do, to (0, 1). Network, loss, weight .25, batches of 64
and 60 epochs are those of the authors' code; its rate is 1e-4, at which 60 epochs need many thousands of rows, and that
of the budgets the 5e-3 of later benchmarks; "quick" has fewer rows and goes over them more often. Its optional term for
known means is left out: it takes background knowledge. `own_features=False` is the authors' ablation, noise alone: then
predictions do not depend on the row, and the best one is a typical row. A bottom of linear layers narrower than its
input resists the attack, as any vector of their null space can be added to a prediction without changing the release.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn

from splitfed.attacks.base import FORWARD, Attack, Budgets, Knowledge, Needs, Progress, unwrap
from splitfed.attacks.networks.gradient_descent import count_turns, draw_batches, take_step
from splitfed.attacks.reconstruction.inversion import spread
from splitfed.core.errors import InvalidInput, require_count, require_number
from splitfed.core.messages import View


@dataclass(frozen=True)
class Grn(Attack):
    """Trains a generator for `epochs` over the victims in batches of `batch_size` >= 2 with Adam at rate `lr`.

    `variance`: weight of the predicted features' variance. `own_features`: whether the generator reads the adversary's
    own features; noise alone is the paper's ablation.
    """

    trains_decoder: ClassVar[bool] = True
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES, Needs.UPSTREAM, Needs.OWN_INPUTS})
    adapts_to = FORWARD
    budgets: ClassVar[Budgets] = {
        "quick": {"epochs": 200, "batch_size": 32, "lr": 5e-3},
        "full": {"epochs": 60, "batch_size": 64, "lr": 5e-3},
    }

    epochs: int = field(default=200, metadata=require_count("grn epochs", low=1))
    batch_size: int = field(default=32, metadata=require_count("grn batch_size", low=2))
    lr: float = field(default=5e-3, metadata=require_number("grn lr", low=0.0, open_low=True))
    variance: float = field(default=0.25, metadata=require_number("grn variance", low=0.0))
    own_features: bool = True

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return rows (victims, *shape) with the adversary's own features unchanged and the others predicted."""
        upstream = unwrap(knowledge.upstream)
        if self.own_features and not knowledge.own:
            raise InvalidInput(
                "grn needs inputs of its own to distinguish rows; this party has none (own_features=False: noise alone)"
            )
        seen = view.select(kind="activation").tensors(knowledge.device)
        rows = VictimRows(knowledge, len(next(iter(seen.values()))))
        if len(rows.base) < 2:
            raise InvalidInput("grn learns across rows, and there is one victim; expected two or more")
        inputs = rows.scaled if self.own_features else rows.scaled[:, :0]
        noise = rows.unknown.numel() + (0 if self.own_features else rows.scaled.shape[1])
        net = network(inputs.shape[1] + noise, rows.unknown.numel()).to(knowledge.device)
        optimizer = torch.optim.Adam(net.parameters(), lr=self.lr)

        def generated(chosen: Tensor) -> Tensor:
            noise_rows = torch.randn(len(chosen), noise, generator=generator).to(knowledge.device)
            return spread(net(torch.cat([inputs[chosen], noise_rows], 1)), knowledge.value_range)

        for _ in count_turns(self.epochs, progress):
            for chosen in draw_batches(len(rows.base), self.batch_size, generator):
                prediction = generated(chosen)
                made = upstream(rows.whole(chosen, prediction))
                misfit = torch.stack([(made[name] - z[chosen]).square().sum() for name, z in seen.items()]).sum()
                take_step(optimizer, misfit + self.variance * prediction.var(0).sum())
        with torch.no_grad():
            everybody = torch.arange(len(rows.base))
            return rows.whole(everybody, generated(everybody))


class VictimRows:
    """Known parts of the victims' rows: `base` (victims, numbers) with own features in place; `unknown` (k,) positions.

    `scaled`: (victims, own), own features as generator inputs: in (0, 1), or standardised if the data have no range.
    """

    def __init__(self, knowledge: Knowledge, victims: int) -> None:
        own, device = knowledge.own or {}, knowledge.device
        middle = sum(knowledge.value_range) / 2 if knowledge.value_range is not None else 0.0
        self.shape = knowledge.shape
        self.base = torch.full((victims, prod(self.shape)), middle, device=device)
        for name, values in own.items():
            self.base[:, knowledge.places[name].to(device)] = values.flatten(1)
        held, read = (torch.zeros(prod(self.shape), dtype=torch.bool) for _ in range(2))
        for name, positions in knowledge.places.items():
            (held if name in own else read)[positions] = True
        self.unknown = (read & ~held).nonzero().flatten().to(device)
        mine = self.base[:, held.to(device)]
        if knowledge.value_range is not None:
            low, high = knowledge.value_range
            self.scaled = (mine - low) / (high - low)
        else:
            self.scaled = (mine - mine.mean(0)) / mine.std(0).clamp_min(1e-6) if len(mine) > 1 else mine

    def whole(self, chosen: Tensor, prediction: Tensor) -> Tensor:
        """Return the rows `chosen` with unknown features from `prediction`: (chosen, *shape), differentiable.

        `prediction`: (chosen, k).
        """
        return self.base[chosen.to(self.base.device)].index_copy(1, self.unknown, prediction).view(-1, *self.shape)


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Return an untrained generator from (n, inputs) to (n, outputs), unbounded."""
    layers: list[nn.Module] = []
    width = inputs
    for hidden in (600, 200, 100):
        layers += [nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.ReLU()]
        width = hidden
    layers.append(nn.Linear(width, outputs))
    return nn.Sequential(*layers)
