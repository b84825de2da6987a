"""Checkpoints: whole or not there, the newest whole one is taken, two are kept, nothing runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from splitfed.core import digests
from splitfed.core.errors import InvalidInput
from splitfed.training import checkpoint
from tests.examples import assert_same


def states(number: int) -> dict[str, object]:
    return {"party-a": {"w": torch.full((3,), float(number))}, "run": {"count": number, "none": None}}


def fill(folder: Path, count: int) -> None:
    for number in range(count):
        checkpoint.save(folder, number, states(number))


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert found[0] == 0
    assert_same(found[1], states(0))


def test_an_empty_or_missing_folder_holds_none(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path) is None
    assert checkpoint.load(tmp_path / "missing") is None


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    fill(tmp_path, 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000002", "000003"]
    names = sorted(p.name for p in (tmp_path / "000003").iterdir())
    assert names == ["manifest.json", "party-a.safetensors", "run.safetensors"]


@pytest.mark.parametrize(
    "damage",
    [
        "flip",
        "cut",
        "remove",
        "manifest cut",
        "manifest without hashes",
    ],
)
def test_a_damaged_newest_falls_back_to_the_one_before(tmp_path: Path, damage: str) -> None:
    fill(tmp_path, 3)
    file, manifest = tmp_path / "000002" / "party-a.safetensors", tmp_path / "000002" / "manifest.json"
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(content[:-10])
    elif damage == "remove":
        file.unlink()
    elif damage == "manifest cut":
        manifest.write_text(manifest.read_text()[:-20])
    else:
        manifest.write_text(json.dumps({"round": 2}))
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert found[0] == 1
    assert_same(found[1], states(1))


def test_all_damaged_is_said_in_one_line(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    for file in tmp_path.glob("*/run.safetensors"):
        file.write_bytes(b"")
    with pytest.raises(
        InvalidInput, match=r"run.safetensors is damaged: and so is every other checkpoint of the run; put"
    ):
        checkpoint.load(tmp_path)


def test_half_written_files_are_cleaned_at_the_next_save(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    (tmp_path / "000000" / ".run.safetensors.tmp").write_bytes(b"half")
    (tmp_path / "000001").mkdir()
    (tmp_path / "000001" / "party-a.safetensors").write_bytes(b"whole, but no manifest followed")
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert found[0] == 0
    checkpoint.save(tmp_path, 2, states(2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000000", "000002"]
    assert not list(tmp_path.glob("*/.*"))


def test_a_crash_before_the_manifest_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 1)
    write = checkpoint.write_atomic

    def crash(path: Path, content: bytes) -> None:
        if path.name == "manifest.json":
            raise OSError("the disk is gone")
        write(path, content)

    monkeypatch.setattr(checkpoint, "write_atomic", crash)
    with pytest.raises(OSError, match="the disk is gone"):
        checkpoint.save(tmp_path, 1, states(1))
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert found[0] == 0


class Unwelcome:
    """An object whose loading would run code of its class."""


def test_what_cannot_be_kept_is_refused_and_leaves_the_one_before(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    with pytest.raises(InvalidInput, match=r"the state of bad\['x'\]\[0\] is of type Unwelcome, which a checkpoint"):
        checkpoint.save(tmp_path, 1, {"good": {}, "bad": {"x": [Unwelcome()]}})
    assert [p.name for p in tmp_path.iterdir()] == ["000000"]


def test_a_checkpoint_of_an_earlier_version_is_refused_in_one_line(tmp_path: Path) -> None:
    """They were written by torch, whose loader has run what a crafted file told it to."""
    home = tmp_path / "000000"
    checkpoint.write_atomic(home / "run.pt", b"anything")
    manifest = {"round": 0, "metrics": "", "sha256": {"run": digests.of(b"anything")}}
    checkpoint.write_atomic(home / "manifest.json", digests.json_with_digest(manifest))
    with pytest.raises(InvalidInput, match=r"000000 was written by an earlier version.*train the run again in another"):
        checkpoint.load(tmp_path)


FORGED: dict[str, Any] = {
    "no such tensor": {"$": "tensor", "value": 7},
    "no such type": {"$": "Popen", "value": ["true"]},
    "no type": {"$": 3},
    "a device that is none": {"$": "tensor", "value": 0, "device": "elsewhere"},
    "an order that is none": {"$": "tensor", "value": 0, "order": [0, 0, 5]},
    "a shape that is too large": {"$": "tensor", "value": 0, "dtype": "torch.complex64", "shape": [1 << 60]},
    "an array of objects": {"$": "array", "value": 0, "dtype": "O", "shape": [1], "scalar": False},
    "a dict with a list as key": {"$": "dict", "value": [[[], 0]]},
    "a range of texts": {"$": "range", "value": ["a", "b", "c"]},
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_manifest_is_damaged_and_makes_nothing_else(tmp_path: Path, name: str) -> None:
    home = checkpoint.save(tmp_path, 0, states(0))
    manifest = digests.read(home / "manifest.json", "")
    manifest["values"]["party-a"] = FORGED[name]
    checkpoint.write_atomic(home / "manifest.json", digests.json_with_digest(manifest))
    with pytest.raises(digests.Damaged, match=r"party-a.safetensors is damaged: "):
        checkpoint.load(tmp_path)


def test_a_write_replaces_the_old_content_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    checkpoint.write_atomic(path, b"old")
    checkpoint.write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in path.parent.iterdir()] == ["file.txt"]
