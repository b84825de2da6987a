"""The tables of a study of how topologies are computed: each makes settings, a list in place of a value a grid of them.

Their key, and their parameters, are those of the secure computation that is registered.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from splitfed.core.errors import unknown
from splitfed.core.secure_computation import SecureComputation
from splitfed.registry import EXTENSIONS, resolve
from splitfed.study.config.lookup import StudyReader
from splitfed.study.config.parameters import GridPoint, Parameter, check_parameters, parameters_of
from splitfed.study.config.run_spec import COMPUTATION, ComputationSetting, NamedAlgorithm
from splitfed.study.config.schema import ComputationTable

PLAIN = "none"
"""The protocol of a run in plain."""

UNTOLD = ("protocol", "key_folder", "accept_leak")
"""Fields that stand in no label beside the protocol: where keys lie does not tell two settings apart."""


def expand_computation(
    reader: StudyReader, where: str, table: ComputationTable, base: Path
) -> tuple[dict[str, Any], list[ComputationSetting]]:
    """Return such a table with defaults, and every setting of its grid.

    A relative `key_folder` starts from `base`.
    """
    if table.protocol == PLAIN:
        for key in [*table.extra, *([] if table.defended else ["defended"])]:
            reader.mistakes.add(f"{where}.{key}", unknown("key", key, ["protocol"]))
        return {"protocol": PLAIN}, [ComputationSetting(where)]
    kind: type[SecureComputation] = resolve(EXTENSIONS["computations"][COMPUTATION])
    allowed = parameters_of(kind)
    # As TOML gives them: a folder as text, without null.
    allowed["key_folder"] = Parameter("key_folder", Path, None)
    given = {"protocol": table.protocol, **table.extra}
    found = check_parameters(reader.mistakes, where, allowed, given, keys=["defended"], grid=True, base=base)
    settings = [_setting(reader, where, kind, point, table.defended) for point in found.points]
    written = found.written | ({} if table.defended else {"defended": False})
    return written, [setting for setting in settings if setting is not None]


def _setting(
    reader: StudyReader, where: str, kind: type[SecureComputation], point: GridPoint, defended: bool
) -> ComputationSetting | None:
    """Return what a point of the grid means; None after a mistake, which is put into the field that it is about."""
    told = {key: value for key, value in point.in_label.items() if key not in UNTOLD}
    with reader.mistakes.blaming(where, point.full):
        secure = kind(**point.full).with_key_folder(None)
        part = NamedAlgorithm(COMPUTATION, secure.label, point.full, told)
        return ComputationSetting(where, (part,), secure, point.full.get("key_folder"), defended)
    return None
