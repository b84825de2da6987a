"""Where the keys of a study's secure computations lie: a folder a run inside `key_folder`, never in the study's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Topology
from splitfed.study.config.run_spec import RunSpec


def check_keys(cells: Iterable[RunSpec], folder: Path) -> None:
    """Refuse keys that would lie in `folder`, the study's own, and computations whose packages are not installed."""
    home = folder.resolve()
    for cell in cells:
        setting = cell.computation
        if setting.secure is not None:
            setting.secure.check_installed()
        if setting.key_folder is not None and home in (path := Path(setting.key_folder).resolve(), *path.parents):
            raise InvalidInput(
                f"{setting.where}: key_folder={setting.key_folder!r} lies in {str(folder)!r}, the folder of the "
                "study, which is copied and shared; keep keys elsewhere"
            )


def with_key_folder(topology: Topology, cell: RunSpec, folder: Path) -> Topology:
    """Return the topology of the run `cell` in `folder` with the place of its keys, where it keeps them in files."""
    if topology.computation is None or cell.computation.key_folder is None:
        return topology
    # By its folder, since a run that is opened again has its own configuration, in which it may have another name.
    own = Path(cell.computation.key_folder) / folder.resolve().name
    return replace(topology, computation=topology.computation.with_key_folder(own))
