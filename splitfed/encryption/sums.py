"""Sums of encrypted vectors: whoever has the public context adds them, the key holder alone reads what they add up to.

Numbers lie one a slot, 2048 in a ciphertext. Degree and moduli are those of the preset `sums`; the scale is as large as
the largest magnitude of a sum allows: 2^46 for 64.

Vectors are encrypted as multiples of a step that exceeds twice the stated error of their sum, so that the key holder
rounds the decrypted sum to the multiple that it is, and not to one near by. What it hands on is then the sum of what
was encrypted, without the error of decryption, from which the key could be computed by whoever has the ciphertexts as
well (Li, Micciancio, "On the security of homomorphic encryption on approximate numbers", EUROCRYPT 2021). A number in
seven billion has an error beyond the stated one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.encryption.arithmetic import add
from splitfed.encryption.backend import import_tenseal
from splitfed.encryption.ciphertexts import SLOTS, EncryptedTensor, decrypt, encrypt, message_bytes
from splitfed.encryption.keys import KeyHolder, PublicContext, from_uint8, load_public_context, to_uint8
from splitfed.encryption.parameters import PRESETS, CkksParameters
from splitfed.encryption.sizes import padded_bytes

_HEADER_BYTES = 512
"""Room for the header of a public context, and for TenSEAL's frame of the key in it: 320 bytes."""


def sum_parameters(limit: float) -> CkksParameters:
    """Return the parameters that add up numbers to a magnitude of `limit` > 0: those of `sums`, at the largest scale.

    Raises `InvalidInput` for a limit that leaves no scale.
    """
    base = PRESETS["sums"]
    most = base.moduli[0] - 2
    scale_bits = most - max(0, math.ceil(math.log2(limit)))
    if scale_bits < 1:
        raise InvalidInput(f"limit={limit:g} is beyond the scale; expected at most {2.0 ** (most - 1):g}")
    return CkksParameters(degree=base.degree, moduli=base.moduli, scale_bits=scale_bits)


def make_sum_keys(parameters: CkksParameters) -> KeyHolder:
    """Return a new key pair without the keys for products, which sums do not need; 20 ms."""
    tenseal = import_tenseal()
    context = tenseal.context(
        tenseal.SCHEME_TYPE.CKKS, parameters.degree, coeff_mod_bit_sizes=list(parameters.moduli), n_threads=1
    )
    context.global_scale = 2.0**parameters.scale_bits
    return KeyHolder(parameters, tenseal.context_from(context.serialize(True, True, False, False), 1))


def public_context_message(context: PublicContext) -> Tensor:
    """Return a public context of `make_sum_keys` as bytes, `public_context_bytes` of them: (bytes,) of uint8."""
    content = from_uint8(context.to_tensor())
    room = public_context_bytes(context.parameters)
    if len(content) + 4 > room:
        raise InvalidInput(f"a public context of {len(content)} bytes does not fit into {room}: it has other keys")
    return to_uint8((len(content).to_bytes(4, "little") + content).ljust(room, b"\0"))


def read_public_context(message: Tensor) -> PublicContext:
    """Return the public context in `message` (bytes,); raise `InvalidInput` for any other bytes."""
    content = from_uint8(message)
    size = int.from_bytes(content[:4], "little")
    return load_public_context(to_uint8(content[4 : 4 + size] or b"\0"))


def public_context_bytes(parameters: CkksParameters) -> int:
    """Return the bytes of `public_context_message`."""
    return 4 + _HEADER_BYTES + padded_bytes(parameters.public_key_bytes)


def vector_bytes(parameters: CkksParameters, numbers: int) -> int:
    """Return the bytes of a message with `numbers` >= 1 encrypted numbers, and of one with their sum."""
    return message_bytes(parameters, SLOTS, (1, numbers))


def encrypt_vector(numbers: Tensor, context: PublicContext) -> Tensor:
    """Return `numbers` (numbers,) encrypted, as bytes for a message: (bytes,) of uint8.

    Raises `InvalidInput` for numbers that the scale does not hold.
    """
    return encrypt(numbers.view(1, -1), context, bound=context.parameters.largest, layout=SLOTS).to_tensor()


def add_vectors(vectors: Iterable[EncryptedTensor]) -> EncryptedTensor:
    """Return the sum of one or more encrypted `vectors`, of one length and one key pair.

    That the sum stays within the scale is the senders' matter: they encrypt shares that add up to one at most. Raises
    `InvalidInput` for vectors of several lengths, layouts or key pairs.
    """
    parts = iter(vectors)
    total = next(parts)
    if total.layout != SLOTS:
        raise InvalidInput(f"a sum of vectors takes ciphertexts in the layout {SLOTS!r}, not {total.layout!r}")
    for part in parts:
        # The bound is that of the whole sum.
        total = add(total, replace(part, bound=0.0))
    return total


def decrypt_steps(total: EncryptedTensor, holder: KeyHolder, step: float) -> Tensor:
    """Return a sum of multiples of `step` > 0 as whole numbers of steps: (numbers,) int64, without an error.

    Raises `InvalidInput` where the stated error reaches half a step, and for ciphertexts of another key pair.
    """
    if not total.precision < step / 2:
        raise InvalidInput(
            f"a sum with errors up to {total.precision:.1e} cannot be rounded to multiples of {step:.1e}"
        )
    return torch.round(decrypt(total, holder).flatten() / step).long()
