"""The database of a search, an SQLite file of Optuna: whether it may be opened, and opened so that all may wait for it.

SQLite does what a file tells it to: it rolls back a journal that lies beside a database and deletes the file that the
journal names, and runs the triggers and views that the database holds. So whose the file is, and what lies in it and
beside it, is looked at before anything else is asked of it, and that without SQLite's help.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from optuna.storages import RDBStorage
from sqlalchemy.pool import NullPool, StaticPool

from splitfed.core.digests import Damaged
from splitfed.core.errors import InvalidInput, SplitfedError, describe_error
from splitfed.study.run import failures
from splitfed.study.trust import is_own, refusal

AGAIN = "delete it and go on with --resume: what is finished is kept in runs/"
LOCKED_SECONDS = 600.0
"""For how long a process waits for an SQLite file to which another one is writing, which may have been suspended."""

_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
_SCHEMA = "SELECT type, name, coalesce(sql, '') FROM sqlite_master"
_BESIDE = ("-journal", "-wal", "-shm")


def check_database(path: Path, *, own: bool) -> None:
    """Refuse the database at `path` where opening it could do anything but read and write trials; nothing is opened.

    `own`: whether this user made it; then what a crash left beside it is taken up, but for a journal that names
    another file, which SQLite would delete. A database of somebody else must have nothing beside it and Optuna's tables
    as this version of Optuna makes them, and nothing else in it. Raises `InvalidInput`.
    """
    for beside in (path.with_name(path.name + end) for end in _BESIDE):
        if not beside.exists() and not beside.is_symlink():
            continue
        if not own:
            raise InvalidInput(f"{beside} lies beside a database of somebody else and would be played back; delete it")
        if beside.name.endswith("-journal") and beside.read_bytes()[-8:] == _JOURNAL_MAGIC:
            raise InvalidInput(f"{beside} names another file, which would be deleted; delete the journal")
    if path.is_file() and not own:
        # Unchangeable: neither a lock nor a journal is looked at, and nothing is written.
        address = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
        try:
            with closing(sqlite3.connect(address, uri=True)) as database:
                found = _objects(database.execute(_SCHEMA).fetchall())
        except sqlite3.Error as error:
            raise Damaged(path, AGAIN, describe_error(error)) from None
        strange = sorted(found - _optunas_objects())
        if strange:
            kind, name, _ = strange[0]
            raise InvalidInput(
                f"{path} holds a {kind} {name!r} that is not as Optuna makes it, and could run commands; {AGAIN}"
            )


def check_search_database(folder: Path, trust: bool) -> None:
    """Refuse to go on with a search in `folder` whose database is not this user's own, unless `trust` is given.

    Whatever is said of it, it must hold nothing but trials: see `check_database`.
    """
    path = folder / "study.db"
    if not any(folder.glob(f"{path.name}*")):
        return
    own = is_own(folder)
    if not own and not trust:
        raise refusal(folder, "it has no mark of yours that is valid", f"open its database {path.name}")
    check_database(path, own=own)


@contextmanager
def detect_damage(path: Path) -> Iterator[None]:
    """Say that the database in the file `path` is damaged where the block cannot read it; raises `Damaged` then.

    One with anything in it but tables and indices of Optuna's names is damaged, too.
    """
    try:
        if path.is_file():
            with closing(sqlite3.connect(path.absolute(), timeout=LOCKED_SECONDS)) as database:
                # Before anything that would call a trigger or a view.
                known = {(kind, name) for kind, name, _ in _optunas_objects()}
                strange = sorted(
                    {(kind, name) for kind, name, _ in _objects(database.execute(_SCHEMA).fetchall())} - known
                )
                if strange:
                    raise Damaged(path, AGAIN, f"it holds a {strange[0][0]} {strange[0][1]!r}, which is not Optuna's")
                found = database.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise Damaged(path, AGAIN, " ".join(str(found).split()))
        yield
    except SplitfedError:
        raise
    except Exception as error:  # what a damaged file makes of the libraries that read it can be any error
        if failures.explain_failure(error) is not None:
            raise
        raise Damaged(path, AGAIN, describe_error(error)) from error


def open_database(path: Path) -> RDBStorage:
    """Open Optuna's storage in the SQLite file `path`, made if it is not there."""
    # A connection may be closed by another thread than the one that opened it.
    connect = partial(sqlite3.connect, path.absolute(), timeout=LOCKED_SECONDS, check_same_thread=False)
    # The address names no file: printed into it, a path with ?, %, # or a brace would name another one. Without a pool
    # every connection is closed when it was used.
    return RDBStorage("sqlite://", engine_kwargs={"creator": connect, "poolclass": NullPool})


@cache
def _optunas_objects() -> frozenset[tuple[str, str, str]]:
    """Return what a database holds that this version of Optuna has just made."""
    fresh = RDBStorage("sqlite://", engine_kwargs={"poolclass": StaticPool})
    with fresh.engine.connect() as connection:
        found = _objects(connection.exec_driver_sql(_SCHEMA).fetchall())
    fresh.engine.dispose()
    return found


def _objects(rows: Sequence[Any]) -> frozenset[tuple[str, str, str]]:
    return frozenset((str(kind), str(name), " ".join(str(definition).split())) for kind, name, definition in rows)
