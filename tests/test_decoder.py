"""The decoder behind `inverse_network`: it starts out at the mean row, in the range of the data and without one."""

from __future__ import annotations

import pytest
import torch

from splitfed.attacks.decoder import Decoder
from splitfed.seeding import generator, stream


@pytest.mark.parametrize("shape", [(3, 4, 4), (10,)])
def test_an_image_decoder_starts_at_the_mean_of_its_channels(shape: tuple[int, ...]) -> None:
    start = torch.stack([torch.full((8, 8), 0.1), torch.full((8, 8), 0.7)])
    with stream(0):
        decoder = Decoder({"z": shape}, (2, 8, 8), (0.0, 1.0), 8, start).eval()
        blind = Decoder({"z": shape}, (2, 8, 8), (0.0, 1.0), 8).eval()
    z = {"z": torch.randn(16, *shape, generator=generator(1))}
    with torch.no_grad():
        told, untold = (d(z).mean((0, 2, 3)).tolist() for d in (decoder, blind))
    assert told == pytest.approx([0.1, 0.7], abs=0.06)
    assert untold == pytest.approx([0.5, 0.5], abs=0.06)


def test_columns_without_a_range_start_at_their_means() -> None:
    start = torch.tensor([-4.0, 0.0, 9.0])
    with stream(0):
        decoder = Decoder({"z": (5,)}, (3,), None, 4, start).eval()
    with torch.no_grad():
        found = decoder({"z": torch.zeros(2, 5)})
    assert torch.allclose(found, start.expand(2, 3), atol=0.3)


def test_a_mean_at_the_edge_of_the_range_can_still_be_left() -> None:
    """An always-black channel starts at .01, not at the sigmoid's end, where its slope is nothing."""
    with stream(0):
        decoder = Decoder({"z": (5,)}, (4,), (0.0, 1.0), 4, torch.zeros(4)).eval()
    with torch.no_grad():
        found = decoder({"z": torch.zeros(1, 5)})
    assert float(found.min()) > 0.005
    assert float(found.max()) < 0.02
