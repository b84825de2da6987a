"""Encrypted sums of vectors: exact after rounding, in messages of one length, and refused where they do not fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.encryption import ciphertexts, keys as key_frames
from splitfed.encryption.ciphertexts import (
    SLOTS,
    EncryptedTensor,
    decrypt,
    encrypt,
    load_ciphertexts,
    message_bytes,
)
from splitfed.encryption.key_search import find_secret_keys
from splitfed.encryption.keys import KeyHolder, to_uint8
from splitfed.encryption.linear import linear
from splitfed.encryption.secure_sum import (
    add_vectors,
    decrypt_steps,
    encrypt_vector,
    make_sum_keys,
    public_context_bytes,
    public_context_message,
    read_public_context,
    sum_parameters,
)
from tests.encryption.examples import keys


@cache
def holder(pair: int) -> KeyHolder:
    """A key pair for sums of magnitude 64; another `pair` number has another."""
    return make_sum_keys(sum_parameters(64.0))


def numbers(count: int, largest: float = 1.0, seed: int = 0) -> Tensor:
    drawn = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn * 2 - 1) * largest


def arrived(values: Tensor, pair: int = 0) -> EncryptedTensor:
    public = holder(pair).public
    return load_ciphertexts(encrypt_vector(values, public), public)


@pytest.mark.parametrize(("limit", "bits"), [(64.0, 46), (65.0, 45), (1.0, 52), (0.01, 52), (4096.0, 40)])
def test_the_scale_is_as_large_as_the_limit_allows(limit: float, bits: int) -> None:
    found = sum_parameters(limit)
    assert (found.degree, found.moduli, found.scale_bits) == (4096, (54, 55), bits)
    assert found.largest >= limit
    with pytest.raises(InvalidInput, match=r"^limit=4\.5036e\+15 is beyond the scale; expected at most"):
        sum_parameters(2.0**52)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2048), (1, 2049), (3, 1500), (5000, 1)])
def test_numbers_return_from_slots_in_a_message_of_the_length_that_was_stated(shape: tuple[int, int]) -> None:
    pair, x = holder(0), numbers(shape[0] * shape[1], 64.0).view(shape)
    content = encrypt(x, pair.public, bound=64.0, layout=SLOTS).to_tensor()
    assert len(content) == message_bytes(pair.parameters, SLOTS, shape)
    back = load_ciphertexts(content, pair.public)
    assert len(back.ciphertexts) == -(-x.numel() // 2048)
    assert float((decrypt(back, pair) - x).abs().max()) <= back.precision < 2e-10


def test_the_sum_of_many_is_within_its_stated_error_and_exact_in_steps() -> None:
    step = 2.0**-26
    parts = [torch.round(numbers(2500, 1.0, seed) / step) * step for seed in range(20)]
    total = add_vectors(map(arrived, parts))
    truth = torch.stack(parts).sum(0)
    error = float((decrypt(total, holder(0)).flatten() - truth).abs().max())
    # Neither exceeded nor 15 times too wide.
    assert 0 < error <= total.precision <= 15 * error
    assert total.precision < step / 2
    assert decrypt_steps(total, holder(0), step).tolist() == torch.round(truth / step).long().tolist()
    # What leaves the key holder says nothing of the error that depends on its key.
    other = add_vectors(arrived(part, 1) for part in parts)
    assert decrypt_steps(other, holder(1), step).tolist() == decrypt_steps(total, holder(0), step).tolist()


def test_messages_of_a_sum_have_the_lengths_that_were_stated() -> None:
    pair = holder(0)
    for count in (1, 2048, 3000):
        content = encrypt_vector(numbers(count), pair.public)
        assert len(content) == message_bytes(pair.parameters, SLOTS, (1, count))
        assert len(add_vectors([arrived(numbers(count))] * 3).to_tensor()) == len(content)
    message = public_context_message(pair.public)
    assert len(message) == public_context_bytes(pair.parameters)
    server = read_public_context(message)
    assert server.fingerprint == pair.fingerprint
    # It can be handed on, and has no key in it.
    assert torch.equal(public_context_message(server), message)
    assert find_secret_keys([server, message], server) == []


def cut(content: Tensor) -> Tensor:
    return content[:-1].clone()


def flip(content: Tensor) -> Tensor:
    changed = content.clone()
    changed[len(changed) // 2] ^= 1
    return changed


def with_secret_key() -> Tensor:
    """Return the message of a public context in which the secret key was left."""
    pair = holder(0)
    body = pair._context.serialize(True, True, False, False)
    content = key_frames._frame(key_frames._PUBLIC, pair.parameters, pair.fingerprint, False, body)
    assert find_secret_keys(content, pair.public)
    return to_uint8(len(content).to_bytes(4, "little") + content)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: load_ciphertexts(cut(encrypt_vector(numbers(5), holder(0).public)), holder(0).public), "corrupted or"),
        (
            lambda: load_ciphertexts(flip(encrypt_vector(numbers(5), holder(0).public)), holder(0).public),
            "corrupted or",
        ),
        (lambda: load_ciphertexts(encrypt_vector(numbers(5), holder(1).public), holder(0).public), "another key pair"),
        (lambda: add_vectors([arrived(numbers(5)), arrived(numbers(5), 1)]), "of different key pairs cannot be added"),
        (lambda: add_vectors([arrived(numbers(5)), arrived(numbers(6))]), r"shape \(1, 6\) cannot be added"),
        (
            lambda: add_vectors([encrypt(numbers(5).view(1, 5), holder(0).public, bound=1.0)]),
            "takes ciphertexts in the layout 'slots', not 'batch'",
        ),
        (lambda: encrypt_vector(numbers(3) * 500, holder(0).public), "the declared bound is 64"),
        (lambda: decrypt_steps(arrived(numbers(5)), holder(1), 0.1), "another key pair"),
        (lambda: decrypt_steps(arrived(numbers(5)), holder(0), 2.0**-32), "cannot be rounded to multiples of 2.3e-10"),
        (lambda: linear(arrived(numbers(5)), torch.ones(1, 5)), "not 'slots'"),
        (lambda: read_public_context(cut(public_context_message(holder(0).public))[:9000]), "corrupted or truncated"),
        (lambda: read_public_context(torch.zeros(3, dtype=torch.uint8)), "holds no public context"),
        (lambda: read_public_context(with_secret_key()), "a public context must not have a secret key"),
        (lambda: public_context_message(keys("sums").public), "has other keys"),
    ],
)
def test_what_is_bad_is_refused_in_one_line(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text) as refusal:
        make()
    assert "\n" not in str(refusal.value)


def test_only_slots_may_be_filled_up_and_with_nothing_but_zeros() -> None:
    """A message must hold nothing beside what its header names: a digest made by a forger does not help."""
    pair = holder(0)
    start = len(ciphertexts._MAGIC) + ciphertexts._HEADER.size + ciphertexts._DIGEST_BYTES
    for layout, filling in ((SLOTS, b"\1"), ("batch", b"\0")):
        x = encrypt(numbers(4).view(1, 4), pair.public, bound=1.0, layout=layout)
        raw = x.to_tensor().numpy().tobytes()
        header, body = raw[len(ciphertexts._MAGIC) : start - ciphertexts._DIGEST_BYTES], raw[start:] + filling
        forged = ciphertexts._MAGIC + header + ciphertexts._digest(header, body) + body
        with pytest.raises(InvalidInput, match=re.escape("do not add up to the")):
            load_ciphertexts(to_uint8(forged), pair.public)
