"""Numbers of rows in the batches of a run, for a model whose `forward` may depend on that number."""

from __future__ import annotations

from collections.abc import Sequence

from splitfed.core.replay_rows import check_row_counts, is_replayed
from splitfed.core.topology import Topology
from splitfed.data.dataset import Federation
from splitfed.engines.inference import ROWS_AT_ONCE
from splitfed.federated.base import Method
from splitfed.schedules.base import Training, spread_counts


def check_ways(
    topologies: Sequence[Topology], data: Federation, training: Training, method: Method | None = None
) -> None:
    """Raise `InvalidInput` for a replayed model whose `forward` takes another path for batch sizes of the run.

    Clients may be scored on the rows of others. The number of rows that a method passes through a model is unknown
    beforehand: for methods, representative numbers up to all rows are tried.
    """
    passes: dict[int, str] = {}
    for client in data.clients:
        for part, held in (("validation", client.validation), ("test", client.test)):
            for rows in _parts_of(len(held)):
                passes.setdefault(rows, f"{part} rows of {client.name}, scored by {ROWS_AT_ONCE} at a time")
    most = max(len(client.train) for client in data.clients)
    by_method = dict.fromkeys(spread_counts(most) if method else (), f"rows that {type(method).__name__} may pass")
    passes |= {rows: what for rows, what in by_method.items() if rows not in passes}
    for one in {id(t): t for t in topologies}.values():
        if not any(is_replayed(segment.module) for segment in one.segments):
            continue
        steps: dict[int, str] = {}
        for number, client in enumerate(data.clients):
            if topologies[number] is not one:
                continue
            for rows, what in training.of_client(number).row_counts(len(client.train)).items():
                steps.setdefault(rows, f"{what} of {client.name} in training")
        if method is not None and (method.traits(one).own_steps or any(len(client.shown) for client in data.clients)):
            steps |= {rows: what for rows, what in by_method.items() if rows not in steps}
        for segment in one.segments:
            check_row_counts(segment.module, steps, passes)


def _parts_of(rows: int) -> set[int]:
    return {min(ROWS_AT_ONCE, rows), rows % ROWS_AT_ONCE} - {0}
