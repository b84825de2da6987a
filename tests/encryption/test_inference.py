"""Inference on ciphertexts: the outputs of the plain model to the stated precision, to the depth of the parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.topologies import u_shaped
from tests.encryption.training_examples import MIDDLES, Deep, model, rows, settings


@pytest.mark.parametrize("middle", MIDDLES)
def test_encrypted_outputs_agree_with_the_plain_model(middle: str) -> None:
    whole, x = model(middle), rows().clients[0].test.x
    topology = u_shaped(whole, ["features", "middle"], encryption=settings(precision=1e-2))
    encrypted = sf.predict(topology, x, batch_size=4)
    with torch.no_grad():
        plain = whole(x)
    # The head is 1-Lipschitz in tanh, and its rows of weights have norm below 1.5.
    assert 0 < float((encrypted - plain).abs().max()) < 1.5e-2
    assert torch.equal(sf.predict(replace(topology, computation=None), x, batch_size=len(x)), plain)


def test_five_multiplications_fit_where_no_gradient_comes_back() -> None:
    torch.manual_seed(0)
    whole, x = Deep(), rows().clients[0].test.x
    topology = u_shaped(whole, ["features", "middle"], encryption=settings(bound=1.0, precision=0.1))
    with torch.no_grad():
        assert float((sf.predict(topology, x) - whole(x)).abs().max()) < 1e-4
    with pytest.raises(InvalidInput, match="has 3 trainable layers"):
        sf.train(topology, rows(), rounds=1)


def test_what_cannot_be_predicted_is_refused() -> None:
    topology, x = u_shaped(model(), ["features", "middle"], encryption=settings()), torch.rand(3, 1, 8, 8)
    with pytest.raises(InvalidInput, match="at least one row"):
        sf.predict(topology, x[:0])
    with pytest.raises(InvalidInput, match="unknown head 'other'"):
        sf.predict(topology, x, head="other")
    with pytest.raises(InvalidInput, match="batch_size=0"):
        sf.predict(topology, x, batch_size=0)
    many = torch.rand(3000, 1, 8, 8)
    with pytest.raises(InvalidInput, match="batches of 3000 rows do not fit"):
        sf.predict(replace(topology, computation=settings(parameters="depth_1_coarse")), many, batch_size=3000)
    whole = model()
    whole.middle = nn.Sequential(nn.Linear(6, 5), nn.Sigmoid())
    with pytest.raises(InvalidInput, match="Linear, Sigmoid is not linear"):
        sf.predict(u_shaped(whole, ["features", "middle"], encryption=settings()), x)
