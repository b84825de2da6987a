"""Text from a file as it is shown to people: what would be invisible, or turn other text around, is spelled out."""

from __future__ import annotations

import unicodedata
from typing import Any

_ALLOWED = frozenset("\n\r\t\u200c\u200d")  # joiners belong to the spelling of words and to emoji
_HIDDEN = ("Cc", "Cf", "Cs")


def make_visible(value: Any) -> Any:
    """Return plain data with every text in it, keys too, as `escape_invisible` shows it."""
    if isinstance(value, str):
        return escape_invisible(value)
    if isinstance(value, dict):
        return {escape_invisible(str(key)): make_visible(item) for key, item in value.items()}
    return [make_visible(item) for item in value] if isinstance(value, list) else value


def escape_invisible(text: str) -> str:
    """Return `text` with control characters, marks of writing direction and lone surrogates as `\\u202e`.

    An SVG file with one of them could not be read, and a mark of direction lets a name read as another one.
    """
    return text if text.isascii() and text.isprintable() else "".join(map(_escape_character, text))


def _escape_character(sign: str) -> str:
    hidden = unicodedata.category(sign) in _HIDDEN or ord(sign) & 0xFFFE == 0xFFFE
    return f"\\u{ord(sign):04x}" if hidden and sign not in _ALLOWED else sign
