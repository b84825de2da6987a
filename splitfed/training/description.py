"""What defines a run, as plain values: two runs with equal descriptions do the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from splitfed.core.defense import privacy_event
from splitfed.core.messages import Recording
from splitfed.core.rows import RowSource, in_memory
from splitfed.core.secure_computation import SecureComputation
from splitfed.core.topology import Topology
from splitfed.data.dataset import Federation
from splitfed.data.mixup import mixup_of
from splitfed.data.transform import transform_of
from splitfed.planning.held_rows import lines_told
from splitfed.planning.validation import Prepared
from splitfed.training.identity import digest, digest_given


def describe(
    prepared: Prepared,
    rounds: int,
    record: Recording | None,
    device: object,
    besides: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Return the description that a run's folder keeps, and that a resumed run must repeat.

    `besides`: place -> what else a user may have written for the run.
    """
    kinds = list({id(t): t for t in prepared.topologies}.values())
    data = prepared.data
    # Which of the topologies, the first and the others, every client has.
    makes = [next(i for i, one in enumerate(kinds) if one is t) for t in prepared.topologies]
    told = lines_told(prepared.topology, prepared.facts[0], data.clients[0].train.features)
    return {
        "topology": prepared.topology.name,
        **({"cut_choice": prepared.topology.cut_choice} if prepared.topology.cut_choice else {}),
        **({"told": told} if told else {}),
        **_computation(prepared.topology.computation),
        **_graph(prepared.topology),
        **({"others": [_graph(t) for t in kinds[1:]], "makes": makes} if len(kinds) > 1 else {}),
        "data": {
            "name": data.name,
            "clients": [len(c.train) for c in data.clients],
            "victims": len(data.victims),
            "rows": digest(_rows(data)),
        },
        "schedule": repr(prepared.schedule),
        "defenses": [repr(d) for d in prepared.defenses],
        "method": None if prepared.method is None else repr(prepared.method),
        "optimizers": {role: repr(o) for role, o in prepared.optims.items()},
        "rounds": rounds,
        **({"private": mechanisms} if (mechanisms := private_mechanisms(prepared)) else {}),
        "training": asdict(prepared.training),
        "record": repr(record or Recording()),
        "device": str(device),
        "code": digest_user_objects(prepared, besides or {}),
    }


def private_mechanisms(prepared: Prepared) -> list[str]:
    """Return the classes of the defenses, and of the method, that promise privacy by noise from the run's seed."""
    mechanisms = [type(defense).__name__ for defense in prepared.defenses if privacy_event(defense) is not None]
    method = prepared.method
    if method is not None and any(method.traits(topology).message_events for topology in prepared.topologies):
        mechanisms.append(type(method).__name__)
    return mechanisms


def digest_user_objects(prepared: Prepared, besides: Mapping[str, object]) -> dict[str, str]:
    """Return digests of everything that a user may have given: values, and code that is no package's."""
    things: dict[str, object] = {}
    for i, topology in enumerate({id(t): t for t in prepared.topologies}.values()):
        where = "" if i == 0 else f" of topology {i}"
        things |= {f"module of segment {s.name!r}{where}": s.module for s in topology.segments}
        things |= {f"task of head {h.value!r}{where}": h.task for h in topology.heads}
    things |= {f"defense {type(d).__name__} ({i})": d for i, d in enumerate(prepared.defenses)}
    sources = [client.train.source for client in prepared.data.clients if client.train.source.draws]
    for what, find in (("transform", transform_of), ("mixup", mixup_of)):
        found = {repr(one) if isinstance(one, float) else str(id(one)): one for one in map(find, sources)}
        named = enumerate(one for one in found.values() if one is not None)
        things |= {f"{what} of the rows{f' ({i})' if i else ''}": one for i, one in named}
    things |= {"schedule": prepared.schedule, "method": prepared.method}
    own = {role: optim.name for role, optim in prepared.optims.items() if not isinstance(optim.name, str)}
    things |= {f"optimizer of {role!r}": factory for role, factory in own.items()}
    return digest_given({**things, **besides})


def _computation(secure: SecureComputation | None) -> dict[str, str]:
    """Return what defines a secure computation, by its name; where its keys lie does not."""
    return {} if secure is None else {secure.name: repr(secure.with_key_folder(None))}


def _graph(topology: Topology) -> dict[str, Any]:
    return {
        "segments": {
            s.name: {
                "role": s.role,
                "inputs": list(s.inputs),
                "outputs": list(s.outputs),
                "parameters": sum(p.numel() for p in s.module.parameters()),
                "module": hashlib.sha256(_shown(s.module).encode()).hexdigest()[:16],
            }
            for s in topology.segments
        },
        "heads": {
            h.value: {
                "role": h.role,
                "labels": h.labels,
                "weight": h.weight,
                "target": h.target,
                "via": list(h.via),
                "task": None if h.task is None else h.task.name,
            }
            for h in topology.heads
        },
        "forward_only": sorted(topology.forward_only),
        **({"training_only": sorted(topology.training_only)} if topology.training_only else {}),
        "weights": digest(topology.state_dict()),
    }


def _shown(module: nn.Module) -> str:
    """Return how `module` shows itself; its classes where that fails, as it may of what other parties hold."""
    try:
        return repr(module)
    except Exception as error:  # noqa: BLE001  of a user's own module, which may read what is elsewhere
        classes = (f"{name}: {type(inner).__name__}" for name, inner in module.named_modules())
        return "\n".join((type(error).__name__, *classes))


def _rows(data: Federation) -> dict[str, Tensor | RowSource]:
    parts = {f"{c.name}/{part}": getattr(c, part) for c in data.clients for part in ("train", "validation", "test")}
    parts |= {"victims": data.victims, "auxiliary": data.auxiliary}
    tensors: dict[str, Tensor | RowSource] = {f"{c.name}/shown": c.shown for c in data.clients if len(c.shown)}
    for name, rows in parts.items():
        tensors |= {f"{name}/x": rows.source, f"{name}/y": rows.y}
        if not in_memory(rows.source) and name in data.sources:
            tensors[f"{name}/numbers"] = data.sources[name]
        tensors |= {f"{name}/{target}": found.y for target, found in rows.targets.items()}
    return tensors
