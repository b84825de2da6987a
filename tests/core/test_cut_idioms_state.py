"""Python state that goes on changing is refused by its name wherever it is kept, and left as it was."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch

from splitfed.core.cutting import cut
from splitfed.core.errors import InvalidInput
from tests.core.cut_idioms_state import MODELS, told
from tests.core.idioms import left_alone


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_state_that_goes_on_changing_is_refused_by_its_name_and_put_back(name: str, replayed: bool) -> None:
    make, text = MODELS[name]
    model = make(replayed)
    before, x = told(model), torch.randn(8, 8)
    # An iterator of itertools cannot be turned back: an equal one stands in its stead.
    alone = contextlib.nullcontext() if name == "itertools_count" else left_alone(model)
    with alone, pytest.raises(InvalidInput, match=re.escape(f"forward changes the {text}")) as caught:
        cut(model, ["a"], x)
    assert "\n" not in str(caught.value)
    assert told(model) == before
