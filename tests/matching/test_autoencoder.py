"""The autoencoder: as good as the best linear code, stopped in time, the same from the same seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, NonFinite
from splitfed.core.random import generator
from splitfed.matching.autoencoder import Autoencoder, encode, fit, from_state, reconstruct
from tests.rounding import single


def _plane(rows: int, seed: int = 0) -> Tensor:
    """Rows of six values on a plane: deviation 1 along one direction, a half along another."""
    random = generator(seed)
    axes = torch.linalg.qr(torch.randn(6, 2, generator=generator(9))).Q
    return (torch.randn(rows, 2, generator=random) * torch.tensor([1.0, 0.5])) @ axes.T


def test_a_code_of_two_keeps_a_plane_and_a_code_of_one_loses_its_lesser_direction() -> None:
    train, validation = _plane(500), _plane(200, 1)
    errors = {}
    for code in (1, 2):
        module = Autoencoder(6, code)
        errors[code] = fit(module, train, validation, learning_rate=0.02, seed=0).losses
    assert min(errors[2]) < 1e-4
    # The lost variance, .25, over the six values; no code of one can lose less than the rows' second direction holds.
    assert min(errors[1]) == pytest.approx(0.25 / 6, rel=0.2)
    lost = torch.linalg.svdvals(validation)[1].square() / validation.numel()
    assert min(errors[1]) > float(lost)


def test_the_best_epoch_is_kept_and_training_stops() -> None:
    calls: list[tuple[int, int, dict[str, Any]]] = []
    module = Autoencoder(6, 3, hidden=(5,), seed=1)
    train, validation = _plane(40), _plane(40, 1) + torch.randn(40, 6, generator=generator(2))
    found = fit(
        module,
        train,
        validation,
        epochs=60,
        patience=3,
        learning_rate=0.03,
        progress=lambda epoch, epochs, metrics: calls.append((epoch, epochs, dict(metrics))),
    )
    assert found.losses[found.best] == min(found.losses)
    assert len(found.losses) == found.best + 1 + 3 < 60
    assert [call[0] for call in calls] == list(range(1, len(found.losses) + 1))
    assert {call[1] for call in calls} == {60}
    assert [call[2]["validation"] for call in calls] == list(found.losses)
    with torch.no_grad():
        kept = (module(validation) - validation).square().mean()
    assert float(kept) == single(min(found.losses))


def test_equal_seeds_give_equal_bits_and_leave_global_state_alone() -> None:
    before = torch.get_rng_state()
    found = []
    for seed in (0, 0, 1):
        module = Autoencoder(6, 2, seed=seed)
        fit(module, _plane(64), _plane(64, 1), epochs=2, seed=seed)
        found.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_module_from_its_state_computes_the_same_on_memory_of_its_own() -> None:
    module = Autoencoder(6, 2, hidden=(5, 4))
    encoder, decoder = from_state(module.encoder.state_dict()), from_state(module.decoder.state_dict())
    x = _plane(7).reshape(7, 2, 3)
    assert torch.equal(encode(encoder, x), encode(module.encoder, x))
    assert torch.equal(reconstruct(encoder, decoder, x), module(x))
    addresses = {p.data_ptr() for p in module.parameters()}
    assert not addresses & {p.data_ptr() for part in (encoder, decoder) for p in part.parameters()}


def test_a_loss_that_leaves_the_finite_numbers_is_named() -> None:
    with pytest.raises(NonFinite, match="after epoch 0: lower the learning rate"):
        fit(Autoencoder(6, 2), _plane(64), _plane(64), learning_rate=1e30)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Autoencoder(6, 6), "code=6 is not allowed for rows of 6 values; expected at most 5"),
        (lambda: Autoencoder(6, 0), "code=0 is not allowed; expected a whole number of at least 1"),
        (lambda: Autoencoder(1, 1), "inputs=1 is not allowed; expected a whole number of at least 2"),
        (lambda: Autoencoder(6, 2, hidden=(0,)), "hidden=0 is not allowed"),
        (lambda: fit(Autoencoder(6, 2), _plane(4), _plane(4), patience=0), "patience=0 is not allowed"),
        (lambda: fit(Autoencoder(6, 2), _plane(4), _plane(4), learning_rate=0), "learning_rate=0 is not allowed"),
    ],
)
def test_bad_input_is_one_line(call, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidInput) as error:
        call()
    assert text in str(error.value)
    assert "\n" not in str(error.value)
