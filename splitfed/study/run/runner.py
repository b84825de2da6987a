"""One run of a study: train once, measure, attack, and leave everything in the run's folder.

What is finished is kept: a run whose folder holds a result is not repeated, an attack whose scores are written is
read back, and half a training goes on from its newest checkpoint.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from splitfed.attacks.base import Attack, Needs, Target
from splitfed.attacks.budgets import quick_look
from splitfed.attacks.scoring import reconstruction_metrics as predictions
from splitfed.attacks.work import StatesWork
from splitfed.core import digests
from splitfed.core.defense import (
    UPLOAD,
    Defense,
    GradientDefense,
    PenaltyDefense,
    ReceiverPenaltyDefense,
    ReleaseDefense,
)
from splitfed.core.errors import FolderGone, NonFinite, SplitfedError
from splitfed.core.grouping import group_pairs, nest
from splitfed.core.topology import Topology
from splitfed.data.dataset import Dataset
from splitfed.engines.base import FED
from splitfed.planning.validation import labels_of
from splitfed.study.config import build
from splitfed.study.config.callback_tables import make_callbacks
from splitfed.study.config.client_tables import describe_clients
from splitfed.study.config.run_spec import COMPUTATION, AttackSetting, DefenseSetting, RunSpec
from splitfed.study.config.toml import dumps
from splitfed.study.config.training_table import PartyNames
from splitfed.study.report import planned_costs, privacy
from splitfed.study.report.exposure import role_holdings
from splitfed.study.report.figures.federated import save_prototypes
from splitfed.study.report.topology_data import graph_of, input_depth
from splitfed.study.results import (
    AttackRecord,
    DefenseLabel,
    MeasuredUtility,
    RunResult,
    Score,
    Scores,
    TopologyLabel,
    attack_from_json,
    read_result,
    to_json,
    write_result,
)
from splitfed.study.run.measured_releases import measure_dependence, measure_information
from splitfed.study.run.preflight import adversaries_of, evaluation_of
from splitfed.study.run.progress import Watcher
from splitfed.study.trust import write_mark
from splitfed.training.callbacks import deciding
from splitfed.training.checkpoint import write_atomic
from splitfed.training.client_scores import find_best_round, find_first_reaching, summarize_clients
from splitfed.training.entry_point import train
from splitfed.training.folder import EqualNoise, RunFolder
from splitfed.training.identity import data_digest
from splitfed.training.run import Run
from splitfed.training.settings import Logging

Json = dict[str, Any]
Judge = Callable[[int, int], None]
"""Told after every round how many of how many are trained; what it raises ends the run."""


def run_cell(cell: RunSpec, data: Dataset, folder: Path, watcher: Watcher, judge: Judge | None = None) -> RunResult:
    """Do the run `cell` in `folder`, or what is left of it; return its result, as written to result.json.

    A training that diverges is a result too: `{"id", ..., "failed": one line}`. Raises what `judge` does.
    """
    if (done := read_result(folder, cell.id)) is not None:
        return done
    cell = at_length(cell, folder)
    if folder.is_dir() and not (folder / "run.json").is_file():
        # A crash came before the run had been described: nothing has been computed yet.
        shutil.rmtree(folder)
    builder, about = build.StudyBuilder(data), replace(identity_of(cell), data_digest=data_digest(data))
    try:
        run = train_cell(cell, data, folder, watcher, builder, judge)
    except NonFinite as error:
        return write_result(folder, replace(about, failed=str(error)))
    RunFolder(folder).check_there()
    write_atomic(folder / "config.toml", digests.toml_with_digest(dumps(cell.config)))
    write_mark(folder, cell.code.sources())
    attacks, refused = [], [{"attack": label, "why": why} for label, why in cell.left_out]
    measured = {
        **_measure_run(run, cell),
        **_planned_costs(run, cell, builder),
        "privacy": _privacy_ledgers(run, cell, builder),
        "files": save_prototypes(run, folder),
        "rounds_at_first": _earlier_length(cell, folder),
    }
    for setting in cell.attacks:
        if (why := _refusal(cell, run, setting)) is not None:
            refused.append({"attack": setting.label, "why": why})
            continue
        try:
            attacks.append(run_attack(run, setting, folder, watcher))
        except (digests.Damaged, FolderGone):
            raise
        except SplitfedError as error:
            return write_result(folder, replace(about, failed=f"attack {setting.key}: {error}"))
    return write_result(folder, replace(about, **measured, attacks=tuple(attacks), refused=tuple(refused)))


def _refusal(cell: RunSpec, run: Run, setting: AttackSetting) -> str | None:
    """Return why an attack cannot begin; None for a run that may not tell so, which the study would have refused."""
    may_tell = cell.skip_refused or run.engine.topology.computation is not None
    if setting.lives != "outside" or not may_tell:
        return None
    return run.evaluator.refusal(setting.attack.name, build.attack(setting), setting.adversary)


def at_length(cell: RunSpec, folder: Path) -> RunSpec:
    """Return `cell` with as many rounds as the run in `folder` is to have by now; see `splitfed.study.run.longer`."""
    if not (folder / "rounds.json").is_file():
        return cell
    return with_rounds(cell, max(cell.training.rounds, int(RunFolder(folder).read_definition()["rounds"])))


def with_rounds(cell: RunSpec, rounds: int) -> RunSpec:
    """Return `cell` with `rounds` rounds in all."""
    return replace(cell, training=replace(cell.training, rounds=rounds))


def _earlier_length(cell: RunSpec, folder: Path) -> int | None:
    """Return how many rounds the run was begun with, where it has got more; else None."""
    first = int(digests.read(folder / "run.json", digests.RETRAIN)["rounds"])
    return None if first == cell.training.rounds else first


def train_cell(
    cell: RunSpec,
    data: Dataset,
    folder: Path,
    watcher: Watcher,
    builder: build.StudyBuilder | None = None,
    judge: Judge | None = None,
) -> Run:
    """Train the run of `cell` in `folder`, from its newest checkpoint if there is one.

    `builder`: who has made the run's topology and split, or will be asked for them again; None for one of its own.
    Raises what `judge` does.
    """
    builder = builder or build.StudyBuilder(data)
    plan, built, schedule = cell.training, builder.topologies(cell), build.schedule(cell)
    method, topology = build.method(cell, data), build.first_topology(built)
    names = PartyNames(topology, schedule, cell.data.clients, aggregated=method is not None)

    callbacks = make_callbacks(cell.callbacks, folder)
    if read_result(folder) is not None:
        # A run that is opened again writes no second account of itself.
        callbacks = deciding(callbacks)

    def progress(done: int, total: int, metrics: Mapping[str, Any]) -> None:
        watcher.round(done, total, metrics.get("epsilon"))
        if judge is not None:
            judge(done, total)

    with warnings.catch_warnings():
        # Plan and report say it once of all runs.
        warnings.simplefilter("ignore", EqualNoise)
        return train(
            built if cell.models else _with_key_folder(topology, cell, folder),
            builder.federation(cell),
            schedule=schedule,
            defenses=build.defenses(cell),
            method=method,
            rounds=plan.rounds,
            batch_size=plan.batch_size,
            optimizer=plan.optimizer,
            seed=cell.seed,
            device=plan.device,
            local=plan.local,
            adversaries=adversaries_of(cell, topology),
            evaluation=evaluation_of(plan, names),
            logging=Logging(folder, True, names.recording(plan.record), progress=progress, callbacks=callbacks),
        )


def _with_key_folder(topology: Topology, cell: RunSpec, folder: Path) -> Topology:
    """Return the topology of the run `cell` in `folder` with the place of its keys, where it keeps them in files."""
    if topology.computation is None or cell.computation.key_folder is None:
        return topology
    # By its folder, since a run that is opened again has its own configuration, in which it may have another name.
    own = Path(cell.computation.key_folder) / folder.resolve().name
    return replace(topology, computation=topology.computation.with_key_folder(own))


def run_attack(run: Run, setting: AttackSetting, folder: Path, watcher: Watcher) -> AttackRecord:
    """Run one attack and write prediction, truth and scores; scores that are there already are read back."""
    scores = folder / "attacks" / f"{setting.key}.json"
    if scores.is_file():
        advice = "delete it and repeat the command: the attack is then run anew"
        done = attack_from_json(digests.read(scores, advice))
        same_parameters = done.parameters == dict(setting.attack.parameters) and done.tune == setting.tune
        same_releases = (1 if done.releases is None else done.releases.count) == setting.releases
        if same_parameters and same_releases and (done.asked, done.round) == (setting.adversary, setting.round):
            digests.check_file(folder / done.file, done.sha256, advice.replace("it", f"it and {scores.name}", 1))
            return done
    watcher.attack(setting.key, 0, 1)
    attack, tuned = _tune_attack(run, setting, watcher)
    if isinstance(attack, StatesWork):
        # Attacks that may double their work: the clock of a few steps says more than a bar.
        plan = partial(run.plan_attack, attack, adversary=setting.adversary, releases=setting.releases)
        watcher.note_once(_planned_key(run, attack, setting), lambda: str(plan()))
    progress = partial(watcher.attack, setting.key)
    (outcome,) = run.attack(
        attack,
        adversary=setting.adversary,
        progress=progress,
        round=setting.round,
        floors=setting.floors,
        releases=setting.releases,
    )
    file = f"attacks/{setting.key}.safetensors"
    # As float32 token ids above 16777216 would become others.
    kind = torch.int64 if attack.target is Target.TOKENS else torch.float32
    tensors = save({key: getattr(outcome, key).to(kind).contiguous() for key in ("prediction", "truth")})
    RunFolder(folder).check_there()
    write_atomic(folder / file, tensors)
    entry = AttackRecord(
        attack=setting.key,
        label=setting.label,
        adversary=outcome.adversary,
        threat_model=outcome.threat_model,
        seconds=outcome.seconds,
        target=attack.target.name.lower(),
        victims=outcome.victims,
        scores=_score_table(outcome.scores),
        file=file,
        sha256=digests.of(tensors),
        lives=setting.lives,
        under_trained=tuple(outcome.under_trained),
        unadapted=tuple(outcome.unadapted),
        floors=setting.floors,
        releases=outcome.repeated,
        round=setting.round,
        quick=quick_look(attack.budgets, str(setting.attack.label_values.get("budget"))),
        depth=input_depth(run.engine.topology, run.engine.parties[outcome.adversary].role),
        stolen=None if outcome.stolen is None else _score_table(outcome.stolen),
        selection=None if outcome.selection is None else outcome.selection.to_json(),
        tuned=tuned,
        parameters=dict(setting.attack.parameters),
        asked=setting.adversary,
        tune=setting.tune,
    )
    write_atomic(scores, digests.json_with_digest(to_json(entry)))
    return entry


def _planned_key(run: Run, attack: Attack, setting: AttackSetting) -> str:
    """Return what runs share in which `attack` takes about as long: its parameters, and the shapes of all it works on.

    Of an attack that trains copies of the model also for how many rounds.
    """
    rows = (len(run.data.auxiliary), len(run.data.victims), run.data.shape)
    shapes = sorted(run.engine.all_facts[0].shapes.items())
    rounds = run.evaluator.grants.trained_rounds() if Needs.IMITATION in attack.requires else None
    return repr((attack, setting.adversary, setting.releases, rows, shapes, rounds))


def _tune_attack(run: Run, setting: AttackSetting, watcher: Watcher) -> tuple[Attack, Json | None]:
    """Return the attack of `setting`, tuned on auxiliary rows where it asks for that, and what is to be told of it."""
    attack = build.attack(setting)
    if not setting.tune:
        return attack, None
    progress = partial(watcher.attack, f"{setting.key}, tuned")
    tuning = run.tune(
        attack, trials=setting.tune, adversary=setting.adversary, progress=progress, releases=setting.releases
    )
    tuned = {
        "parameters": {name: getattr(tuning.attack, name) for name in attack.space},
        "metric": tuning.metric,
        "score": tuning.score,
        "given": tuning.given,
        "trials": [{"parameters": dict(t.parameters), "score": t.score} for t in tuning.trials],
    }
    return tuning.attack, tuned


def identity_of(cell: RunSpec) -> RunResult:
    """Return a result that says no more than what the run is: its name, and the labels of all that it is made of."""
    builder, guard, labels = cell.topology.part, cell.defense, cell.labels
    parts = tuple({"name": p.name, "parameters": dict(p.label_values)} for p in guard.parts)
    return RunResult(
        id=cell.id,
        topology=TopologyLabel(labels["topology"], builder.name, dict(builder.parameters), cell.cut_choice),
        defense=DefenseLabel(guard.label, guard.name, guard.guarantee, **_describe_strength(guard), parts=parts),
        seed=cell.seed,
        training_attack=None if cell.training_attack is None else cell.training_attack.label,
        schedule=labels["schedule"],
        method=labels["method"],
        computation=labels[COMPUTATION],
        model=cell.model_label,
        data=cell.data.name,
        clients=cell.data.clients,
        variant=cell.variant,
        clients_differ=tuple(describe_clients(cell)),
    )


def _describe_strength(guard: DefenseSetting) -> Json:
    """Tell the strength of a setting, and in which parameter, unit and direction it counts; nothing without one."""
    if (found := guard.strength) is None:
        return {}
    return {
        "strength": float(found.value),
        "strength_parameter": found.name,
        "strength_unit": found.unit,
        "stronger": "more" if found.rises else "less",
    }


def _measure_run(run: Run, cell: RunSpec) -> Json:
    answering, task, topology = run.best.entry, run.data.task, run.engine.topology
    tested, defended = answering["test"], _defense_labels(cell, topology)
    return {
        "utility": MeasuredUtility(
            metric=task.metric_name,
            higher_is_better=task.higher_is_better,
            validation=answering["validation"]["union"],
            test=tested["union"],
            interval=tested.get("interval"),
            bounds=task.bounds,
            constant=None if run.constant is None else run.constant._asdict(),
            clients=tuple(tested["clients"]),
            spread=tested.get("spread"),
            method=_summarize_scores(tested, "method"),
            across=_summarize_scores(tested, "across"),
        ),
        "selected": _selected_round(run),
        "kept_round": int(answering["round"]) + 1 if cell.training.keep == "best" else None,
        "target": _rounds_to_target(run, cell),
        "turned_off": None if run.method is None else run.method.traits(run.engine.topology).turned_off,
        "restart_optimizers": run.training.restart_optimizers,
        "starts": run.training.starts,
        "starts_asked": cell.training.local.starts,
        "bytes": run.bytes,
        "messages": run.engine.traffic.messages(),
        "bytes_by_kind": dict(run.engine.traffic.by_kind()),
        "seconds": run.seconds,
        "rounds": len(run.history),
        "stopped": run.stopped,
        "rounds_planned": None if run.stopped is None else cell.training.rounds,
        "history": tuple(run.history),
        "dependence": measure_dependence(run),
        "information": measure_information(run),
        "topology_graph": graph_of(topology, defended),
    }


def _summarize_scores(tested: Mapping[str, Any], kind: str) -> Json:
    """Return the further scores of a `kind` over the clients, by name."""
    return {name: summarize_clients(scores) for name, scores in tested.get(kind, {}).items()}


def _rounds_to_target(run: Run, cell: RunSpec) -> Json | None:
    """Return when training first reached the study's target on validation rows, and what had crossed by then."""
    if cell.target is None:
        return None
    entry = find_first_reaching(run.history, cell.target, run.data.task.higher_is_better) or {}
    return {
        "value": cell.target,
        "rounds": int(entry["round"]) + 1 if entry else None,
        **{key: entry.get(key) for key in ("bytes", "simulated_seconds")},
    }


