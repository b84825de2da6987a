"""Train a topology on the data of several clients: validate everything, place the parties, run the rounds."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from splitfed.data.federation import Federation
from splitfed.defense import Defense
from splitfed.engines.local import LocalEngine
from splitfed.errors import InvalidInput, check_count, unknown
from splitfed.folder import RunFolder
from splitfed.graph import Topology
from splitfed.optim import Optim
from splitfed.probe import Facts, probe
from splitfed.registry import load
from splitfed.run import Run
from splitfed.schedules.base import Schedule, Training
from splitfed.view import Recording

Progress = Callable[[int, int, Mapping[str, Any]], None]


def train(
    topology: Topology,
    data: Federation,
    *,
    schedule: str | Schedule = "sequential",
    defenses: Defense | Sequence[Defense] = (),
    rounds: int = 10,
    batch_size: int = 64,
    local_epochs: int = 1,
    optimizer: str | Optim | Mapping[str, Optim] | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    record: Recording | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    evaluate_every: int = 1,
    progress: Progress | None = None,
) -> Run:
    """Train `topology` for `rounds` rounds on `data` and return the run.

    `optimizer`: one for all roles, or role -> `Optim` (default SGD at rate 0.05, momentum 0.9). `record`: whose
    view to keep during training. `folder`: where metrics and a checkpoint of every round go; with `resume` the run
    goes on from the newest one, to the same bits as if it had never stopped. `progress(round, rounds, metrics)` is
    called after every round. Raises `InvalidInput`, before anything is computed or written, for anything that
    does not fit, and `NonFinite` when training diverges.
    """
    check_count("rounds", rounds, low=1)
    check_count("evaluate_every", evaluate_every, low=1)
    training = Training(batch_size, local_epochs, seed)
    plan: Schedule = load("schedules", schedule)() if isinstance(schedule, str) else schedule
    ready = topology.with_task(data.task)
    facts = probe_with(ready, data)
    check_outputs(ready, facts)
    guards = (defenses,) if isinstance(defenses, Defense) else tuple(defenses)
    check_batches(facts, guards, data, training)
    plan.check(ready, len(data.clients))
    optims = optims_of(ready, optimizer)
    place = None if folder is None else RunFolder(Path(folder))
    if resume and place is None:
        raise InvalidInput("resume=True needs the folder of the run to resume")
    engine = LocalEngine(
        ready,
        facts,
        len(data.clients),
        defenses=guards,
        optims=optims,
        seed=seed,
        device=_device(device),
        recording=record,
        folder=None if place is None else place.path / "views",
    )
    for lane, client in enumerate(data.clients):
        for part in ("train", "validation", "test"):
            rows = getattr(client, part)
            engine.own(lane, part, dict.fromkeys(ready.inputs, rows.x), {h.value: rows.y for h in ready.heads})
    if place is not None:
        place.claim(describe(ready, data, plan, guards, optims, rounds, training, record, device), resume=resume)
    run = Run(engine, data, plan, plan.start(len(data.clients)), seed, place)
    first = 0 if place is None else place.restore(run)
    for number in range(first, rounds):
        due = (number + 1) % evaluate_every == 0 or number + 1 == rounds
        metrics = _round(run, training, number, due)
        if place is not None:
            place.save(run, metrics)
        if progress is not None:
            progress(number + 1, rounds, metrics)
    return run


def _round(run: Run, training: Training, number: int, due: bool) -> dict[str, Any]:
    """Train round `number`, score it if that is `due`, and return what the history holds of it."""
    engine = run.engine
    started = time.perf_counter()
    losses = run.schedule.round(engine, training, number, run.schedule_state)
    engine.end_round()
    metrics: dict[str, Any] = {
        "round": number,
        "loss": sum(losses) / len(losses),
        "steps": len(losses),
        "seconds": time.perf_counter() - started,
        "bytes": engine.traffic.bytes(),
        "messages": engine.traffic.messages(),
    }
    metrics |= {part: run.evaluate(part, number) for part in ("validation", "test") if due}
    run.history.append(metrics)
    return metrics


def probe_with(topology: Topology, data: Federation) -> Facts:
    """Probe `topology` with a few rows of the first client (repeated where it has only one)."""
    x = data.clients[0].train.x[:4]
    return probe(topology, dict.fromkeys(topology.inputs, x if len(x) > 1 else x.repeat(2, *[1] * (x.dim() - 1))))


def describe(
    topology: Topology,
    data: Federation,
    schedule: Schedule,
    defenses: Sequence[Defense],
    optims: Mapping[str, Optim],
    rounds: int,
    training: Training,
    record: Recording | None,
    device: torch.device | str,
) -> dict[str, Any]:
    """Return what defines the run, as plain values: two runs with equal descriptions do the same."""
    return {
        "topology": topology.name,
        "segments": {
            s.name: {
                "role": s.role,
                "inputs": list(s.inputs),
                "outputs": list(s.outputs),
                "parameters": _count(s.module),
            }
            for s in topology.segments
        },
        "heads": {h.value: {"role": h.role, "labels": h.labels, "weight": h.weight} for h in topology.heads},
        "weights": _digest(topology.state_dict()),
        "data": {
            "name": data.name,
            "clients": [len(c.train) for c in data.clients],
            "victims": len(data.victims),
            "rows": _digest(_rows(data)),
        },
        "schedule": repr(schedule),
        "defenses": [repr(d) for d in defenses],
        "optimizers": {role: repr(o) for role, o in optims.items()},
        "rounds": rounds,
        "training": asdict(training),
        "record": repr(record or Recording()),
        "device": str(device),
    }


def _rows(data: Federation) -> dict[str, torch.Tensor]:
    parts = {f"{c.name}/{part}": getattr(c, part) for c in data.clients for part in ("train", "validation", "test")}
    parts |= {"victims": data.victims, "auxiliary": data.auxiliary}
    return {f"{name}/{k}": t for name, rows in parts.items() for k, t in (("x", rows.x), ("y", rows.y))}


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a hash of names, shapes and values."""
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _device(name: torch.device | str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidInput(f"device={name!r} is not allowed; expected cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(f"device={str(name)!r} is not there: torch finds no GPU")
    return device


def _count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def optims_of(topology: Topology, optimizer: str | Optim | Mapping[str, Optim] | None) -> dict[str, Optim]:
    """Return each role's optimizer, from one for all (an `Optim`, or a name with torch's defaults) or by role."""
    if isinstance(optimizer, str):
        optimizer = Optim(optimizer, {})
    if optimizer is None or isinstance(optimizer, Optim):
        return dict.fromkeys(topology.roles, optimizer or Optim())
    if not isinstance(optimizer, Mapping) or not all(isinstance(o, Optim) for o in optimizer.values()):
        raise InvalidInput(f"optimizer={optimizer!r} is not allowed; expected an Optim, a name, or role -> Optim")
    for role in optimizer:
        if role not in topology.roles:
            raise unknown("role in optimizer", role, topology.roles)
    return {role: optimizer.get(role, Optim()) for role in topology.roles}


def check_outputs(topology: Topology, facts: Facts) -> None:
    """Refuse a model whose output is not as wide as the task needs."""
    for head in topology.heads:
        assert head.task is not None
        shape = facts.shapes[head.value]
        wanted = head.task.outputs
        if wanted is not None and shape != (wanted,) and not (wanted == 1 and shape == ()):
            raise InvalidInput(
                f"the model returns {shape} a row at {head.value!r}; {head.task.name} here needs ({wanted},)"
            )


def check_batches(facts: Facts, defenses: Sequence[Defense], data: Federation, training: Training) -> None:
    """Refuse a batch size that leaves some client a batch too small for batch norm or for a defense."""
    needs = [(2, f"batch norm in segment {name!r}") for name in sorted(facts.batch_norm)]
    needs += [(d.least_rows, type(d).__name__) for d in defenses]
    least, who = max(needs, key=lambda need: need[0], default=(1, ""))
    for client in data.clients:
        rows = len(client.train)
        smallest = min(rows, training.batch_size, rows % training.batch_size or training.batch_size)
        if smallest < least:
            size = "one" if smallest == 1 else str(smallest)
            raise InvalidInput(
                f"{client.name} has {rows} training rows, so batch_size={training.batch_size} leaves a batch of "
                f"{size}, and {who} needs {least} rows or more: choose another size"
            )
