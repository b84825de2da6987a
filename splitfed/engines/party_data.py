"""Data of the parties of a run: rows by part, initial weights, and optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from splitfed.core.rows import RowSource
from splitfed.core.usage_counts import RowOrigins
from splitfed.engines.parties import RunParties


class PartyData(Protocol):
    """Rows, initial weights and optimizers of the parties of `run_parties`; only data owners have rows."""

    run_parties: RunParties

    def rows(self, replica: int, part: str) -> int:
        """Return the number of rows of `replica` in `part`."""
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
        """Give each data owner of `replica` its inputs and labels of `part`.

        `relabel`: whether defenses change the labels used in training. `origins`: as in `PartyState.own`.
        """
        parties, topology = self.run_parties.replicas[replica].parties, self.run_parties.topologies[replica]
        for role in topology.data_roles:
            own_inputs = {v: t for v, t in inputs.items() if topology.inputs[v] == role}
            own_labels = {h.value: labels[h.value] for h in topology.heads if h.labels == role and h.value in labels}
            parties[role].state.own(part, own_inputs, own_labels, relabel, origins)

    def drop(self, replica: int, part: str) -> None:
        """Delete the rows of `part` at the data owners of `replica`."""
        for party in self.run_parties.owners(replica):
            party.state.drop(part)

    def show(self, replica: int, part: str, rows: Tensor) -> None:
        """Define `part` of `replica` as the `rows` of its part "train", with the labels used in training."""
        for party in self.run_parties.owners(replica):
            party.state.show(part, rows)

    def start_from(self, replica: int, tensors: Mapping[str, Tensor]) -> None:
        """Set the initial weights of the client of `replica` to `tensors`, `segment/name` -> tensor."""
        for party in self.run_parties.owners(replica) if tensors else ():
            party.state.adopt({**party.state.contents(copies=False), **tensors})

    def restart_optimizers(self) -> None:
        """Clear the state of every party's optimizer, such as momentum; weights and learning rates are kept."""
        for party in self.run_parties.members().values():
            party.state.restart()

    def end_round(self) -> None:
        """Advance every party's learning-rate scheduler."""
        for party in self.run_parties.members().values():
            party.state.end_round()
