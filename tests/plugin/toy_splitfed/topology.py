"""Toy topology: the first two segments of a chain at the client, the third at the server.

Paper: none; an example of a plug-in.
"""

from __future__ import annotations

from torch import nn

from splitfed.core.tasks import Task
from splitfed.core.topology import Topology
from splitfed.topologies import vanilla


def toy_topology(model: nn.Module, cut: str, task: Task | None = None) -> Topology:
    """Cut `model` after the submodule `cut`."""
    return vanilla(model, cut, task)
