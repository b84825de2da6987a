"""The planner: which preset it takes, what it refuses, and that layers are no less precise than planned."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from splitfed.core.errors import InvalidInput
from splitfed.encryption.arithmetic import square
from splitfed.encryption.ciphertexts import CONSTANTS, encrypt
from splitfed.encryption.linear import linear, linear_encrypted
from splitfed.encryption.parameter_fit import choose_parameters
from splitfed.encryption.parameters import PRESETS
from tests.encryption.examples import keys


@pytest.mark.parametrize(
    ("demand", "name"),
    [
        ({"depth": 0, "precision": 1e-6}, "sums"),
        ({"depth": 1, "precision": 1e-3}, "depth_1_coarse"),
        ({"depth": 1, "precision": 1e-6}, "depth_1"),
        ({"depth": 1, "precision": 1e-3, "gain": 100.0}, "depth_1"),
        ({"depth": 1, "precision": 1e-3, "largest": 100.0}, "depth_1_coarse"),
        ({"depth": 1, "precision": 1e-3, "largest": 100.0, "squares": 1}, "depth_1"),
        ({"depth": 1, "precision": 1e-3, "features": 256, "largest": 4.0, "encrypted_weights": True}, "depth_1"),
        ({"depth": 1, "precision": 1e-3, "rows": 4096}, "depth_1"),
        ({"depth": 1, "precision": 1e-3, "rows": 4096, "layout": "rows"}, "depth_1_coarse"),
        ({"depth": 1, "precision": 1e-4, "results": 64, "layout": "rows"}, "depth_1"),
        ({"depth": 1, "precision": 1e-3, "features": 2049, "layout": "rows"}, "depth_1"),
        ({"depth": 1, "precision": 1.0, "largest": 513.0}, "depth_1"),
        ({"depth": 2, "precision": 1e-4}, "depth_2"),
        ({"depth": 3, "precision": 1e-4}, "depth_3"),
        ({"depth": 3, "precision": 1e-4, "rows": 4097}, "depth_5"),
        ({"depth": 6, "precision": 1e-4}, "depth_7"),
    ],
)
def test_the_cheapest_that_fits_is_taken(demand: Mapping[str, Any], name: str) -> None:
    assert choose_parameters(**demand) == PRESETS[name]


@pytest.mark.parametrize(
    ("demand", "text"),
    [
        ({"depth": 8, "precision": 1.0}, "depth=8 is too deep: the scale is exhausted after 7 multiplications"),
        (
            {"depth": 1, "precision": 1.0, "rows": 8193},
            "rows=8193 do not fit: a ciphertext has 8192 slots at most; use",
        ),
        (
            {"depth": 1, "precision": 1.0, "features": 8193, "layout": "rows"},
            "features=8193, results=1 do not fit: a ciphertext has 8192 slots at most",
        ),
        ({"depth": 1, "precision": 1.0, "largest": 3e5}, "a number may have magnitude 262144 at most"),
        ({"depth": 2, "precision": 1e-9}, "precision=1e-09 is too fine: at depth 2 the smallest error is 3.4e-08"),
        ({"depth": 1, "precision": 0.0}, "precision=0.0 is not allowed; expected a finite number above 0"),
        ({"depth": 1, "precision": 1.0, "gain": float("nan")}, "gain=nan is not allowed"),
        ({"depth": -1, "precision": 1.0}, "depth=-1 is not allowed"),
        ({"depth": 1, "precision": 1.0, "rows": 0}, "rows=0 is not allowed"),
        ({"depth": 1, "precision": 1.0, "squares": 2}, "squares=2 is not allowed; expected no more than depth=1"),
        ({"depth": 2, "precision": 1.0, "layout": "rows"}, "the layout 'rows' holds one linear layer"),
        (
            {"depth": 1, "precision": 1.0, "layout": "rows", "encrypted_weights": True},
            "the layout 'rows' holds one linear layer, with weights in plain",
        ),
        ({"depth": 1, "precision": 1.0, "layout": "columns"}, "unknown layout 'columns'"),
    ],
)
def test_what_no_preset_holds_is_refused(demand: Mapping[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        choose_parameters(**demand)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("precision", [1e-2, 1e-4, 5e-6])
@pytest.mark.parametrize("layers", ["linear", "rows", "linear square", "encrypted weights"])
def test_layers_are_no_less_precise_than_planned(layers: str, precision: float) -> None:
    features, results, bound = 6, 3, 2.0
    w = torch.full((results, features), 0.5)
    demand: dict[str, Any] = {"features": features, "results": results, "largest": features * bound**2}
    demand |= {"gain": math.sqrt(features) * 0.5}
    match layers:
        case "linear":
            demand |= {"depth": 1, "largest": features * bound * 0.5}
        case "rows":
            demand |= {"depth": 1, "largest": features * bound * 0.5, "layout": "rows"}
        case "linear square":
            demand |= {"depth": 2, "squares": 1, "largest": (features * bound * 0.5) ** 2}
        case "encrypted weights":
            demand |= {"depth": 1, "encrypted_weights": True, "largest": features * bound**2}
    found = choose_parameters(precision=precision, **demand)
    name = next(name for name, preset in PRESETS.items() if preset == found)
    context = keys(name, rotations=layers == "rows").public
    x = encrypt(torch.ones(2, features), context, bound=bound, layout="rows" if layers == "rows" else "batch")
    if layers == "encrypted weights":
        out = linear_encrypted(x, encrypt(w, context, bound=bound, layout=CONSTANTS))
    else:
        out = linear(x, w)
    if layers == "linear square":
        out = square(out)
    # Primes are not quite powers of two.
    assert out.precision <= 1.001 * precision
    assert out.bound <= demand["largest"]
