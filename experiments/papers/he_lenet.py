"""The MNIST network that He, Zhang and Lee (ACSAC 2019) attack, and after them Erdogan, Kupcu and Cicek (WPES 2022).

Layers, sizes and names are those of both groups' public code (`net.py`, `unsplit/models.py`): valid convolutions, max
pooling, 45,278 weights.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from splitfed.core.optimizers import Optim


def he_lenet() -> nn.Sequential:
    """Return the network for (n, 1, 28, 28) with fresh weights from torch's default generator."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 8, 5),
            ReLU1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(8, 16, 5),
            ReLU2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(256, 120),
            fc1act=nn.ReLU(),
            fc2=nn.Linear(120, 84),
            fc2act=nn.ReLU(),
            fc3=nn.Linear(84, 10),
        )
    )


def adam(eps: float) -> Optim:
    """Return the optimizer that both groups train the victim with; `eps` is 1e-3 in the one, torch's in the other."""
    return Optim("Adam", {"lr": 1e-3, "eps": eps, "amsgrad": True})
