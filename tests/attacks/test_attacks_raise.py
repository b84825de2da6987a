"""What attacks refuse, and what they say."""

from __future__ import annotations

import re
from typing import Any

import pytest

import splitfed
from splitfed.attacks.base import Attack
from splitfed.attacks.reconstruction.inverse_network import InverseNetwork
from splitfed.attacks.reconstruction.rmle import Rmle
from splitfed.core.errors import InvalidInput
from splitfed.topologies import u_shaped, vanilla
from splitfed.training.run import Run
from tests.examples import InPlaceAfterCut, images, toy_data


def run_with(**changes: Any) -> Run:
    shape = changes.pop("shape", "vanilla")
    data = toy_data(60).clients(1, **{"auxiliary": 10, "victims": 10, **changes})
    model = InPlaceAfterCut()
    topology = vanilla(model, "conv") if shape == "vanilla" else u_shaped(model, ("conv", "fc1"))
    return splitfed.train(topology, data, rounds=1)


def test_an_unknown_budget_is_refused() -> None:
    with pytest.raises(InvalidInput, match="unknown budget of Rmle 'ful'; did you mean 'full'"):
        Rmle.with_budget("ful")


def test_budgets_are_the_authors_settings_with_changes() -> None:
    assert Rmle.with_budget("full") == Rmle(iterations=5000, lr=0.01, tv=1.0, l2=0.0)
    assert Rmle.with_budget("full", iterations=10).iterations == 10
    assert InverseNetwork.with_budget("full").epochs == 50


def test_an_attack_without_run_is_named() -> None:
    with pytest.raises(NotImplementedError, match=r"Attack does not define run\(view, knowledge"):
        run_with().attack(Attack())


def test_missing_auxiliary_data_is_named() -> None:
    with pytest.raises(InvalidInput, match="InverseNetwork needs auxiliary data; this run does not grant that"):
        run_with(auxiliary=0).attack("inverse_network")


def test_a_party_that_receives_no_release_cannot_invert() -> None:
    with pytest.raises(InvalidInput, match="owns the inputs of client 0: there is nothing to reconstruct"):
        run_with().attack("rmle", adversary="client0")


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "attack": ({"attacks": "rmel"}, "unknown attack 'rmel'; did you mean 'rmle'"),
    "adversary": ({"adversary": "sever"}, "unknown party 'sever'; did you mean 'server'"),
    "client": ({"client": 3}, "client=3 is not allowed; expected 0 to 0"),
    "negative client": ({"client": -1}, "client=-1 is not allowed; expected 0 to 0"),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls(case: str) -> None:
    arguments, text = CALLS[case]
    with pytest.raises(InvalidInput, match=re.escape(text)):
        run_with().attack(**{"attacks": "rmle", **arguments})


def test_no_victims() -> None:
    with pytest.raises(InvalidInput, match="there are no victims to attack: set some aside"):
        run_with(victims=0).attack("rmle")


def test_rows_of_another_shape() -> None:
    with pytest.raises(
        InvalidInput, match=re.escape("x has rows of shape (1, 9, 9); this run was trained on (1, 8, 8)")
    ):
        run_with().predict(images(4, side=9)[0])


def test_without_auxiliary_data_rmle_still_runs() -> None:
    """It does not require any; only the mean-image baseline would."""
    (result,) = run_with(auxiliary=0).attack(Rmle(iterations=2))
    assert result.prediction.shape == (10, 1, 8, 8)
