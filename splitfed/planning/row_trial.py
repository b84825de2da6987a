"""Trial of row independence, on rows and batches of the run itself, for runs with a guarantee by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from splitfed.core.defense import Accounted, Defense, WeightDefense
from splitfed.core.errors import InvalidInput, describe_failure, others_code
from splitfed.core.own_values import OWN_ROWS
from splitfed.core.privacy_events import Protects
from splitfed.core.random import derive, generator
from splitfed.core.row_independence import try_rows
from splitfed.core.row_places import find_counting
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.core.trial_rows import TrialRows
from splitfed.data.dataset import Dataset, Federation
from splitfed.engines.inference import ROWS_AT_ONCE
from splitfed.federated.base import Method
from splitfed.planning.example_passes import inputs_of
from splitfed.schedules.base import Training

PASSED = max(ROWS_AT_ONCE, OWN_ROWS)
"""Largest batch of the trial in evaluation mode."""


def promises_rows(defenses: Sequence[Defense], method: Method | None, topology: Topology) -> bool:
    """Return whether a run gives a guarantee by row that requires rows to be computed independently."""
    return any(isinstance(d, WeightDefense) for d in defenses) or promises_passes(defenses, method, topology)


def promises_passes(defenses: Sequence[Defense], method: Method | None, topology: Topology) -> bool:
    """Return whether such a guarantee also covers what is computed of rows in evaluation mode."""
    released = (d for d in defenses if isinstance(d, Accounted) and not isinstance(d, WeightDefense))
    if not all(protects_labels(d) for d in released):
        return True
    return method is not None and bool(method.traits(topology).message_events)


def protects_labels(defense: Accounted) -> bool:
    """Return whether the guarantee of `defense` covers labels only."""
    # A defense that is not calibrated yet has no event.
    event = defense.event()
    return event is not None and event.protects is Protects.LABELS


def with_findings(
    topologies: Sequence[Topology],
    facts: Sequence[TopologyFacts],
    data: Federation,
    training: Training,
    passes: bool,
    counted: bool = False,
) -> tuple[TopologyFacts, ...]:
    """Return the `facts` of every client with the findings on its rows, computed once for each topology.

    Tested with training rows of all clients of that topology, before any transform, in the largest batches of one of
    them; with `passes`, also in the largest batches of evaluation; with `counted`, also whether adding or removing a
    row changes others. Raises `InvalidInput` for a segment that cannot take such a batch.
    """
    found: dict[int, TopologyFacts] = {}
    for topology, known in zip(topologies, facts, strict=True):
        if id(topology) not in found:
            clients = [number for number, one in enumerate(topologies) if one is topology]
            trial = trial_rows(topology, data, clients, training, passes)
            with others_code(partial(_refusal, topology, trial.batch)):
                shown = try_rows(topology, known, trial)
                shown += find_counting(topology, known, trial) if counted else ()
                found[id(topology)] = replace(known, row_findings=tuple(dict.fromkeys(shown)))
    return tuple(
        replace(known, row_findings=found[id(one)].row_findings) for one, known in zip(topologies, facts, strict=True)
    )


def _refusal(topology: Topology, batch: int, error: BaseException) -> BaseException:
    if isinstance(error, InvalidInput):
        return error
    return InvalidInput(
        f"topology {topology.name!r} cannot take a batch of {batch} rows of the run: {describe_failure(error)}"
    )


def trial_rows(
    topology: Topology, data: Federation, clients: Sequence[int], training: Training, passes: bool = False
) -> TrialRows:
    """Return training rows of these `clients`, up to twice as many as their largest batch."""
    held = [data.clients[number] for number in clients]
    parts = [client.train for client in held]
    batch = max(training.of_client(n).largest_batch(len(rows)) for n, rows in zip(clients, parts, strict=True))
    most = max(len(part) for client in held for part in (client.train, client.validation, client.test))
    evaluated = min(PASSED, most) if passes else 0
    wanted = 2 * max(2, batch, evaluated)
    inputs: list[dict[str, Tensor]] = []
    labels: list[dict[str, Tensor]] = []
    for number, rows in enumerate(parts):
        # About equally many of each client.
        few = wanted * (number + 1) // len(parts) - wanted * number // len(parts)
        order = torch.randperm(len(rows), generator=generator(derive(training.seed, "trial rows", number)))
        chosen = rows.rows(order[: max(1, few)]) if few else None
        if chosen is not None:
            inputs.append(inputs_of(topology, chosen))
            labels.append({head.value: chosen.label(head.target) for head in topology.heads})
    x = {name: torch.cat([one[name] for one in inputs]) for name in topology.inputs}
    y = {head.value: torch.cat([one[head.value] for one in labels]) for head in topology.heads}
    discrete = any(not t.is_floating_point() for t in x.values())
    # Scored rows are released as well.
    scored = [getattr(client, part) for client in held for part in ("validation", "test")]
    everything = [*parts, *(rows for rows in (*scored, data.victims, data.auxiliary) if len(rows))]
    return TrialRows(x, y, batch, _spans(topology, everything, x) if discrete else {}, evaluated=evaluated)


def _spans(topology: Topology, parts: Sequence[Dataset], x: dict[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return input -> its smallest and largest whole number, over all rows in memory and over `x`."""
    fed = [x, *(inputs_of(topology, rows) for rows in parts if rows.source.resident)]
    return {
        name: (min(int(one[name].min()) for one in fed), max(int(one[name].max()) for one in fed))
        for name, t in x.items()
        if not t.is_floating_point()
    }
