"""Sizes of serialised ciphertexts and keys in bytes: stored for the presets, measured on demand for other parameters.

SEAL compresses what it writes (zstd). Residues are uniform modulo a prime, so compressed ciphertexts of the same kind
have almost the same size; moduli of 60 bits gain nothing, those of 40 bits a quarter.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from splitfed.encryption.backend import import_seal, import_tenseal, to_bytes


class KeySizes(NamedTuple):
    """Bytes of a ciphertext by the multiplications left, of the public key, and of the relinearisation keys."""

    ciphertext: tuple[int, ...]
    public: int
    relinearization: int


# Means over three key pairs and six ciphertexts each; single ciphertexts lie within 1 % of them.
_MEASURED: Mapping[tuple[int, tuple[int, ...]], KeySizes] = MappingProxyType(
    {
        (4096, (54, 55)): KeySizes((61732,), 123482, 123465),
        (4096, (40, 29, 40)): KeySizes((49151, 86387), 134224, 277051),
        (8192, (60, 40, 60)): KeySizes((131200, 235064), 363488, 727816),
        (8192, (60, 40, 40, 60)): KeySizes((131200, 235035, 331312), 464764, 1395559),
        (8192, (50, 36, 36, 36, 50)): KeySizes((117904, 213506, 302155, 392757), 510853, 2033164),
        (16384, (60, 40, 40, 40, 40, 40, 60)): KeySizes(
            (262275, 459807, 657838, 855812, 1053635, 1251506), 1514117, 9090972
        ),
        (16384, (60, 40, 40, 40, 40, 40, 40, 40, 60)): KeySizes(
            (262275, 459739, 657852, 855717, 1053641, 1251530, 1449453, 1647353), 1909201, 15288985
        ),
        (4096, (40, 20, 40)): KeySizes((49171, 80897), 129252, 258257),
        (8192, (40, 21, 21, 21, 40)): KeySizes((94336, 156739, 213360, 269434), 368762, 1482227),
    }
)


def stored_sizes(degree: int, moduli: tuple[int, ...]) -> KeySizes | None:
    """Return the stored sizes for these moduli, None for moduli of no preset; sizes do not depend on the scale."""
    return _MEASURED.get((degree, moduli))


def padded_bytes(mean: int) -> int:
    """Return the bytes reserved for a message of `mean` bytes on average, half a per cent more.

    Of thousands of ciphertexts and keys none was more than a tenth of a per cent longer than the mean.
    """
    return mean + mean // 200


@lru_cache(maxsize=64)
def measure_sizes(degree: int, moduli: tuple[int, ...], scale_bits: int) -> KeySizes:
    """Return the sizes measured with a temporary key pair, which takes tenths of a second; needs TenSEAL."""
    tenseal, seal = import_tenseal(), import_seal()
    context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, degree, coeff_mod_bit_sizes=list(moduli), n_threads=1)
    context.global_scale = 2.0**scale_bits
    frame = len(context.serialize(False, False, False, False))
    seal_context = context.seal_context().data
    evaluator, ciphertext = seal.Evaluator(seal_context), seal.Ciphertext()
    seal.Encryptor(seal_context, context.public_key().data).encrypt_zero(ciphertext)
    lengths = [len(to_bytes(ciphertext))]
    while ciphertext.coeff_modulus_size() > 1:
        evaluator.mod_switch_to_next_inplace(ciphertext)
        lengths.append(len(to_bytes(ciphertext)))
    return KeySizes(
        tuple(reversed(lengths)),
        len(context.serialize(True, False, False, False)) - frame,
        len(context.serialize(False, False, False, True)) - frame,
    )
