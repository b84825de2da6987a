"""Text from a file as it is shown to people: what would be invisible, or turn other text around, is spelled out."""

from __future__ import annotations

import unicodedata
from typing import Any

_KEPT = frozenset("\n\r\t\u200c\u200d")  # joiners belong to the spelling of words and to emoji
_HIDDEN = ("Cc", "Cf", "Cs")


def plain(value: Any) -> Any:
    """Return plain data with every text in it, keys too, as `visible` shows it."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {visible(str(key)): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def visible(text: str) -> str:
    """Return `text` with control characters, marks of writing direction and lone surrogates as `\\u202e`.

    An SVG file with one of them could not be read, and a mark of direction lets a name read as another one.
    """
    return text if text.isascii() and text.isprintable() else "".join(map(_shown, text))


def _shown(sign: str) -> str:
    hidden = unicodedata.category(sign) in _HIDDEN or ord(sign) & 0xFFFE == 0xFFFE
    return f"\\u{ord(sign):04x}" if hidden and sign not in _KEPT else sign
