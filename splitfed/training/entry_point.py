"""Train a topology on the data of several clients: validate everything, place the parties, run the rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from splitfed.core.defense import Defense, privacy_event
from splitfed.core.errors import InvalidInput, about, check_count, check_kind, short
from splitfed.core.local_update import LocalUpdate
from splitfed.core.messages import LocalLink, Recording
from splitfed.core.optimizers import Optim
from splitfed.core.random import read_seed
from splitfed.core.state_encoding import check_state
from splitfed.core.topology import Topology
from splitfed.data.dataset import Federation
from splitfed.engines.engine import Engine
from splitfed.engines.factory import make_engine
from splitfed.federated.base import Method
from splitfed.planning.calibration import calibrate_defenses
from splitfed.planning.timed import check_speeds, clock_of
from splitfed.planning.uploads import check_uploads
from splitfed.planning.validation import Prepared, labels_of, prepare, rows_of
from splitfed.poisoning import injection
from splitfed.poisoning.base import Poisoning
from splitfed.poisoning.injection import poison_data
from splitfed.schedules.base import Schedule, Training
from splitfed.threats.training_time import check_questions, place_attacks
from splitfed.training.arguments import read_arguments, write_arguments
from splitfed.training.callbacks import check_deciding, committed_ledger, deciding, describe_callbacks
from splitfed.training.description import describe
from splitfed.training.detectors import place_detectors
from splitfed.training.folder import RunFolder
from splitfed.training.local_learner import place_objectives
from splitfed.training.rounds import RunPlan, train_rounds
from splitfed.training.run import Run
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
    seed = read_seed(seed)
    find_device(device)
    for name, given in (
        ("local", local),
        ("adversaries", adversaries),
        ("evaluation", evaluation),
        ("logging", logging),
    ):
        check_kind(name, given, GROUPS[name], f"splitfed.{GROUPS[name].__name__}(...)")
    arguments = {
        "schedule": schedule,
        "method": method,
        "defenses": defenses,
        "batch_size": batch_size,
        "optimizer": optimizer,
        "seed": seed,
        "device": device,
        "local": local,
        "adversaries": adversaries,
        "evaluation": evaluation,
    }
    with nullcontext() if logging.folder is None else RunFolder(Path(logging.folder)).alone():
        run = begin_run(topology, data, rounds, arguments, logging)
        assert isinstance(run.plan, RunPlan)
        train_rounds(run, run.plan)
    return run


def begin_run(
    topology: Topology | Sequence[Topology],
    data: Federation,
    rounds: int,
    arguments: Mapping[str, Any],
    logging: Logging,
) -> Run:
    """Return the run of `train` with these `arguments` as far as its folder has it, before its next round."""
    adversaries, evaluation, device = (arguments[name] for name in ("adversaries", "evaluation", "device"))
    prepared = prepare(
        topology,
        poison_data(data, adversaries.poisonings, arguments["seed"]),
        schedule=arguments["schedule"],
        defenses=arguments["defenses"],
        optimizer=arguments["optimizer"],
        training=Training.of(arguments["local"], arguments["batch_size"], arguments["seed"]),
        method=arguments["method"],
    )
    run = open_run(prepared, rounds, device, adversaries, evaluation, logging)
    if run.folder is not None:
        kept = {"record": logging.record, "link": logging.link, "callbacks": tuple(deciding(logging.callbacks))}
        write_arguments(run.folder.path, {**arguments, **kept})
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
        return begin_run(topology, data, rounds, arguments, Logging(folder, resume=True, **kept))


def open_run(
    prepared: Prepared,
    rounds: int,
    device: torch.device | str,
    adversaries: Adversaries,
    evaluation: Evaluation,
    logging: Logging,
) -> Run:
    """Return the run of `rounds` rounds as far as its folder has it, before its next round; see `train`."""

    def prepare_for(length: int) -> Prepared:
        return check_run(prepared, length, device, adversaries, evaluation)

    ready = prepare_for(rounds)
    with about("callbacks"):
        check_deciding(logging.callbacks, ready)
    run = start_run(RunPlan(ready, rounds, adversaries, evaluation, logging, prepare_for), device)
    run.callbacks = tuple(logging.callbacks)
    run.committed = committed_ledger(run.callbacks, ready, rounds, evaluation.every, evaluation.delta)
    if run.folder is not None:
        run.folder.restore(run)
    return run


def check_run(
    prepared: Prepared, rounds: int, device: torch.device | str, adversaries: Adversaries, evaluation: Evaluation
) -> Prepared:
    """Return `prepared` with method and defenses calibrated for `rounds` rounds; refuse what does not fit these."""
    with about("device"):
        find_device(device)
    obstacle = "detectors, which train on rows of their own choice" if adversaries.detectors else None
    off = adversaries.off_protocol
    with about("defenses"):
        doubt = f"{off!r} does not follow the protocol" if off else None
        prepared = calibrate_defenses(prepared, rounds, obstacle, doubt)
        check_uploads(prepared)
    with about("accumulate"):
        check_adversaries(prepared.training, adversaries)
    with about("across"):
        check_across(evaluation.across_clients, prepared.defenses)
    with about("speeds"):
        check_speeds(prepared, evaluation.speeds)
    return prepared


def start_run(plan: RunPlan, device: torch.device | str) -> Run:
    """Return the run of `plan` before its first round, everybody in place, and its folder claimed, where it has one."""
    prepared, adversaries, evaluation, logging = plan.prepared, plan.adversaries, plan.evaluation, plan.logging
    clock = None if evaluation.speeds is None else clock_of(prepared, evaluation.speeds)
    folder = None if logging.folder is None else RunFolder(Path(logging.folder))
    views = None if folder is None else folder.path / "views"
    engine = engine_of(prepared, device, logging.record, views, LINKS[logging.link])
    for replica, tensors in enumerate(prepared.first_weights()):
        engine.start_from(replica, tensors)
    place_objectives(engine, prepared)
    place_adversaries(engine, prepared, adversaries)
    if folder is not None:
        check_kept(engine)
        deciders = {f"class of callback {i}": type(one) for i, one in enumerate(deciding(logging.callbacks))}
        described = describe(prepared, plan.rounds, logging.record, device, adversaries.user_objects() | deciders)
        speeds = None if evaluation.speeds is None else repr(evaluation.speeds)
        extras = {**adversaries.describe(), "speeds": speeds, "delta": evaluation.delta}
        extras["callbacks"] = describe_callbacks(logging.callbacks)
        folder.claim({**described, **extras}, resume=logging.resume)
    else:
        engine.run_parties.maker.write_keys()  # no checkpoint of this run does it
    state = prepared.schedule.start(engine.replicas)
    run = Run(engine, prepared.data, prepared.schedule, state, prepared.training.seed, folder, clock)
    run.plan = plan
    run.follow(prepared.method)
    run.evaluator.grants.training, run.evaluator.grants.rounds = prepared.training, plan.rounds
    run.delta, run.crosswise = evaluation.delta, evaluation.across_clients
    return run


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


def check_adversaries(training: Training, adversaries: Adversaries) -> None:
    """Refuse to gather the gradients of several batches where somebody acts on those of every batch, or step."""
    if training.accumulate == 1:
        return
    acting = [
        *(f"training attack {type(attack).__name__}" for attack in adversaries.resolved_attacks.values()),
        *(f"detector {type(one).__name__}" for one in adversaries.detectors.values()),
        *(type(one).__name__ for one in adversaries.poisonings if type(one).enter is not Poisoning.enter),
    ]
    if acting:
        raise InvalidInput(
            f"accumulate={training.accumulate} is not allowed beside {acting[0]}, which acts on every batch and "
            "expects a step behind it; take a larger batch_size"
        )


def check_across(across: bool, defenses: Sequence[Defense]) -> None:
    """Refuse to score every client's model on the others' rows where a defense promises something of what it plans."""
    private = next((d for d in defenses if privacy_event(d) is not None), None)
    if across and private is not None:
        raise InvalidInput(
            f"across=True puts everybody's rows through everybody's segments, which is not in the plan of what "
            f"{type(private).__name__} promises: leave one of them out"
        )


def engine_of(
    prepared: Prepared,
    device: torch.device | str = "cpu",
    record: Recording | None = None,
    views: Path | None = None,
    link: type[LocalLink] = LocalLink,
) -> Engine:
    """Return the engine of a run: the parties of `prepared` on `device`, each client with its data.

    `record`: which parties' messages are kept, in the folder `views` if given; `link`: what carries messages.
    """
    engine = make_engine(
        prepared.topologies,
        prepared.facts,
        len(prepared.topologies),
        defenses=prepared.defenses,
        optims=prepared.optims,
        seed=prepared.training.seed,
        device=find_device(device),
        recording=record,
        folder=views,
        placement=prepared.placement,
        expected=_expected_batch_sizes(prepared),
        link=link,
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


def find_device(name: torch.device | str) -> torch.device:
    """Return the device called `name`; refuse one that torch does not train on here."""
    check_kind("device", name, (str, torch.device), "cpu, cuda or cuda:N")
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError):
        raise InvalidInput(f"device={short(name)} is not allowed; expected cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise InvalidInput(f"device={str(name)!r} is not allowed; expected cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidInput(f"device={str(name)!r} is not there; this machine has {torch.cuda.device_count()} GPUs")
    return device
