"""The networks of the FedProto table: the authors' CNN, and a LeNet whose embedding is as wide.

Paper: Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: federated prototype learning across heterogeneous clients",
AAAI 2022: two convolutions and two linear layers, with 50 numbers between the linear ones; kernels, channels and
dropout as in the authors' code.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from splitfed.core.topology import Topology
from splitfed.models.lenet import lenet
from splitfed.topologies import local

WIDTH = 50


def cnn() -> Topology:
    """Return the CNN for x (n, 1, 28, 28), whole at the client; the embedding (n, 50) is its body's output."""
    layers = OrderedDict(
        conv1=nn.Conv2d(1, 10, 5),
        pool1=nn.MaxPool2d(2),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(10, 20, 5),
        drop2=nn.Dropout2d(),
        pool2=nn.MaxPool2d(2),
        relu2=nn.ReLU(),
        flatten=nn.Flatten(),
        fc1=nn.Linear(320, WIDTH),
        relu3=nn.ReLU(),
        drop3=nn.Dropout(),
        fc2=nn.Linear(WIDTH, 10),
    )
    return local(nn.Sequential(layers), ("relu3",))


def narrow_lenet() -> Topology:
    """Return LeNet for x (n, 1, 28, 28), whole at the client, with 50 numbers in place of 84 before its last layer."""
    model = lenet((1, 28, 28), 10, seed=None)
    model.fc2, model.fc3 = nn.Linear(120, WIDTH), nn.Linear(WIDTH, 10)
    return local(model, ("relu4",))
