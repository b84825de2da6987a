"""Search for secret keys in all objects reachable from one, in bytes and in files.

Objects are recognised by type: a context with a secret key, a secret key, a key generator, a decryptor; also an
encryptor, which may hold either key and does not reveal which. Bytes are recognised by SEAL's format: at each
occurrence of its header, loading a secret key of the given parameters is tried, which succeeds for nothing else,
wherever in a message, checkpoint or file it stands. Not found are bytes that were compressed or encoded again, and
serialised keys of other parameters; objects with such keys are found.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splitfed.core.payload import not_dense
from splitfed.encryption.backend import FAILURES, from_bytes, import_seal, import_tenseal
from splitfed.encryption.keys import PublicContext

# Code, classes and imported modules belong to the program, not to a party's data.
_PROGRAM = (types.ModuleType, type, types.CodeType, types.BuiltinFunctionType, types.FrameType)
_HEADER = b"\x5e\xa1\x10"
_HEADER_BYTES = 16


def find_secret_keys(held: object, context: PublicContext) -> list[str]:
    """Return descriptions of the secret keys in `held` and in all objects reachable from it; empty if there are none.

    `context`: a public context with the parameters of the keys to search for. Tensors, arrays and byte strings are
    searched as bytes.
    """
    found = []
    for thing in _reachable(held):
        if _has_secret_key(thing):
            found.append(type(thing).__name__)
        content = _content(thing)
        if content is not None:
            places = _places(content, context)
            found += [f"{type(thing).__name__} of {len(content)} bytes, at byte {place}" for place in places]
    return found


def find_secret_key_files(folder: Path, context: PublicContext) -> list[str]:
    """Return the files below `folder`, hidden ones too, that contain a secret key, with its position.

    `context`: a public context with the parameters of the keys to search for.
    """
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [f"{path}, at byte {place}" for path in files for place in _places(path.read_bytes(), context)]


def _places(content: bytes, context: PublicContext) -> Iterator[int]:
    """Yield the positions in `content` at which a serialised secret key begins."""
    place = content.find(_HEADER)
    while place >= 0:
        size = int.from_bytes(content[place + 8 : place + _HEADER_BYTES], "little")
        if _HEADER_BYTES < size <= len(content) - place:
            key = import_seal().SecretKey()
            try:
                from_bytes(key, context.seal_context, content[place : place + size])
                yield place
            except FAILURES:
                pass
        place = content.find(_HEADER, place + 1)


def _content(thing: object) -> bytes | None:
    if isinstance(thing, (bytes, bytearray)):
        return bytes(thing)
    if isinstance(thing, memoryview):
        return thing.tobytes()
    if isinstance(thing, np.ndarray):
        return thing.tobytes() if not thing.dtype.hasobject else None
    if isinstance(thing, Tensor) and thing.device.type != "meta" and not_dense(thing) is None:
        # The whole storage, not only the view.
        storage = thing.detach().cpu().untyped_storage()
        return torch.tensor([], dtype=torch.uint8).set_(storage).numpy().tobytes()
    return None


def _has_secret_key(thing: Any) -> bool:
    """Return whether `thing` is an object of TenSEAL or SEAL that holds a secret key."""
    if not type(thing).__module__.startswith(("_tenseal_cpp", "_sealapi_cpp", "tenseal")):
        return False
    tenseal, name = import_tenseal(), type(thing).__name__
    if name in ("SecretKey", "Decryptor", "KeyGenerator", "Encryptor"):
        return True
    if isinstance(thing, tenseal.Context) or name == "TenSEALContext":
        return bool(thing.has_secret_key())
    # An encrypted vector or tensor can be decrypted if its context has the key.
    linked = getattr(thing, "context", None)
    try:
        return callable(linked) and _has_secret_key(linked())
    except FAILURES:
        # It was loaded without a context.
        return False


def _reachable(start: object) -> Iterator[object]:
    """Yield every object reachable from `start`, through graphs and closures as well, each once."""
    seen: dict[int, object] = {}
    waiting = [start]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, _PROGRAM):
            continue
        seen[id(thing)] = thing  # held, so that no address is used twice
        yield thing
        if isinstance(thing, types.FunctionType):
            # Without its globals, which belong to the program.
            waiting += [*(thing.__closure__ or ()), thing.__defaults__, thing.__kwdefaults__, thing.__dict__]
        elif isinstance(thing, Tensor):
            waiting += [thing.grad if thing.is_leaf else None, thing._base, *gc.get_referents(thing)]
        else:
            waiting += gc.get_referents(thing)
