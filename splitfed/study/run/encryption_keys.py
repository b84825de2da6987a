"""Where the keys of a study's encrypted runs lie: a folder a run inside `key_folder`, never in the study's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Topology
from splitfed.encryption.backend import import_tenseal
from splitfed.study.config.cell import Cell


def check_keys(cells: Iterable[Cell], folder: Path) -> None:
    """Refuse keys that would lie in `folder`, the study's own, and encrypted runs where TenSEAL is not installed."""
    home = folder.resolve()
    encrypted = [cell for cell in cells if cell.encryption.settings is not None]
    if encrypted:
        import_tenseal()
    for setting in [cell.encryption for cell in encrypted]:
        if setting.key_folder is not None and home in (path := Path(setting.key_folder).resolve(), *path.parents):
            raise InvalidInput(
                f"{setting.where}: key_folder={setting.key_folder!r} lies in {str(folder)!r}, the folder of the "
                "study, which is copied and handed on; keep keys elsewhere"
            )


def with_key_folder(topology: Topology, cell: Cell, folder: Path) -> Topology:
    """Return the topology of the run `cell` in `folder` with the place of its keys, where it keeps them in files."""
    if topology.encryption is None or cell.encryption.key_folder is None:
        return topology
    # By its folder, since a run that is opened again has its own configuration, in which it may have another name.
    own = Path(cell.encryption.key_folder) / folder.resolve().name
    return replace(topology, encryption=replace(topology.encryption, key_folder=own))
