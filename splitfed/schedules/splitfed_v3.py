"""SplitFed v3: every client keeps segments of its own; the server's copies, one a client, are averaged every epoch.

Paper: Gawali, Arvind, Suryavanshi, Madaan, Gaikwad, Bhanu Prakash, Kulkarni, Pant, "Comparison of privacy-preserving
distributed deep learning methods in healthcare", MIUA 2021.

No weights pass between clients. The average has equal weights, as in the paper, unless `by_examples` is set. Evaluation
uses a client's own segments with the averaged server segments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Topology
from splitfed.engines.base import Placement, Trainer
from splitfed.schedules.base import Round, State, Training, shared_roles
from splitfed.schedules.sampling_and_dropout import Averaged, dropped_clients, examples, list_clients


@dataclass(frozen=True, kw_only=True)
class SplitFedV3(Averaged):
    """Private client segments and averaged server copies; `by_examples` weights that average by training rows."""

    by_examples: bool = False

    def check(self, topology: Topology, clients: int) -> None:
        """Raise `InvalidInput` for a topology without a shared role."""
        super().check(topology, clients)
        if not shared_roles(topology):
            raise InvalidInput(
                f"splitfed_v3 averages the server's copies; topology {topology.name!r} has no party without data"
            )

    def placement(self, topology: Topology) -> Placement:
        """Return a copy of the shared roles for each client."""
        return self.fusing(Placement(shared_roles(topology)))

    def round(self, engine: Trainer, training: Training, number: int, state: State) -> Round:
        """Train all clients at the same time, and average the server's copies after every epoch."""
        turns = self.turns(engine, training, number)
        losses: list[float] = []
        averaged = True
        for local in range(training.local_epochs):
            # A client that drops out has finished every epoch before the one it leaves in.
            now = [replace(turn, epochs=[turn.epochs[local]], finished=turn.completes(local)) for turn in turns]
            engine.branch(list_clients(now))
            client_losses = engine.train_at_once({turn.client: turn.epochs for turn in now})
            losses += [loss for steps in client_losses.values() for loss in steps]
            if self.enough(now):
                engine.merge(examples(engine, now, self.by_examples))
            else:
                averaged = False
        return Round(losses, list_clients(turns), dropped_clients(turns), averaged)