def _selected_round(run: Run) -> Json | None:
    """Return the round that validation rows would choose, and its scores; None without validation rows."""
    if (best := find_best_round(run.history, run.data.task.higher_is_better)) is None:
        return None
    scores = {part: best[part]["union"] for part in ("validation", "test")}
    return {"round": int(best["round"]) + 1, **scores, "across": _summarize_scores(best["test"], "across")}


def _planned_costs(run: Run, cell: RunSpec, builder: build.StudyBuilder) -> Json:
    """Return what was predicted before training, what the formulas need, and who sees what."""
    ready = builder.prepare(cell)
    # Without defenses it is the same once more.
    defended = builder.prepare(cell, defended=True) if build.defenses(cell) else ready
    topology, rows = run.engine.topology, run.data.clients[0].train
    known, sizes = run.engine.all_facts[0], planned_costs.sizes(ready)
    return {
        "predicted": planned_costs.predict_costs(cell, defended),
        "sizes": None if sizes is None else asdict(sizes),
        "parties": tuple(
            role_holdings(
                topology,
                known,
                labels_of(topology, rows),
                _defense_labels(
                    cell,
                    topology,
                    lambda defense: (
                        not _acts_on_gradients(defense) or isinstance(defense, ReleaseDefense | PenaltyDefense)
                    ),
                    uploads=True,
                ),
                _defense_labels(cell, topology, _acts_on_gradients),
                run.engine.traffic.flows,
                {name: FED if name == FED else party.role for name, party in run.engine.parties.items()},
            )
        ),
    }


