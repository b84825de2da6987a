"""White-box canaries for private steps: rows with chosen gradients, passed through the clipping and noise of a defense.

Paper: Nasr, Hayes, Steinke, Balle, Tramèr, Jagielski, Carlini, Terzis, "Tight auditing of differentially private
machine learning", USENIX Security 2023 (gradients of a single coordinate each, distinct ones).

Every guarded party gets a probe of one linear layer without bias, whose gradient for a row is the row itself; the
probe's gradient after the defense is what an optimizer would see. The noise of distinct coordinates is independent, so
that one step with many canaries gives as many samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from splitfed.core.defense import WeightDefense
from splitfed.core.gradient_privatizer import GradientPrivatizer, PrivatizedParty
from splitfed.core.messages import Stamp
from splitfed.core.random import derive

SIZE = 1e3
"""Norm of a canary's gradient before clipping."""

_EMPTY_STEPS = 32


@dataclass(frozen=True)
class CanaryParty:
    """A guarded party: its name, its role, and the roles that it sends the norms of its rows' gradients."""

    party: str
    role: str
    tells: tuple[str, ...] = ()


@dataclass(frozen=True)
class Canaries:
    """The guarded parties of one client under `defense`.

    `position`: of the defense in the run's list; `replica`: of the client's messages.
    """

    defense: WeightDefense
    position: int
    seats: tuple[CanaryParty, ...]
    replica: int
    seed: int

    def sums(
        self, rows: Sequence[Tensor], turns: Sequence[tuple[int, int]], words: Sequence[str | int], divisor: float
    ) -> list[dict[str, Tensor]]:
        """Return the noised gradient sums of steps, times `divisor`: role -> (width,) for each step.

        `rows`: (rows, width) gradients for each step. `turns`: (epoch, step) of each. `words`: together with the run's
        seed they determine the seed of the noise.
        """
        seed, width = derive(self.seed, "audit", *words), rows[0].shape[1]
        example_passes = {seat.role: nn.Linear(width, 1, bias=False) for seat in self.seats}
        privatizers = {seat.role: self._make_privatizer(seat, example_passes[seat.role], seed) for seat in self.seats}
        step_sums = []
        for gradients, (epoch, step) in zip(rows, turns, strict=True):
            stamp = Stamp("train", self.replica, epoch, step)
            for role, privatizer in privatizers.items():
                _pass(privatizer, example_passes[role], gradients, divisor, stamp)
            norms = {seat.role: privatizers[seat.role].norms() for seat in self.seats if seat.tells and len(gradients)}
            for seat in self.seats:
                for receiver in seat.tells if len(gradients) else ():
                    privatizers[receiver].hear(norms[seat.role])
            role_sums = {}
            for role, privatizer in privatizers.items():
                privatizer.finish()
                gradient = example_passes[role].weight.grad
                assert gradient is not None
                role_sums[role] = gradient.detach().flatten().double() * divisor
                example_passes[role].weight.grad = None
                privatizer.drop()
            step_sums.append(role_sums)
        return step_sums

    def deviations(self, width: int = 4096) -> dict[str, float]:
        """Return the standard deviation of the noise at each role, from steps without rows."""
        empty = [torch.zeros(0, width)] * _EMPTY_STEPS
        found = self.sums(empty, [(0, step) for step in range(_EMPTY_STEPS)], ("deviations",), 1.0)
        return {
            role: max(float(torch.cat([one[role] for one in found]).square().mean().sqrt()), 1e-300)
            for role in found[0]
        }

    def scores(self, sums: Mapping[str, Tensor], scales: Mapping[str, float]) -> Tensor:
        """Return the score of every coordinate, (width,): the sum over roles, in deviations of their noise."""
        return torch.stack([left / scales[role] for role, left in sums.items()]).sum(0)

    def _make_privatizer(self, seat: CanaryParty, canary: nn.Module, seed: int) -> GradientPrivatizer:
        device = torch.device("cpu")
        holder = PrivatizedParty(seat.party, seat.role, {"canary": canary}, seed, self.position, device, seat.tells)
        return self.defense.privatizer(holder)


def diagonal(count: int, width: int, first: int = 0, size: float = SIZE) -> Tensor:
    """Return `count` gradients of one coordinate each, starting at coordinate `first`: (count, width)."""
    rows = torch.zeros(count, width)
    rows[torch.arange(count), first + torch.arange(count)] = size
    return rows


def _pass(privatizer: GradientPrivatizer, canary: nn.Module, rows: Tensor, divisor: float, stamp: Stamp) -> None:
    """Backpropagate the sum of the rows' losses over `divisor` through the probe."""
    privatizer.begin(len(rows), divisor, stamp, True)
    if len(rows) == 0:
        return
    with torch.enable_grad():
        with privatizer.watching(canary):
            y = canary(rows)
        privatizer.backward([y], [torch.full_like(y, 1 / divisor)], [])
