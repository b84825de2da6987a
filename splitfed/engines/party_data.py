"""What the parties of a run hold: rows by the name of their part, weights to start from, optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from splitfed.core.rows import RowSource
from splitfed.core.usage_counts import RowOrigins
from splitfed.engines.parties import RunParties


class PartyData(Protocol):
    """Rows, first weights and optimizers of the parties of `run_parties`; rows are their data owners' alone."""

    run_parties: RunParties

    def rows(self, replica: int, part: str) -> int:
        """Return how many rows `replica` has in `part`."""
        return self.run_parties.owners(replica)[0].state.rows(part)

    def own(
        self,
        replica: int,
        part: str,
        inputs: Mapping[str, Tensor | RowSource],
        labels: Mapping[str, Tensor],
        relabel: bool = True,
        origins: RowOrigins | None = None,
    ) -> None:
        """Give each data owner of `replica` the inputs and labels that are its own.

        `relabel`: whether defenses change the labels to train on. `origins`: as in `PartyState.own`.
        """
        parties, topology = self.run_parties.replicas[replica].parties, self.run_parties.topologies[replica]
        for role in topology.data_roles:
            own_inputs = {v: t for v, t in inputs.items() if topology.inputs[v] == role}
            own_labels = {h.value: labels[h.value] for h in topology.heads if h.labels == role and h.value in labels}
            parties[role].state.own(part, own_inputs, own_labels, relabel, origins)

    def drop(self, replica: int, part: str) -> None:
        """Let the data owners of `replica` forget the rows called `part`."""
        for party in self.run_parties.owners(replica):
            party.state.drop(part)

    def show(self, replica: int, part: str, rows: Tensor) -> None:
        """Let `part` of `replica` be these `rows` of its part "train", as the data owners train on them."""
        for party in self.run_parties.owners(replica):
            party.state.show(part, rows)

    def start_from(self, replica: int, tensors: Mapping[str, Tensor]) -> None:
        """Let the client of `replica` start from `tensors`, `segment/name` -> tensor, in place of its topology's."""
        for party in self.run_parties.owners(replica) if tensors else ():
            party.state.adopt({**party.state.contents(copies=False), **tensors})

    def restart_optimizers(self) -> None:
        """Let every party's optimizer forget its state, such as momentum; weights and learning rates stay."""
        for party in self.run_parties.members().values():
            party.state.restart()

    def end_round(self) -> None:
        """Advance every party's learning-rate scheduler."""
        for party in self.run_parties.members().values():
            party.state.end_round()
