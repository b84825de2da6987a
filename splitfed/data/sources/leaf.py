"""LEAF: rows by user (FEMNIST: by writer) in JSON files, as the LEAF benchmark writes them.

Paper: Caldas, Duddu, Wu, Li, Konečný, McMahan, Smith, Talwalkar, "LEAF: a benchmark for federated settings", 2018.

Format: files such as all_data_0.json, each {"users": [name, ...], "num_samples": [rows, ...], "user_data": {name: {"x":
[row, ...], "y": [label, ...]}}}, where a row is a list of numbers. Data sets of LEAF whose rows are text are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from splitfed.core.errors import InvalidInput, check_count, first_line
from splitfed.core.tasks import classification
from splitfed.data.conversion import as_rows
from splitfed.data.dataset import Dataset
from splitfed.data.from_python import RowType, from_arrays
from splitfed.data.sources.files import existing_file


def leaf(
    path: str | Path,
    shape: list[int] | tuple[int, ...] | None = None,
    classes: int | None = None,
    users: int | None = None,
    least: int = 1,
    dtype: RowType = "float32",
) -> Dataset:
    """Return the rows of all users in `path`, a file or a folder of .json files, with the user's number as domain.

    `shape` of a row, such as (1, 28, 28) for FEMNIST (default: columns); with it, numbers in [0, 1] get the value range
    of images. `classes`: the number of classes (default: the largest label + 1). `users`: how many to keep, the first
    ones with at least `least` rows. `dtype`: "int64" keeps whole numbers, such as token ids. `.clients(n,
    by_domain=True)` makes a client of each. Raises `InvalidInput` that names the file and the user.
    """
    check_count("least", least, low=1)
    for name, value in (("users", users), ("classes", classes)):
        if value is not None:
            check_count(name, value, low=1)
    source = Path(path).expanduser()
    files = sorted(source.glob("*.json")) if source.is_dir() else [existing_file(source)]
    if not files:
        raise InvalidInput(f"{source} has no .json file; expected files such as all_data_0.json")
    kept: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for file in files:
        for user, x, y in _users(file):
            if user in kept:
                raise InvalidInput(f"{file} has user {user!r} twice, or again after an earlier file")
            if len(y) >= least and (users is None or len(kept) < users):
                width = next(iter(kept.values()), (x, y))[0].shape[1]
                if x.shape[1] != width:
                    raise InvalidInput(f"{file}: user {user!r} has rows of {x.shape[1]} numbers, not {width}")
                kept[user] = (as_rows(f"{file}: x of user {user!r}", x, dtype).numpy() if dtype == "float32" else x), y
    if len(kept) < (users or 1):
        raise InvalidInput(f"{source} has {len(kept)} users with at least {least} rows; expected {users or 1} or more")
    x, y = (np.concatenate(parts) for parts in zip(*kept.values(), strict=True))
    image = shape is not None and dtype == "float32" and x.min() >= 0 and x.max() <= 1
    if shape is not None and (not shape or math.prod(shape) != x.shape[1]):
        raise InvalidInput(f"shape={tuple(shape)} is not allowed; {source} has rows of {x.shape[1]} numbers")
    return from_arrays(
        x if shape is None else x.reshape(-1, *shape),
        y,
        task=classification(max(2, int(y.max()) + 1) if classes is None else classes),
        name=source.resolve().stem,
        value_range=(0.0, 1.0) if image else None,
        domains=np.repeat(np.arange(len(kept)), [len(own) for _, own in kept.values()]),
        dtype=dtype,
    )


def _users(file: Path) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield name, x (rows, numbers) and y (rows,) int64 of every user in `file`."""
    try:
        known = json.loads(existing_file(file).read_bytes())
    except InvalidInput:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{file} is no JSON: {first_line(error)}") from None
    if not isinstance(known, Mapping) or not isinstance(known.get("users"), list):
        raise InvalidInput(f"{file} has no list of users; expected users, num_samples and user_data")
    rows, counts = known.get("user_data"), known.get("num_samples")
    if not isinstance(rows, Mapping) or not isinstance(counts, list) or len(counts) != len(known["users"]):
        raise InvalidInput(f"{file} has no user_data, or not a number in num_samples for each of its users")
    if unlisted := [user for user in rows if user not in known["users"]]:
        raise InvalidInput(f"{file} has rows of user {unlisted[0]!r}, who is not in its list of users")
    for user, count in zip(known["users"], counts, strict=True):
        own = rows.get(user) if isinstance(user, str) else None
        if not isinstance(own, Mapping) or not {"x", "y"} <= set(own):
            raise InvalidInput(f"{file}: user {user!r} has no x and y in user_data")
        x, y = (_numbers(file, user, part, own[part]) for part in ("x", "y"))
        if x.ndim != 2 or y.ndim != 1 or len(x) != len(y) or len(y) != count or not x.size:
            raise InvalidInput(
                f"{file}: user {user!r} has x of shape {x.shape}, y of shape {y.shape} and num_samples {count}; "
                "expected (rows, numbers), (rows,) and rows"
            )
        if y.min() < 0 or bool((y != np.rint(y)).any()):
            raise InvalidInput(f"{file}: user {user!r} has a label that is no class; expected 0, 1, ...")
        yield user, x, y.astype(np.int64)


def _numbers(file: Path, user: str, part: str, value: Any) -> np.ndarray:
    try:
        found = np.asarray(value)
    except ValueError:
        raise InvalidInput(f"{file}: user {user!r} has rows of different lengths in {part}") from None
    if found.dtype.kind not in "iuf" or not np.isfinite(found).all():
        raise InvalidInput(f"{file}: user {user!r} has values other than finite numbers in {part}")
    return found
