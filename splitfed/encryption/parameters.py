"""Parameters of CKKS: security, depth, precision and magnitude; presets, and which of them lose precision.

A ciphertext of degree N holds N/2 numbers, its slots, at a scale 2^s, modulo a product of primes. A multiplication
squares the scale; dropping one prime of s bits ("rescaling") restores it. The first prime is never dropped, and the
last one, the special prime, is used by the keys alone, so that each prime between them allows one multiplication: their
number is the depth.

Security: the moduli of all primes together have at most the bits that the table of the homomorphic encryption standard
allows for 128 bits against classical attacks and secrets of -1, 0, 1. SEAL refuses more as well.

Precision follows the formulas of `splitfed.encryption.noise`.

Sizes of serialised ciphertexts and keys are stored for the presets and measured on demand for other parameters. SEAL
compresses what it writes (zstd). Residues are uniform modulo a prime, so compressed ciphertexts of the same kind have
almost the same size; moduli of 60 bits gain nothing, those of 40 bits a quarter.

Papers: Cheon, Kim, Kim, Song, "Homomorphic encryption for arithmetic of approximate numbers", ASIACRYPT 2017; Albrecht
et al., "Homomorphic encryption security standard", HomomorphicEncryption.org, 2018, table 1; the scales 2^20 and 2^21
after Khan, Nguyen, Michalas, "Split ways", 2023, and the same authors' "Split without a leak", 2023.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from splitfed.core.errors import InvalidInput, check_count, unknown
from splitfed.encryption.backend import import_seal, make_context, to_bytes
from splitfed.encryption.noise import TAIL, accumulate_noise, rounding_noise

SECURITY_BITS = 128
"""The security of every set of parameters here, in bits."""

LARGEST_MODULUS: Mapping[int, int] = MappingProxyType({4096: 109, 8192: 218, 16384: 438, 32768: 881})
"""Degree -> the most bits that all moduli may have together at 128 bits of security."""

LOSSY = 1e-3
"""Largest error acceptable for training: parameters beyond it are never chosen, and cause a warning."""


@dataclass(frozen=True, kw_only=True)
class CkksParameters:
    """Parameters of the CKKS scheme at 128 bits of security.

    `degree`: N of the polynomial modulus X^N + 1, one of 4096, 8192, 16384, 32768. `moduli`: bits of the primes, each
    in [20, 60]: the first, one of `scale_bits` for each multiplication, and the special one, no smaller than any.
    `scale_bits`: a number x is encoded as the integer nearest to x 2^scale_bits.
    """

    degree: int
    moduli: tuple[int, ...]
    scale_bits: int

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for less than 128 bits of security, and for moduli that do not preserve the scale."""
        if self.degree not in LARGEST_MODULUS:
            allowed = ", ".join(map(str, LARGEST_MODULUS))
            raise InvalidInput(f"degree={self.degree!r} is not allowed; expected one of {allowed}")
        object.__setattr__(self, "moduli", tuple(self.moduli))
        check_count("scale_bits", self.scale_bits, low=1)
        for bits in self.moduli:
            check_count("bits of a modulus", bits, low=20)
        total, most = sum(self.moduli), LARGEST_MODULUS[self.degree]
        if total > most:
            raise InvalidInput(
                f"moduli={list(self.moduli)} have {total} bits, which is less than {SECURITY_BITS} bits of security; "
                f"degree {self.degree} allows {most} by the homomorphic encryption standard"
            )
        if len(self.moduli) < 2 or self.moduli[-1] < max(self.moduli) or max(self.moduli) > 60:
            raise InvalidInput(
                f"moduli={list(self.moduli)} are not allowed; expected two or more of at most 60 bits, the last no "
                "smaller than any other"
            )
        if any(bits != self.scale_bits for bits in self.moduli[1:-1]) or self.moduli[0] < self.scale_bits + 2:
            raise InvalidInput(
                f"moduli={list(self.moduli)} do not fit scale_bits={self.scale_bits}; expected the first to have 2 "
                f"bits more at least, and each between the first and the last exactly {self.scale_bits}"
            )

    @property
    def slots(self) -> int:
        """Number of slots: how many numbers a ciphertext holds."""
        return self.degree // 2

    @property
    def depth(self) -> int:
        """Number of multiplications in sequence that a fresh ciphertext allows."""
        return len(self.moduli) - 2

    @property
    def security(self) -> int:
        """Security in bits, by the homomorphic encryption standard."""
        return SECURITY_BITS

    @property
    def largest(self) -> float:
        """Largest magnitude of a number, a result included: half the range of the first modulus."""
        return 2.0 ** (self.moduli[0] - self.scale_bits - 2)

    @property
    def noise(self) -> float:
        """Standard deviation of a slot's error after encryption, and of the error that a rescaling adds."""
        return rounding_noise(self.degree, 2.0**self.scale_bits)

    @property
    def precision(self) -> float:
        """Largest error of a number of magnitude at most 1 after up to `depth` squarings."""
        return TAIL * accumulate_noise(self.noise, [2.0] * self.depth, self.noise)

    @property
    def ciphertext_bytes(self) -> tuple[int, ...]:
        """Mean bytes of a serialised ciphertext by its remaining multiplications, from 0 to `depth`."""
        return self._sizes.ciphertext

    @property
    def public_key_bytes(self) -> int:
        """Bytes of the serialised public key."""
        return self._sizes.public

    @property
    def relinearization_key_bytes(self) -> int:
        """Bytes of the serialised relinearisation keys, which a product of two ciphertexts needs."""
        return self._sizes.relinearization

    @property
    def galois_key_bytes(self) -> int:
        """Bytes of the serialised rotation keys: one for each power of two, in both directions."""
        return 2 * (self.degree.bit_length() - 2) * self._sizes.relinearization

    @property
    def is_lossy(self) -> bool:
        """True if the stated precision is worse than 1e-3."""
        return self.precision > LOSSY

    @property
    def _sizes(self) -> KeySizes:
        # Sizes do not depend on the scale.
        stored = STORED_SIZES.get((self.degree, self.moduli))
        return measure_sizes(self.degree, self.moduli, self.scale_bits) if stored is None else stored

    def describe(self) -> str:
        """Return the parameters as one line of text."""
        return (
            f"degree {self.degree}, moduli {list(self.moduli)}, scale 2^{self.scale_bits}: depth {self.depth}, "
            f"{self.slots} slots, magnitude at most {self.largest:g}, precision {self.precision:.1e}, "
            f"{self.ciphertext_bytes[-1]} bytes a ciphertext, {SECURITY_BITS} bits of security"
        )


