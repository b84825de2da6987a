"""Keys by role: a key holder has the secret key, all other parties a public context that never contained it.

Keys are drawn by SEAL's own generator, seeded by the operating system: no seed of a run reproduces them, on purpose. A
resumed run loads them from their file. That file is readable by the key holder's user only (mode 600), and is refused
inside the folder of a run or a study, which may be copied and shared.

A public context is made from bytes that were written without the secret key, and a context that has one is refused.
`splitfed.encryption.key_search` searches everything else that reaches a server.

Clients may share a key pair. Then each of them can decrypt what any of them encrypts, and one that colludes with the
server reveals everything.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.encryption.backend import FAILURES, import_seal, import_tenseal, make_context
from splitfed.encryption.parameters import CkksParameters

_MAGIC = b"splitfed ckks "
_PUBLIC, _SECRET = "public context 1", "secret keys 1"
_RUN_FILES = ("run.json", "result.json")


class ModulusLevel(NamedTuple):
    """The moduli at one level: their id in SEAL, and the last prime, by which a rescaling divides."""

    parms_id: Any
    last_prime: int


@dataclass(frozen=True, eq=False)
class PublicContext:
    """Public part of a key pair: the parameters, the public key, and the keys for products and rotations.

    `fingerprint`: 16 bytes that identify the key pair. See `KeyHolder.public`, `load_public_context`.
    """

    parameters: CkksParameters
    fingerprint: bytes
    context: Any

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for a context that has a secret key."""
        if self.context.has_secret_key():
            raise InvalidInput("a public context must not have a secret key")

    @property
    def has_rotations(self) -> bool:
        """True if the rotation keys are included, which products of packed rows need."""
        return bool(self.context.has_galois_keys())

    def to_tensor(self) -> Tensor:
        """Return the context as bytes for a message: (bytes,) of uint8."""
        body = self.context.serialize(True, False, self.has_rotations, True)
        return to_uint8(_frame(_PUBLIC, self.parameters, self.fingerprint, self.has_rotations, body))

    @cached_property
    def seal_context(self) -> Any:
        """SEAL's context of the same parameters."""
        return self.context.seal_context().data

    @cached_property
    def evaluator(self) -> Any:
        """SEAL's evaluator, which adds, multiplies and rotates ciphertexts."""
        return import_seal().Evaluator(self.seal_context)

    @cached_property
    def encoder(self) -> Any:
        """SEAL's encoder, which converts numbers into plaintexts."""
        return import_seal().CKKSEncoder(self.seal_context)

    def make_encryptor(self) -> Any:
        """Return a new encryptor with the public key; not kept, as an encryptor does not reveal which key it has."""
        return import_seal().Encryptor(self.seal_context, self.context.public_key().data)

    @cached_property
    def relinearization_keys(self) -> Any:
        """Relinearisation keys, which reduce a product of two ciphertexts to two polynomials."""
        return self.context.relin_keys().data

    @cached_property
    def rotation_keys(self) -> Any:
        """Rotation keys of the slots; raises `InvalidInput` if the key holder made none."""
        if not self.has_rotations:
            raise InvalidInput("the row layout needs keys for rotations; make the keys with rotations=True")
        return self.context.galois_keys().data

    @cached_property
    def levels(self) -> tuple[ModulusLevel, ...]:
        """The moduli by remaining multiplications, from 0 to the depth."""
        found, data = [], self.seal_context.first_context_data()
        while data is not None:
            found.append(ModulusLevel(data.parms_id(), data.parms().coeff_modulus()[-1].value()))
            data = data.next_context_data()
        return tuple(reversed(found))


