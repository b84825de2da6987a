"""Selects what an adversary can read where a topology is computed in plain, or on ciphertexts or secret shares."""

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
    """What parties of a topology can read; this class: everything, as the computation is in plain."""

    def check_readable(self, name: str, attack: Attack, engine: Engine, party: str, client: int) -> None:
        """Raise `InvalidInput` if `attack`, called `name`, would read only values that `party` cannot decrypt."""

    def check_learning(self, name: str, who: str, topology: Topology, role: str) -> None:
        """Raise `InvalidInput` if the training attack `who` could read no value at the party `name`, of `role`."""

    def select(self, view: View, attack: Attack, topology: Topology) -> View:
        """Return the messages of `view` that `attack` is given."""
        return view

    def knowledge(self, engine: Engine, party: str, client: int) -> Mapping[str, Any]:
        """Return what `party` knows of the computation it takes part in: field of `Knowledge` -> value."""
        return {}

    def read_hidden(self, engine: Engine, view: View, knowledge: Knowledge) -> tuple[str, Tensor, float]:
        """Return an encrypted value of `view`, for the scorer: its name, its numbers, and their largest error.

        The numbers are (rows, features). Called only for attacks whose target is an encrypted value.
        """
        raise NotImplementedError


def views_of(topology: Topology) -> ComputationViews:
    """Return the views of the computation that `topology` uses."""
    kind = ComputationViews if topology.computation is None else resolve(topology.computation.views)
    views: ComputationViews = kind()
    return views
