"""Linear inverse: ridge regression, in closed form, from releases of auxiliary rows to these rows.

Paper: none; after He, Zhang, Lee, "Model inversion attacks against collaborative inference", ACSAC 2019 (black box),
whose adversary trains a network from the same pairs, with ridge regression in its place: Hoerl, Kennard, "Ridge
regression: biased estimation for nonorthogonal problems", Technometrics 1970.

With the pairs centred, B = (Z'Z + lam tr(Z'Z)/m I)^-1 Z'X in float64, m the numbers of a release, and

    x^ = clip((z - mean z) B + mean x).

Where m exceeds the pairs, the same B comes from Z'(ZZ' + lam tr(Z'Z)/m I)^-1 X. lam is chosen on a fifth of the
auxiliary rows, held out, from 1e-10, 1e-7, 1e-4, 1e-2, 1 and 100; B is then solved for all of them.

A closed form cannot be under-trained, so it is the floor of every trained decoder (`splitfed.threats.floors`). For
Gaussian data behind a linear client with Gaussian noise it is the optimal estimator; where releases hold no information
it predicts the mean row. It adapts to random defenses: the pairs were queried through them, `queries` times.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from splitfed.attacks.base import FORWARD, Attack, Knowledge, Needs, Progress, Space, unwrap
from splitfed.attacks.networks.query_passes import hold_out, join_values, query_passes
from splitfed.attacks.networks.ridge_map import fit_ridge_map
from splitfed.core.errors import require_count
from splitfed.core.messages import View


@dataclass(frozen=True)
class LinearInverse(Attack):
    """The linear map from releases to rows with the least squared error on auxiliary rows.

    `queries`: number of passes of the auxiliary rows through the victims' parties, if defenses are random.
    """

    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES, Needs.QUERIES, Needs.AUXILIARY})
    adapts_to = FORWARD
    space: ClassVar[Space] = {"queries": (1, 5, 20)}

    queries: int = field(default=5, metadata=require_count("linear_inverse queries", low=1))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the reconstructions of the releases in the view: (victims, *shape)."""
        released = view.select(kind="activation").tensors(knowledge.device)
        x = unwrap(knowledge.auxiliary)
        kept, aside = hold_out(len(x), generator, "linear_inverse")
        names = list(released)
        z = join_values(released, names)
        passes = [join_values(p, names) for p in query_passes(unwrap(knowledge.query), x, self.queries)]
        progress(1, 2)
        fitted, weights = fit_ridge_map(passes, x.flatten(1), kept, aside)
        progress(2, 2)
        return fitted.predict(weights, z).to(x.dtype).view(-1, *knowledge.shape)
