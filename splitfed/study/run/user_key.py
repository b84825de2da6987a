"""A secret key of this user, which distinguishes results that they made from those of somebody else."""

from __future__ import annotations

import os
import secrets
import stat
import sys
from contextlib import suppress
from pathlib import Path

SIZE = 32


class NoKey(Exception):
    """There is no key that could be used; the text says why."""


def key_file() -> Path:
    """Return where the key is kept: splitfed/key below the user's folder of local state."""
    home = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_STATE_HOME", "")
    if not os.path.isabs(home):
        try:
            home = str(Path.home() / ".local" / "state")
        except RuntimeError as error:
            raise NoKey(f"there is no home folder for a key ({error})") from None
    return Path(home) / "splitfed" / "key"


def read_key() -> bytes:
    """Return the key. Raises `NoKey` where there is none, or one that others could have read or written."""
    path = key_file()
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            about, content = os.fstat(descriptor), file.read(SIZE + 1)
    except OSError as error:
        raise NoKey(f"no key can be read from {str(path)!r} ({error.strerror})") from None
    if not stat.S_ISREG(about.st_mode) or len(content) != SIZE:
        raise NoKey(f"{str(path)!r} holds no key; remove it")
    if sys.platform != "win32" and (about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077):
        raise NoKey(f"{str(path)!r} is open to other users; remove it, or: chmod 600")
    return content


def get_or_make_key() -> bytes:
    """Return the key, made on first use, for this user's eyes alone. Raises `NoKey` where that fails."""
    path = key_file()
    with suppress(OSError):
        path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        if not path.exists():
            # Whole before it has its name, which only one process can give: all read the same key.
            temporary = path.with_name(f".key.{os.getpid()}.{secrets.token_hex(4)}")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with open(descriptor, "wb") as file:
                    file.write(secrets.token_bytes(SIZE))
                    file.flush()
                    os.fsync(descriptor)
                os.link(temporary, path)
            finally:
                temporary.unlink()
    return read_key()
