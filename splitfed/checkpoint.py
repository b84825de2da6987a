"""Checkpoints: one file a party and round, a manifest last; a crash at any moment leaves a whole one behind.

Files are written beside their place, flushed to the disk and renamed; the manifest names the round that all files
share, with their hashes, so files of two rounds are never mixed. The newest two are kept.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from splitfed.errors import InvalidInput

KEPT = 2


def write_atomic(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that `path` holds either the old content or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    # A link that somebody left under this name would lead the writing elsewhere.
    temporary.unlink(missing_ok=True)
    with temporary.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save(folder: Path, number: int, states: Mapping[str, Any]) -> None:
    """Save `states` (name -> tensors and plain values) as the checkpoint of round `number`."""
    clean(folder)
    home = folder / f"{number:06d}"
    hashes = {}
    for name, state in states.items():
        buffer = io.BytesIO()
        torch.save(state, buffer)
        hashes[name] = hashlib.sha256(buffer.getbuffer()).hexdigest()
        write_atomic(home / f"{name}.pt", buffer.getvalue())
    write_atomic(home / "manifest.json", json.dumps({"round": number, "sha256": hashes}, indent=1).encode())
    for old in _complete(folder)[:-KEPT]:
        shutil.rmtree(old)


def load(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """Return round and states of the newest checkpoint that is whole, or None where there is none."""
    for home in reversed(_complete(folder)):
        manifest = _manifest(home)
        if manifest is None:
            continue
        states = {name: _read(home / f"{name}.pt", digest) for name, digest in manifest["sha256"].items()}
        if all(state is not None for state in states.values()):
            return int(manifest["round"]), {name: state[0] for name, state in states.items() if state is not None}
    if folder.is_dir() and _complete(folder):
        raise InvalidInput(f"every checkpoint in {folder} is damaged; start the run anew elsewhere")
    return None


def clean(folder: Path) -> None:
    """Remove what a crash left half written."""
    for stray in folder.glob("*/.*.tmp"):
        stray.unlink()
    if folder.is_dir():
        for home in folder.iterdir():
            if home.is_dir() and not (home / "manifest.json").is_file():
                shutil.rmtree(home)


def _complete(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/manifest.json"))


def _manifest(home: Path) -> dict[str, Any] | None:
    """Return the manifest of a checkpoint, or None where it is damaged."""
    try:
        manifest = json.loads((home / "manifest.json").read_text("utf-8"))
    except ValueError:
        return None
    whole = isinstance(manifest, dict) and isinstance(manifest.get("sha256"), dict) and "round" in manifest
    return manifest if whole else None


def _read(path: Path, digest: str) -> tuple[Any] | None:
    content = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(content).hexdigest() != digest:
        return None
    return (torch.load(io.BytesIO(content), weights_only=True),)
