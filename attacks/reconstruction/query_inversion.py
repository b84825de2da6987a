"""Black-box inversion by second order: rows whose release equals what was seen, by Gauss-Newton on queries alone.

Paper: none; after He, Zhang, Lee, "Model inversion attacks against collaborative inference", ACSAC 2019 (black box),
whose adversary trains a decoder on queries. Steps are those of Levenberg, "A method for the solution of certain
non-linear problems in least squares", Quarterly of Applied Mathematics 2, 1944; between two Jacobians they update the
older one as Broyden, "A class of methods for solving nonlinear simultaneous equations", Mathematics of Computation 19,
1965.

For a row x and its release z, whose variance over auxiliary rows is s, minimise

    |f(x) - z|^2 / s  +  w |u|^2,   x = mu + B diag(sigma) u,

with mu, B and sigma^2 the mean, principal directions and shrunk variances of the auxiliary rows, and w the `prior`. f
is what the victims' own parties answer, defenses included; neither weights nor architecture are used. Its Jacobian is
that of differences along the directions of the greatest variance, one query each, as many of them as two thirds of
the queries that a victim has; along the others a row stays where the regression begins it
(`splitfed.attacks.reconstruction.linear_inverse`). Rows are clipped to the value range after every step.

Where f is differentiable and keeps what the rows hold it ends near the rounding of f, without any weight. It is refused
where two queries of the same rows differ: a difference of two random releases is noise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from splitfed.attacks.base import FORWARD, Attack, Budgets, Knowledge, Needs, Progress, unwrap
from splitfed.attacks.networks.query_passes import is_repeatable, join_values
from splitfed.attacks.search_space import Space
from splitfed.core.errors import InvalidInput, require_count, require_number
from splitfed.core.messages import View
from splitfed.registry import load

LARGEST = 1 << 24
"""Numbers in the Jacobians of the victims that are searched for at once."""
SHRINK = 0.05
"""Share of the mean variance that is added to every direction of the prior, as few rows leave most of them unseen."""
DIFFERENCE = 0.01
"""Length of a difference, in deviations of the rows along its direction."""
DIFFERENCES = 2 / 3
"""Share of a victim's queries that one Jacobian takes at most."""
STEPS, UPDATES = 10, 16
"""Most steps by one Jacobian while another one is within reach, and updates that are kept beside the Jacobians."""
SLOW, EXACT = 0.3, 1e-13
"""Share of the loss left by a step after which the Jacobian is computed anew, and misfit that is taken for none."""
DAMPING, EASED, RAISED, MOST_DAMPING = 1e-2, 0.2, 10.0, 1e6
"""First damping, its factors after steps that lower the loss and that do not, and the damping at which a row ends."""