def _privacy_ledgers(run: Run, cell: RunSpec, builder: build.StudyBuilder) -> Json | None:
    """Return the ledger that was planned and the one that was counted; None where nothing is promised."""
    if (planned := privacy.plan_ledger(cell, builder)) is None:
        return None
    return {"ledger": run.ledger.as_dict(), "planned": planned}


def _defense_labels(
    cell: RunSpec, topology: Topology, counts: Callable[[Defense], bool] = lambda defense: True, uploads: bool = False
) -> dict[str, str]:
    """Return for each guarded edge, and each message of a method if `uploads`, the defenses there that count."""
    # A drawing shows edges alone.
    labels = group_pairs(
        (edge, part.label)
        for part, defense in zip(cell.defense.parts, build.defenses(cell), strict=True)
        if counts(defense)
        for edge in (*defense.edges(topology), *(kind + UPLOAD for kind in defense.uploads if uploads))
    )
    return {edge: " + ".join(parts) for edge, parts in labels.items()}


def _acts_on_gradients(defense: Defense) -> bool:
    return isinstance(defense, GradientDefense | ReceiverPenaltyDefense)


def _score_table(found: predictions.Scores) -> Scores:
    """Return metric -> predictor -> mean and interval, the order in which the report reads them."""
    return nest(
        (metric, who, Score(one.mean, one.low, one.high, one.median, one.worst_decile))
        for who, metrics in found.items()
        for metric, one in metrics.items()
    )
