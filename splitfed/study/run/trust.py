"""Whose a folder of results is, and whether its code may run: the user's own may, anybody else's needs `--trust`.

A study that reaches outside of its folder, by import paths or by files of data or weights, leaves a mark in its results
and in the folder of every run: a keyed hash, with a key that only this user can read, of the configuration and of the
Python files that its paths named, which are kept beside it. Whoever has no key cannot make such a mark, and none
outlives a change.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from splitfed.core import digests
from splitfed.core.errors import InvalidInput
from splitfed.models.import_paths import Code
from splitfed.registry import EXTENSIONS, TABLES, load, resolve
from splitfed.study.config.parameters import holds_type, parameters_of
from splitfed.study.config.schema import read_toml
from splitfed.study.config.search_space import flatten_choices
from splitfed.study.report.contained import find_link_out, path_inside
from splitfed.study.run.user_key import NoKey, get_or_make_key, read_key
from splitfed.training.checkpoint import write_atomic

MARK, SOURCES = "mark.json", "code"
_OF_RUN = ("run.json", "result.json")

NAMES = ("model", "schedule", "aggregation", "rule", "loss", "metric", "transform")
"""Keys of a study whose text says what is run."""

_READING = ("data", "models")
"""Kinds of algorithms that read files."""

NAMED = (*NAMES, "data", "topology", "method", "defense", "combine", "attack", "optimizer", "callback")
"""Keys whose table, or list of tables, says so by its `name`."""

BY_ROLE = ("optimizer",)
"""Those whose table may hold one such table a role, whatever the role is called."""


def is_results(folder: Path) -> bool:
    """Return whether `folder`, or one that it lies in, is that of a run or of a study that was begun.

    One file of those that a run or a study leaves is enough. Of the folders around it, the user's home, the folder of
    temporary files, the root of the file system and what is above them do not count: anything may lie there.
    """
    home = folder.resolve()
    ends = {place for place in (_resolve(Path.home), _resolve(lambda: Path(tempfile.gettempdir()))) if place}
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


def _resolve(place: Callable[[], Path]) -> Path | None:
    try:
        return place().resolve()
    except (OSError, RuntimeError):  # no home is known, or no folder for temporary files
        return None


def code_of(folder: Path, config: Mapping[str, Any], trust: bool) -> Code:
    """Return where the import paths of the study `config`, found in the results `folder`, may lead.

    Raises `InvalidInput` where it reaches outside of the folder, is not this user's own, and `trust` is not given.
    """
    sources = folder / SOURCES
    if trust:
        return Code(sources if sources.is_dir() else folder)
    check_links(folder)
    imported, read = dict.fromkeys(import_paths(config)), _files_outside(folder, config)
    connected = (f"connect to {address!r}" for address in _addresses(config))
    reached = [*(f"import {path!r}" for path in imported), *(f"read {path!r}" for path in read), *connected]
    if not reached:
        return Code(refusal=str(refusal(folder, "its configuration was not read as it is used", "import a module")))
    files, reason = _check_mark(folder, config)
    if files is None:
        raise refusal(folder, reason, " and ".join(reached[:3]) + (", ..." if len(reached) > 3 else ""))
    return Code(sources, files)


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
    if "search" not in config and not [*import_paths(config), *_files_outside(folder, config), *_addresses(config)]:
        return
    for name, content in sources.items():
        write_atomic(folder / SOURCES / name, content)
    hashes = {name: digests.of(content) for name, content in sources.items()}
    try:
        key = get_or_make_key()
    except NoKey:
        return
    named = {"mark": config, **({} if written is None else {"study": written})}
    marks = {name: _signature(key, signed, hashes) for name, signed in named.items()}
    write_atomic(folder / MARK, json.dumps({"files": hashes, **marks}, indent=1).encode())


def read_own_files(folder: Path) -> dict[str, bytes] | None:
    """Return the Python files kept in the run's `folder` if it has a mark of this user's, None if it has not."""
    files, _ = _check_mark(folder, read_toml(folder / "config.toml", digests.RUN_CONFIG))
    return None if files is None else {name: (folder / SOURCES / name).read_bytes() for name in files}


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


def _files_outside(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield every path of data, of a model's weights or of keys that lies outside of `folder`, in tables at any depth.

    Which keys are paths is said by the types of the parameters of all that the study names, wherever it names it.
    """
    tables = list(_tables(config))
    held = (one for table in tables for value in table.values() for one in flatten_choices(value))
    texts = {one for one in held if isinstance(one, str)}
    named = [load(kind, name) for kind in _READING for name in sorted(set(TABLES[kind]) & texts)]
    named += map(resolve, EXTENSIONS["computations"].values())
    allowed = [one for builder in named for one in parameters_of(builder).values()]
    paths = {one.name for one in allowed if is_path(one.hint)}
    for value in (v for table in tables for name in sorted(paths & table.keys()) for v in flatten_choices(table[name])):
        if isinstance(value, str) and (value.startswith("~") or path_inside(folder, value) is None):
            yield value


def is_path(hint: Any) -> bool:
    """Return whether a parameter with this hint is the path of a file or of a folder."""
    return holds_type(hint, Path) or any(get_origin(one) is os.PathLike for one in get_args(hint))


def _tables(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every table in `value`, itself included."""
    if isinstance(value, Mapping):
        yield value
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _tables(inner)


def _addresses(config: Mapping[str, Any]) -> list[str]:
    """Return what the study connects to: a storage that its search shares with other machines, a page of its runs."""
    search = config.get("search")
    storage = search.get("storage") if isinstance(search, Mapping) else None
    tables = [one for one in flatten_choices(config.get("callback")) if isinstance(one, Mapping)]
    online = ["wandb.ai" for one in tables if one.get("name") == "wandb" and one.get("mode") == "online"]
    return [*([storage] if isinstance(storage, str) else []), *online[:1]]


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
        if path is None or not path.is_file() or digests.of(path.read_bytes()) != digest:
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
