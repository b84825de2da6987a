"""Ciphertexts: numbers return to the stated precision, bytes are those predicted, and bad ones are one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.messages import LocalLink, Message, Stamp
from splitfed.core.traffic import Traffic
from splitfed.encryption import ciphertexts
from splitfed.encryption.arithmetic import add, square
from splitfed.encryption.ciphertexts import (
    BATCH,
    CONSTANTS,
    ROWS,
    EncryptedTensor,
    decrypt,
    encrypt,
    load_ciphertexts,
    message_bytes,
)
from splitfed.encryption.keys import KeyHolder, to_uint8
from splitfed.encryption.parameters import PRESETS
from tests.encryption.examples import keys


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Numbers in [-1, 1], most of them near the ends, where errors are largest."""
    x = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1
    return x.sign() * x.abs() ** 0.1


def sent(x: Tensor, holder: KeyHolder, **options: Any) -> EncryptedTensor:
    """Return `x` encrypted, after it crossed as bytes."""
    return load_ciphertexts(encrypt(x, holder.public, bound=1.0, **options).to_tensor(), holder.public)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive) if p.degree > 8192 else name for name, p in PRESETS.items()],
)
def test_the_stated_precision_of_every_preset_holds_through_its_depth(name: str) -> None:
    holder, found = keys(name), PRESETS[name]
    x = numbers(found.slots, 1)
    encrypted, truth = encrypt(x, holder.public, bound=1.0), x
    assert encrypted.level == found.depth
    while encrypted.level:
        encrypted, truth = square(encrypted), truth * truth
    error = float((decrypt(encrypted, holder) - truth).abs().max())
    # Neither wrong nor so wide that it says nothing: between 2 and 4 were seen.
    assert error <= found.precision <= 15 * error
    # Scales wander by primes that are no powers of two: by 2 in 100 of the precision for primes of 20 bits.
    assert encrypted.precision == pytest.approx(found.precision, rel=0.1)
    if found.is_lossy:
        assert error > 1e-3
    with pytest.raises(InvalidInput, match=f"none is left of {found.depth}: the scale is exhausted"):
        square(encrypted)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((3, 5), {}),
        ((4096, 1), {}),
        ((5, 6), {"layout": ROWS}),
        ((1, 1), {"layout": ROWS}),
        ((3, 5), {"layout": ROWS, "width": 32}),
        ((3, 2048), {"layout": ROWS}),
        ((2, 4096), {"layout": ROWS}),
        ((2, 3), {"layout": CONSTANTS}),
    ],
)
def test_numbers_return_in_every_layout(shape: tuple[int, int], options: dict[str, Any]) -> None:
    holder = keys("depth_1")
    x = numbers(*shape)
    arrived = sent(x, holder, **options)
    back = decrypt(arrived, holder)
    assert back.shape == shape
    assert float((back - x).abs().max()) <= arrived.precision < 1e-7


@pytest.mark.parametrize(
    ("name", "layout", "shape", "width"),
    [
        ("sums", BATCH, (10, 6), None),
        ("depth_1_coarse", BATCH, (10, 6), None),
        ("depth_1", ROWS, (200, 256), None),
        ("depth_2", BATCH, (2, 6), None),
        ("depth_2", ROWS, (20, 5), 512),
        ("depth_3", CONSTANTS, (2, 3), None),
        ("scale_21", BATCH, (10, 6), None),
    ],
)
def test_bytes_are_predicted_within_one_per_cent(
    name: str, layout: str, shape: tuple[int, int], width: int | None
) -> None:
    holder = keys(name)
    encrypted = encrypt(numbers(*shape), holder.public, bound=1.0, layout=layout, width=width)
    real = encrypted.to_tensor().nbytes
    assert message_bytes(holder.parameters, layout, shape, width=width) == pytest.approx(real, rel=0.01)
    if holder.parameters.depth:
        real = square(encrypted).to_tensor().nbytes
        level = holder.parameters.depth - 1
        predicted = message_bytes(holder.parameters, layout, shape, level=level, width=width)
        assert predicted == pytest.approx(real, rel=0.01)


def test_ciphertexts_cross_as_a_message_that_is_counted_in_their_bytes() -> None:
    holder = keys("sums")
    content = encrypt(numbers(4, 3), holder.public, bound=1.0).to_tensor()
    traffic = Traffic()
    message = Message("client0", "server", "activation", "a->b", {"z": content}, Stamp("train", 0, 0, 0))
    arrived = LocalLink(traffic, {}).deliver(message)
    assert list(traffic.counters.values()) == [[1, content.numel()]]
    assert torch.equal(arrived.tensors["z"], content)


