"""Parameters of CKKS: what is secure, which preset a planner takes, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from splitfed.core.errors import InvalidInput
from splitfed.encryption.backend import import_tenseal
from splitfed.encryption.ciphertexts import message_bytes
from splitfed.encryption.parameter_fit import choose_parameters
from splitfed.encryption.parameters import LARGEST_MODULUS, PRESETS, STORED_SIZES, CkksParameters, measure_sizes, preset
from tests.encryption.examples import keys


def parameters(**changes: Any) -> CkksParameters:
    return CkksParameters(**{"degree": 8192, "moduli": (60, 40, 40, 60), "scale_bits": 40} | changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"degree": 1024}, "degree=1024 is not allowed; expected one of 4096, 8192, 16384, 32768"),
        ({"degree": 4096}, "have 200 bits, which is less than 128 bits of security; degree 4096 allows 109"),
        ({"moduli": (60, 40, 40, 40, 60)}, "have 240 bits, which is less than 128 bits of security"),
        ({"degree": 4096, "moduli": (40, 29, 41), "scale_bits": 29}, "have 110 bits, which is less than 128 bits"),
        ({"moduli": (60, 40, 40, 50)}, "the last no smaller than any other"),
        ({"moduli": (60,)}, "expected two or more of at most 60 bits"),
        ({"moduli": (61, 40, 40, 61)}, "of at most 60 bits"),
        ({"moduli": (60, 40, 39, 60)}, "do not fit scale_bits=40"),
        ({"moduli": (41, 40, 40, 60)}, "expected the first to have 2 bits more at least"),
        ({"moduli": (60, 40, 15, 60)}, "bits of a modulus=15 is not allowed"),
        ({"scale_bits": 0}, "scale_bits=0 is not allowed"),
    ],
)
def test_what_is_insecure_or_does_not_fit_is_refused_in_one_line(changes: Mapping[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        parameters(**changes)
    assert "\n" not in str(caught.value)


def test_the_library_holds_the_same_bounds() -> None:
    # The table of the standard, its bounds exactly; one bit more is refused by SEAL, and by us before it.
    assert LARGEST_MODULUS == {4096: 109, 8192: 218, 16384: 438, 32768: 881}
    tenseal = import_tenseal()
    for degree, moduli in ((4096, (54, 55)), (8192, (54, 54, 55, 55))):
        assert sum(moduli) == LARGEST_MODULUS[degree]
        tenseal.context(tenseal.SCHEME_TYPE.CKKS, degree, coeff_mod_bit_sizes=list(moduli), n_threads=1)
        beyond = [*moduli[:-1], moduli[-1] + 1]
        with pytest.raises(ValueError, match="not set correctly"):
            tenseal.context(tenseal.SCHEME_TYPE.CKKS, degree, coeff_mod_bit_sizes=beyond, n_threads=1)


def test_presets_that_lose_precision_warn_and_are_planned_by_nobody() -> None:
    assert {name for name, found in PRESETS.items() if found.is_lossy} == {"scale_20", "scale_21"}
    with pytest.warns(UserWarning, match=r"'scale_20' loses precision: .* errors up to 0\.02"):
        assert preset("scale_20") == PRESETS["scale_20"]
    # It would be the cheapest: 80 kB.
    assert choose_parameters(depth=1, precision=1.0) == PRESETS["depth_1_coarse"]
    assert preset("depth_2").describe().startswith("degree 8192, moduli [60, 40, 40, 60], scale 2^40: depth 2, 4096 sl")
    with pytest.raises(InvalidInput, match="unknown encryption preset 'depth_4'"):
        preset("depth_4")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive) if p.degree > 8192 else name for name, p in PRESETS.items()],
)
def test_stated_bytes_of_keys_are_those_of_real_ones(name: str) -> None:
    found, context = PRESETS[name], keys(name).public.context
    frame = len(context.serialize(False, False, False, False))
    assert len(context.serialize(True, False, False, False)) - frame == pytest.approx(found.public_key_bytes, rel=0.01)
    relinearization = len(context.serialize(False, False, False, True)) - frame
    assert relinearization == pytest.approx(found.relinearization_key_bytes, rel=0.01)


def test_stated_bytes_of_rotation_keys_are_those_of_real_ones() -> None:
    context = keys("sums", rotations=True).public.context
    real = len(context.serialize(False, False, True, False))
    assert real == pytest.approx(PRESETS["sums"].galois_key_bytes, rel=0.01)


def test_parameters_of_no_preset_are_measured() -> None:
    other = CkksParameters(degree=4096, moduli=(40, 28, 40), scale_bits=28)
    assert (other.degree, other.moduli) not in STORED_SIZES
    assert other.ciphertext_bytes == measure_sizes(4096, (40, 28, 40), 28).ciphertext
    assert other.ciphertext_bytes == pytest.approx(PRESETS["depth_1_coarse"].ciphertext_bytes, rel=0.05)


def test_the_page_tells_the_presets_as_they_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "encryption.md").read_text("utf-8")
    for name, p in PRESETS.items():
        keys_bytes = p.public_key_bytes + p.relinearization_key_bytes
        row = (
            f"| `{name}` | {p.degree} | {'-'.join(map(str, p.moduli))} | 2^{p.scale_bits} | {p.depth} | {p.slots} | "
            f"{p.largest:.0f} | {p.precision:.0e} | {p.ciphertext_bytes[-1] / 1e3:.0f} | {keys_bytes / 1e6:.1f} | "
            f"{p.galois_key_bytes / 1e6:.0f} |"
        )
        assert row in page
    sent = [message_bytes(PRESETS["depth_2"], layout, (64, 256)) / 1e6 for layout in ("batch", "rows")]
    assert "`batch` sends {:.0f} MB and `rows` {:.1f} MB".format(*sent) in page