@dataclass(frozen=True)
class QueryInversion(Attack):
    """At most `row_queries` queries a victim, for differences and for steps; `prior`: weight of the Gaussian prior."""

    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES, Needs.QUERIES, Needs.AUXILIARY})
    adapts_to = FORWARD
    budgets: ClassVar[Budgets] = {
        "quick": {"row_queries": 500},
        "standard": {"row_queries": 4000},
        "full": {"row_queries": 20_000},
    }
    space: ClassVar[Space] = {"prior": (0.0, 1e-6, 1e-4, 1e-2)}

    row_queries: int = field(default=4000, metadata=require_count("query_inversion row_queries", low=6))
    prior: float = field(default=1e-6, metadata=require_number("query_inversion prior", low=0.0))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the rows found for the releases in the view: (victims, *shape)."""
        seen = view.select(kind="activation").tensors(knowledge.device)
        x, names = unwrap(knowledge.auxiliary), list(seen)
        if not is_repeatable(unwrap(knowledge.query), x):
            raise InvalidInput("query_inversion needs the same release of a row in every query; here they differ")
        start: Tensor = load("attacks", "linear_inverse")(queries=1).run(view, knowledge, generator, lambda *_: None)
        z = join_values(seen, names)
        search = _Search(knowledge, names, x, self.row_queries, self.prior)
        at_once, found = max(1, LARGEST // (search.width * z.shape[1])), []
        for part in torch.arange(len(z)).split(at_once):
            found.append(search.run(z[part].double(), start[part].flatten(1).double()))
            progress(int(part[-1]) + 1, len(z))
        return torch.cat(found).to(x.dtype).view(-1, *knowledge.shape)


class _Search:
    """The search for the rows of releases z (n, numbers), float64, in the directions of the greatest variance."""

    def __init__(self, knowledge: Knowledge, names: list[str], x: Tensor, row_queries: int, prior: float) -> None:
        self._knowledge, self._names, self._most, self._prior = knowledge, names, row_queries, prior
        rows = x.flatten(1).double()
        self.width = min(rows.shape[1], int(DIFFERENCES * row_queries))
        centred = rows - rows.mean(0)
        variances, basis = torch.linalg.eigh(centred.T @ centred / max(len(rows) - 1, 1))
        variances = variances.clamp_min(0.0) + SHRINK * variances.mean().clamp_min(1e-12)
        self._basis = basis[:, -self.width :]
        self._sigma, self._mean = variances[-self.width :].sqrt(), rows.mean(0)
        self._scale = float(self._ask(rows).var(0).mean().clamp_min(1e-12))

    def run(self, z: Tensor, start: Tensor) -> Tensor:
        """Return the rows (n, d) found from `start` (n, d)."""
        x, every = self._clip(start), torch.arange(len(z), device=z.device)
        f = self._ask(x)
        loss, jacobians = self._losses(x, f, z), _Jacobians(len(z), self.width, z)
        damping, used, steps = z.new_full((len(z),), DAMPING), every * 0 + 1, every * 0 + STEPS
        while True:
            # With what is left for steps alone they go on by the last differences.
            stale = (steps >= STEPS) & (used + self.width < self._most)
            going = (damping < MOST_DAMPING) & ((f - z).square().sum(1) > EXACT * z.shape[1] * self._scale)
            rows = every[going & (used < self._most)]
            if not len(rows):
                return x
            anew = rows[stale[rows]]
            if len(anew):
                jacobians.measure(anew, self._differences(x[anew], f[anew]) / self._scale**0.5)
                used[anew], steps[anew] = used[anew] + self.width, 0
            u = self._whiten(x)
            step = jacobians.step((z - f) / self._scale**0.5, u, damping, self._prior)[rows]
            new = self._clip(x[rows] + (step * self._sigma) @ self._basis.T)
            answered = self._ask(new)
            after, used[rows] = self._losses(new, answered, z[rows]), used[rows] + 1
            lower, fresh = after < loss[rows], steps[rows] == 0
            # By differences of this very place a step that fails is too long; by older ones, these may be at fault.
            slow = torch.where(~lower & fresh, 0, STEPS)
            steps[rows] = torch.where(lower & (after < SLOW * loss[rows]), steps[rows] + 1, slow)
            damping[rows] *= torch.where(lower, EASED, RAISED)
            better = rows[lower]
            moved, change = torch.zeros_like(u), torch.zeros_like(f)
            moved[better], change[better] = self._whiten(new[lower]) - u[better], answered[lower] - f[better]
            jacobians.update(moved, change / self._scale**0.5)
            x[better], f[better], loss[better] = new[lower], answered[lower], after[lower]

    def _ask(self, x: Tensor) -> Tensor:
        """Return what is released of rows x (n, d): (n, numbers), float64."""
        known = self._knowledge
        released = unwrap(known.query)(x.to(unwrap(known.auxiliary).dtype).view(-1, *known.shape))
        return join_values(released, self._names).double()

    def _differences(self, x: Tensor, f: Tensor) -> Tensor:
        """Return the Jacobian at x (n, d), whose releases are f (n, numbers): (n, directions, numbers)."""
        ahead = x[:, None] + DIFFERENCE * (self._sigma * self._basis).T
        return (self._ask(ahead.flatten(0, 1)).view(len(x), self.width, -1) - f[:, None]) / DIFFERENCE

    def _losses(self, x: Tensor, f: Tensor, z: Tensor) -> Tensor:
        return (f - z).square().sum(1) / self._scale + self._prior * self._whiten(x).square().sum(1)

    def _whiten(self, x: Tensor) -> Tensor:
        """Return the coordinates u of rows x (n, d): (n, directions)."""
        found: Tensor = (x - self._mean) @ self._basis / self._sigma
        return found

    def _clip(self, x: Tensor) -> Tensor:
        bounds = self._knowledge.value_range
        return x if bounds is None else x.clamp(*bounds)


class _Jacobians:
    """A Jacobian a row, (directions, numbers), as it was measured, and the last updates of rank one since then."""

    def __init__(self, rows: int, width: int, like: Tensor) -> None:
        # Of single precision: a step only has to lead down, and losses are of double precision.
        self._measured = torch.zeros(rows, width, like.shape[1], device=like.device)
        self._square, self._factor = (like.new_zeros(rows, width, width) for _ in range(2))
        self._damping = like.new_zeros(rows)
        """The damping that a row's factor is of; 0: it has none."""
        self._along, self._missed = like.new_zeros(rows, UPDATES, width), like.new_zeros(rows, UPDATES, like.shape[1])
        self._count = 0

    def measure(self, rows: Tensor, found: Tensor) -> None:
        """Take those `found` for `rows` in place of the older ones and their updates."""
        self._measured[rows], self._square[rows] = found.float(), found @ found.transpose(1, 2)
        self._damping[rows], self._along[rows] = 0.0, 0.0

    def step(self, left: Tensor, u: Tensor, damping: Tensor, prior: float) -> Tensor:
        """Return the damped step (n, directions) from u that removes what is `left` of the releases (n, numbers).

        Products of a Jacobian with itself are those it was measured with; a lower damping waits for the next one.
        """
        anew = (self._damping == 0) | (damping > self._damping)
        matrix = self._square[anew]
        mean = matrix.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-12)
        matrix.diagonal(dim1=1, dim2=2).add_((prior + damping[anew] * mean)[:, None])
        self._factor[anew], self._damping[anew] = torch.linalg.cholesky_ex(matrix)[0], damping[anew]
        slope = (self._measured @ left[:, :, None].float()).squeeze(2).double() - prior * u
        slope += (self._along.transpose(1, 2) @ (self._missed @ left[:, :, None])).squeeze(2)
        found: Tensor = torch.cholesky_solve(slope[:, :, None], self._factor).squeeze(2)
        return found.nan_to_num(0.0, 0.0, 0.0)

    def update(self, step: Tensor, change: Tensor) -> None:
        """Make each Jacobian map its `step` (n, directions) to its `change` (n, numbers); a step of 0 leaves it."""
        place = self._count % UPDATES
        if place == 0:
            self._measured.baddbmm_(self._along.transpose(1, 2).float(), self._missed.float())
            self._along.zero_()
        expected = (step[:, None].float() @ self._measured).squeeze(1).double()
        expected += ((self._along @ step[:, :, None]).transpose(1, 2) @ self._missed).squeeze(1)
        self._along[:, place] = step / step.square().sum(1, keepdim=True).clamp_min(1e-30)
        self._missed[:, place] = change - expected
        self._count += 1
