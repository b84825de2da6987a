"""State as JSON and tensors: everything comes back to the bit and by its type, or is refused with its place."""

from __future__ import annotations

import copy
import enum
import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from splitfed.core.errors import InvalidInput
from splitfed.core.state_encoding import TAG, check_state, encode
from tests.examples import read_back


class Mode(enum.Enum):
    """No plain value."""

    ON = 1


def mixed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


def same(one: Any, two: Any) -> None:
    """Compare types, too, and floats by their bits."""
    assert type(one) is type(two)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.requires_grad) == (two.dtype, two.shape, two.requires_grad)
        assert bytes(one.detach().contiguous().reshape(-1).view(torch.uint8)) == bytes(
            two.detach().contiguous().reshape(-1).view(torch.uint8)
        )
        assert one.stride() == two.stride()
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.strides) == (two.dtype, two.shape, two.strides)
        assert one.tobytes() == two.tobytes()
    elif isinstance(one, dict):
        assert list(map(repr, one)) == list(map(repr, two))
        for left, right in zip(one.items(), two.items(), strict=True):
            same(left, right)
        if isinstance(one, OrderedDict):
            same(vars(one), vars(two))
    elif isinstance(one, (list, tuple, deque)):
        assert len(one) == len(two)
        for left, right in zip(one, two, strict=True):
            same(left, right)
    elif isinstance(one, float):
        assert struct.pack("d", one) == struct.pack("d", two)
    else:
        assert one == two


base = torch.arange(8.0)
VALUES: dict[str, Any] = {
    "floats": [0.1, -0.0, 5e-324, math.inf, -math.inf],
    "integers": [0, -(2**200), 2**20_000, True],
    "texts": ["", "\u2028\x00\ud800", TAG],
    "nothing and bytes": [None, b"\x00\xff", bytearray(b"ab"), b""],
    "a dict that looks like a tag": {TAG: "tensor", "value": 0},
    "keys that are no texts": {1: "a", (2, "b"): [], None: {}, 0.5: 0, "1": "b"},
    "containers": [(1, [2]), {3}, frozenset({4, "x"}), range(2, 9, 3), slice(1, None, 2), Counter("aab"), 1 + 2j],
    "a queue with a limit": deque([1, (2,)], maxlen=4),
    "names of torch": [torch.float16, torch.strided, torch.channels_last, torch.device("cuda", 1), torch.Size([2, 3])],
    "an ellipsis": ...,
    "a state dict with versions": mixed().state_dict(),
    "no numbers": [torch.zeros(0, 3), torch.tensor(2.0), np.zeros((0, 2))],
    "dtypes": [
        torch.arange(6).reshape(2, 3).to(t) for t in (torch.bool, torch.bfloat16, torch.uint16, torch.complex64)
    ],
    "strides": [
        torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(6.0).reshape(2, 3).T,
        torch.arange(6.0).reshape(2, 3)[:, 1:],
        torch.arange(3.0).expand(2, 3),
        torch.ones(2, 3, dtype=torch.complex64).mH,
    ],
    "memory": [base[2:], base[::2], torch.arange(12.0).reshape(3, 4)[1:, 2]],
    "a tensor that learns": torch.ones(2, requires_grad=True),
    "layouts of arrays": [
        np.arange(6.0).reshape(2, 3).T,
        np.arange(24.0).reshape(4, 6)[::-1, ::3],
        np.broadcast_to(np.float32(2), (2, 3)),
    ],
    "sets of numbers": [{8, 0, 16}, frozenset((0.5, -1.0))],
    "a weight": nn.Parameter(torch.ones(2), requires_grad=False),
    "arrays": [np.arange(4, dtype="<u2").reshape(2, 2), np.float64(0.1), np.array("text"), np.datetime64(1, "s")],
    "generators": [torch.Generator().manual_seed(3).get_state(), random.Random(1).getstate(), np.random.PCG64(2).state],
}


@pytest.mark.parametrize("name", VALUES)
def test_what_is_kept_comes_back(name: str) -> None:
    same(VALUES[name], read_back(VALUES[name]))


def test_a_nan_keeps_being_one() -> None:
    assert math.isnan(read_back(math.nan))


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
NESTED = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.integers() | st.tuples(st.text()), inner) | st.tuples(inner)
    ),
    max_leaves=12,
)


@settings(max_examples=30, deadline=None)
@given(NESTED)
def test_whatever_is_plain_comes_back(state: Any) -> None:
    same(state, read_back(state))


def test_a_tensor_under_two_names_is_one_again() -> None:
    shared, base = torch.ones(3), torch.arange(4.0)
    found = read_back({"a": shared, "b": [shared], "first": base[:2], "second": base[2:]})
    assert found["a"] is found["b"][0]
    same(found["second"], base[2:])
    _, tensors = encode({"first": base[:2]}, "")
    assert tensors[0].untyped_storage().nbytes() in (8, 16), "safetensors writes the numbers of the view alone"


def test_tensors_that_overlap_share_their_memory_again() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    parts = [whole[1:, 1:3], whole[2], whole[:, 5], torch.zeros(2), whole[2]]
    found = read_back(parts)
    same(parts, found)
    found[1].mul_(-1)
    assert found[0].tolist() == [[7.0, 8.0], [-13.0, -14.0], [19.0, 20.0]]
    assert found[2].tolist() == [5.0, 11.0, -17.0, 23.0]
    assert torch.equal(found[4], found[1])
    assert found[4] is not found[1]


def test_values_are_json_of_the_standard() -> None:
    tree, _ = encode(VALUES, "state")
    json.dumps(tree, allow_nan=False)


def looped() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


REFUSED: dict[str, tuple[Any, str]] = {
    "an object": ({"a": [Mode.ON]}, r"state\['a'\]\[0\] is of type Mode, which a checkpoint cannot hold"),
    "a function": (len, "state is of type builtin_function_or_method"),
    "a class of one's own that is a dict": (defaultdict(int), "state is of type defaultdict"),
    "an object as a key": ({Mode.ON: 1}, "a key of state is of type Mode"),
    "a sparse tensor": (torch.eye(2).to_sparse(), "state is a torch.sparse_coo Tensor on cpu"),
    "shapes alone": (torch.ones(2, device="meta"), "on meta, which a checkpoint cannot hold"),
    "a masked array": (np.ma.array([1.0]), "state is of type MaskedArray, of float64, which a checkpoint cannot hold"),
    "an array of objects": (np.array([{}]), "state is an array of object"),
    "a loop": (looped(), "is nested more than 100 deep"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_with_its_place(name: str) -> None:
    value, text = REFUSED[name]
    with pytest.raises(InvalidInput, match=text):
        check_state(value, "state")


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop", "Rprop", "ASGD", "Adafactor", "RAdam"])
def test_the_state_of_an_optimizer_comes_back(name: str) -> None:
    model = mixed().to(memory_format=torch.channels_last)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    model(torch.ones(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    same(state, read_back(state))
