"""What the runs of a study cost before they are trained, as plain JSON, beside the published formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from splitfed.core.errors import InvalidInput, unknown
from splitfed.core.replay import ReplayedSegment
from splitfed.core.topology import Topology, member
from splitfed.costs import han, splitfed_paper
from splitfed.costs.singh import (
    Sizes,
    common_gradient_total,
    crossover,
    federated_client,
    federated_total,
    sizes_of,
    split_client,
    split_total,
)
from splitfed.data.dataset import Dataset
from splitfed.planning.computation import plan_of
from splitfed.planning.example_passes import facts_with
from splitfed.planning.held_rows import lines_told
from splitfed.planning.plan import Cost, cost, federated_bytes
from splitfed.planning.validation import Prepared
from splitfed.registry import TABLES, load
from splitfed.schedules.base import Schedule
from splitfed.study.config import build
from splitfed.study.config.callback_tables import make_callbacks
from splitfed.study.config.client_tables import describe_clients
from splitfed.study.config.grid import Grid
from splitfed.study.config.run_spec import COMPUTATION, RunSpec
from splitfed.study.config.training_table import PartyNames
from splitfed.study.report.data import Json
from splitfed.study.report.privacy import place_of, plan_ledgers


def predict_costs(cell: RunSpec, ready: Prepared) -> Json:
    """Return what the run `cell` costs, worked out from shapes: see `cost_to_json`; of a secured one also a batch.

    That has the key `COMPUTATION`: see `ComputationPlan.estimate_batch`.
    """
    names = PartyNames(ready.topology, ready.schedule, len(ready.topologies), aggregated=ready.method is not None)
    speeds = names.of(cell.training.speeds)
    begins = {"restart_optimizers": ready.training.restart_optimizers, "starts": ready.training.starts}
    found = cost_to_json(cost(ready, cell.training.rounds, speeds), ready.topology) | begins
    if (ends := early_end(cell)) is not None:
        found["at_most"] = "; ".join(filter(None, [found["at_most"], ends]))
    rows = min(ready.training.of_client(0).batch_size, max(1, len(ready.data.clients[0].train)))
    batch = plan_of(ready.topology).estimate_batch(ready.topology, ready.facts[0], rows)
    return found if batch is None else {**found, COMPUTATION: batch}


def early_end(cell: RunSpec) -> str | None:
    """Return why the run `cell` may have fewer rounds than it is planned for; None where no callback may end it."""
    pairs = zip(cell.callbacks, make_callbacks(cell.callbacks, Path("run")), strict=True)
    found = [f"{named.label}, by {one.decides_by}" for named, one in pairs if one.decides_by is not None]
    return f"training may end before round {cell.training.rounds}: {'; '.join(found)}" if found else None


def cost_to_json(found: Cost, topology: Topology) -> Json:
    """Return `found` as plain values: bytes and messages of all training, operations, bytes of memory by role.

    `client_bytes` has an entry a client, `flops` (role -> operations) an entry a party that plays the role. `at_most`:
    why all this may be less, None where it is exact.
    """
    replicas = range(len(found.clients))
    parties = {r: [member(r, i) for i in replicas] if r in topology.data_roles else [r] for r in topology.roles}
    return {
        "bytes": found.bytes,
        "messages": found.messages,
        "bytes_by_kind": found.by_kind,
        "client_bytes": [found.client_bytes(replica) for replica in replicas],
        "flops": {role: [found.flops.get(name, 0.0) for name in names] for role, names in parties.items()},
        "memory": {role: {**m._asdict(), "total": m.total} for role, m in found.memory.items()},
        "seconds": found.seconds,
        "at_most": found.at_most,
    }


def sizes(ready: Prepared) -> Sizes | None:
    """Return what the published formulas need, per epoch; None where they say nothing of the topology.

    They are about clients that cut one model between themselves and a server, with gradients that come back, all of it
    in plain.
    """
    topology = ready.topology
    if (
        topology.computation is not None
        or len({id(t) for t in ready.topologies}) > 1
        or len(topology.roles) != 2
        or len(topology.data_roles) != 1
    ):
        return None
    examples = sum(len(client.train) for client in ready.data.clients)
    try:
        return sizes_of(topology, ready.facts[0], len(ready.topologies), examples)
    except InvalidInput:
        return None


def formulas(s: Sizes) -> Json:
    """Return the floats of one epoch by Singh et al., 2019, and from how many clients on split learning sends fewer."""
    return {
        "source": "Singh, Vepakomma, Gupta, Raskar, 2019",
        "unit": "floats an epoch",
        **asdict(s),
        "split_with_hand_over": {"client": split_client(s), "total": split_total(s)},
        "split_without_hand_over": {"client": split_client(s, False), "total": split_total(s, False)},
        "federated": {"client": federated_client(s), "total": federated_total(s)},
        "crossover_clients": {
            "with_hand_over": crossover(s) / s.parameters,
            "without_hand_over": crossover(s, False) / s.parameters,
        },
        "schedules": schedule_formulas(s),
        "latency": latencies(s),
    }


def schedule_formulas(s: Sizes) -> Json:
    """Return schedule -> source of its formula, and the floats that all clients send and get in an epoch by it.

    Of "sglr" at the schedule's own share of clients with the common gradient.
    """
    thapa = "Thapa, Chamikara, Camtepe, Sun, 2022"
    totals = {
        "sequential": (thapa, splitfed_paper.communication_total("split", s)),
        "splitfed_v1": (thapa, splitfed_paper.communication_total("splitfed_v1", s)),
        "splitfed_v2": (thapa, splitfed_paper.communication_total("splitfed_v2", s)),
        "sglr": ("Pal et al., 2021", common_gradient_total(s, load("schedules", "sglr").phi)),
        "local_loss": ("Han, Bhatti, Lee, Moon, 2021", han.local_loss_communication(_han_setting(s))),
    }
    return {name: {"source": source, "total": total} for name, (source, total) in totals.items()}


def _han_setting(s: Sizes) -> han.HanSetting:
    return han.HanSetting(s.parameters, s.client_share, s.cut_width, s.examples / s.clients, s.clients)


def latencies(s: Sizes) -> Json:
    """Return the latency of one global round by Han et al., 2021, at their constants, and the best cut by them.

    Their units: one operation a parameter and example, P_C 1 and P_S 100 operations and R 1 float in a unit of time.
    "thapa": that of Thapa et al., 2022, at the same R, where all methods compute as long as a client with the whole
    model does, and averaging takes no time.
    """
    setting = _han_setting(s)
    times = splitfed_paper.Times(han.client_compute(setting, whole=True), setting.rate)
    return {
        "source": "Han, Bhatti, Lee, Moon, 2021, table 1",
        "unit": "P_C = 1, P_S = 100, R = 1, beta = .2",
        "split": han.split_latency(setting),
        "splitfed": han.splitfed_latency(setting),
        "local_loss": han.local_loss_latency(setting),
        "federated": han.federated_latency(setting),
        "thapa": {name: splitfed_paper.epoch_time(name, s, times) for name in splitfed_paper.METHODS},
        "optimal_client_share": han.optimal_client_share(setting) if han.inner_cut_pays(setting) else None,
    }


def check_schedule_names(names: str | Sequence[str]) -> list[str]:
    """Return `names` if all are registered schedules, every one for "all"; refuse the first that is not."""
    known, given = list(TABLES["schedules"]), [names] if isinstance(names, str) else names
    if list(given) == ["all"]:
        return known
    for name in given:
        if name not in known:
            raise unknown("schedule", name, ["all", *known])
    return list(dict.fromkeys(given))


def plan_study(grid: Grid, data: Dataset, others: Sequence[str]) -> Json:
    """Return what every topology of the study costs with its own schedules and with `others`, names with defaults.

    Costs are those of the first seed's split. A schedule that refuses a topology has its reason under "refused".
    """
    first, builder = grid.cells[0], build.StudyBuilder(data)
    mine = sorted((c for c in grid.cells if c.seed == first.seed), key=lambda c: c.computation.secure is None)
    # Schedules are compared in plain where the study has such runs.
    shapes = {c.topology.label: c for c in mine}
    return {
        "study": grid.name,
        "seed": first.seed,
        "seeds": len({c.seed for c in grid.cells}),
        "clients": first.data.clients,
        "rounds": first.training.rounds,
        "local_epochs": first.training.local.local_epochs,
        "speeds": first.training.speeds is not None,
        "clients_differ": describe_clients(first),
        "starts_asked": first.training.local.starts,
        "topologies": [
            {"topology": label, **_topology_costs(cell, builder, _study_cells(grid, label, first.seed), others)}
            for label, cell in shapes.items()
        ],
        "defenses": [
            {"defense": guard.label, "guarantee": guard.guarantee, "bytes": _defended_bytes(grid, guard.label, builder)}
            for guard in {c.defense.label: c.defense for c in grid.cells}.values()
        ],
        "privacy": plan_ledgers([c for c in grid.cells if c.seed == first.seed and c.training_attack is None], builder),
    }


def _defended_bytes(grid: Grid, defense: str, builder: build.StudyBuilder) -> list[Json]:
    """Return what the runs with this defense send, where that is not what they would send without it."""
    found = []
    cells = [c for c in grid.cells if c.seed == grid.cells[0].seed and c.training_attack is None]
    for cell in [c for c in cells if c.defense.label == defense]:
        try:
            bare, ready = (cost(builder.prepare(cell, defended=d), cell.training.rounds).bytes for d in (False, True))
        except InvalidInput:
            # Said where the topology's costs are, or with the privacy of the run.
            continue
        if bare != ready:
            found.append({**place_of(cell), "bytes": ready, "undefended": bare})
    return found


def _study_cells(grid: Grid, topology: str, seed: int) -> list[RunSpec]:
    """Return one run for each schedule of the study, and each method on it, with this topology."""
    mine = [c for c in grid.cells if c.topology.label == topology and c.seed == seed]
    return list({tuple(c.labels.values()): c for c in mine}.values())


def _topology_costs(cell: RunSpec, builder: build.StudyBuilder, own: Sequence[RunSpec], others: Sequence[str]) -> Json:
    named = {c.schedule.name for c in own}
    found = [(c.labels, True, _costs_or_refusal(c, builder)) for c in own]
    for name in (other for other in others if other not in named):
        costs = _costs_or_refusal(cell, builder, load("schedules", name)())
        found.append(({**cell.labels, "schedule": name, "method": "none"}, False, costs))
    # A schedule may add segments, such as heads to train clients on: the formulas are about the model alone.
    ready = builder.prepare(cell, build.schedule(cell))
    plain, count = build.first_topology(builder.topologies(cell)), len(ready.topologies)
    facts = facts_with(plain, ready.data.clients[0].train)
    bare = replace(ready, topologies=(plain,) * count, facts=(facts,) * count)
    # Clients of different make have no one model.
    known = None if cell.models else sizes(bare)
    # Where the columns of a row are with several parties, none of them could train the whole model.
    alone = len(set(plain.inputs.values())) == 1 and not cell.models
    return {
        "schedules": [
            {
                "schedule": labels["schedule"],
                "method": labels["method"],
                "computation": labels[COMPUTATION],
                "in_study": in_study,
                **costs,
            }
            for labels, in_study, costs in found
        ],
        "cut_choice": plain.cut_choice,
        "told": lines_told(plain, facts, ready.data.clients[0].train.features),
        "replayed": any(isinstance(segment.module, ReplayedSegment) for segment in plain.segments),
        "formulas": None if known is None else formulas(known),
        "federated_averaging_bytes": federated_bytes(bare, cell.training.rounds) if alone else None,
    }


def _costs_or_refusal(cell: RunSpec, builder: build.StudyBuilder, schedule: Schedule | None = None) -> Json:
    try:
        return {"refused": None, **predict_costs(cell, builder.prepare(cell, schedule))}
    except InvalidInput as error:
        return {"refused": str(error)}
