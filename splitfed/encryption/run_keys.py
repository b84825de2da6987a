"""The key pairs of a run: one a client or one for all, kept in files of their own where the run is to be resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from splitfed.core.encryption_settings import Encryption
from splitfed.core.errors import InvalidInput
from splitfed.encryption.keys import KeyHolder, load_keys, make_keys
from splitfed.encryption.parameters import preset

SHARED = "clients"


class RunKeys:
    """Makes the key pairs of the parties `holders`, or loads them from the key folder where they are there.

    Raises `InvalidInput` for a key file that is of other parameters, corrupted, or open to other users.
    """

    def __init__(self, settings: Encryption, holders: Sequence[str]) -> None:
        self._settings = settings
        self._folder = None if settings.key_folder is None else Path(settings.key_folder).expanduser()
        names = [SHARED] if settings.keys == "shared" else list(holders)
        self._loaded: set[str] = set()
        self._pairs = {name: self._make(name) for name in names}
        self._name_of = dict.fromkeys(holders, SHARED) if settings.keys == "shared" else {h: h for h in holders}

    def of(self, party: str) -> KeyHolder:
        """Return the key pair of `party`."""
        return self._pairs[self._name_of[party]]

    def groups(self) -> dict[str, tuple[str, ...]]:
        """Return the parties of each key pair: the first of them -> all of them."""
        parties: dict[str, list[str]] = {}
        for party, name in self._name_of.items():
            parties.setdefault(name, []).append(party)
        return {mine[0]: tuple(mine) for mine in parties.values()}

    def write(self) -> None:
        """Write the keys that are in no file yet into the key folder, where there is one."""
        for name, pair in self._pairs.items():
            if self._folder is not None and name not in self._loaded:
                try:
                    self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                except OSError as error:
                    where = f"key_folder={str(self._folder)!r} cannot be made here ({error.strerror})"
                    raise InvalidInput(f"{where}; give another") from None
                pair.save(self._path(name))
                self._loaded.add(name)

    def state(self) -> dict[str, str]:
        """Write the keys that are in no file yet, and return which they are, for a checkpoint: no secret is in it."""
        self.write()
        return {name: pair.fingerprint.hex() for name, pair in self._pairs.items()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse to go on from a checkpoint that was written under other keys."""
        for name, pair in self._pairs.items():
            if state.get(name) == pair.fingerprint.hex():
                continue
            if self._folder is None:
                raise InvalidInput(
                    "the run was encrypted under keys that lasted as long as its process; give key_folder before the "
                    "first round of a run that is to be resumed"
                )
            what = "holds other keys" if name in self._loaded else "is missing"
            raise InvalidInput(
                f"key file {str(self._path(name))!r} {what}: the checkpoint was written under the keys of {name!r} "
                f"with fingerprint {str(state.get(name))[:8]}; put the file back"
            )

    def _make(self, name: str) -> KeyHolder:
        parameters = preset(self._settings.parameters)
        rotations = self._settings.layout == "rows"
        if self._folder is None or not self._path(name).exists():
            return make_keys(parameters, rotations=rotations)
        pair = load_keys(self._path(name))
        if pair.parameters != parameters or (rotations and not pair.public.has_rotations):
            raise InvalidInput(
                f"key file {str(self._path(name))!r} is of other parameters ({pair.parameters.describe()}) than the "
                f"run's {self._settings.parameters!r}; give another key_folder"
            )
        self._loaded.add(name)
        return pair

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}.key"
