"""What an adversary reads of a topology that is computed in plain, or secured, and what the scorer alone reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from splitfed.attacks.base import Attack, Knowledge
from splitfed.core.messages import View
from splitfed.core.topology import Topology
from splitfed.engines.engine import Engine
from splitfed.registry import resolve


class ComputationViews:
    """What parties of a computation can read: in plain everything, where a subclass says nothing else."""

    def check_readable(self, name: str, attack: Attack, engine: Engine, party: str, client: int) -> None:
        """Refuse an attack by `party`, called `name`, where it can read nothing of what it would read."""

    def check_learning(self, name: str, who: str, topology: Topology, role: str) -> None:
        """Refuse the training attack `who` at the party `name`, of `role`, where it can read nothing."""

    def select(self, view: View, attack: Attack, topology: Topology) -> View:
        """Return what of `view` is handed to `attack`."""
        return view

    def knowledge(self, engine: Engine, party: str, client: int) -> Mapping[str, Any]:
        """Return what `party` knows of its own part in the computation: fields of `Knowledge` -> value."""
        return {}

    def read_hidden(self, engine: Engine, view: View, knowledge: Knowledge) -> tuple[str, Tensor, float]:
        """Return what in `view` crossed unreadable, for the scorer: the value, its numbers, and their largest error.

        The numbers are (rows, features). Asked for attacks alone that aim at what crosses unreadable.
        """
        raise NotImplementedError


def views_of(topology: Topology) -> ComputationViews:
    """Return what parties can read where `topology` is computed."""
    kind = ComputationViews if topology.computation is None else resolve(topology.computation.views)
    views: ComputationViews = kind()
    return views
