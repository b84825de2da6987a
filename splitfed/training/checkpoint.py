"""Checkpoints: one file of tensors a party and round, a manifest last; a crash at any moment leaves a whole one behind.

Tensors are in safetensors files; all other values in the manifest, as JSON: what is read back can run no code. Files
are written beside their place, flushed to the disk and renamed; the manifest names the round that all files
share, with their hashes, so files of two rounds are never mixed. The manifest carries its own digest, and that of the
metrics up to its round. The newest two are kept.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, torch as files

from splitfed.core import digests
from splitfed.core.digests import Damaged
from splitfed.core.errors import InvalidInput
from splitfed.core.state_encoding import decode, encode

KEPT = 2


class NewestCheckpoint(NamedTuple):
    """The newest checkpoint that is whole: its round, its states by name, the digest of the metrics up to there.

    `damaged`: files of newer checkpoints, which were passed over.
    """

    number: int
    states: dict[str, Any]
    metrics: str
    damaged: tuple[Path, ...] = ()


def make_folder(path: Path) -> None:
    """Make the folder at `path` where it is not there; refuse what stands there and is none."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise InvalidInput(f"{path} is no folder, in which files are to be written: move it away") from None
    except OSError as error:
        if error.errno == errno.ENOSPC:  # told as such: it passes
            raise
        raise InvalidInput(f"folder {str(path)!r} cannot be made here ({error.strerror}); give another") from None


def write_atomic(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that `path` holds either the old content or the new one, whole."""
    make_folder(path.parent)
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

    `metrics`: the digest of the metrics up to and with that round. Raises `InvalidInput`, before anything is written,
    for a state that cannot be kept; see `splitfed.core.state_encoding`.
    """
    encoded = {name: encode(state, f"the state of {name}") for name, state in states.items()}
    clean(folder)
    home = folder / f"{number:06d}"
    hashes = {}
    for name, (_, tensors) in encoded.items():
        content = files.save({str(i): tensor for i, tensor in enumerate(tensors)})
        hashes[name] = digests.of(content)
        write_atomic(home / f"{name}.safetensors", content)
    values = {name: tree for name, (tree, _) in encoded.items()}
    manifest = {"round": number, "metrics": metrics, "sha256": hashes, "values": values}
    write_atomic(home / "manifest.json", digests.json_with_digest(manifest, indent=None))
    for old in _complete(folder)[:-KEPT]:
        shutil.rmtree(old)
    return home


def load(folder: Path) -> NewestCheckpoint | None:
    """Return the newest checkpoint that is whole, or None where there is none; raises `Damaged` if none of them is."""
    damaged: list[Path] = []
    for home in reversed(_complete(folder)):
        try:
            found = _read(home)
        except Damaged as error:
            damaged.append(error.path)
        else:
            return found._replace(damaged=tuple(damaged))
    if damaged:
        raise Damaged(damaged[0], digests.RETRAIN, "and so is every other checkpoint of the run")
    return None


def newest_round(folder: Path) -> int:
    """Return the round of the newest checkpoint, whole or not; -1 where there is none."""
    return max((int(home.name) for home in _complete(folder) if home.name.isdigit()), default=-1)


def clean(folder: Path) -> None:
    """Remove what a crash left half written."""
    for stray in folder.glob("*/.*.tmp"):
        stray.unlink()
    for home in folder.glob("*/"):
        if not (home / "manifest.json").is_file():
            shutil.rmtree(home)


def _complete(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/manifest.json"))


def _read(home: Path) -> NewestCheckpoint:
    """Return the checkpoint in `home`; raises `Damaged` where it is not whole."""
    path = home / "manifest.json"
    manifest = digests.read(path, digests.RETRAIN)
    hashes, values = manifest.get("sha256"), manifest.get("values")
    if isinstance(hashes, dict) and values is None:
        raise InvalidInput(
            f"{home} was written by an earlier version, in a form that is no longer read, as that could run code; "
            "train the run again in another folder"
        )
    if not (isinstance(hashes, dict) and isinstance(values, dict) and hashes.keys() == values.keys()):
        raise Damaged(path, digests.RETRAIN, "it lists no files")
    states = {}
    for name, tree in values.items():
        file = home / f"{name}.safetensors"
        content = file.read_bytes() if file.is_file() else b""
        if digests.of(content) != hashes[name]:
            raise Damaged(file, digests.RETRAIN)
        try:
            states[name] = decode(tree, files.load(content))
        except (ValueError, KeyError, SafetensorError) as error:
            raise Damaged(file, digests.RETRAIN, str(error)) from None
    return NewestCheckpoint(int(manifest.get("round", 0)), states, str(manifest.get("metrics")))