def test_a_header_says_nothing_of_the_batch_but_its_shape() -> None:
    """It crosses in plain: small numbers, large ones and zeros under one declared bound have the same one."""
    holder, end = keys("sums"), len(ciphertexts._MAGIC) + ciphertexts._HEADER.size
    batches = [scale * numbers(4, 3, seed=seed) for seed, scale in enumerate((1.0, 1e-3, 0.0))]
    headers = [encrypt(x, holder.public, bound=1.0).to_tensor()[:end].tolist() for x in batches]
    assert headers[0] == headers[1] == headers[2]


def test_two_encryptions_of_the_same_differ() -> None:
    holder, x = keys("sums"), numbers(4, 1)
    first, second = (encrypt(x, holder.public, bound=1.0).to_tensor() for _ in range(2))
    start = 200
    same = (first[start:60000] == second[start:60000]).float().mean()
    assert same < 0.05


@pytest.mark.parametrize(
    ("x", "options", "text"),
    [
        (torch.ones(2, 2) * 1.5, {}, "a number of magnitude 1.5 cannot be encrypted; the declared bound is 1"),
        (torch.tensor([[float("nan")]]), {}, "a number of magnitude nan cannot be encrypted"),
        (torch.tensor([[float("inf")]]), {}, "a number of magnitude inf cannot be encrypted"),
        (torch.ones(2, 2), {"bound": 5000.0}, "bound=5000 is beyond the scale; these parameters hold magnitudes up to"),
        (torch.ones(2, 2), {"bound": 0.0}, "bound=0.0 is not allowed"),
        (torch.ones(2049, 1), {}, "a batch of 2049 rows does not fit into 2048 slots; use smaller batches"),
        (torch.ones(1, 2049), {"layout": ROWS}, "a row of 2049 features does not fit into 2048 slots"),
        (torch.ones(1, 1), {"layout": ROWS, "width": 4096}, "a row of 4096 features does not fit into 2048 slots"),
        (torch.ones(1, 1), {"width": 4}, "width=4 is not allowed; only a 'rows' layout has one"),
        (torch.ones(1, 1), {"layout": "batches"}, "unknown layout 'batches'; did you mean 'batch'"),
        (torch.ones(3), {}, "a (3,) tensor cannot be encrypted; expected (rows, features), not empty"),
        (torch.ones(0, 3), {}, "a (0, 3) tensor cannot be encrypted"),
    ],
)
def test_what_cannot_be_encrypted_is_one_line(x: Tensor, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(text)):
        encrypt(x, keys("sums").public, **{"bound": 1.0} | options)


def test_numbers_beyond_the_scale_would_wrap_round() -> None:
    # Why a bound is declared and added up: SEAL computes what wraps round the modulus without a word.
    holder = keys("sums")
    largest = holder.parameters.largest
    encrypted = encrypt(torch.full((2048, 1), largest), holder.public, bound=largest)
    assert float(decrypt(encrypted, holder)[5]) == pytest.approx(largest)
    with pytest.raises(InvalidInput, match="a sum may reach magnitude 8192, beyond the 4096 that the scale holds"):
        add(encrypted, encrypted)
    ciphertext, evaluator = encrypted.ciphertexts[0], holder.public.evaluator
    evaluator.add_inplace(ciphertext, ciphertext)
    evaluator.add_plain_inplace(ciphertext, _plaintext(holder, largest / 2))
    assert float(decrypt(encrypted, holder)[5]) == pytest.approx(-1.5 * largest)


def _plaintext(holder: KeyHolder, value: float) -> Any:
    plaintext = ciphertexts.import_seal().Plaintext()
    holder.public.encoder.encode(value, 2.0**holder.parameters.scale_bits, plaintext)
    return plaintext


def _flip(place: int) -> Callable[[Tensor], Tensor]:
    def flip(content: Tensor) -> Tensor:
        content[place] ^= 1
        return content

    return flip


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda c: c[:0], "0 bytes are not ciphertexts of this package"),
        (lambda c: c[1:], "are not ciphertexts of this package"),
        (lambda c: torch.zeros(1000, dtype=torch.uint8), "are not ciphertexts of this package"),
        (lambda c: c[:-1], "are corrupted or truncated: their digest does not match"),
        (lambda c: c[:40], "are corrupted or truncated"),
        (lambda c: c[:8], "are corrupted or truncated"),
        (_flip(10), "are corrupted or truncated"),
        (_flip(50), "are corrupted or truncated"),
        (_flip(-100), "are corrupted or truncated"),
        (lambda c: torch.cat([c, c[:1]]), "are corrupted or truncated"),
        (lambda c: c.float(), "tensor of torch.float32 is not a ciphertext or key; expected (bytes,) of uint8"),
        (lambda c: c[None], "is not a ciphertext or key"),
    ],
)
def test_bad_bytes_are_one_line(change: Callable[[Tensor], Tensor], text: str) -> None:
    holder = keys("sums")
    content = encrypt(numbers(2, 1), holder.public, bound=1.0).to_tensor()
    with pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        load_ciphertexts(change(content), holder.public)
    assert "\n" not in str(caught.value)


