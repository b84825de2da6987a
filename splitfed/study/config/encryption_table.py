"""The tables `[encryption]` of a study: each makes settings, a list in place of one value a grid of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from splitfed.core.encryption_settings import Encryption
from splitfed.core.errors import InvalidInput, unknown
from splitfed.study.config.cell import EncryptionSetting
from splitfed.study.config.lookup import StudyReader
from splitfed.study.config.parameters import GridPoint, Parameter, check_parameters, parameters_of
from splitfed.study.config.schema import EncryptionTable

PLAIN = "none"
"""The protocol of a run that is not encrypted."""

UNTOLD = ("protocol", "key_folder", "accept_leak")
"""Fields that stand in no label beside the protocol: where keys lie does not tell two settings apart."""


def expand_encryption(
    reader: StudyReader, where: str, table: EncryptionTable, base: Path
) -> tuple[dict[str, Any], list[EncryptionSetting]]:
    """Return an `[encryption]` table with defaults, and every setting of its grid.

    A relative `key_folder` starts from `base`.
    """
    if table.protocol == PLAIN:
        for key in [*table.extra, *([] if table.defended else ["defended"])]:
            reader.mistakes.add(f"{where}.{key}", unknown("key", key, ["protocol"]))
        return {"protocol": PLAIN}, [EncryptionSetting(where)]
    allowed = parameters_of(Encryption)
    # As TOML gives them: a folder as text, without null.
    allowed["key_folder"] = Parameter("key_folder", Path, None)
    given = {"protocol": table.protocol, **table.extra}
    found = check_parameters(reader.mistakes, where, allowed, given, keys=["defended"], grid=True, base=base)
    settings = [_setting(reader, where, point, table.defended) for point in found.points]
    written = found.written | ({} if table.defended else {"defended": False})
    return written, [setting for setting in settings if setting is not None]


def _setting(reader: StudyReader, where: str, point: GridPoint, defended: bool) -> EncryptionSetting | None:
    """Return what a point of the grid means; None after a mistake, which is put into the field that it is about."""
    told = {key: value for key, value in point.in_label.items() if key not in UNTOLD}
    try:
        settings = Encryption(**point.full)
    except InvalidInput as error:
        text = str(error)
        blamed = [key for key in reversed(point.full) if f"{key}=" in text] or [k for k in point.full if k in text]
        reader.mistakes.add(f"{where}.{blamed[0]}" if blamed else where, error)
        return None
    return EncryptionSetting(where, replace(settings, key_folder=None), told, point.full.get("key_folder"), defended)
