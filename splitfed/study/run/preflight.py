"""Everything that can be refused without training is refused here: data, splits, cuts, defenses, adversaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from splitfed.attacks.base import Phase, Target
from splitfed.core.errors import InvalidInput, about, check_count, check_number
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.data.dataset import Dataset, Federation
from splitfed.engines.base import FED
from splitfed.federated.base import Method
from splitfed.planning.validation import assemble, complete
from splitfed.study.config import build
from splitfed.study.config.callback_tables import make_callbacks
from splitfed.study.config.grid import Grid
from splitfed.study.config.mistakes import Mistakes
from splitfed.study.config.run_spec import AttackSetting, NamedAlgorithm, RunSpec, TrainingPlan, format_value
from splitfed.study.config.schema import CUT_KEYS
from splitfed.study.config.training_attacks import add_training_attack, training_attacks
from splitfed.study.config.training_table import PartyNames
from splitfed.threats.repeated_releases import check_releases
from splitfed.threats.tuning import SHARE, PseudoVictims, check_tunable
from splitfed.topologies.auto_cuts import AUTO
from splitfed.training.entry_point import engine_of
from splitfed.training.run import Run
from splitfed.training.run_plan import RunPlan
from splitfed.training.settings import Adversaries, Evaluation, Logging


def check_grid(grid: Grid, source: str, data: Dataset | None = None) -> tuple[Grid, Dataset]:
    """Load the data and put every run together without training it; return the grid, its cuts named, and the data.

    `data`: the data set of the grid, where it has been loaded before. Runs that are refused are left out where the grid
    skips them. Raises `InvalidStudy` with a line a mistake, its place in the study called `source` in front; where runs
    are skipped, if none is left.
    """
    mistakes = Mistakes(source)
    first = grid.cells[0]
    with mistakes.at("data"):
        loaded = build.dataset(first.data) if data is None else data
        builder = build.StudyBuilder(loaded)
        splits = {seed: _split_data(builder, first, seed) for seed in dict.fromkeys(c.seed for c in grid.cells)}
    mistakes.stop()
    notes = {cell.id: Mistakes(source) if grid.skip_refused else mistakes for cell in grid.cells}
    grid = _name_cuts(mistakes, notes, grid, loaded)
    with mistakes.at("study.target"):
        _check_target(first.target, loaded, list(splits.values()))
    assembled: dict[tuple[str, ...], Assembled | None] = {}
    blamed: dict[tuple[str, ...], Mistakes] = {}
    groups: dict[tuple[str, ...], list[RunSpec]] = {}
    for cell in grid.cells:
        mistakes.stop_if_many()
        own = notes[cell.id]
        if grid.skip_refused and own:
            continue
        label = tuple(cell.labels.values())
        if label not in assembled:
            assembled[label] = _assemble_cell(own, cell, builder)
            blamed[label] = own
        if (found := assembled[label]) is None:
            _share(blamed[label], own)
            continue
        _check_cell(own, cell, splits[cell.seed], found)
        if not (grid.skip_refused and own):
            groups.setdefault((*label, cell.training_attack.key if cell.training_attack else ""), []).append(cell)
    names = [found.names for found in assembled.values() if found]
    _check_recording(mistakes, first, names)
    refusals: dict[str, dict[str, Mistakes]] = {}
    for group in groups.values():
        # One stands for all, as attacks are asked of runs without their defenses.
        refusals[group[0].id] = _check_attacks(source, notes[group[0].id], group[0], builder)
    granted = {key for found in refusals.values() for key, refusal in found.items() if not refusal}
    for group in groups.values():
        own = notes[group[0].id]
        for key, refusal in refusals[group[0].id].items():
            # Where runs may be skipped, an attack that others grant is told with the results of those that do not.
            if refusal and not (grid.skip_refused and key in granted):
                own.take(refusal)
        for cell in group[1:]:
            _share(own, notes[cell.id])
    _check_speeds(mistakes, first, names)
    mistakes.stop()
    return _without_refused(grid, notes, mistakes), loaded


def _name_cuts(mistakes: Mistakes, notes: Mapping[str, Mistakes], grid: Grid, data: Dataset) -> Grid:
    """Return `grid` with its automatic cuts named; what has none is noted for its runs, where they may be skipped."""
    if not grid.skip_refused:
        grid = name_auto_cuts(mistakes, grid, data)
        mistakes.stop()
        return grid
    named: dict[str, RunSpec] = {}
    for label in dict.fromkeys(cell.topology.label for cell in grid.cells):
        cells = tuple(cell for cell in grid.cells if cell.topology.label == label)
        own = notes[cells[0].id]
        named |= {cell.id: cell for cell in name_auto_cuts(own, replace(grid, cells=cells), data).cells}
        for cell in cells[1:]:
            _share(own, notes[cell.id])
    return replace(grid, cells=tuple(named[cell.id] for cell in grid.cells))


def name_auto_cuts(mistakes: Mistakes, grid: Grid, data: Dataset) -> Grid:
    """Return `grid` with names in place of "auto" in every run; a model without such a place is noted as a mistake."""
    chosen: dict[str, tuple[NamedAlgorithm, str]] = {}
    cells = []
    for cell in grid.cells:
        label, builder = cell.topology.label, cell.topology.part
        if label not in chosen:
            chosen[label] = builder, cell.cut_choice
            if (key := next((key for key in CUT_KEYS if builder.parameters.get(key) == AUTO), None)) is not None:
                try:
                    chosen[label] = _with_names(cell, key, data)
                except InvalidInput as error:
                    mistakes.add(_place_of(cell, error), error)
        builder, why = chosen[label]
        cells.append(replace(cell, topology=replace(cell.topology, parts=(builder,)), cut_choice=why))
    return replace(grid, cells=tuple(cells))


def _with_names(cell: RunSpec, key: str, data: Dataset) -> tuple[NamedAlgorithm, str]:
    """Return the builder of `cell` with the names that it has chosen for its parameter `key`, and why it has."""
    builder, built = cell.topology.part, build.topology(cell, data)
    original = built.segments[0].original
    if original is None or not built.cut_choice:
        return builder, cell.cut_choice
    names: Any = original.cuts[0] if key == "cut" else list(original.cuts)
    parameters = {**builder.parameters, key: names}
    told = {**builder.label_values, key: f"{AUTO}: {format_value(names)}"}
    return replace(builder, parameters=parameters, label_values=told), built.cut_choice


def _share(blamed: Mistakes, own: Mistakes) -> None:
    """Note for one run what was found wrong with another that has the same."""
    if blamed is not own:
        own.take(blamed)


def _without_refused(grid: Grid, notes: Mapping[str, Mistakes], mistakes: Mistakes) -> Grid:
    """Return `grid` without the runs that have `notes`; where no run is left it raises `InvalidStudy`."""
    if not grid.skip_refused:
        return grid
    kept = tuple(cell for cell in grid.cells if not notes[cell.id])
    if not kept:
        for own in notes.values():
            mistakes.take(own)
        mistakes.stop()
    refused = tuple((cell.id, notes[cell.id].first) for cell in grid.cells if notes[cell.id])
    return replace(grid, cells=kept, refused=refused)


class Assembled(NamedTuple):
    """What runs that differ in seed and defenses have in common, as `validation.assemble` returns it."""

    topologies: tuple[Topology, ...]
    facts: tuple[TopologyFacts, ...]
    method: Method | None
    names: PartyNames


def _assemble_cell(mistakes: Mistakes, cell: RunSpec, builder: build.StudyBuilder) -> Assembled | None:
    """Put together what does not depend on seed or defenses; None after a mistake."""
    plan = build.schedule(cell)
    try:
        with about("method"):
            method = build.method(cell, builder.data)
        split = builder.federation(cell)
        topologies, facts = assemble(builder.topologies(cell), split, plan, method, cell.seed, builder.example_passes)
    except InvalidInput as error:
        mistakes.add(_place_of(cell, error), error)
    else:
        names = PartyNames(topologies[0], plan, len(split), aggregated=method is not None)
        return Assembled(topologies, facts, method, names)
    return None


def _check_cell(mistakes: Mistakes, cell: RunSpec, split: Federation, found: Assembled) -> None:
    """Refuse what `train` would: the run as a whole."""
    plan, defenses, schedule = cell.training, tuple(build.defenses(cell)), build.schedule(cell)
    try:
        ready = complete(
            *(found.topologies, found.facts, split, schedule, found.method, defenses),
            *(plan.optimizer, plan.training(cell.seed)),
        )
        with about("callbacks"):
            logging = Logging(callbacks=make_callbacks(cell.callbacks, Path("run")))
        adversaries, evaluation = adversaries_of(cell, ready.topology), evaluation_of(plan, found.names)
        RunPlan(ready, plan.rounds, plan.device, adversaries, evaluation, logging)
    except InvalidInput as error:
        mistakes.add(_place_of(cell, error), error)


def adversaries_of(cell: RunSpec, topology: Topology) -> Adversaries:
    """Return the attacks that live in the training of `cell`."""
    return Adversaries(*training_attacks(cell, topology))


def evaluation_of(plan: TrainingPlan, names: PartyNames) -> Evaluation:
    """Return what is measured of a run of `plan` that has the parties `names`."""
    return Evaluation(plan.evaluate_every, plan.across, plan.delta, names.of(plan.speeds), plan.keep)


def _place_of(cell: RunSpec, error: InvalidInput) -> str:
    """Return the place in the study of what `error` is about."""
    if error.part.startswith("topology."):
        return f"{cell.topology.where}.{error.part.removeprefix('topology.')}"
    places = {
        **dict.fromkeys(("topology", ""), cell.topology.where),
        "schedule": cell.schedule.where,
        "method": cell.method.where,
        "computation": cell.computation.where,
        "defenses": cell.defense.where,
        "callbacks": "callback",
        **{where: where for where in ("model", *(one.where for one in cell.models))},
    }
    return places.get(error.part) or f"training.{error.part}"


def check_attack(setting: AttackSetting, run: Run) -> None:
    """Refuse an attack that `run`, trained or not, does not grant, and one that could not be scored.

    What an attack needs only the attack knows: it is begun and stopped; see `Evaluator.refusal`. Of a secured run
    that is asked after its training, and told with its results.
    """
    attack, data = build.attack(setting), run.data
    check_releases(setting.attack.name, attack, setting.releases, run.engine.topology.computation)
    shows_inputs = attack.target in (Target.INPUTS, Target.REPRESENTATIVES)
    if len(data.auxiliary) == 0 and attack.target is not Target.MEMBERS:
        raise InvalidInput("there is no auxiliary row for the baseline of a score; give some (data.auxiliary=0.2)")
    if len(data.victims) == 0 and attack.phase is not Phase.TRAINING:
        raise InvalidInput("there are no victims to attack; set some aside (data.victims=64)")
    if shows_inputs and data.victims.unscaled:
        raise InvalidInput(
            f"{data.name} holds images without a value range, as files that are read by row do; store bytes"
        )
    against_recording = (
        attack.phase is Phase.TRAINING and setting.adversary in (None, FED) and FED in run.engine.parties
    )
    party = FED if against_recording else run.evaluator.adversary(setting.adversary)
    if (against_recording or setting.round is not None) and party not in run.engine.link.recorders:
        raise InvalidInput(
            f"{setting.attack.name} goes against recorded training; record it: [training.record] parties = [{party!r}]"
        )
    if setting.round is not None:
        check_count("round", setting.round, high=max(run.evaluator.grants.rounds - 1, 0))
    if setting.tune:
        check_tunable(setting.attack.name, attack, attack.space)
        PseudoVictims(
            run.evaluator, attack, run.evaluator.adversary(setting.adversary), 0, run.seed, SHARE, setting.releases
        )
    if run.engine.topology.computation is not None:
        # That an attack finds nothing to read there is a result, beside those of the study's runs in plain.
        return
    if (refusal := run.evaluator.refusal(setting.attack.name, attack, setting.adversary)) is not None:
        raise _attack_error(setting, refusal)


def _attack_error(setting: AttackSetting, why: object) -> InvalidInput:
    whose = "" if setting.adversary is None else f" by {setting.adversary}"
    return InvalidInput(f"{setting.attack.name}{whose}: {why}")


def build_untrained_run(cell: RunSpec, data: Dataset) -> Run:
    """Return the run `cell` before its first round, its training attacks in it, without its defenses, on the CPU."""
    run = _build_run(cell, build.StudyBuilder(data))
    for setting in cell.attacks:
        if setting.lives != "outside":
            add_training_attack(run.engine, run.plan.prepared, setting)
    return run


def _build_run(cell: RunSpec, builder: build.StudyBuilder) -> Run:
    ready = builder.prepare(cell)
    names = PartyNames(ready.topology, ready.schedule, len(ready.data.clients), aggregated=ready.method is not None)
    logging = Logging(record=names.recording(cell.training.record))
    plan = RunPlan(ready, cell.training.rounds, logging=logging)
    return Run(plan, engine_of(plan))


def _check_attacks(source: str, mistakes: Mistakes, cell: RunSpec, builder: build.StudyBuilder) -> dict[str, Mistakes]:
    """Ask every attack of a run, if it can be put together; return those outside of training with what refuses them."""
    if not cell.attacks:
        return {}
    try:
        run = _build_run(cell, builder)
    except InvalidInput as error:
        if not mistakes:
            mistakes.add(cell.topology.where, error)
        return {}
    # Training attacks first, for others may ask them; one that could not enter has been complained of already.
    for setting in [p for p in cell.attacks if p.lives != "outside" and _can_enter(mistakes, run, p)]:
        with mistakes.at(setting.where):
            check_attack(setting, run)
    found = {}
    for setting in (p for p in cell.attacks if p.lives == "outside"):
        found[setting.key] = Mistakes(source)
        with found[setting.key].at(setting.where):
            check_attack(setting, run)
    return found


def _can_enter(mistakes: Mistakes, run: Run, setting: AttackSetting) -> bool:
    try:
        add_training_attack(run.engine, run.plan.prepared, setting)
    except InvalidInput as error:
        mistakes.add(setting.where, _attack_error(setting, error))
        return False
    return True


def _split_data(builder: build.StudyBuilder, cell: RunSpec, seed: int) -> Federation:
    found = builder.federation(replace(cell, seed=seed))
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
        raise InvalidInput("target is measured on validation rows, and no client has one; give a larger validation")


def _check_recording(mistakes: Mistakes, cell: RunSpec, names: Sequence[PartyNames]) -> None:
    """Refuse to record a party that no run has; without any run that can be put together, who is there is not known."""
    with mistakes.at("training.record.parties"):
        if names:
            cell.training.record.recorders(tuple({party: None for n in names for party in n.parties}), None)


def _check_speeds(mistakes: Mistakes, cell: RunSpec, names: Sequence[PartyNames]) -> None:
    """Refuse the speed of a party that no run has; where something is wrong already, who is there is not known."""
    speeds = cell.training.speeds
    if speeds is None or mistakes:
        return
    with mistakes.at("training.speeds"):
        speeds.check(set().union(*(n.parties for n in names)), set().union(*(n.roles for n in names)))
