"""Hashes of results that no rename moves: numbers in the order of the run, without module paths and class names.

What is text (of errors and of the ledger) has hashes of its own, so that a change of wording is told from a change of
numbers.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from splitfed.attacks.scoring.prediction_scores import ORACLES
from splitfed.threats.floors import FLOORS
from splitfed.training.run import AttackResult, Run
from tests.golden.renames import KEYS

TEXT = "text"
"""How the names of parts begin that hold wording alone."""
LENGTH = 16
TOLD = ("party", "place", "protects", "unit", "neighbours", "counted", "defense", "mechanism", "method", "note")
BESIDE = (*FLOORS, *ORACLES)
"""Floors and oracles, which are attacks and scores of their own and no part of how an attack was scored."""
CLOCK = ("seconds",)
"""What a history holds of the wall clock."""


def of(*values: Any) -> str:
    """Return the hash of `values`: tensors with dtype and shape, numbers bit by bit, tables by their sorted keys."""
    digest = hashlib.sha256()
    for piece in pieces(values):
        digest.update(struct.pack("<Q", len(piece)))
        digest.update(piece)
    return digest.hexdigest()[:LENGTH]


def pieces(value: Any) -> Iterator[bytes]:
    """Yield `value` as bytes, each piece with its kind before it."""
    if value is None or isinstance(value, bool):
        yield repr(value).encode()
    elif isinstance(value, str):
        # An enumeration of texts is its text.
        yield b"s" + str(value).encode()
    elif isinstance(value, int):
        yield b"i" + repr(int(value)).encode()
    elif isinstance(value, float):
        yield b"f" + struct.pack("<d", value)
    elif isinstance(value, Tensor):
        yield f"t{value.dtype}{tuple(value.shape)}".encode()
        yield bits(value)
    elif isinstance(value, Mapping):
        yield f"m{len(value)}".encode()
        for key in sorted(value, key=str):
            yield b"k" + str(key).encode()
            yield from pieces(value[key])
    elif isinstance(value, (list, tuple)):
        yield f"l{len(value)}".encode()
        for one in value:
            yield from pieces(one)
    else:
        raise TypeError(f"a result holds a {type(value).__name__}, which has no hash: add it to tests/golden/hashes.py")


def bits(tensor: Tensor) -> bytes:
    """Return the numbers of `tensor` as they lie in a contiguous copy."""
    plain = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def leaves(value: Any) -> list[str]:
    """Return the hashes of all tensors and numbers in a nested state, sorted: keys and order do not matter."""
    if isinstance(value, Mapping):
        return sorted(found for one in value.values() for found in leaves(one))
    if isinstance(value, (list, tuple)):
        return sorted(found for one in value for found in leaves(one))
    return [] if isinstance(value, str) else [of(value)]


def without_clock(value: Any) -> Any:
    """Return a history entry without what the wall clock measured."""
    if isinstance(value, Mapping):
        return {KEYS.get(key, key): without_clock(one) for key, one in value.items() if key not in CLOCK}
    return [without_clock(one) for one in value] if isinstance(value, (list, tuple)) else value


def of_run(run: Run) -> dict[str, str]:
    """Return the parts of a run: weights, whole state, metrics, predictions, views, ledger, traffic."""
    replicas = [run.engine.modules(replica) for replica in range(run.engine.replicas)]
    views = [run.engine.view(party) for party in sorted(run.engine.parties)]
    ledger = run.ledger.as_dict()
    lines = [*ledger.pop("lines"), *ledger.pop("totals")]
    numbers = [{k: v for k, v in line.items() if k not in TOLD} for line in lines]
    words = [{k: v for k, v in line.items() if k in TOLD} for line in lines]
    said = [list(ledger.pop(name)) for name in ("open", "replaced", "uncharged")]
    # Where no value carries an input, the ledger is that of a commit that did not look for it.
    said += [list(one) for one in (ledger.pop("carried"),) if one]
    return {
        "weights": of([[list(m.state_dict().values()) for _, m in sorted(held.items())] for held in replicas]),
        "state": of(leaves(run.state())),
        "metrics": of(without_clock(run.history)),
        "predictions": of(run.predict(run.data.victims.x)),
        "view": of([[(*m[:4], list(m.tensors.values()), tuple(m.stamp)) for m in view.messages] for view in views]),
        "ledger": of(ledger, numbers),
        f"{TEXT} ledger": of(words, said),
        "traffic": of(sorted((tuple(flow), tuple(n)) for flow, n in run.engine.traffic.flows.items())),
    }


def of_attack(found: AttackResult) -> dict[str, str]:
    """Return the parts of an attack: who was the adversary, what it reconstructed, and how that was scored."""
    scores = {
        KEYS.get(who, who): {n: (i.mean, i.low, i.high, i.n) for n, i in own.items()}
        for who, own in found.scores.items()
        if who not in BESIDE
    }
    stolen = {
        who: {n: (i.mean, i.low, i.high, i.n) for n, i in scores.items()}
        for who, scores in (found.stolen or {}).items()
    }
    return {
        f"attack {found.attack}": of(found.adversary, found.prediction, found.truth),
        f"grade {found.attack}": of(scores, stolen),
    }


def of_error(error: Exception, name: str = "refused") -> dict[str, str]:
    """Return the parts of a refusal: the type of the error, and apart from it its text."""
    return {name: type(error).__name__, f"{TEXT} {name}": of(str(error))}
