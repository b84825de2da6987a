"""Joint: one group of parties trains together, every party in every step.

Paper: Vepakomma, Gupta, Swedish, Raskar, "Split learning for health", 2018, section on vertically partitioned data; its
extended vanilla and multi-task configurations are trained the same way.

The parties of a vertical, extended or multi-task topology hold different features of the same records, so there is one
replica. Several groups with records of their own train each like this under "independent", where they share no party,
and under "splitfed_v3", where they share a server.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Topology
from splitfed.engines.base import Trainer
from splitfed.schedules.base import Round, Schedule, State, Training


@dataclass(frozen=True, kw_only=True)
class Joint(Schedule):
    """Plain training of one replica."""

    def check(self, topology: Topology, clients: int) -> None:
        """Raise `InvalidInput` for more than one client."""
        if clients != 1:
            raise InvalidInput(
                f"schedule 'joint' trains one group of parties on the records they share; {clients} clients were given "
                "(take one; or for several groups 'independent', which trains each like this, and 'splitfed_v3' where "
                "they share a server)"
            )

    def round(self, engine: Trainer, training: Training, number: int, state: State) -> Round:
        """Train every batch of the round."""
        rows = engine.rows(0, "train")
        epochs = training.epochs(number)
        return Round([loss for e in epochs for loss in engine.train(0, e, training.batches(rows, e, 0))], (0,))
