"""Train a topology on the data of several clients: validate everything, place the parties, run the rounds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from splitfed.attacks.training_time.training_attack import TrainingAttack
from splitfed.core.defense import Defense, privacy_event
from splitfed.core.errors import InvalidInput, check_count, check_number, unknown
from splitfed.core.initial_weights import STARTS
from splitfed.core.messages import Recording
from splitfed.core.optimizers import Optim
from splitfed.core.topology import Topology
from splitfed.costs.speeds import Speeds
from splitfed.data.federation import Federation
from splitfed.detectors.base import Detector
from splitfed.engines.byte_link import ByteLink
from splitfed.engines.local import LocalEngine
from splitfed.engines.message_link import LocalLink
from splitfed.federated.base import Method
from splitfed.planning.calibration import calibrate_defenses
from splitfed.planning.timed import clock_of
from splitfed.planning.uploads import check_uploads
from splitfed.planning.validation import Prepared, inputs_of, labels_of, prepare
from splitfed.poisoning import injection
from splitfed.poisoning.base import Manipulation
from splitfed.schedules.base import Schedule, Training
from splitfed.threats.training_time import check_questions, place_attacks, resolve_attack
from splitfed.training.description import describe
from splitfed.training.detectors import post
from splitfed.training.folder import RunFolder
from splitfed.training.local_learner import place_objectives
from splitfed.training.run import Run

Progress = Callable[[int, int, Mapping[str, Any]], None]

LINKS: Mapping[str, type[LocalLink]] = {"memory": LocalLink, "bytes": ByteLink}


def train(
    topology: Topology | Sequence[Topology],
    data: Federation,
    *,
    schedule: str | Schedule = "sequential",
    defenses: Defense | Sequence[Defense] = (),
    method: str | Method | None = None,
    rounds: int = 10,
    batch_size: int = 64,
    local_epochs: int = 1,
    sampling: str = "shuffle",
    optimizer: str | Optim | Mapping[str, Optim] | None = None,
    restart_optimizers: bool = False,
    starts: str | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    record: Recording | None = None,
    intruders: Mapping[str, TrainingAttack | str] | None = None,
    ask: Mapping[str, int] | None = None,
    detectors: Mapping[str, Detector] | None = None,
    manipulations: Manipulation | Sequence[Manipulation] = (),
    speeds: Speeds | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    evaluate_every: int = 1,
    across: bool = False,
    delta: float | None = None,
    link: str = "memory",
    progress: Progress | None = None,
) -> Run:
    """Train `topology` for `rounds` rounds on `data` and return the run.

    `topology`: one for all clients, or one a client, with segments of different make on the same shared ones. `method`:
    a federated method, layered on the schedule. `sampling`: "shuffle", or "poisson" (see `Training`). `optimizer`: one
    for all roles, or role -> `Optim` (default SGD at rate 0.05, momentum 0.9). `restart_optimizers`: whether every
    party's optimizer forgets its state (momentum) at the start of every round, whatever the method, unless the method
    was told otherwise (its `restart`); by default it lives as long as the run. `starts`: "shared", every client starts
    from the weights of the topology, or "own", each from a draw of its own by the seed (default: as the topologies have
    it: one for all is shared, one a client keeps the weights it has); what is broadcast before the first round is the
    same for everybody either way (`run.starts`). `record`: whose view to keep during training. `intruders`: party -> an
    attack that lives inside training there; `ask`: party -> after how many rounds, and after the last, it is asked
    about the victims, from which it learns nothing. `delta`: at which the privacy ledger states epsilon (default: that
    of a target epsilon, or 1 / (10 rows)). `detectors`: client (or the clients' role) -> who watches over its
    gradients. `manipulations`: clients that misbehave; the run's data are then as they left them. `speeds`: machines
    and links; with them a simulated clock runs beside training. `folder`: where metrics and a checkpoint of every round
    go; with `resume` the run goes on from the newest one, to the same bits as if it had never stopped. `across`:
    whether every client's model is also scored on the others' rows (`Run.across`). `link`: "memory", or "bytes", which
    sends every message as bytes with a checked header, to the same result.
    `progress(round, rounds, metrics)` is called after every round. Raises `InvalidInput`, before anything is computed
    or written, for anything that does not fit, and `NonFinite` when training diverges.
    """
    check_count("rounds", rounds, low=1)
    check_count("evaluate_every", evaluate_every, low=1)
    if link not in LINKS:
        raise unknown("link", link, LINKS)
    if starts not in (None, *STARTS):
        raise unknown("starts", str(starts), STARTS)
    if delta is not None:
        check_number("delta", delta, low=0.0, high=1.0, open_low=True, open_high=True)
    misconduct = injection.check_manipulations(manipulations)
    data = injection.poison_data(data, misconduct, seed)
    prepared = prepare(
        topology,
        data,
        schedule=schedule,
        defenses=defenses,
        optimizer=optimizer,
        training=Training(batch_size, local_epochs, seed, sampling, restart_optimizers, starts),
        method=method,
    )
    tampered = [name for name, given in (intruders or {}).items() if resolve_attack(given).active]
    # Who bends an upload only processes what is there; who stands inside a step may let one row show in another's.
    tampered += [type(one).__name__ for one in misconduct if type(one).enter is not Manipulation.enter]
    prepared = calibrate_defenses(
        prepared,
        rounds,
        "detectors, which train on rows of their own choice" if detectors else None,
        f"{tampered[0]!r} does not follow the protocol" if tampered else None,
    )
    check_across(across, prepared.defenses)
    check_uploads(prepared)
    clock = None if speeds is None else clock_of(prepared, speeds)
    place = None if folder is None else RunFolder(Path(folder))
    if resume and place is None:
        raise InvalidInput("resume=True needs the folder of the run to resume")
    engine = engine_of(prepared, device, record, None if place is None else place.path / "views", LINKS[link])
    for lane, tensors in enumerate(prepared.first_weights()):
        engine.start_from(lane, tensors)
    place_objectives(engine, prepared)
    place_attacks(engine, prepared, intruders or {})
    check_questions(engine, data, ask or {})
    post(engine, prepared, detectors or {})
    returned = prepared.method is not None and prepared.method.traits(prepared.topology).returns_weights
    injection.enter(engine, data, misconduct, seed, returned)
    if place is not None:
        others = _describe_extras(intruders or {}, ask or {}, detectors or {}, misconduct, speeds)
        besides = _user_objects(intruders or {}, detectors or {}, misconduct)
        described = describe(prepared, rounds, record, device, besides)
        place.claim({**described, **others, "delta": delta}, resume=resume)
    run = Run(engine, data, prepared.schedule, prepared.schedule.start(len(data.clients)), seed, place, clock)
    run.follow(prepared.method)
    run.evaluator.training = prepared.training
    run.evaluator.rounds = rounds
    run.delta = delta
    run.crosswise = across
    first = 0 if place is None else place.restore(run)
    for number in range(first, rounds):
        due = (number + 1) % evaluate_every == 0 or number + 1 == rounds
        metrics = _round(run, prepared.training, number, due, number + 1 == rounds)
        for party, every in (ask or {}).items():
            if (number + 1) % every == 0 or number + 1 == rounds:
                metrics.setdefault("asked", {})[party] = run.ask(party)
        if place is not None:
            place.save(run, metrics)
        if progress is not None:
            progress(number + 1, rounds, metrics)
    return run


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
) -> LocalEngine:
    """Place the parties of `prepared`, and give each client its data."""
    engine = LocalEngine(
        prepared.topologies,
        prepared.facts,
        len(prepared.topologies),
        defenses=prepared.defenses,
        optims=prepared.optims,
        seed=prepared.training.seed,
        device=_device(device),
        recording=record,
        folder=views,
        placement=prepared.placement,
        expected=_expected_batch_sizes(prepared),
        link=link,
    )
    for lane, (client, graph) in enumerate(zip(prepared.data.clients, prepared.topologies, strict=True)):
        for part in ("train", "validation", "test"):
            rows = getattr(client, part)
            engine.own(lane, part, inputs_of(graph, rows), labels_of(graph, rows))
        engine.show(lane, "public", client.shown)
    return engine


def _describe_extras(
    intruders: Mapping[str, TrainingAttack | str],
    ask: Mapping[str, int],
    detectors: Mapping[str, Detector],
    manipulations: Sequence[Manipulation],
    speeds: Speeds | None,
) -> dict[str, Any]:
    """Describe what else a resumed run must have, None where there is none."""
    return {
        "intruders": {name: repr(resolve_attack(given)) for name, given in intruders.items()} or None,
        "ask": dict(ask) or None,
        "detectors": {name: repr(detector) for name, detector in detectors.items()} or None,
        "manipulations": {str(i): repr(one) for i, one in enumerate(manipulations)} or None,
        "speeds": None if speeds is None else repr(speeds),
    }


def _user_objects(
    intruders: Mapping[str, TrainingAttack | str],
    detectors: Mapping[str, Detector],
    manipulations: Sequence[Manipulation],
) -> dict[str, object]:
    """Return what may hold code of the user's, by its place."""
    return {
        **{f"intruder at {name!r}": resolve_attack(given) for name, given in intruders.items()},
        **{f"detector at {name!r}": detector for name, detector in detectors.items()},
        **{f"manipulation {type(one).__name__} ({i})": one for i, one in enumerate(manipulations)},
    }


def _round(run: Run, training: Training, number: int, due: bool, last: bool) -> dict[str, Any]:
    """Train round `number`, score it if that is `due`, and return what the history holds of it.

    Test rows are scored with an interval in the `last` round: a second scoring would release every row once more.
    """
    engine = run.engine
    started = time.perf_counter()
    if training.restart_optimizers:
        engine.restart_optimizers()
    run.query(training, number)
    done = run.schedule.round(run.trainer, training, number, run.schedule_state)
    done = run.aggregate(done, number)
    engine.end_round()
    metrics: dict[str, Any] = {
        "round": number,
        "loss": _mean(done.losses),
        "steps": len(done.losses),
        "clients": len(done.clients),
        "dropped": list(done.dropped),
        "fused": done.fused,
        "seconds": time.perf_counter() - started,
        "bytes": engine.traffic.bytes(),
        "messages": engine.traffic.messages(),
    }
    if any(privacy_event(d) is not None for d in engine.defenses):
        metrics["epsilon"] = None
    if run.clock is not None:
        metrics["simulated_seconds"] = run.clock.now
    if engine.insiders:
        metrics["intruders"] = {name: insider.metrics() for name, insider in engine.insiders.items()}
    if engine.sentries:
        metrics["detectors"] = {name: sentry.metrics() for name, sentry in engine.sentries.items()}
    for part in ("validation", "test") if due else ():
        metrics[part] = run.evaluate(part, number, interval=last and part == "test")
    if "epsilon" in metrics:
        # Scoring releases rows too, so it is counted when that is done.
        ledger = run.ledger
        metrics["epsilon"] = ledger.epsilon
        metrics["epsilons"] = {total.protects: total.epsilon for total in ledger.totals}
    run.history.append(metrics)
    return metrics


def _mean(losses: Sequence[float]) -> float | None:
    """Return the mean; None without losses, and where one is not finite, which only a step of dp_sgd survives."""
    return sum(losses) / len(losses) if losses and all(map(math.isfinite, losses)) else None


def _expected_batch_sizes(prepared: Prepared) -> list[float] | None:
    """Return the expected size of every client's batches; None where sizes are not left to chance."""
    found = [prepared.training.expected(len(client.train)) for client in prepared.data.clients]
    return [size for size in found if size is not None] or None


def _device(name: torch.device | str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidInput(f"device={name!r} is not allowed; expected cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise InvalidInput(f"device={str(name)!r} is not allowed; expected cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(f"device={str(name)!r} is not there: torch finds no GPU")
    return device