def _preset(degree: int, first: int, depth: int, scale_bits: int, special: int) -> CkksParameters:
    return CkksParameters(degree=degree, moduli=(first, *[scale_bits] * depth, special), scale_bits=scale_bits)


PRESETS: Mapping[str, CkksParameters] = MappingProxyType(
    {
        "sums": _preset(4096, 54, 0, 40, 55),
        "depth_1_coarse": _preset(4096, 40, 1, 29, 40),
        "depth_1": _preset(8192, 60, 1, 40, 60),
        "depth_2": _preset(8192, 60, 2, 40, 60),
        "depth_3": _preset(8192, 50, 3, 36, 50),
        "depth_5": _preset(16384, 60, 5, 40, 60),
        "depth_7": _preset(16384, 60, 7, 40, 60),
        "scale_20": _preset(4096, 40, 1, 20, 40),
        "scale_21": _preset(8192, 40, 3, 21, 40),
    }
)
"""Name -> parameters. `scale_20` and `scale_21` have the scales of the first publications, and lose precision."""


def preset(name: str) -> CkksParameters:
    """Return the preset called `name`; warn if it loses precision, raise `InvalidInput` for an unknown name."""
    if name not in PRESETS:
        raise unknown("encryption preset", name, PRESETS)
    found = PRESETS[name]
    if found.is_lossy:
        warnings.warn(
            f"encryption preset {name!r} loses precision: numbers of magnitude 1 are decrypted with errors up to "
            f"{found.precision:.1g}",
            UserWarning,
            stacklevel=2,
        )
    return found


class KeySizes(NamedTuple):
    """Bytes of a ciphertext by the multiplications left, of the public key, and of the relinearisation keys."""

    ciphertext: tuple[int, ...]
    public: int
    relinearization: int


# Means over three key pairs and six ciphertexts each; single ciphertexts lie within 1 % of them.
STORED_SIZES: Mapping[tuple[int, tuple[int, ...]], KeySizes] = MappingProxyType(
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


def padded_bytes(mean: int) -> int:
    """Return the bytes reserved for a message of `mean` bytes on average, half a per cent more.

    Of thousands of ciphertexts and keys none was more than a tenth of a per cent longer than the mean.
    """
    return mean + mean // 200


@lru_cache(maxsize=64)
def measure_sizes(degree: int, moduli: tuple[int, ...], scale_bits: int) -> KeySizes:
    """Return the sizes measured with a temporary key pair, which takes tenths of a second; needs TenSEAL."""
    seal, context = import_seal(), make_context(degree, moduli, scale_bits)
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
