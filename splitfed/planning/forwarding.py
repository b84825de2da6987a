"""A trainer around another: it forwards what is asked of it, but for what those built on it do otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from splitfed.core.executor import Combine
from splitfed.engines.base import LaneBatches, Trainer


class ForwardingTrainer(Trainer):
    """Forwards everything to `inner`; several lanes are trained by `train`, one after another."""

    def __init__(self, inner: Trainer) -> None:
        self.inner = inner
        self.topology, self.lanes = inner.topology, inner.lanes

    def rows(self, lane: int, part: str) -> int:
        """Return what `inner` returns."""
        return self.inner.rows(lane, part)

    def train(self, lane: int, epoch: int, batches: Sequence[Tensor], first: int = 0) -> list[float]:
        """Let `inner` train."""
        return self.inner.train(lane, epoch, batches, first)

    def train_together(
        self, epoch: int, step: int, batches: LaneBatches, scales: Mapping[int, float], combine: Combine | None = None
    ) -> dict[int, float]:
        """Let `inner` take one step of every lane."""
        return self.inner.train_together(epoch, step, batches, scales, combine)

    def hand_over(self, source: int, target: int, role: str, epoch: int, via: str | None = None) -> None:
        """Let `inner` hand weights over."""
        self.inner.hand_over(source, target, role, epoch, via)

    def download(self, lanes: Sequence[int], epoch: int) -> None:
        """Let `inner` send the clients weights."""
        self.inner.download(lanes, epoch)

    def upload(self, weights: Mapping[int, float], epoch: int) -> None:
        """Let `inner` average what the clients send."""
        self.inner.upload(weights, epoch)

    def branch(self, lanes: Sequence[int]) -> None:
        """Let `inner` copy."""
        self.inner.branch(lanes)

    def merge(self, weights: Mapping[int, float]) -> None:
        """Let `inner` merge its copies."""
        self.inner.merge(weights)
