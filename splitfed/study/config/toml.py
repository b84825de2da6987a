"""Writes TOML (Python reads it only): tables of plain values, arrays of tables, inline tables below."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitfed.core.errors import InvalidInput, short

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dumps(document: Mapping[str, Any]) -> str:
    """Return `document` (table name -> table, or list of tables) as TOML; values that are None are left out.

    What is no table stands in front, as TOML has it.
    """
    plain = {name: found for name, found in document.items() if not _is_table(found)}
    blocks = ["\n".join(f"{key} = {value}" for key, value in _pairs(plain))] if plain else []
    for name, content in document.items():
        if name in plain:
            continue
        tables = content if isinstance(content, list) else [content]
        head = f"[[{_key(name)}]]" if isinstance(content, list) else f"[{_key(name)}]"
        blocks += ["\n".join([head, *(f"{k} = {v}" for k, v in _pairs(table))]) for table in tables]
    return "\n\n".join(blocks) + "\n"


def _is_table(content: Any) -> bool:
    return isinstance(content, Mapping) or (isinstance(content, list) and all(isinstance(t, Mapping) for t in content))


def _pairs(table: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(_key(key), _value(value)) for key, value in table.items() if value is not None]


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _text(value: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped as well.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    match value:
        case Mapping():
            return "{" + ", ".join(f"{k} = {v}" for k, v in _pairs(value)) + "}"
        case list() | tuple():
            return "[" + ", ".join(_value(item) for item in value if item is not None) + "]"
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str() | Path():
            return _text(str(value))
    raise InvalidInput(
        f"{short(value)} is not allowed in a study; expected text, a number, true or false, a list or a table"
    )
