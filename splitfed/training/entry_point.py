"""Train a topology on the data of several clients: validate everything, place the parties, run the rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from splitfed.core.defense import Defense
from splitfed.core.errors import about, check_count, check_kind
from splitfed.core.local_update import LocalUpdate
from splitfed.core.optimizers import Optim
from splitfed.core.random import read_seed
from splitfed.core.state_encoding import check_state
from splitfed.core.topology import Topology
from splitfed.data.dataset import Federation
from splitfed.engines.engine import Engine
from splitfed.engines.factory import make_engine
from splitfed.federated.base import Method
from splitfed.planning.validation import Prepared, labels_of, rows_of
from splitfed.poisoning import injection
from splitfed.schedules.base import Schedule
from splitfed.threats.training_time import check_questions, place_attacks
from splitfed.training.arguments import read_arguments, write_arguments
from splitfed.training.callbacks import deciding, describe_callbacks
from splitfed.training.description import describe
from splitfed.training.detectors import place_detectors
from splitfed.training.folder import RunFolder
from splitfed.training.local_learner import place_objectives
from splitfed.training.run import Run
from splitfed.training.run_plan import RunPlan, plan_run
from splitfed.training.settings import (
    GROUPS,
    LINKS,
    Adversaries,
    Evaluation,
    Logging,
)


def train(
    topology: Topology | Sequence[Topology],
    data: Federation,
    *,
    schedule: str | Schedule = "sequential",
    method: str | Method | None = None,
    defenses: Defense | Sequence[Defense] = (),
    rounds: int = 10,
    batch_size: int | Sequence[int] = 64,
    optimizer: str | Optim | Mapping[str, Optim] | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    local: LocalUpdate = LocalUpdate(),
    adversaries: Adversaries = Adversaries(),
    evaluation: Evaluation = Evaluation(),
    logging: Logging = Logging(),
) -> Run:
    """Train `topology` for `rounds` rounds on `data` and return the run.

    `topology`: one for all clients, or one a client, with segments of different make on the same shared ones. `method`:
    a federated method, layered on the schedule. `batch_size`: rows a step, one for all clients or one a client.
    `optimizer`: one for all roles, or role -> `Optim` (default SGD at rate 0.05, momentum 0.9). `seed`: of everything
    drawn. `device`: "cpu", "cuda" or "cuda:N". `local`: what a client does in a round. `adversaries`: attacks inside
    training, poisoning clients, detectors. `evaluation`: what is measured. `logging`: folder, checkpoints, recorded
    views, callbacks. Raises `InvalidInput`, before anything is computed or written, for anything that does not fit, and
    `NonFinite` when training diverges.
    """
    check_count("rounds", rounds, low=1)
    for name, given in (
        ("local", local),
        ("adversaries", adversaries),
        ("evaluation", evaluation),
        ("logging", logging),
    ):
        check_kind(name, given, GROUPS[name], f"splitfed.{GROUPS[name].__name__}(...)")
    arguments: dict[str, Any] = {
        "schedule": schedule,
        "method": method,
        "defenses": defenses,
        "batch_size": batch_size,
        "optimizer": optimizer,
        "seed": read_seed(seed),
        "device": device,
        "local": local,
        "adversaries": adversaries,
        "evaluation": evaluation,
    }
    with nullcontext() if logging.folder is None else RunFolder(Path(logging.folder)).alone():
        run = start_run(plan_run(topology, data, rounds, logging, **arguments))
        if run.folder is not None:
            kept = {"record": logging.record, "link": logging.link, "callbacks": tuple(deciding(logging.callbacks))}
            write_arguments(run.folder.path, {**arguments, **kept})
        run.train_to(rounds)
    return run


def load_run(folder: Path, topology: Topology | Sequence[Topology], data: Federation, given: Mapping[str, Any]) -> Run:
    """Return the run of `train` in `folder` at its newest checkpoint, trained on `data`; nothing is trained.

    `topology` and `data` are those that it was trained with, the model with the weights it had before; `given`: what
    the folder could not keep, by the names of `train`, and "callbacks", "record" and "link" of `Logging`.
    """
    arguments = read_arguments(folder, given)
    kept = {name: arguments.pop(name) for name in ("record", "link", "callbacks")}
    rounds = RunFolder(folder).read_definition()["rounds"]
    with RunFolder(folder).alone(reads=True):
        RunFolder(folder).check_opened()
        return start_run(plan_run(topology, data, rounds, Logging(folder, resume=True, **kept), **arguments))


def start_run(plan: RunPlan) -> Run:
    """Return the run of `plan` before its next round, everybody in place, and its folder claimed, where it has one."""
    prepared, adversaries, evaluation, logging = plan.prepared, plan.adversaries, plan.evaluation, plan.logging
    engine = engine_of(plan)
    for replica, tensors in enumerate(prepared.first_weights()):
        engine.start_from(replica, tensors)
    place_objectives(engine, prepared)
    place_adversaries(engine, prepared, adversaries)
    if logging.folder is not None or evaluation.keep == "best":
        check_kept(engine)
    if logging.folder is None:
        engine.run_parties.maker.write_keys()  # no checkpoint of this run does it
        return Run(plan, engine)
    folder = RunFolder(Path(logging.folder))
    deciders = {f"class of callback {i}": type(one) for i, one in enumerate(deciding(logging.callbacks))}
    described = describe(prepared, plan.rounds, logging.record, plan.device, adversaries.user_objects() | deciders)
    speeds = None if evaluation.speeds is None else repr(evaluation.speeds)
    kept = {"keep": None if evaluation.keep == "last" else f"{evaluation.keep}, every={evaluation.every}"}
    extras = {**adversaries.describe(), "speeds": speeds, "delta": evaluation.delta, **kept}
    extras["callbacks"] = describe_callbacks(logging.callbacks)
    folder.claim({**described, **extras}, resume=logging.resume)
    return Run(plan, engine, folder)


def check_kept(engine: Engine) -> None:
    """Refuse a run whose checkpoints could not hold its state, as far as that can be told before its first step."""
    for party in engine.parties.values():
        with about("optimizer"):
            party.state.check_optimizer()
        check_state(party.state.state_dict(), f"the state of {party.state.name}")
    with about("adversaries"):
        check_state({n: one.state() for n, one in engine.training_attacks.items()}, "the state of training attacks")
        check_state({n: one.state() for n, one in engine.detectors.items()}, "the state of detectors")


def place_adversaries(engine: Engine, prepared: Prepared, adversaries: Adversaries) -> None:
    """Place training attacks, detectors and poisoning clients in `engine`; refuse those that could not work there."""
    place_attacks(engine, prepared, adversaries.training_attacks)
    check_questions(engine, prepared.data, adversaries.evaluate_every)
    place_detectors(engine, prepared, adversaries.detectors)
    returned = prepared.method is not None and prepared.method.traits(prepared.topology).returns_weights
    injection.enter(engine, prepared.data, adversaries.poisonings, prepared.training.seed, returned)


def engine_of(plan: RunPlan) -> Engine:
    """Return the engine of the run of `plan`: its parties, each client with its data."""
    prepared, logging = plan.prepared, plan.logging
    engine = make_engine(
        prepared.topologies,
        prepared.facts,
        len(prepared.topologies),
        defenses=prepared.defenses,
        optims=prepared.optims,
        seed=prepared.training.seed,
        device=plan.device,
        recording=logging.record,
        folder=None if logging.folder is None else Path(logging.folder) / "views",
        placement=prepared.placement,
        expected=_expected_batch_sizes(prepared),
        link=LINKS[logging.link],
        accumulate=prepared.training.accumulate,
    )
    for replica, (client, graph) in enumerate(zip(prepared.data.clients, prepared.topologies, strict=True)):
        for part in ("train", "validation", "test"):
            rows = getattr(client, part)
            engine.own(replica, part, rows_of(graph, rows), labels_of(graph, rows))
        engine.show(replica, "public", client.shown)
    return engine


def _expected_batch_sizes(prepared: Prepared) -> list[float] | None:
    """Return the expected size of every client's batches; None where sizes are not left to chance."""
    sizes = ((prepared.training.of_client(i), client) for i, client in enumerate(prepared.data.clients))
    found = [training.expected(len(client.train)) for training, client in sizes]
    return [size for size in found if size is not None] or None
