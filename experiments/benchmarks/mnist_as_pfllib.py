"""MNIST-5k as PFLlib prepares it, so that accuracies can be compared with its own: images in [-1, 1], and its split.

The split is that of Li et al., "Federated Learning on Non-IID Data Silos", ICDE 2022: class by class in Dirichlet
shares, and a client that already has its fair share of rows gets no more. Three quarters of a client's rows are for
training. Numbers are drawn in the order in which PFLlib draws them, whose seed is 1.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

import splitfed as sf
from splitfed.data.dataset import ClientData, Federation


def federation(clients: int, alpha: float = 0.1, seed: int = 1) -> Federation:
    """Return all 5000 rows on `clients` clients, each with rows to train on and to test on."""
    data = sf.data.mnist5k()
    data = dataclasses.replace(data, x=2 * data.x - 1, value_range=(-1.0, 1.0))
    random = np.random.RandomState(seed)
    positions = _split(data.y.numpy(), clients, alpha, random)
    while min(map(len, positions)) < 2:
        positions = _split(data.y.numpy(), clients, alpha, random)
    none = torch.zeros(0, dtype=torch.int64)
    sources, members = {"auxiliary": none, "victims": none}, []
    for number, rows in enumerate(positions):
        shuffled = torch.from_numpy(rows[random.permutation(len(rows))])
        test, train = shuffled.tensor_split([len(rows) - 3 * len(rows) // 4])
        name = f"client{number}"
        members.append(ClientData(name, data.rows(train), data.rows(none), data.rows(test)))
        sources |= {f"{name}/train": train, f"{name}/validation": none, f"{name}/test": test}
    return Federation(data.name, data.task, tuple(members), data.rows(none), data.rows(none), sources)


def _split(labels: np.ndarray, clients: int, alpha: float, random: np.random.RandomState) -> list[np.ndarray]:
    held: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        random.shuffle(rows)
        shares = random.dirichlet(np.full(clients, alpha))
        shares[[len(mine) >= len(labels) / clients for mine in held]] = 0
        bounds = (np.cumsum(shares / shares.sum())[:-1] * len(rows)).astype(int)
        for mine, new in zip(held, np.split(rows, bounds), strict=True):
            mine.extend(new.tolist())
    return [np.asarray(mine) for mine in held]
