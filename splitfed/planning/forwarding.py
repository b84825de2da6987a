"""Base of trainers that wrap another trainer and forward all calls except for those that they override."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from splitfed.core.executor import Combine
from splitfed.engines.base import ReplicaBatches, Scales, Trainer


class ForwardingTrainer(Trainer):
    """Forwards everything to `inner`; several replicas are trained by `train`, one after another."""

    def __init__(self, inner: Trainer) -> None:
        self.inner = inner
        self.topology, self.replicas = inner.topology, inner.replicas

    def rows(self, replica: int, part: str) -> int:
        """Forward to `inner`."""
        return self.inner.rows(replica, part)

    def train(self, replica: int, epoch: int, batches: Sequence[Tensor], first: int = 0) -> list[float]:
        """Forward to `inner`."""
        return self.inner.train(replica, epoch, batches, first)

    def train_together(
        self, epoch: int, step: int, batches: ReplicaBatches, scales: Scales, combine: Combine | None = None
    ) -> dict[int, float]:
        """Forward to `inner`."""
        return self.inner.train_together(epoch, step, batches, scales, combine)

    def hand_over(self, source: int, target: int, role: str, epoch: int, via: str | None = None) -> None:
        """Forward to `inner`."""
        self.inner.hand_over(source, target, role, epoch, via)

    def download(self, replicas: Sequence[int], epoch: int) -> None:
        """Forward to `inner`."""
        self.inner.download(replicas, epoch)

    def upload(self, weights: Mapping[int, float], epoch: int) -> None:
        """Forward to `inner`."""
        self.inner.upload(weights, epoch)

    def branch(self, replicas: Sequence[int]) -> None:
        """Forward to `inner`."""
        self.inner.branch(replicas)

    def merge(self, weights: Mapping[int, float]) -> None:
        """Forward to `inner`."""
        self.inner.merge(weights)
