"""Whose a folder of results is, and what it may do: the user's own runs its code, anybody else's needs `--trust`.

A study that reaches outside of its folder, by import paths, by files or by addresses, leaves a mark in its results and
in the folder of every run: a keyed hash, with a key that only this user can read, of the configuration and of the
Python files that its paths named, which are kept beside it. Whoever has no key cannot make such a mark, and none
outlives a change. Links that lead out of a folder are followed in none of them.

What the check of a study found is kept in its folder, so that whoever goes on with the same study need not check it
again. It counts for the same study, the same files of data and weights, the same versions and the same machine only. A
study with code of the user's, by import paths or plug-ins, is checked in every call, for its code may have changed; the
workers of one call rely on what that call has checked.
"""

from __future__ import annotations

import glob
import hashlib
import hmac
import json
import os
import platform
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from splitfed.core import digests
from splitfed.core.errors import InvalidInput
from splitfed.models.import_paths import NameResolver
from splitfed.registry import PLUGINS
from splitfed.study.config.schema import read_toml
from splitfed.study.config.search_space import Assignment, flatten_choices
from splitfed.training.checkpoint import write_atomic

MARK, SOURCES, CHECKED = "mark.json", "code", "checked.json"
_OF_RUN = ("run.json", "result.json")
KEY_BYTES = 32
MOST_FILES = 10_000
"""Files of one folder that the check of a study looks at."""

# What may reach outside of a folder. Keys of a study whose text says what is run; keys whose table, or list of tables,
# says so by its `name`; those whose table may hold one such table a role, whatever the role is called.
NAMES = ("model", "schedule", "aggregation", "rule", "loss", "metric", "transform")
NAMED = (*NAMES, "data", "topology", "method", "defense", "combine", "attack", "optimizer", "callback")
BY_ROLE = ("optimizer",)


def import_paths(config: Any, place: str = "") -> Iterator[str]:
    """Yield every import path of the study `config`, wherever one could be followed, in tables at any depth.

    `place`: the key under which `config` itself stands.
    """
    for key, value in config.items() if isinstance(config, Mapping) else ():
        for one in flatten_choices(value):
            if isinstance(one, str) and ":" in one and (key in NAMES or (key == "name" and place in NAMED)):
                yield one
            deeper = ({key: one}, place) if isinstance(one, list) else (one, place if place in BY_ROLE else key)
            yield from import_paths(*deeper)


