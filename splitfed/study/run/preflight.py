"""Everything that can be refused without training is refused here: data, splits, cuts, defenses, adversaries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from splitfed.attacks.base import Phase, Target
from splitfed.core.defense import Calibrated
from splitfed.core.errors import InvalidInput, check_number, unknown
from splitfed.core.per_client_defenses import check_clients
from splitfed.core.probe import Facts
from splitfed.core.random import derive
from splitfed.core.step_plan import segment_plans
from splitfed.core.topology import Topology, member
from splitfed.data.dataset import Dataset
from splitfed.data.federation import Federation
from splitfed.engines.base import FED
from splitfed.federated.base import MethodContext
from splitfed.planning.calibration import calibrate_defenses
from splitfed.planning.uploads import check_uploads, sent_kinds
from splitfed.planning.validation import (
    Prepared,
    check_batches,
    check_exact,
    check_outputs,
    check_sampling,
    combine_placement,
    fit_defenses,
    optims_of,
    probe_with,
)
from splitfed.study.config import build
from splitfed.study.config.assembly import PieceError
from splitfed.study.config.cell import Cell, Probe
from splitfed.study.config.grid import Grid
from splitfed.study.config.mistakes import Mistakes
from splitfed.study.config.speeds_table import PartyNames
from splitfed.study.config.training_attacks import add_training_attack
from splitfed.study.report import planned_costs
from splitfed.threats.tuning import SHARE, Bench, check_tunable
from splitfed.training.entry_point import check_across, engine_of
from splitfed.training.run import Run


def check_grid(grid: Grid, source: str) -> Dataset:
    """Load the data and put every run together without training it; return the data.

    Raises `InvalidStudy` with a line a mistake, its place in the study called `source` in front.
    """
    mistakes = Mistakes(source)
    first = grid.cells[0]
    with mistakes.at("training.device"):
        _check_device(first.training.device)
    with mistakes.at("data"):
        data = build.dataset(first.data)
        splits = {seed: _split_data(data, first, seed) for seed in dict.fromkeys(c.seed for c in grid.cells)}
    mistakes.stop()
    with mistakes.at("study.target"):
        _check_target(first.target, data, list(splits.values()))
    topologies: dict[tuple[str, str, str], tuple[Topology, Facts] | None] = {}
    cells: dict[tuple[str, str, str, str], Cell] = {}
    for cell in grid.cells:
        mistakes.stop_if_many()
        split = splits[cell.seed]
        label = (cell.topology.builder.label, cell.training.schedule.label, cell.method.label)
        if label not in topologies:
            topologies[label] = _check_topology(mistakes, cell, data, split)
        probed = topologies[label]
        if probed is None:
            continue
        cells.setdefault((*label, cell.training_attack.key if cell.training_attack else ""), cell)
        topology, facts = probed
        defenses = build.defenses(cell)
        with mistakes.at(cell.defense.where):
            fit = fit_defenses(topology, facts, split.clients[0].train, defenses, cell.seed)
            check_clients(defenses, fit[0], len(split))
            segment_plans(*fit, defenses)
            if any(guard.uploads for guard in defenses):
                check_uploads(replace(planned_costs.prepare_cell(cell, data), defenses=tuple(defenses)))
            if any(isinstance(guard, Calibrated) for guard in defenses):
                calibrate_defenses(
                    replace(planned_costs.prepare_cell(cell, data), defenses=tuple(defenses)), cell.training.rounds
                )
        training = cell.training.training(cell.seed)
        with mistakes.at("training.sampling"):
            check_sampling(build.schedule(cell), training)
        with mistakes.at("training.across"):
            check_across(cell.training.across, defenses)
        with mistakes.at("training.batch_size"):
            check_batches([facts] * len(split), defenses, split, training)
    _check_methods(mistakes, grid, data)
    _check_attacks(mistakes, list(cells.values()), data)
    _check_speeds(
        mistakes, grid, {label: probed[0] for label, probed in topologies.items() if probed}, len(splits[first.seed])
    )
    mistakes.stop()
    return data


def check_attack(probe: Probe, run: Run) -> None:
    """Refuse an attack that `run`, trained or not, does not grant, and one that could not be scored.

    What an attack needs only the attack knows: it is begun and stopped; see `Evaluator.refusal`.
    """
    attack, data = build.attack(probe), run.data
    shows_inputs = attack.target in (Target.INPUTS, Target.REPRESENTATIVES)
    if len(data.auxiliary) == 0 and attack.target is not Target.MEMBERS:
        raise InvalidInput("there is no auxiliary row for the baseline of a score; give some (data.auxiliary=0.2)")
    if len(data.victims) == 0 and attack.phase is not Phase.TRAINING:
        raise InvalidInput("there are no victims to attack; set some aside (data.victims=64)")
    if shows_inputs and len(data.shape) == 3 and data.victims.value_range is None:
        raise InvalidInput(f"{data.name} holds images without a value range, so no score has a scale; store bytes")
    against_recording = attack.phase is Phase.TRAINING and probe.adversary in (None, FED) and FED in run.engine.parties
    if not against_recording:
        run.evaluator.adversary(probe.adversary)
    elif FED not in run.engine.link.recorders:
        raise InvalidInput(
            f"{probe.attack.name} goes against recorded training; record it: [training.record] parties = [{FED!r}]"
        )
    if probe.tune:
        check_tunable(probe.attack.name, attack, attack.space)
        Bench(run.evaluator, attack, run.evaluator.adversary(probe.adversary), 0, run.seed, SHARE)
    refusal = run.evaluator.refusal(probe.attack.name, attack, probe.adversary)
    if refusal is not None:
        raise _attack_error(probe, refusal)


def _attack_error(probe: Probe, why: object) -> InvalidInput:
    whose = "" if probe.adversary is None else f" by {probe.adversary}"
    return InvalidInput(f"{probe.attack.name}{whose}: {why}")


def build_untrained_run(cell: Cell, data: Dataset) -> Run:
    """Return the run `cell` before its first round, its training attacks in it, without its defenses, on the CPU."""
    run, ready = _build_run(cell, data)
    for probe in cell.attacks:
        if probe.lives != "outside":
            add_training_attack(run.engine, ready, probe)
    return run


def _build_run(cell: Cell, data: Dataset) -> tuple[Run, Prepared]:
    ready = planned_costs.prepare_cell(cell, data)
    engine = engine_of(ready, record=cell.training.record)
    run = Run(engine, ready.data, ready.schedule, ready.schedule.start(len(ready.data)), cell.seed)
    run.follow(ready.method)
    if ready.method is not None and any(build.attack(probe).reads for probe in cell.attacks):
        run.evaluator.uploads.sent = sent_kinds(ready)
    run.evaluator.grants.training, run.evaluator.grants.rounds = ready.training, cell.training.rounds
    return run, ready


def _check_methods(mistakes: Mistakes, grid: Grid, data: Dataset) -> None:
    """Put every run with a method, or with weights drawn for each client, together as a whole.

    For what a method needs of rows, batches and optimizers, and layers of which torch knows no way to draw them.
    """
    seen: set[tuple[str, ...]] = set()
    for cell in grid.cells:
        label = cell.topology.builder.label, cell.training.schedule.label, cell.method.label, str(cell.seed)
        # What is wrong already may be what is in its way.
        bare = cell.method.part is None
        if (bare and cell.training.starts is None) or mistakes or label in seen:
            continue
        seen.add(label)
        with mistakes.at("training.starts" if bare else cell.method.where):
            planned_costs.prepare_cell(cell, data)


def _check_attacks(mistakes: Mistakes, cells: Sequence[Cell], data: Dataset) -> None:
    """Ask every attack in every place where a run can be put together."""
    for cell in cells:
        if not cell.attacks:
            continue
        try:
            run, ready = _build_run(cell, data)
        except InvalidInput as error:
            if not mistakes:
                mistakes.add(cell.topology.where, error)
            continue
        # Training attacks first, for others may ask them; one that could not enter has been complained of already.
        inside = [
            probe for probe in cell.attacks if probe.lives != "outside" and _can_enter(mistakes, run, ready, probe)
        ]
        for probe in [*inside, *(probe for probe in cell.attacks if probe.lives == "outside")]:
            with mistakes.at(probe.where):
                check_attack(probe, run)


def _can_enter(mistakes: Mistakes, run: Run, ready: Prepared, probe: Probe) -> bool:
    try:
        add_training_attack(run.engine, ready, probe)
    except InvalidInput as error:
        mistakes.add(probe.where, _attack_error(probe, error))
        return False
    return True


def _split_data(data: Dataset, cell: Cell, seed: int) -> Federation:
    found = build.federation(data, cell.data, seed)
    if not any(len(client.test) for client in found.clients):
        raise InvalidInput("no client has a test row, so utility cannot be measured; give a larger test fraction")
    return found


def _check_target(target: float | None, data: Dataset, splits: Sequence[Federation]) -> None:
    """Refuse a target that is no value of the metric, and one that no validation row could show to be reached."""
    if target is None:
        return
    if data.task.metric_name == "accuracy":
        check_number("target (an accuracy)", target, low=0.0, high=1.0)
    else:
        check_number("target", target)
    if not all(any(len(client.validation) for client in split.clients) for split in splits):
        raise InvalidInput("target is told of validation rows, and no client has one; give a larger validation")


def _check_topology(mistakes: Mistakes, cell: Cell, data: Dataset, split: Federation) -> tuple[Topology, Facts] | None:
    """Build and probe the topology of `cell`, and check what does not depend on seed or defense."""
    where = cell.topology.where
    with mistakes.at(where):
        try:
            ready = build.topology(cell, data)
        except PieceError as error:
            mistakes.add(f"{where}.{error.path}", error)
            return None
        plan, rows = build.schedule(cell), split.clients[0].train
        facts = probe_with(ready, rows)
        check_outputs(ready, facts)
        check_exact(ready, rows)
        with mistakes.at(cell.training.where):
            plan.check(ready, len(split))
            ready = plan.prepare(ready, facts, cell.seed)
            facts = probe_with(ready, rows)
        with mistakes.at(cell.method.where):
            method = build.method(cell, data)
            if method is not None:
                method.check(ready, len(split))
                ready = method.fit(ready, facts, derive(cell.seed, "method"))
                facts = probe_with(ready, rows)
                clients = len(split)
                combine_placement(method, plan, [ready] * clients)
                method.check_run(MethodContext([ready] * clients, [facts] * clients, plan.binds(clients)))
        with mistakes.at("training.optimizer"):
            optims_of(ready, cell.training.optimizer)
        with mistakes.at("training.record.parties"):
            fed = {FED: FED} if cell.method.part is not None or plan.placement(ready).fused else {}
            _check_known(cell.training.record.parties, _party_roles(ready, len(split)) | fed)
        return ready, facts
    return None


def _check_speeds(mistakes: Mistakes, grid: Grid, ready: Mapping[tuple[str, str, str], Topology], clients: int) -> None:
    """Refuse the speed of a party that no run has; where something is wrong already, who is there is not known."""
    speeds = grid.cells[0].training.speeds
    if speeds is None or mistakes:
        return
    schedules = {cell.training.schedule.label: build.schedule(cell) for cell in grid.cells}
    names = [
        PartyNames(topology, schedules[label], clients, meeting=method != "none")
        for (_, label, method), topology in ready.items()
    ]
    with mistakes.at("training.speeds"):
        speeds.check(set().union(*(n.parties for n in names)), set().union(*(n.roles for n in names)))


def _check_known(names: Iterable[str], parties: Iterable[str]) -> None:
    for name in names:
        if name not in parties:
            raise unknown("party to record", name, parties)


def _party_roles(topology: Topology, clients: int) -> dict[str, str]:
    """Return the names of all parties with their roles: data owners are numbered."""
    shared = {role: role for role in topology.roles if role not in topology.data_roles}
    return shared | {member(role, i): role for role in topology.data_roles for i in range(clients)}


def _check_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidInput(f"device={name!r} is not allowed; expected cpu, cuda or cuda:0, ...") from None
    if device.type not in ("cpu", "cuda"):
        raise InvalidInput(f"device={name!r} is not allowed; expected cpu, cuda or cuda:0, ...")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidInput(f"device={name!r} is not there; this machine has {torch.cuda.device_count()} GPUs")
