"""What a cut costs: how often the weights of a large model are copied, and how many rows run through it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from splitfed.core import weight_sharing
from splitfed.core.cut_places import cut_places
from splitfed.core.cutting import cut
from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.plain_values import equal_tensors, same_tensors
from splitfed.planning.held_rows import lines_told
from splitfed.topologies.vanilla import vanilla
from tests.core.cut_idioms import leak

WIDTH = 512
"""So wide that weights are not compared by value, as small ones are, while an operation is recorded."""
COPIES = torch.ops.aten.clone.default, torch.ops.aten._to_copy.default


class Net(nn.Module):
    """Three layers, and dropout that depends on the mode, so that it is cut by replay."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def change(self) -> None:
        """What `forward` does to its weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, WIDTH)."""
        self.change()
        h = functional.dropout(self.first(x).relu(), 0.1, training=self.training)
        return self.third(self.second(h).relu())


class Clamps(Net):
    """Writes into a weight where nobody counts it, in a segment of its own."""

    def change(self) -> None:
        """Halve a weight."""
        self.first.weight.data.mul_(0.5)


class Leaks(Net):
    """Writes into a weight of one segment what has run through a hook behind it, which a copy does not have."""

    def __init__(self) -> None:
        super().__init__()
        leak(self.third.weight, 2)


class _Counts(TorchDispatchMode):
    """Counts copies of whole weights, rows that run through a layer in the forward pass, and layers run on shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = self.rows = self.on_shapes = self.masks = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it."""
        given = args[0] if args and isinstance(args[0], Tensor) else None
        if given is not None and not given.is_meta and func in COPIES and given.shape == (WIDTH, WIDTH):
            self.copies += (kwargs or {}).get("device") != torch.device("meta")
        if func is torch.ops.aten.addmm.default and not args[1].is_meta:
            self.rows += len(args[1])
        self.on_shapes += func is torch.ops.aten.addmm.default and args[1].is_meta
        self.masks += func is torch.ops.aten.isnan.default and args[0].dim() > 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every model be a large one."""
    monkeypatch.setattr(weight_sharing, "LARGE", 0)


@pytest.mark.usefixtures("large")
def test_a_large_model_is_copied_once_and_seen_by_few_rows() -> None:
    model, x = Net(), torch.randn(8, WIDTH)
    with _Counts() as counts:
        before, _ = cut(model, ("first",), x)
    assert type(before.module).__name__.endswith("Segment0")
    # The snapshot, of three layers, and nothing else.
    assert counts.copies == 3
    assert counts.rows <= 3 * 34


def test_no_layer_runs_on_shapes_and_changed_weights_are_put_back_without_a_mask() -> None:
    with _Counts() as counts:
        cut(Net(), ("first",), torch.randn(8, WIDTH))
    assert counts.on_shapes == 0
    assert counts.masks == 0


def test_numbers_are_the_same_by_bytes_or_by_value() -> None:
    for size in (6, WIDTH**2, WIDTH**2 + 1):
        one = torch.randn(size)
        one[0] = 0.0
        assert equal_tensors(one, one.clone())
        assert equal_tensors(one, one * torch.where(one == 0, -1, 1))
        assert equal_tensors(one[1:], one[1:].clone())
        assert not equal_tensors(one, one + 1e-3)
        one[-1] = torch.nan
        assert same_tensors(one, one.clone())
        assert same_tensors(one, one * torch.where(one == 0, -1, 1))
        assert not same_tensors(one, one.nan_to_num(2.0))
        assert not same_tensors(one.nan_to_num(2.0), one)


@pytest.mark.usefixtures("large")
def test_a_large_model_is_copied_once_for_all_of_its_places() -> None:
    with _Counts() as counts:
        places = cut_places(Net(), torch.randn(8, WIDTH))
    assert sum(place.possible for place in places) > 1
    assert counts.copies == 3


def test_a_small_model_is_compared_on_all_stages() -> None:
    with _Counts() as counts:
        cut(Net(), ("first",), torch.randn(8, WIDTH))
    assert counts.rows > 3 * 2 * 34


@pytest.mark.usefixtures("large")
def test_a_model_that_writes_weights_is_compared_on_copies_of_its_own() -> None:
    model, x = Clamps(), torch.randn(8, WIDTH)
    kept = copy.deepcopy(model.state_dict())
    before, after = cut(model, ("first",), x)
    assert all(torch.equal(kept[name], tensor) for name, tensor in model.state_dict().items())
    alone = copy.deepcopy(model).eval()
    assert torch.equal(alone(x), after.module.eval()(before.module.eval()(x)))


class Compares(Net):
    """Compares rows with those of a table, all of which it needs."""

    def __init__(self) -> None:
        super().__init__()
        self.fourth = nn.Linear(5, WIDTH)

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        """Return (rows, WIDTH)."""
        assert table is not None
        return super().forward(self.fourth(self.first(x) @ table.T))


@pytest.mark.usefixtures("large")
def test_an_input_that_has_no_rows_is_not_shortened() -> None:
    example = {"x": torch.randn(8, WIDTH), "table": torch.randn(5, WIDTH)}
    with pytest.raises(InvalidInput, match=r"the inputs of Compares have 8 rows \(x\), 5 rows \(table\): a batch has"):
        cut(Compares(), ("second",), example)


@pytest.mark.usefixtures("large")
def test_a_plan_says_what_is_not_proved_of_a_large_model() -> None:
    topology = vanilla(Net(), "first", example=torch.randn(8, WIDTH))
    facts = pass_example(topology, {"x": torch.randn(2, WIDTH)})
    proof = "compared on 3 rows in training and 2 rows in evaluation without gradients, with one step between them"
    assert lines_told(topology, facts)[-1].startswith(proof)


@pytest.mark.usefixtures("large")
def test_a_difference_of_a_large_model_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"the gradient of weight 'third.weight' differs"):
        cut(Leaks(), ("first",), torch.randn(8, WIDTH))