class KeyHolder:
    """The secret key and its public context. Made by `make_keys` and `load_keys`."""

    def __init__(self, parameters: CkksParameters, context: Any) -> None:
        self._context = context
        self.parameters = parameters
        self.fingerprint = _fingerprint(parameters, context)

    @cached_property
    def public(self) -> PublicContext:
        """The public context of this key pair, made from bytes without the secret key."""
        rotations = self._context.has_galois_keys()
        content = self._context.serialize(True, False, rotations, True)
        return PublicContext(self.parameters, self.fingerprint, import_tenseal().context_from(content, 1))

    @cached_property
    def decryptor(self) -> Any:
        """SEAL's decryptor, which turns ciphertexts into plaintexts."""
        secret = self._context.secret_key().data
        return import_seal().Decryptor(self._context.seal_context().data, secret)

    def save(self, path: str | Path) -> None:
        """Write the keys to the new file `path`, readable by this user only.

        Raises `InvalidInput` for a file that exists, and for a path inside the folder of a run or a study.
        """
        path = _outside_runs(path)
        rotations = bool(self._context.has_galois_keys())
        # Keys for rotations are tens of megabytes, and made again from the secret key.
        body = self._context.serialize(True, True, False, True)
        content = _frame(_SECRET, self.parameters, self.fingerprint, rotations, body)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        try:
            with open(os.open(path, flags, 0o600), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            raise InvalidInput(f"key file {str(path)!r} exists already; give a new one, or load it") from None
        except OSError as error:
            raise InvalidInput(f"key file {str(path)!r} cannot be written ({error.strerror})") from None


def make_keys(parameters: CkksParameters, *, rotations: bool = False) -> KeyHolder:
    """Return a new key pair for `parameters`, from the operating system's randomness.

    `rotations`: True to make the rotation keys of the "rows" layout too, `parameters.galois_key_bytes` more bytes.
    """
    context = make_context(parameters.degree, parameters.moduli, parameters.scale_bits)
    if rotations:
        context.generate_galois_keys()
    return KeyHolder(parameters, context)


def load_keys(path: str | Path) -> KeyHolder:
    """Return the key pair in the file `path`.

    Raises `InvalidInput` for a file that is missing, no key file, corrupted, or open to other users, and for one inside
    the folder of a run or a study.
    """
    path = _outside_runs(path)
    name = f"key file {str(path)!r}"
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(descriptor, "rb") as file:
            about, content = os.fstat(descriptor), file.read()
    except FileNotFoundError:
        raise InvalidInput(
            f"{name} is missing; without it, data encrypted under its keys cannot be decrypted"
        ) from None
    except OSError as error:
        raise InvalidInput(f"{name} cannot be read ({error.strerror})") from None
    if sys.platform != "win32" and (about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077):
        raise InvalidInput(f"{name} is open to other users (mode {stat.S_IMODE(about.st_mode):o}); chmod 600 it")
    parameters, context, header = _open_frame(_SECRET, content, name)
    if not context.has_secret_key():
        raise InvalidInput(f"{name} holds no secret key")
    if header["rotations"]:
        context.generate_galois_keys()
    return KeyHolder(parameters, context)


def load_public_context(content: Tensor) -> PublicContext:
    """Return the public context in `content`, (bytes,) of uint8.

    Raises `InvalidInput` for bytes of another format, corrupted or truncated, and for a context with a secret key.
    """
    parameters, context, _ = _open_frame(_PUBLIC, from_uint8(content), "the public context")
    return PublicContext(parameters, _fingerprint(parameters, context), context)


def to_uint8(content: bytes) -> Tensor:
    """Return bytes as a tensor: (bytes,) of uint8."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def from_uint8(tensor: Tensor) -> bytes:
    """Return the bytes of a uint8 tensor; raise `InvalidInput` for any other tensor."""
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise InvalidInput(
            f"a {tuple(tensor.shape)} tensor of {tensor.dtype} is not a ciphertext or key; expected (bytes,) of uint8"
        )
    return tensor.detach().cpu().numpy().tobytes()


def _fingerprint(parameters: CkksParameters, context: Any) -> bytes:
    text = json.dumps([parameters.degree, parameters.moduli, parameters.scale_bits]).encode()
    return hashlib.blake2b(text + context.serialize(True, False, False, False), digest_size=16).digest()


def _frame(kind: str, parameters: CkksParameters, fingerprint: bytes, rotations: bool, body: bytes) -> bytes:
    header = {
        "degree": parameters.degree,
        "moduli": parameters.moduli,
        "scale_bits": parameters.scale_bits,
        "rotations": rotations,
        "fingerprint": fingerprint.hex(),
        "digest": hashlib.blake2b(body, digest_size=32).hexdigest(),
    }
    return _MAGIC + kind.encode() + b"\n" + json.dumps(header).encode() + b"\n" + body


def _open_frame(kind: str, content: bytes, name: str) -> tuple[CkksParameters, Any, dict[str, Any]]:
    """Return the parameters, TenSEAL's context and the header in `content`; `name` describes the source in errors."""
    start = _MAGIC + kind.encode() + b"\n"
    if not content.startswith(start):
        other = next((k for k in (_PUBLIC, _SECRET) if content.startswith(_MAGIC + k.encode())), None)
        raise InvalidInput(f"{name} holds no {kind[:-2]}" + ("" if other is None else f" but a {other[:-2]}"))
    line, _, body = content[len(start) :].partition(b"\n")
    try:
        header = json.loads(line)
        parameters = CkksParameters(
            degree=header["degree"], moduli=tuple(header["moduli"]), scale_bits=header["scale_bits"]
        )
        digest, fingerprint, _ = header["digest"], bytes.fromhex(header["fingerprint"]), bool(header["rotations"])
    except (ValueError, KeyError, TypeError):
        raise InvalidInput(f"{name} is corrupted: its header cannot be read") from None
    if hashlib.blake2b(body, digest_size=32).hexdigest() != digest:
        raise InvalidInput(f"{name} is corrupted or truncated: its {len(body)} bytes do not match their digest")
    try:
        context = import_tenseal().context_from(body, 1)
        made = context.seal_context().data.key_context_data().parms()
        found = (made.poly_modulus_degree(), tuple(m.value().bit_length() for m in made.coeff_modulus()))
        same = found == (parameters.degree, parameters.moduli) and context.global_scale == 2.0**parameters.scale_bits
    except FAILURES as error:
        raise InvalidInput(f"{name} is corrupted: {error}") from None
    if not same or fingerprint != _fingerprint(parameters, context):
        raise InvalidInput(f"{name} is corrupted: its keys do not match the fingerprint in its header")
    return parameters, context, header


def _outside_runs(path: str | Path) -> Path:
    """Return `path`, absolute; raise `InvalidInput` for a path inside the folder of a run or a study."""
    path = Path(path).expanduser().absolute()
    for folder in path.resolve().parents:
        study = (folder / "study.toml").is_file() and (folder / "config.toml").is_file()
        if study or any((folder / name).is_file() for name in _RUN_FILES):
            raise InvalidInput(
                f"key file {str(path)!r} lies in {str(folder)!r}, the folder of a run or a study, which may be copied "
                "and shared; keep keys elsewhere"
            )
    return path
