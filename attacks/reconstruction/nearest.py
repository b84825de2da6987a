"""Nearest rows: predicts the mean of the auxiliary rows whose releases are nearest to the victim's.

Paper: none; after Cover, Hart, "Nearest neighbor pattern classification", IEEE Transactions on Information Theory 1967.

x^ is the mean of the auxiliary rows with the k nearest releases, by Euclidean distance. Channels may be divided by
their deviations over the auxiliary rows. k, and whether channels are scaled, are chosen by the least squared error on a
fifth of the auxiliary rows, held out (256 of them at most).

The prediction contains no detail of the victim's own row, so it is the floor of attacks with a generative prior: a
reconstruction no better than the mean of ten reveals class and style, not the image. If releases hold no information,
its error is (1 + 1/k) times that of the mean row. It adapts to random defenses: the release of an auxiliary row is the
mean over `queries` queries, drawn afresh.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from splitfed.attacks.base import FORWARD, Attack, Knowledge, Needs, Progress, Space, unwrap
from splitfed.attacks.networks.query_passes import channel_scales, hold_out, join_values, nearest_means, query_passes
from splitfed.core.errors import InvalidInput, require_count, require_counts
from splitfed.core.messages import View

MOST_ASIDE = 256
"""Maximum number of held-out rows; for each, distances to all other rows are computed twice."""


@dataclass(frozen=True)
class Nearest(Attack):
    """Predicts the mean of the auxiliary rows with the nearest releases.

    `neighbours`: candidate numbers of rows, chosen on held-out rows. `queries`: see the head of this module.
    """

    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES, Needs.QUERIES, Needs.AUXILIARY})
    adapts_to = FORWARD
    space: ClassVar[Space] = {"neighbours": ((1,), (3,), (10,), (30,))}

    neighbours: tuple[int, ...] = field(default=(1, 10), metadata=require_counts("nearest neighbours", low=1))
    queries: int = field(default=5, metadata=require_count("nearest queries", low=1))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the reconstructions of the releases in the view: (victims, *shape)."""
        released = view.select(kind="activation").tensors(knowledge.device)
        x = unwrap(knowledge.auxiliary)
        kept, aside = (part.to(x.device) for part in hold_out(len(x), generator, "nearest", MOST_ASIDE))
        if max(self.neighbours) > len(kept):
            raise InvalidInput(
                f"nearest neighbours={max(self.neighbours)!r} is not allowed; expected at most {len(kept)}, the "
                "auxiliary rows that are not held out"
            )
        names, flat = list(released), x.flatten(1)
        passes = query_passes(unwrap(knowledge.query), x, self.queries)
        mean = {name: torch.stack([p[name] for p in passes]).mean(0) for name in names}
        progress(1, 2)
        best: tuple[float, Tensor] | None = None
        for scales in (None, channel_scales(mean)):
            known, drawn, z = (join_values(part, names, scales) for part in (mean, passes[0], released))
            tried = nearest_means(known[kept], flat[kept], drawn[aside], self.neighbours)
            found = nearest_means(known, flat, z, self.neighbours)
            for own, rows in zip(tried, found, strict=True):
                error = float((own - flat[aside].double()).square().mean())
                if best is None or error < best[0]:
                    best = error, rows
        progress(2, 2)
        return unwrap(best)[1].to(x.dtype).view(-1, *knowledge.shape)
