"""Python state that goes on changing is refused by its name wherever it is kept, and left as it was."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
import operator
import queue
import re
import threading
import weakref
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from splitfed.core.cutting import cut
from splitfed.core.errors import InvalidInput
from splitfed.core.model_snapshot import ModelSnapshot
from splitfed.core.unread_state import refuse_unread
from tests.core.cut_idioms_state import MODELS, UNREAD, Counting, InWhatIsUnread, Settings, Table, add, told
from tests.core.idioms import Idiom, check_left_alone, check_training, left_alone
from tests.thinning import thin


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("name", thin(MODELS, 4))
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


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("name", thin(UNREAD, 4))
def test_state_that_cannot_be_read_is_refused_by_its_name_before_it_has_changed(name: str, replayed: bool) -> None:
    make, use, far, text = UNREAD[name]
    model, x = InWhatIsUnread(replayed, tool=make(), use=use), torch.randn(8, 8)
    with left_alone(model), pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        cut(model, ["a"], x)
    assert "'tool'" in str(caught.value) or "of 'tool" in str(caught.value)
    assert "buffer" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert far(model.tool) == 0


class Pair(NamedTuple):
    value: int
    other: int


HOLD_NOTHING: dict[str, Any] = {
    "lock": threading.Lock(),
    "pattern": re.compile("a+"),
    "date": datetime.date(2020, 1, 1),
    "decimal": Decimal("0.5"),
    "sentinel": object(),
    "getter": operator.itemgetter(0),
    "logger": logging.getLogger("splitfed.tests"),
    "function_of_numpy": np.concatenate,
    "ufunc": np.add,
    "operator_of_torch": torch.ops.aten.relu,
    "keys": {"a": 1}.keys(),
    "bound": "text".join,
    "proxy_of_what_is_gone": weakref.proxy(Settings()),
    "alias": list[int],
    "named_tuple": Pair(0, 1),
    "bound_by_torch": torch._C._get_tracing_state,
}


@pytest.mark.parametrize("name", thin(HOLD_NOTHING, 7))
def test_what_holds_nothing_is_no_obstacle(name: str) -> None:
    refuse_unread(ModelSnapshot(InWhatIsUnread(tool=[HOLD_NOTHING[name]], use=add)).records)


def test_what_no_code_of_the_users_names_is_no_obstacle() -> None:
    model = Counting(other=queue.SimpleQueue())
    model.a.tool = queue.SimpleQueue()  # type: ignore[assignment]
    refuse_unread(ModelSnapshot(model).records)


@pytest.mark.parametrize(
    ("at", "keep", "replayed"),
    thin(itertools.product([("a",), ("a", "b")], ["attribute", "length", "dict"], [False, True]), 5),
)
def test_a_cache_that_the_first_call_fills_is_held_by_each_party_that_reads_it(
    at: tuple[str, ...], keep: str, replayed: bool
) -> None:
    # A table has no rows, which a trace would have to send.
    idiom = Idiom(lambda: Table(keep, replayed), at=at, replayed=replayed or len(at) == 2)
    check_training(idiom)
    check_left_alone(idiom)


def test_what_the_first_rows_decide_is_no_cache() -> None:
    """Started from its first batch, as in data-dependent initialization: warmed, it would be another model."""

    class FromTheFirstBatch(Table):
        def positions(self, length: int) -> Tensor:
            return torch.zeros(8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x.reshape(-1, 4, 2))
            if not self.length:
                self.a.bias.data.copy_(-h.detach().mean((0, 1)))
                self.length = 1
            return super().forward(x)

    with pytest.raises(InvalidInput, match="is another model than the uncut one"):
        cut(FromTheFirstBatch("length", True), ["a"], torch.randn(8, 8))
