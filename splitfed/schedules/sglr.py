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
from splitfed.schedules.base import shared_roles
from splitfed.schedules.joint_step import JointStep


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

    def combined(self, topology: Topology, seed: int, epoch: int, step: int, clients: int) -> Combine | None:
        """Return the function that gives some of the clients, drawn anew, a common gradient on edges from clients."""
        order = torch.randperm(clients, generator=generator(seed, "sglr", epoch, step))
        drawn = frozenset(order[: round(self.phi * clients)].tolist())
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
