"""The workloads of the benchmarks: the split that others' accuracies are compared on."""

from __future__ import annotations

import torch

from experiments.benchmarks.mnist_as_pfllib import federation


def test_every_row_has_one_place_and_a_fair_share_ends_a_clients_growth() -> None:
    data = federation(20, seed=3)
    positions = torch.cat(list(data.sources.values()))
    assert sorted(positions.tolist()) == list(range(5000))
    for client in data.clients:
        rows = len(client.train) + len(client.test)
        assert len(client.train) == 3 * rows // 4
        labels = torch.cat([client.train.y, client.test.y])
        # Classes come in order: what a client had before its last one was less than its fair share.
        assert (labels != labels.max()).sum() < 5000 / 20
    assert data.clients[0].train.x.min() == -1.0
    assert data.clients[0].train.x.max() == 1.0


def test_a_split_follows_its_seed() -> None:
    first, again, other = (federation(5, seed=seed).sources["client0/train"] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
