"""Encrypted tensors and their messages: bytes with a header that states key pair, layout, level and noise.

Layouts of a (rows, features) tensor:
- "batch": one ciphertext a feature, whose slots are the rows;
- "rows": as many rows in a ciphertext as fit, each twice in a row in a block of 2 `width` slots, so that a rotation
  brings every feature to every place;
- "row results": the output of a linear layer on "rows": the numbers of a row at the beginning of its block. The other
  slots of the block hold partial sums, which the key holder can read;
- "constants": one ciphertext a number, which fills all slots: weights to be multiplied with a batch;
- "slots": one number a slot, row after row, in as few ciphertexts as possible: numbers that are only added. A
  message of it is padded with zeros to one length for all messages of its shape, half a per cent more than SEAL
  writes on average.

Each tensor carries two figures that need no key: `bound`, the largest magnitude it can have, and `noise`, the standard
deviation of its error. Both are computed from declared limits and public weights, never from the encrypted numbers.

A digest in the header detects corrupted messages. It uses no key, so it does not detect forged ones.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_kind, check_number, unknown
from splitfed.encryption.backend import FAILURES, from_bytes, import_seal, to_bytes
from splitfed.encryption.keys import KeyHolder, PublicContext, from_uint8, to_uint8
from splitfed.encryption.noise import TAIL
from splitfed.encryption.parameters import CkksParameters, padded_bytes

BATCH, ROWS, ROW_RESULTS, CONSTANTS, SLOTS = LAYOUTS = ("batch", "rows", "row results", "constants", "slots")

_MAGIC = b"SFCKKS1\n"
# Fingerprint, layout, level, rows, features, width, ciphertexts, bound, noise; the digest of all else follows.
_HEADER = struct.Struct("<16sBBIIIIdd")
_DIGEST_BYTES = 16
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, eq=False)
class EncryptedTensor:
    """A (rows, features) tensor as ciphertexts of SEAL under one public context.

    `level`: remaining multiplications. `bound`: largest magnitude that a number can have. `noise`: standard deviation
    of a number's error. `width`: slots for the features of a row in a "rows" layout, a power of two.
    """

    context: PublicContext
    ciphertexts: tuple[Any, ...]
    layout: str
    shape: tuple[int, int]
    level: int
    bound: float
    noise: float
    width: int = 0

    @property
    def precision(self) -> float:
        """Largest error of a number, at 16 standard deviations of the noise."""
        return TAIL * self.noise

    @property
    def scale(self) -> float:
        """The scale at which the numbers are encoded."""
        return float(self.ciphertexts[0].scale)

    def to_tensor(self) -> Tensor:
        """Return the ciphertexts and their header as bytes for a message: (bytes,) of uint8."""
        parts = [to_bytes(ciphertext) for ciphertext in self.ciphertexts]
        header = _HEADER.pack(
            self.context.fingerprint,
            LAYOUTS.index(self.layout),
            self.level,
            *self.shape,
            self.width,
            len(parts),
            self.bound,
            self.noise,
        )
        body = b"".join([*(_LENGTH.pack(len(part)) for part in parts), *parts])
        if self.layout == SLOTS:
            room = len(parts) * (_LENGTH.size + padded_bytes(self.context.parameters.ciphertext_bytes[self.level]))
            body = body.ljust(room, b"\0")
        return to_uint8(_MAGIC + header + _digest(header, body) + body)


def encrypt(
    x: Tensor, context: PublicContext, *, bound: float, layout: str = BATCH, width: int | None = None
) -> EncryptedTensor:
    """Return `x`, (rows, features), freshly encrypted with a public key, so that all multiplications are left.

    `bound` > 0: the largest magnitude of any batch, declared in advance because it is sent in the clear. `layout`:
    "batch", "rows", "constants" or "slots". `width`: for "rows", the larger of the layer's inputs and outputs. Raises
    `InvalidInput` for numbers beyond `bound`, a bound beyond the scale, and for more numbers than slots.
    """
    check_kind("x", x, Tensor, "a tensor of real numbers")
    check_kind("context", context, PublicContext, "a public context, such as holder.public")
    if x.is_complex():
        raise InvalidInput("x is complex, and ciphertexts hold real numbers; encrypt its real and imaginary part")
    parameters = context.parameters
    if layout not in LAYOUTS or layout == ROW_RESULTS:
        raise unknown("layout", layout, (BATCH, ROWS, CONSTANTS, SLOTS))
    if x.dim() != 2 or not x.numel():
        raise InvalidInput(f"a {tuple(x.shape)} tensor cannot be encrypted; expected (rows, features), not empty")
    check_number("bound", bound, low=0.0, open_low=True)
    if bound > parameters.largest:
        raise InvalidInput(
            f"bound={bound:g} is beyond the scale; these parameters hold magnitudes up to {parameters.largest:g}"
        )
    values = x.detach().double().cpu()
    most = float(values.abs().max())
    if not most <= bound:
        raise InvalidInput(f"a number of magnitude {most:g} cannot be encrypted; the declared bound is {bound:g}")
    rows, features = values.shape
    width = _width(parameters, layout, features, width)
    if layout == BATCH and rows > parameters.slots:
        raise InvalidInput(f"a batch of {rows} rows does not fit into {parameters.slots} slots; use smaller batches")
    seal, encryptor, scale = import_seal(), context.make_encryptor(), 2.0**parameters.scale_bits
    plaintext, ciphertexts = seal.Plaintext(), []
    for slots in _slots(values, layout, parameters, width):
        context.encoder.encode(slots, scale, plaintext)
        ciphertext = seal.Ciphertext()
        encryptor.encrypt(plaintext, ciphertext)
        ciphertexts.append(ciphertext)
    return EncryptedTensor(
        context, tuple(ciphertexts), layout, (rows, features), parameters.depth, float(bound), parameters.noise, width
    )


def decrypt(x: EncryptedTensor, holder: KeyHolder) -> Tensor:
    """Return the decrypted numbers of `x`: (rows, features) of float64.

    Decryption is approximate, and its error depends on the secret key: round numbers to the precision before you share
    them (Li, Micciancio, EUROCRYPT 2021). Raises `InvalidInput` for another key pair.
    """
    check_kind("x", x, EncryptedTensor, "what encrypt returns")
    check_kind("holder", holder, KeyHolder, "the key holder, who has the secret key")
    if x.context.fingerprint != holder.fingerprint:
        raise InvalidInput("the ciphertext belongs to another key pair than the key holder's")
    seal, encoder = import_seal(), holder.public.encoder
    plaintext, decoded = seal.Plaintext(), []
    for ciphertext in x.ciphertexts:
        holder.decryptor.decrypt(ciphertext, plaintext)
        decoded.append(torch.tensor(encoder.decode_double(plaintext), dtype=torch.float64))
    slots = torch.stack(decoded)
    rows, features = x.shape
    if x.layout == BATCH:
        return slots[:, :rows].T.contiguous()
    if x.layout == CONSTANTS:
        # All slots hold the same number with independent errors: the mean has a smaller error.
        return slots.mean(1).view(rows, features)
    if x.layout == SLOTS:
        return slots.flatten()[: rows * features].view(rows, features)
    block = block_slots(x.context.parameters, x.width)
    return slots.reshape(-1, block)[:rows, :features].contiguous()


def load_ciphertexts(content: Tensor, context: PublicContext) -> EncryptedTensor:
    """Return the encrypted tensor in `content`, (bytes,) of uint8, which must belong to this public context.

    Raises `InvalidInput` for bytes of another format, corrupted or truncated, and for ciphertexts of other keys.
    """
    raw = from_uint8(content)
    start = len(_MAGIC) + _HEADER.size + _DIGEST_BYTES
    if not raw.startswith(_MAGIC):
        raise InvalidInput(f"{len(raw)} bytes are not ciphertexts of this package")
    header, digest, body = raw[len(_MAGIC) : start - _DIGEST_BYTES], raw[start - _DIGEST_BYTES : start], raw[start:]
    if len(raw) < start or _digest(header, body) != digest:
        raise InvalidInput(f"ciphertexts of {len(raw)} bytes are corrupted or truncated: their digest does not match")
    fingerprint, place, level, rows, features, width, count, bound, noise = _HEADER.unpack(header)
    if fingerprint != context.fingerprint:
        raise InvalidInput(
            f"the ciphertexts belong to another key pair ({fingerprint.hex()[:8]}) than the context here "
            f"({context.fingerprint.hex()[:8]})"
        )
    parameters = context.parameters
    layout = LAYOUTS[place] if place < len(LAYOUTS) else ""
    known = layout and level <= parameters.depth and 0 < bound <= parameters.largest and 0 < noise < math.inf
    if not known or not _is_width(parameters, layout, features, width):
        raise InvalidInput("the header of the ciphertexts does not fit the context here")
    if rows * features == 0 or count != ciphertext_count(parameters, layout, (rows, features), width):
        raise InvalidInput(
            f"{count} ciphertexts do not make a {layout!r} tensor of {rows} rows and {features} features"
        )
    return EncryptedTensor(
        context,
        tuple(_load(part, context, level) for part in _split(body, count, layout == SLOTS)),
        layout,
        (rows, features),
        level,
        bound,
        noise,
        width,
    )


def ciphertext_count(parameters: CkksParameters, layout: str, shape: tuple[int, int], width: int = 0) -> int:
    """Return the number of ciphertexts for a tensor of `shape`, (rows, features), in `layout`."""
    rows, features = shape
    if layout == BATCH:
        return features
    if layout == CONSTANTS:
        return rows * features
    if layout == SLOTS:
        return -(-rows * features // parameters.slots)
    return -(-rows // (parameters.slots // block_slots(parameters, width)))


def message_bytes(
    parameters: CkksParameters,
    layout: str,
    shape: tuple[int, int],
    *,
    level: int | None = None,
    width: int | None = None,
) -> int:
    """Return the bytes of `EncryptedTensor.to_tensor` without encrypting: exact for "slots", else within 1 %.

    `level`: remaining multiplications (default: all, as in a fresh ciphertext). `width`: as in `encrypt`.
    """
    if layout not in LAYOUTS:
        raise unknown("layout", layout, LAYOUTS)
    count = ciphertext_count(parameters, layout, shape, _width(parameters, layout, shape[1], width))
    each = parameters.ciphertext_bytes[parameters.depth if level is None else level]
    each = padded_bytes(each) if layout == SLOTS else each
    return len(_MAGIC) + _HEADER.size + _DIGEST_BYTES + count * (_LENGTH.size + each)


def block_slots(parameters: CkksParameters, width: int) -> int:
    """Return the slots of one row in a "rows" layout: twice its width, or all slots if these are fewer."""
    return min(2 * width, parameters.slots)


def next_power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def _width(parameters: CkksParameters, layout: str, features: int, width: int | None) -> int:
    """Return the width of a row in slots, 0 for layouts without; raise `InvalidInput` for rows that do not fit."""
    if layout not in (ROWS, ROW_RESULTS):
        if width:
            raise InvalidInput(f"width={width} is not allowed; only a 'rows' layout has one")
        return 0
    found = next_power_of_two(max(features, width or 1))
    if found > parameters.slots:
        raise InvalidInput(f"a row of {max(features, width or 1)} features does not fit into {parameters.slots} slots")
    return found


def _is_width(parameters: CkksParameters, layout: str, features: int, width: int) -> bool:
    if layout not in (ROWS, ROW_RESULTS):
        return width == 0
    return features <= width <= parameters.slots and width == next_power_of_two(width)


def _slots(values: Tensor, layout: str, parameters: CkksParameters, width: int) -> Sequence[list[float] | float]:
    """Return the values for the slots of each ciphertext; a single number stands for all slots."""
    if layout == CONSTANTS:
        return [float(value) for value in values.flatten()]
    if layout == BATCH:
        columns: list[list[float]] = values.T.tolist()
        return columns
    if layout == SLOTS:
        parts: list[list[float]] = [part.tolist() for part in values.flatten().split(parameters.slots)]
        return parts
    block = block_slots(parameters, width)
    each = parameters.slots // block
    rows, features = values.shape
    blocks = torch.zeros(-(-rows // each) * each, block, dtype=torch.float64)
    blocks[:rows, :features] = values
    if block > width:
        blocks[:rows, width : width + features] = values
    packed: list[list[float]] = blocks.view(-1, parameters.slots).tolist()
    return packed


def _digest(header: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(header + body, digest_size=_DIGEST_BYTES).digest()


def _split(body: bytes, count: int, is_padded: bool) -> list[bytes]:
    """Return the parts of `body`, each preceded by its length; raise `InvalidInput` for lengths that do not add up."""
    place = _LENGTH.size * count
    lengths = [found for (found,) in _LENGTH.iter_unpack(body[:place])] if place <= len(body) else []
    end = place + sum(lengths)
    if len(lengths) != count or end > len(body) or any(body[end:]) or (end < len(body) and not is_padded):
        raise InvalidInput(f"the lengths of {count} ciphertexts do not add up to the {len(body)} bytes received")
    parts = []
    for length in lengths:
        parts.append(body[place : place + length])
        place += length
    return parts


def _load(part: bytes, context: PublicContext, level: int) -> Any:
    try:
        ciphertext = from_bytes(import_seal().Ciphertext(), context.seal_context, part)
        fits = ciphertext.size() == 2 and ciphertext.coeff_modulus_size() == level + 1
        # Rescaling by primes that are no powers of two lets the scale wander, by less than a factor of 8.
        fits = fits and abs(math.log2(ciphertext.scale) - context.parameters.scale_bits) < 3
    except FAILURES as error:
        raise InvalidInput(f"a ciphertext cannot be read: {error}") from None
    if not fits:
        raise InvalidInput("a ciphertext is not of the level and the scale that its header names")
    return ciphertext
