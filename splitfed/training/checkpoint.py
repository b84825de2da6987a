"""Checkpoints: one file a party and round, a manifest last; a crash at any moment leaves a whole one behind.

Files are written beside their place, flushed to the disk and renamed; the manifest names the round that all files
share, with their hashes, so files of two rounds are never mixed. The manifest carries its own digest, and that of the
metrics up to its round. The newest two are kept.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from splitfed.core import digests
from splitfed.core.digests import Damaged

KEPT = 2


class NewestCheckpoint(NamedTuple):
    """The newest checkpoint that is whole: its round, its states by name, the digest of the metrics up to there.

    `damaged`: files of newer checkpoints, which were passed over.
    """

    number: int
    states: dict[str, Any]
    metrics: str
    damaged: tuple[Path, ...] = ()


def write_atomic(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that `path` holds either the old content or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    # A link that somebody left under this name would lead the writing elsewhere.
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        # On a full disk half a file would take the room that the next try needs.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save(folder: Path, number: int, states: Mapping[str, Any], metrics: str = "") -> Path:
    """Save `states` (name -> tensors and plain values) as the checkpoint of round `number`; return its folder.

    `metrics`: the digest of the metrics up to and with that round.
    """
    clean(folder)
    home = folder / f"{number:06d}"
    hashes = {}
    for name, state in states.items():
        buffer = io.BytesIO()
        torch.save(state, buffer)
        hashes[name] = digests.of(buffer.getvalue())
        write_atomic(home / f"{name}.pt", buffer.getvalue())
    manifest = {"round": number, "metrics": metrics, "sha256": hashes}
    write_atomic(home / "manifest.json", digests.json_with_digest(manifest))
    for old in _complete(folder)[:-KEPT]:
        shutil.rmtree(old)
    return home


def load(folder: Path) -> NewestCheckpoint | None:
    """Return the newest checkpoint that is whole, or None where there is none; raises `Damaged` if none of them is."""
    damaged: list[Path] = []
    for home in reversed(_complete(folder)):
        try:
            manifest = digests.read(home / "manifest.json", digests.RETRAIN)
            states = {name: _read(home / f"{name}.pt", digest) for name, digest in manifest["sha256"].items()}
        except Damaged as error:
            damaged.append(error.path)
        else:
            return NewestCheckpoint(int(manifest["round"]), states, manifest["metrics"], tuple(damaged))
    if damaged:
        raise Damaged(damaged[0], digests.RETRAIN, "and so is every other checkpoint of the run")
    return None


def clean(folder: Path) -> None:
    """Remove what a crash left half written."""
    for stray in folder.glob("*/.*.tmp"):
        stray.unlink()
    for home in folder.glob("*/"):
        if not (home / "manifest.json").is_file():
            shutil.rmtree(home)


def _complete(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/manifest.json"))


def _read(path: Path, digest: object) -> Any:
    content = path.read_bytes() if path.is_file() else b""
    if digests.of(content) != digest:
        raise Damaged(path, digests.RETRAIN)
    return torch.load(io.BytesIO(content), weights_only=True)
