"""Gradients sent in fewer bytes: by hand, through bytes and back, and as many bytes as foreseen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from splitfed.core.defense import Defense
from splitfed.core.defense_context import Context
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Stamp
from splitfed.defenses import GradientCompression, GradientRounding, gradient_compression, gradient_rounding
from tests.rounding import single

HERE = Context("server", "bottom->top", Stamp("train", 0, 0, 0), 0, 0)


def drawn(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape)


def test_compression_by_hand() -> None:
    """Of eight numbers a quarter is two: -9 and 7, wherever they stand; .2 of eight is one, a tenth still one."""
    g = torch.tensor([[1.0, -9.0, 3.0, 0.5], [7.0, -2.0, 0.0, 6.0]])
    kept = torch.tensor([[0.0, -9.0, 0.0, 0.0], [7.0, 0.0, 0.0, 0.0]])
    assert torch.equal(GradientCompression(share=0.25).gradient("z", g, HERE), kept)
    assert [GradientCompression(share=s).kept(8) for s in (0.2, 0.1, 0.5, 1.0)] == [1, 1, 4, 8]
    assert torch.equal(GradientCompression(share=1.0).gradient("z", g, HERE), g)
    # Equal numbers: the first ones stay, and no more than was said.
    even = GradientCompression(share=0.5).gradient("z", torch.ones(1, 4), HERE)
    assert even.tolist() == [[1.0, 1.0, 0.0, 0.0]]


def test_rounding_by_hand() -> None:
    """Mean 0 and deviation 2: the interval is -4 to 4; four bins of two end at -4, -2, 0, 2, 4."""
    g = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    codes, interval = gradient_rounding.pack(g, 4)
    assert interval.tolist() == [-4.0, 2.0]
    assert codes.tolist() == [[3, 1, 3, 1]]
    assert GradientRounding(bins=3).gradient("z", g, HERE)[0].tolist() == single([4 / 3, -4 / 3] * 2)
    # A number beyond the interval goes to its end: mean .1, deviation sqrt(.09), interval end .1 + .6.
    far = torch.zeros(1, 100)
    far[0, 0] = 10.0
    found = GradientRounding(bins=12).gradient("z", far, HERE)
    assert float(found.max()) == single(0.1 + 2 * (99 / 100 * 0.1**2 + 9.9**2 / 100) ** 0.5)
    assert len(found.unique()) == 2


def test_rounding_moves_by_half_a_bin_at_most_within_the_interval() -> None:
    g = drawn(32, 16)
    found = GradientRounding(bins=12).gradient("z", g, HERE)
    spread, mean = float(g.std(correction=0)), float(g.mean())
    inside = (g - mean).abs() <= 2 * spread
    assert float((found - g)[inside].abs().max()) <= 4 * spread / 12 / 2 * 1.0001
    assert float((found - g)[inside].abs().max()) > 4 * spread / 12 / 2 * 0.9
    assert len(found.unique()) == 13


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_equal_numbers_stay(value: float) -> None:
    g = torch.full((3, 4), value)
    assert torch.equal(GradientRounding().gradient("z", g, HERE), g)
    assert torch.equal(GradientCompression(share=1.0).gradient("z", g, HERE), g)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.01, 0.25, 0.4])
def test_compression_through_bytes_and_back(share: float, dtype: torch.dtype) -> None:
    g = drawn(5, 3, 4).to(dtype)
    defense = GradientCompression(share=share)
    values, places = gradient_compression.pack(g, defense.kept(g.numel()))
    wire = values.numpy().tobytes(), places.numpy().tobytes()
    assert len(wire[0]) + len(wire[1]) == defense.packed("gradient", 5, (3, 4), dtype)
    read = torch.frombuffer(bytearray(wire[0]), dtype=dtype), torch.frombuffer(bytearray(wire[1]), dtype=torch.int32)
    assert torch.equal(gradient_compression.unpack(*read, g.shape), defense.gradient("z", g, HERE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bins", [1, 12, 255])
def test_rounding_through_bytes_and_back(bins: int, dtype: torch.dtype) -> None:
    g = drawn(5, 3, 4).to(dtype)
    defense = GradientRounding(bins=bins)
    codes, interval = gradient_rounding.pack(g, bins)
    wire = codes.numpy().tobytes(), interval.numpy().tobytes()
    assert len(wire[0]) + len(wire[1]) == defense.packed("gradient", 5, (3, 4), dtype) == 60 + 2 * dtype.itemsize
    read = torch.frombuffer(bytearray(wire[0]), dtype=torch.uint8), torch.frombuffer(bytearray(wire[1]), dtype=dtype)
    assert torch.equal(gradient_rounding.unpack(*read).view(g.shape), defense.gradient("z", g, HERE))


def test_bytes_by_hand() -> None:
    """40 float32: a quarter is 10 values and 10 places, 80 bytes; .8 would take 256, so all 160 are sent."""
    assert GradientCompression(share=0.25).packed("gradient", 4, (10,), torch.float32) == 80
    assert GradientCompression(share=0.8).packed("gradient", 4, (10,), torch.float32) == 160
    assert GradientRounding().packed("gradient", 4, (10,), torch.float32) == 48
    for defense in (GradientCompression(), GradientRounding()):
        assert defense.packed("activation", 4, (10,), torch.float32) is None


def test_a_gradient_with_too_many_numbers_for_its_places() -> None:
    with pytest.raises(InvalidInput, match=f"a gradient of {2**31} numbers exceeds positions of 32 bits"):
        gradient_compression.pack(torch.zeros(1).expand(2**31), 1)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: GradientCompression(share=0.0),
            r"gradient_compression share=0.0 is not allowed; expected .* \(0, 1\]",
        ),
        (lambda: GradientCompression(share=1.5), "gradient_compression share=1.5 is not allowed"),
        (lambda: GradientRounding(bins=0), "gradient_rounding bins=0 is not allowed; expected a whole number"),
        (
            lambda: GradientRounding(bins=256),
            "gradient_rounding bins=256 is not allowed; expected a whole number of at least 1 and at most",
        ),
    ],
)
def test_refused(make: type[Defense], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        make()
