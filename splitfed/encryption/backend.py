"""Import of TenSEAL and of the SEAL evaluator in it, and serialisation of SEAL's objects.

TenSEAL (0.3.16 or newer) contains the whole interface of SEAL as `tenseal.sealapi`. Keys are made and kept by TenSEAL's
contexts; products are computed by SEAL's evaluator, which lets the caller decide when to rescale. SEAL's objects save
to a path only, so bytes pass through a file, in memory where the system has an in-memory file system.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from splitfed.core.errors import InvalidInput

FAILURES = (ValueError, RuntimeError, IndexError, OverflowError)
"""Exceptions that TenSEAL and SEAL raise for bytes and numbers that they refuse."""


def import_tenseal() -> Any:
    """Return the package `tenseal`; raise `InvalidInput` naming it where it is not installed."""
    try:
        import tenseal

        # Registers the Python types of SEAL's numbers.
        import tenseal.sealapi
    except ImportError:
        raise InvalidInput("encryption needs the package tenseal: pip install 'tenseal>=0.3.16'") from None
    return tenseal


def import_seal() -> Any:
    """Return `tenseal.sealapi`; raise `InvalidInput` naming the package where it is not installed."""
    return import_tenseal().sealapi


def make_context(degree: int, moduli: Sequence[int], scale_bits: int) -> Any:
    """Return a new context of TenSEAL under CKKS with a fresh key pair, from the operating system's randomness."""
    tenseal = import_tenseal()
    context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, degree, coeff_mod_bit_sizes=list(moduli), n_threads=1)
    context.global_scale = 2.0**scale_bits
    return context


@contextmanager
def _scratch_file() -> Iterator[str]:
    """Yield the path of a new empty file, in memory where the system allows it; the file is deleted afterwards."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("splitfed")
        path = f"/proc/self/fd/{descriptor}"
        try:
            if os.path.exists(path):
                yield path
                return
        finally:
            os.close(descriptor)
    with tempfile.TemporaryDirectory() as folder:
        yield os.path.join(folder, "object")


def to_bytes(stored: Any) -> bytes:
    """Return the serialised bytes of `stored`, a ciphertext or a key of SEAL."""
    with _scratch_file() as path:
        stored.save(path)
        return Path(path).read_bytes()


def from_bytes(empty: Any, seal_context: Any, content: bytes) -> Any:
    """Return `empty`, a new ciphertext or key of SEAL, filled from `content`; raise one of `FAILURES` for bad bytes."""
    with _scratch_file() as path:
        Path(path).write_bytes(content)
        empty.load(seal_context, path)
    return empty
