"""Synthetic(alpha, beta): devices whose linear models differ by alpha, and whose rows by beta.

Paper: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated optimization in heterogeneous networks" (FedProx),
MLSys 2020, section 5.1 and appendix C.1.

Device k labels x by argmax(W_k x + b_k). u_k ~ N(0, alpha) is the mean of all numbers in W_k and b_k, of variance 1;
B_k ~ N(0, beta) is the mean of the numbers in v_k, of variance 1, and x ~ N(v_k, S) with S diagonal, S_jj = j^-1.2.
As in the authors' code alpha and beta are standard deviations, which the paper's notation leaves open, and a device has
50 + lognormal(4, 2) rows: most have a few hundred, some many thousands. With `iid` all devices share W and b, drawn
with mean 0, and every v_k is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splitfed.core.errors import check_count, check_number
from splitfed.core.random import generator
from splitfed.core.tasks import classification
from splitfed.data.dataset import Dataset

INPUTS, CLASSES = 60, 10


def synthetic(alpha: float = 1.0, beta: float = 1.0, devices: int = 30, iid: bool = False, seed: int = 0) -> Dataset:
    """Return x (n, 60) of real numbers without bounds, ten classes, and the number of the device as domain.

    `alpha`, `beta` >= 0: how much the models and the rows differ between devices. `.clients(devices, by_domain=True)`
    makes one client for each device.
    """
    check_number("alpha", alpha, low=0.0)
    check_number("beta", beta, low=0.0)
    check_count("devices", devices, low=1)
    random = generator(seed, "synthetic")
    counts = (4 + 2 * _normal(devices, random=random)).exp().long() + 50
    shared = _normal(CLASSES, INPUTS, random=random), _normal(CLASSES, random=random)
    scale = torch.arange(1, INPUTS + 1, dtype=torch.float64) ** -0.6
    xs, ys = [], []
    for device in range(devices):
        u, center = alpha * _normal(1, random=random), beta * _normal(1, random=random)
        weight, bias = u + _normal(CLASSES, INPUTS, random=random), u + _normal(CLASSES, random=random)
        mean = center + _normal(INPUTS, random=random)
        if iid:
            (weight, bias), mean = shared, torch.zeros(INPUTS, dtype=torch.float64)
        x = mean + scale * _normal(int(counts[device]), INPUTS, random=random)
        xs.append(x.float())
        ys.append((x @ weight.T + bias).argmax(1))
    name = f"synthetic({'iid' if iid else f'{alpha:g}, {beta:g}'})"
    domains = torch.arange(devices).repeat_interleave(counts)
    return Dataset(name, torch.cat(xs), torch.cat(ys), classification(CLASSES), domains=domains)


def _normal(*shape: int, random: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=random, dtype=torch.float64)