def test_ciphertexts_of_other_keys_are_one_line() -> None:
    mine, other = keys("sums"), keys("sums", pair=1)
    encrypted = encrypt(numbers(2, 1), other.public, bound=1.0)
    with pytest.raises(InvalidInput, match=r"belong to another key pair \(\w{8}\) than the context here \(\w{8}\)"):
        load_ciphertexts(encrypted.to_tensor(), mine.public)
    with pytest.raises(InvalidInput, match="belongs to another key pair than the key holder's"):
        decrypt(encrypted, mine)


def test_other_things_than_the_ones_expected_are_one_line() -> None:
    holder, x = keys("sums"), torch.rand(2, 3)
    with pytest.raises(InvalidInput, match=r"x=.* is not allowed; expected a tensor of real numbers"):
        encrypt(x.numpy(), holder.public, bound=1.0)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="x is complex, and ciphertexts hold real numbers"):
        encrypt(x.to(torch.complex64), holder.public, bound=1.0)
    with pytest.raises(InvalidInput, match=r"context=.* is not allowed; expected a public context"):
        encrypt(x, holder, bound=1.0)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"holder=.* is not allowed; expected the key holder"):
        decrypt(encrypt(x, holder.public, bound=1.0), holder.public)  # type: ignore[arg-type]


def _forged(original: EncryptedTensor, body: bytes | None = None, **header: Any) -> Tensor:
    """Return the bytes of `original` with another header or body, and a digest that matches."""
    raw = original.to_tensor().numpy().tobytes()
    start = len(ciphertexts._MAGIC)
    names = ("fingerprint", "layout", "level", "rows", "features", "width", "count", "bound", "noise")
    values = dict(zip(names, ciphertexts._HEADER.unpack_from(raw, start), strict=True)) | header
    packed = ciphertexts._HEADER.pack(*values.values())
    body = raw[start + ciphertexts._HEADER.size + ciphertexts._DIGEST_BYTES :] if body is None else body
    return to_uint8(ciphertexts._MAGIC + packed + ciphertexts._digest(packed, body) + body)


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ({"layout": 9}, "does not fit the context"),
        ({"level": 7}, "does not fit the context"),
        ({"level": 0}, "a ciphertext is not of the level and the scale that its header names"),
        ({"bound": 1e9}, "does not fit the context"),
        ({"bound": float("nan")}, "does not fit the context"),
        ({"noise": 0.0}, "does not fit the context"),
        ({"width": 2}, "does not fit the context"),
        ({"layout": 1, "width": 3}, "does not fit the context"),
        ({"features": 2}, "1 ciphertexts do not make a 'batch' tensor of 2 rows and 2 features"),
        ({"rows": 0}, "1 ciphertexts do not make a 'batch' tensor of 0 rows"),
        ({"body": b""}, "the lengths of 1 ciphertexts do not add up to the 0 bytes received"),
        ({"body": (8).to_bytes(4, "little") + b"x" * 9}, "do not add up"),
        ({"body": (20).to_bytes(4, "little") + b"x" * 20}, "a ciphertext cannot be read"),
    ],
)
def test_a_forged_header_is_one_line(header: dict[str, Any], text: str) -> None:
    holder = keys("depth_1_coarse")
    original = encrypt(numbers(2, 1), holder.public, bound=1.0)
    assert load_ciphertexts(_forged(original), holder.public).shape == (2, 1)
    with pytest.raises(InvalidInput, match=re.escape(text)):
        load_ciphertexts(_forged(original, **header), holder.public)


def test_a_damaged_ciphertext_behind_a_digest_that_matches_is_one_line() -> None:
    holder = keys("depth_1_coarse")
    original = encrypt(numbers(2, 1), holder.public, bound=1.0)
    body = original.to_tensor().numpy().tobytes()[-(4 + 80_000) :]
    damaged = (len(body) - 4).to_bytes(4, "little") + body[4:]
    with pytest.raises(InvalidInput, match="a ciphertext cannot be read"):
        load_ciphertexts(_forged(original, body=damaged), holder.public)
    other = encrypt(numbers(2, 1), keys("sums").public, bound=1.0).to_tensor().numpy().tobytes()
    foreign = other[len(ciphertexts._MAGIC) + ciphertexts._HEADER.size + ciphertexts._DIGEST_BYTES :]
    with pytest.raises(InvalidInput, match="a ciphertext cannot be read"):
        load_ciphertexts(_forged(original, body=foreign), holder.public)
