"""Public rows: each client sends these rows to all others once, through the aggregation server, and keeps the rest.

They are messages of kind "data": counted, recorded, and readable by the aggregation server and all other clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.private_values import BOTH
from splitfed.core.random import generator
from splitfed.core.topology import Head, Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.core.usage_counts import OWN, RowOrigins
from splitfed.federated.base import State
from splitfed.federated.learner import Learner, LearnerData, LearnerTraining
from splitfed.federated.objectives import NoObjective, objective_of
from splitfed.federated.topology_values import only_client, only_head

SHOWN_VALUES = {"data": BOTH}
"""`message_values` of the message that carries public rows, for a method's traits."""

Rows = dict[str, Tensor]
"""Public rows of one client: "x" (rows, ...) and "y" (rows,)."""


PublicBatch = Callable[[int, int, Mapping[int, int], int], Tensor]
"""Function that returns the public rows that a client scores in a round.

Its arguments: the run's seed, the client, client -> number of its public rows, the round. It returns positions in the
public rows of all clients, joined in the order of the clients: (rows,) int64.
"""


class PublicRowsObjective(NoObjective):
    """Local objective that stores, for its client, the public rows of other clients: client -> rows."""

    def __init__(self) -> None:
        self.rows: dict[int, Rows] = {}
        # True if the party's stored rows were lost, as after a resume.
        self.stale = False

    def state(self) -> dict[str, Any]:
        """Return the stored rows."""
        return {"rows": {replica: dict(rows) for replica, rows in self.rows.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        self.rows = {replica: dict(rows) for replica, rows in state["rows"].items()}
        self.stale = True


def check(who: str, topology: Topology, clients: int, classes: bool = True) -> Head:
    """Return the only head; raise `InvalidInput` for clients that cannot use each other's rows.

    `classes`: whether the head must be one of classification.
    """
    only_client(who, topology)
    if len(topology.inputs) > 1:
        raise InvalidInput(
            f"{who} exchanges rows of one input; topology {topology.name!r} has {', '.join(topology.inputs)}"
        )
    if clients < 2:
        raise InvalidInput(f"{who} learns from others' public rows; one client has no others")
    return only_head(who, topology, classes)


def check_public(who: str, counts: Sequence[int]) -> None:
    """Raise `InvalidInput` if a client has no public rows; `counts`: one number a client."""
    for client, count in enumerate(counts):
        if count == 0:
            raise InvalidInput(
                f"{who} needs public rows of every client, and client{client} has none: clients(public=0.1)"
            )


def check_batch(who: str, rows: int, facts: Sequence[TopologyFacts]) -> None:
    """Raise `InvalidInput` if steps on `rows` rows are too small for batch norm in a client's model."""
    for known in facts if rows < 2 else ():
        for name in sorted(known.batch_norm):
            raise InvalidInput(
                f"{who} would take steps on a single public row, and batch norm in segment {name!r} needs 2 or more"
            )


def start() -> State:
    """Return the empty state: `shown`, client -> its public rows; `told`, client -> clients whose rows it received."""
    return {"shown": {}, "told": {}}


def exchange_rows(learners: Sequence[Learner], number: int, state: State) -> list[Learner]:
    """Send the public rows of clients that take part for the first time, to all clients that do not have them yet.

    Returns the clients whose parties need rows (see `received_rows`): new clients, those that were sent rows, and those
    that lost theirs in a resume.
    """
    shown, seen_by_client = state["shown"], state["told"]
    first = [learner.replica for learner in learners if learner.replica not in shown]
    for learner in learners:
        if learner.replica in first:
            head, (x,) = learner.topology.heads[0].value, learner.inputs("public").values()
            shown[learner.replica] = dict(learner.send("data", {"x": x, "y": learner.labels(head, "public")}, number))
    changed = []
    for learner in learners:
        known, holder = seen_by_client.setdefault(learner.replica, []), objective_of(learner, PublicRowsObjective)
        new = [replica for replica in sorted(shown) if replica != learner.replica and replica not in known]
        for replica in new:
            rows = dict(learner.receive("data", shown[replica], number))
            known.append(replica)
            if holder is not None:
                holder.rows[replica] = rows
        if new or learner.replica in first or (holder is not None and holder.stale):
            changed.append(learner)
        if holder is not None:
            holder.stale = False
    return changed


def received_rows(learner: LearnerTraining, state: State) -> dict[int, Rows]:
    """Return the public rows that the client has received: client -> rows, in the order of the clients."""
    holder = objective_of(learner, PublicRowsObjective)
    # A plan has no local objectives; what was sent is what the aggregation server has.
    known = {k: state["shown"][k] for k in state["told"].get(learner.replica, ())} if holder is None else holder.rows
    return dict(sorted(known.items()))


def store_rows(learner: LearnerData, part: str, shown: Mapping[int, Rows], own: str | None = None) -> None:
    """Store at the client's party, as `part`, its own rows of part `own`, if named, and the public rows in `shown`.

    With `own="train"` these precede all others' rows; with "public" they stand in the order of the clients.
    """
    (name,), head = learner.topology.inputs, learner.topology.heads[0].value
    held = {client: (rows, RowOrigins.shown(client, len(rows["y"]))) for client, rows in shown.items()}
    if own is not None:
        (mine,), labels = learner.inputs(own).values(), learner.labels(head, own)
        numbers = learner.shown if own == "public" else torch.arange(len(labels))
        held[learner.replica if own == "public" else OWN] = {"x": mine, "y": labels}, RowOrigins.own(numbers)
    pieces = [held[client] for client in sorted(held)]
    x, y = (torch.cat([rows[which] for rows, _ in pieces]) for which in ("x", "y"))
    learner.hold(part, {name: x}, {head: y}, RowOrigins.joined(origins for _, origins in pieces))


def split_batches(order: Tensor, size: int) -> list[Tensor]:
    """Return `order` (rows,) in batches of `size`; a single remaining row joins the batch before it, for batch norm."""
    found = list(order.split(size))
    if len(found) > 1 and len(found[-1]) == 1 < size:
        found[-2:] = [torch.cat(found[-2:])]
    return found


def draw_row_numbers(seed: int, rows: int, first: int, count: int) -> Tensor:
    """Return `count` row numbers below `rows`, from position `first` of an endless sequence of random permutations."""
    found = []
    for turn in range(first // rows, (first + count - 1) // rows + 1):
        order = torch.randperm(rows, generator=generator(seed, "turn", turn))
        found.append(order[max(first - turn * rows, 0) : first + count - turn * rows])
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)
