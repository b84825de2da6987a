"""SGLR: clients in parallel, a common cut gradient for some of them, and a learning rate for each side.

Paper: Pal, Uniyal, Park, Vepakomma, Raskar, Bennis, Jeon, Choi, "Server-side local gradient averaging and learning rate
acceleration for scalable split learning", 2021.

The server joins the clients' releases and computes one loss over all their rows. In every step a fraction `phi` of the
clients is drawn; these receive the same gradient, combined over them, and the others their own. The paper prints a sum
and calls it an average: `combine` is "sum", as printed, or "mean". Where batches differ in length, row i of the common
gradient is combined over the drawn clients that have a row i. The server's learning rate is the configured one times C
** alpha for C clients. Client segments are never averaged. The common gradient is counted once for every client that
receives it; the paper counts it as one broadcast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitfed.core.errors import require_name, require_number
from splitfed.core.executor import Combine
from splitfed.core.messages import Message
from splitfed.core.random import generator
from splitfed.core.topology import Topology
from splitfed.engines.base import Trainer
from splitfed.schedules.base import Round, State, Training, shared_roles
from splitfed.schedules.joint_step import JointStep, by_rows
from splitfed.schedules.sampling_and_dropout import dropped_clients, list_clients


@dataclass(frozen=True, kw_only=True)
class Sglr(JointStep):
    """Cut gradients averaged over some of the clients, and a separate learning rate for the server.

    `phi` in [0, 1]: the share of clients with the common gradient; `alpha`: the exponent of the server's rate.
    """

    phi: float = field(default=0.5, metadata=require_number("phi", low=0.0, high=1.0))
    alpha: float = field(default=0.5, metadata=require_number("alpha", low=0.0, high=2.0))
    combine: str = field(default="sum", metadata=require_name("combine", ("sum", "mean")))

    def rates(self, topology: Topology, clients: int) -> dict[str, float]:
        """Return the factor clients ** alpha for the shared roles."""
        return dict.fromkeys(shared_roles(topology), self.clients_asked(clients) ** self.alpha)

    def binds(self, clients: int) -> str | None:
        """Return the reason: the gradients of several clients are combined edge by edge, so shapes must match."""
        return "combines the gradients of client segments" if clients > 1 else None

    def round(self, engine: Trainer, training: Training, number: int, state: State) -> Round:
        """Take joint steps until all batches are used."""
        turns = self.turns(engine, training, number)
        losses: list[float] = []
        averaged = True
        for epoch, step, batches, averaged in self.steps(training, number, turns):
            if not averaged:
                break
            random = generator(training.seed, "sglr", epoch, step)
            drawn_turns = torch.randperm(len(batches), generator=random)[: round(self.phi * len(batches))].tolist()
            combine = self._combined(engine.topology, frozenset(drawn_turns))
            losses += engine.train_together(epoch, step, batches, by_rows(batches), combine).values()
        return Round(losses, list_clients(turns), dropped_clients(turns), averaged and self.enough(turns))

    def _combined(self, topology: Topology, drawn: frozenset[int]) -> Combine:
        """Return the function that replaces the gradients of the `drawn` clients on every edge that leaves a client."""
        leaving = {e.name for e in topology.crossings if topology.role_of(e.source) in topology.data_roles}

        def combine(edge: str, messages: dict[int, Message]) -> dict[int, Message]:
            chosen = {turn: m for turn, m in messages.items() if turn in drawn}
            if edge not in leaving or len(chosen) < 2:
                return messages
            common = {
                name: _common([m.tensors[name] for m in chosen.values()], self.combine)
                for name in next(iter(chosen.values())).tensors
            }
            return messages | {turn: m._replace(tensors=_first_rows(common, m.tensors)) for turn, m in chosen.items()}

        return combine


def _common(gradients: list[Tensor], how: str) -> Tensor:
    """Return the sum or mean of `gradients` (rows, ...), row by row over those that have the row."""
    longest = max(gradients, key=len)
    total, count = torch.zeros_like(longest), longest.new_zeros(len(longest))
    for gradient in gradients:
        total[: len(gradient)] += gradient
        count[: len(gradient)] += 1
    return total if how == "sum" else total / count.reshape(-1, *[1] * (total.dim() - 1))


def _first_rows(common: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor[: len(own[name])].clone() for name, tensor in common.items()}