def _files_outside(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Return every text of the study that, taken for a path, leads out of `folder`: of data, weights or keys."""
    return [text for text in _texts(config) if text.startswith("~") or path_inside(folder, text) is None]


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in `value`, in tables and lists at any depth."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ():
        yield from _texts(inner)


def _addresses(config: Mapping[str, Any]) -> list[str]:
    """Return what the study connects to: a storage that its search shares with other machines, a page of its runs."""
    search = config.get("search")
    storage = search.get("storage") if isinstance(search, Mapping) else None
    tables = [one for one in flatten_choices(config.get("callback")) if isinstance(one, Mapping)]
    online = ["wandb.ai" for one in tables if one.get("name") == "wandb" and one.get("mode") == "online"]
    return [*([storage] if isinstance(storage, str) else []), *online[:1]]


def _reach(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Return what the study would do outside of `folder`, in words."""
    imported, read = dict.fromkeys(import_paths(config)), dict.fromkeys(_files_outside(folder, config))
    connected = (f"connect to {address!r}" for address in _addresses(config))
    return [*(f"import {path!r}" for path in imported), *(f"read {path!r}" for path in read), *connected]


def is_results(folder: Path) -> bool:
    """Return whether `folder`, or one that it lies in, is that of a run or of a study that was begun.

    One file of those that a run or a study leaves is enough. Of the folders around it, the user's home, the folder of
    temporary files, the root of the file system and what is above them do not count: anything may lie there.
    """
    home, ends = folder.resolve(), {Path(os.path.realpath(os.path.expanduser("~")))}
    with suppress(OSError):  # there is no folder for temporary files
        ends.add(Path(os.path.realpath(tempfile.gettempdir())))
    for place in (home, *home.parents):
        if place != home and (place == place.parent or place in ends):
            return False
        if _holds_results(place):
            return True
    return False


def _holds_results(folder: Path) -> bool:
    """Return whether a study or a run has left a file in `folder`; what cannot be read is none."""
    try:
        if any((folder / name).is_file() for name in ("study.db", *_OF_RUN)):
            return True
        config, runs = folder / "config.toml", folder / "runs"
        if config.is_file() and digests.COMMENT.encode() in config.read_bytes():
            return True
        # Other programs have a folder of this name too.
        return runs.is_dir() and any((run / name).is_file() for run in runs.iterdir() for name in (*_OF_RUN, MARK))
    except OSError:
        return False


def code_of(folder: Path, config: Mapping[str, Any], trust: bool) -> NameResolver:
    """Return where the import paths of the study `config`, found in the results `folder`, may lead.

    Raises `InvalidInput` where it reaches outside of the folder, is not this user's own, and `trust` is not given.
    """
    sources = folder / SOURCES
    if trust:
        return NameResolver(sources if sources.is_dir() else folder)
    check_links(folder)
    if not (reached := _reach(folder, config)):
        return NameResolver(
            refusal=str(refusal(folder, "its configuration was not read as it is used", "import a module"))
        )
    files, reason = _check_mark(folder, config)
    if files is None:
        raise refusal(folder, reason, " and ".join(reached[:3]) + (", ..." if len(reached) > 3 else ""))
    return NameResolver(sources, files)


def check_links(folder: Path) -> None:
    """Refuse a folder with a link that leads out of it, where whoever made it could have files read or written."""
    if (link := find_link_out(folder)) is not None:
        raise refusal(folder, "it holds a link that leads out of it", f"follow {link!r}")


def is_own(folder: Path) -> bool:
    """Return whether the study in `folder` has a mark of this user's."""
    path = folder / "config.toml"
    return path.is_file() and _check_mark(folder, read_toml(path, digests.STUDY_CONFIG))[0] is not None


def write_mark(folder: Path, sources: Mapping[str, bytes], written: Mapping[str, Any] | None = None) -> None:
    """Mark the run or the study in `folder` as this user's own, where it reaches outside or has a database, and keep
    its `sources` there.

    `written`: of a study, what the user wrote, which says the same as the configuration in the folder. Where no key can
    be kept there is no mark, and the folder will need `--trust` like anybody else's.
    """
    config = read_toml(folder / "config.toml")
    if "search" not in config and not _reach(folder, config):
        return
    for name, content in sources.items():
        write_atomic(folder / SOURCES / name, content)
    hashes = {name: digests.of(content) for name, content in sources.items()}
    named = {"mark": config, **({} if written is None else {"study": written})}
    with suppress(NoKey):
        key = get_or_make_key()
        marks = {name: _signature(key, signed, hashes) for name, signed in named.items()}
        write_atomic(folder / MARK, json.dumps({"files": hashes, **marks}, indent=1).encode())


def read_own_files(folder: Path) -> dict[str, bytes] | None:
    """Return the Python files kept in the run's `folder` if it has a mark of this user's, None if it has not."""
    files, _ = _check_mark(folder, read_toml(folder / "config.toml", digests.RUN_CONFIG))
    return None if files is None else {name: (folder / SOURCES / name).read_bytes() for name in files}


def _check_mark(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, str] | None, str]:
    """Return the Python files that the mark in `folder` vouches for, with their hashes; or None, and why not."""
    if not (folder / MARK).is_file():
        return None, "it has no mark of yours"
    try:
        marks = json.loads((folder / MARK).read_text("utf-8"))
        files = {str(name): str(digest) for name, digest in marks["files"].items()}
        signature = _signature(read_key(), config, files)
        valid = any(hmac.compare_digest(signature, there) for there in (marks["mark"], marks.get("study", "")))
    except NoKey as error:
        return None, str(error)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None, f"its {MARK} cannot be read"
    if not valid:
        return None, "its mark is not yours, or its configuration has changed since"
    for name, digest in files.items():
        path = path_inside(folder / SOURCES, name)
        if path is None or digests.of_file(path) != digest:
            return None, f"its {SOURCES}/{name} has changed since it was marked"
    return files, ""


def _signature(key: bytes, config: Mapping[str, Any], files: Mapping[str, str]) -> str:
    """Return the keyed hash of all that decides what is run; attacks may be added, but for those of import paths."""
    attacks = config.get("attack")
    followed = [one for one in attacks if any(import_paths({"attack": one}))] if isinstance(attacks, list) else []
    held = {key: value for key, value in config.items() if key != "attack"} | ({"attack": followed} if followed else {})
    text = json.dumps(["splitfed run 1", held, files], sort_keys=True, default=str)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def refusal(folder: Path, reason: str, what: str) -> InvalidInput:
    """Return the error for a folder that is not known to be this user's own, and `what` would happen."""
    return InvalidInput(
        f"{str(folder)!r} is not known to be your own ({reason}), and would {what}: "
        "that can run code or read files of yours; add --trust if you trust whoever made it, in Python trust=True"
    )


class NoKey(Exception):
    """There is no key that could be used; the text says why."""


def key_file() -> Path:
    """Return where the user's key is kept: splitfed/key below the folder of local state."""
    home = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_STATE_HOME", "")
    if not os.path.isabs(home):
        try:
            home = str(Path.home() / ".local" / "state")
        except RuntimeError as error:
            raise NoKey(f"there is no home folder for a key ({error})") from None
    return Path(home) / "splitfed" / "key"


