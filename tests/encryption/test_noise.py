"""Formulas of noise: what is measured of real ciphertexts lies at them, and what is added up is the worst order."""

from __future__ import annotations

import math

import pytest
import torch

from splitfed.encryption.backend import import_seal
from splitfed.encryption.ciphertexts import decrypt, encrypt
from splitfed.encryption.noise import TAIL, accumulate_noise, baby_steps, rotation_noise
from splitfed.encryption.parameters import PRESETS
from tests.encryption.examples import keys


@pytest.mark.parametrize("name", ["sums", "depth_1_coarse", "depth_3"])
def test_the_noise_of_an_encryption_is_as_large_as_stated(name: str) -> None:
    holder, found = keys(name, rotations=name != "sums"), PRESETS[name]
    x = torch.zeros(found.slots, 4)
    errors = decrypt(encrypt(x, holder.public, bound=1.0), holder)
    # 8000 numbers and more: their deviation is known to a few in a hundred, with tails to a few in ten.
    assert float(errors.std()) == pytest.approx(found.noise, rel=0.15)


def test_a_rotation_adds_more_in_a_few_slots_and_no_more_than_stated() -> None:
    holder, found = keys("depth_1_coarse", rotations=True), PRESETS["depth_1_coarse"]
    context, seal = holder.public, import_seal()
    encrypted = encrypt(torch.zeros(found.slots, 1), context, bound=1.0)
    before = decrypt(encrypted, holder)[:, 0]
    largest = []
    # Each of these has a key, and so errors, of its own.
    for steps in (1, 2, 4, 8, 16, 32):
        result, plaintext = seal.Ciphertext(), seal.Plaintext()
        context.evaluator.rotate_vector(encrypted.ciphertexts[0], steps, context.rotation_keys, result)
        holder.decryptor.decrypt(result, plaintext)
        after = torch.tensor(context.encoder.decode_double(plaintext), dtype=torch.float64)
        largest.append(float((after - before.roll(-steps)).abs().max()))
    # The deviation of all slots alone, 4 to 6 times that of an encryption, would be far too small.
    assert 6 * TAIL * found.noise < max(largest) <= TAIL * rotation_noise(found.degree, 2.0**found.scale_bits)


def test_noise_adds_up_in_the_worst_order() -> None:
    assert accumulate_noise(1.0, [], 1.0) == 1.0
    assert accumulate_noise(3.0, [2.0], 4.0) == math.hypot(6.0, 4.0)
    # By 10 and then by 1 it would be sqrt(102).
    assert accumulate_noise(1.0, [10.0, 1.0], 1.0) == accumulate_noise(1.0, [1.0, 10.0], 1.0) == math.sqrt(201)


def test_baby_steps_and_giant_steps_make_all_results() -> None:
    assert [baby_steps(2**power) for power in range(7)] == [1, 2, 2, 4, 4, 8, 8]
