"""Public rows: each client sends these rows to all others once, through the aggregation server, and keeps the rest.

They are messages of kind "data": counted, recorded, and read by the aggregation server and by everybody else.
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
"""What the message is made of by which rows are shown, for a method's traits."""

Rows = dict[str, Tensor]
"""What one client shows: "x" (rows, ...) and "y" (rows,)."""


PublicBatch = Callable[[int, int, Mapping[int, int], int], Tensor]
"""From the run's seed, a client, how many rows each client has shown (client -> rows, in order) and a round to the rows
that the client scores in it, as positions in all that were shown, one client's after another's: (rows,) int64."""


class PublicRowsObjective(NoObjective):
    """Stands by a client and keeps, for it, what others have shown: client -> rows."""

    def __init__(self) -> None:
        self.rows: dict[int, Rows] = {}
        # Whether the party has forgotten what it held, as after a resume.
        self.stale = False

    def state(self) -> dict[str, Any]:
        """Return the rows."""
        return {"rows": {replica: dict(rows) for replica, rows in self.rows.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`."""
        self.rows = {replica: dict(rows) for replica, rows in state["rows"].items()}
        self.stale = True


def check(who: str, topology: Topology, clients: int, classes: bool = True) -> Head:
    """Refuse clients that could not use each other's rows; return the head. `classes`: whether it must tell classes."""
    only_client(who, topology)
    if len(topology.inputs) > 1:
        raise InvalidInput(
            f"{who} shows rows of one input; topology {topology.name!r} has {', '.join(topology.inputs)}"
        )
    if clients < 2:
        raise InvalidInput(f"{who} learns from others' public rows; one client has no others")
    return only_head(who, topology, classes)


def check_public(who: str, counts: Sequence[int]) -> None:
    """Refuse a client that shows nothing."""
    for client, count in enumerate(counts):
        if count == 0:
            raise InvalidInput(
                f"{who} needs public rows of every client, and client{client} has none: clients(public=0.1)"
            )


def check_batch(who: str, rows: int, facts: Sequence[TopologyFacts]) -> None:
    """Refuse steps on so few `rows` where a client's batch norm could not take them."""
    for known in facts if rows < 2 else ():
        for name in sorted(known.batch_norm):
            raise InvalidInput(
                f"{who} would take steps on a single public row, and batch norm in segment {name!r} needs 2 or more"
            )


def start() -> State:
    """Nobody has shown anything: `shown`, client -> rows; `told`, client -> the clients whose rows it was sent."""
    return {"shown": {}, "told": {}}


def exchange_rows(learners: Sequence[Learner], number: int, state: State) -> list[Learner]:
    """Have clients that are there for the first time show their rows, and send everybody what is new to it.

    Returns the clients whose parties must be given rows (see `received_rows`): new ones, those that were sent some,
    and those that forgot them.
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
    """Return what others have shown to the client: client -> rows, in the order of the clients."""
    holder = objective_of(learner, PublicRowsObjective)
    # A plan has no local objectives; what was sent is what the aggregation server has.
    known = {k: state["shown"][k] for k in state["told"].get(learner.replica, ())} if holder is None else holder.rows
    return dict(sorted(known.items()))


def store_rows(learner: LearnerData, part: str, shown: Mapping[int, Rows], own: str | None = None) -> None:
    """Give the client's party, as its `part`, the rows of its part `own`, if named, and those that others have `shown`.

    The client's "train" comes before all others' rows, its "public" among them in the order of the clients.
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
    """Return `order` (rows,) in batches of `size`; a single row that is left joins the batch before, for batch norm."""
    found = list(order.split(size))
    if len(found) > 1 and len(found[-1]) == 1 < size:
        found[-2:] = [torch.cat(found[-2:])]
    return found


def draw_row_numbers(seed: int, rows: int, first: int, count: int) -> Tensor:
    """Return `count` row numbers below `rows`, from `first` on, out of permutations without end, drawn by `seed`."""
    found = []
    for turn in range(first // rows, (first + count - 1) // rows + 1):
        order = torch.randperm(rows, generator=generator(seed, "turn", turn))
        found.append(order[max(first - turn * rows, 0) : first + count - turn * rows])
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)