def read_key() -> bytes:
    """Return the key. Raises `NoKey` where there is none, or one that others could have read or written."""
    path = key_file()
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            about, content = os.fstat(descriptor), file.read(KEY_BYTES + 1)
    except OSError as error:
        raise NoKey(f"no key can be read from {str(path)!r} ({error.strerror})") from None
    if not stat.S_ISREG(about.st_mode) or len(content) != KEY_BYTES:
        raise NoKey(f"{str(path)!r} holds no key; remove it")
    if sys.platform != "win32" and (about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077):
        raise NoKey(f"{str(path)!r} is open to other users; remove it, or: chmod 600")
    return content


def get_or_make_key() -> bytes:
    """Return the key, made on first use, for this user's eyes alone. Raises `NoKey` where that fails."""
    path = key_file()
    with suppress(OSError):
        path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        if not path.exists():
            # Whole before it has its name, which only one process can give: all read the same key.
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".key.")
            try:
                with open(descriptor, "wb") as file:
                    file.write(secrets.token_bytes(KEY_BYTES))
                    file.flush()
                    os.fsync(descriptor)
                os.link(temporary, path)
            finally:
                os.unlink(temporary)
    return read_key()


def path_inside(folder: Path, name: str) -> Path | None:
    """Return the path of `name`, written in a file of `folder`; None where it lies elsewhere, also by a link."""
    path = _resolve(folder / name)
    return path if path is not None and path.is_relative_to(folder.resolve()) else None


def is_plain_name(name: object) -> bool:
    """Return whether `name` is that of an entry of a folder, and no path, the folder itself or the one above it."""
    text = name if isinstance(name, str) else ""
    return text not in ("", ".", "..") and not any(sign in text for sign in "/\\\0")


def find_link_out(folder: Path) -> str | None:
    """Return the first link below `folder` that leads out of it, relative to `folder`; None where there is none.

    A folder that is a link itself is followed: whoever names it means what it leads to.
    """
    home = folder.resolve()
    for place, folders, files in os.walk(home):
        for path in (Path(place, name) for name in sorted((*folders, *files))):
            end = _resolve(path) if path.is_symlink() else path
            if end is None or not end.is_relative_to(home):
                return path.relative_to(home).as_posix()
    return None


def _resolve(path: Path) -> Path | None:
    """Return where `path` leads; None where that cannot be said, as of links in a circle."""
    try:
        end = path.resolve()
        # From Python 3.13 on `resolve` raises nothing where links lead in a circle.
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            end.stat()
        return end
    except (OSError, RuntimeError, ValueError):
        return None


@dataclass(frozen=True)
class Checked:
    """What a check found: `key` says of what, `refused` the runs that are left out, as pairs of name and reason.

    `setting`: of a search, the first setting that fits.
    """

    key: str
    refused: tuple[tuple[str, str], ...] = ()
    setting: Assignment | None = None


def key_of(resolved: Mapping[str, Any]) -> str:
    """Return what tells the check of the study `resolved`, its tables with all defaults, from any other check."""
    files = {str(path): [found.st_size, found.st_mtime_ns] for path, found in _files(resolved)}
    text = json.dumps([resolved, files, _versions()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def write_checked(folder: Path, found: Checked) -> None:
    """Keep what was found in the study's `folder`, unless it is there already."""
    if read_checked(folder) != found:
        document = {"key": found.key, "refused": [list(pair) for pair in found.refused], "setting": found.setting}
        write_atomic(folder / CHECKED, digests.json_with_digest(document))


def read_checked(folder: Path) -> Checked | None:
    """Return what a check found that the study's `folder` keeps; None where there is none that can be read."""
    try:
        found = digests.read(folder / CHECKED, "")
        refused = tuple((str(name), str(reason)) for name, reason in found["refused"])
        return Checked(str(found["key"]), refused, found["setting"])
    except (digests.Damaged, OSError, KeyError, TypeError, ValueError):
        return None  # it is written again after the next check


def recall(folder: Path | None, resolved: Mapping[str, Any], token: str = "") -> Checked | None:
    """Return what an earlier check of the study `resolved` found, where `folder` keeps it and it still counts.

    `token`: the key by which the process that started this one knows what it has checked; "" for none.
    """
    if folder is None or (found := read_checked(folder)) is None or found.key != key_of(resolved):
        return None
    own_code = bool(PLUGINS) or any(import_paths(resolved))
    return None if own_code and token != found.key else found


def _files(resolved: Mapping[str, Any]) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the files that tables name by absolute paths, and those in folders that they name so."""
    for path in (Path(text) for text in _texts(resolved) if os.path.isabs(text)):
        with suppress(OSError, ValueError):
            for file in sorted(islice(path.rglob("*"), MOST_FILES)) if path.is_dir() else [path]:
                yield file, file.stat()


@cache
def _versions() -> str:
    """Return a digest of all that is installed, of the source of this package, and of the device."""
    installed = sorted(path.name for place in sys.path for path in Path(place).glob("*.dist-info"))
    home = Path(__file__).parents[1]
    files = sorted(glob.glob("**/*.py", root_dir=home, recursive=True))
    source = [[file, (home / file).stat().st_size, (home / file).stat().st_mtime_ns] for file in files]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    told = [sys.version, platform.platform(), torch.__version__, device, installed, source]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()
