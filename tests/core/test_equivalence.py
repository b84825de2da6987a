"""The comparison of a cut model with the uncut one: when it is made, what it tells, and what it leaves behind."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.core.cutting import cut
from splitfed.core.equivalence import check_topology
from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.model_snapshot import ModelSnapshot, drawn_packages, generator_states
from splitfed.core.optimizers import Optim
from splitfed.core.topology import Head, Segment, Topology
from splitfed.threats.retraining import fresh
from splitfed.topologies import multi_hop, vanilla
from tests.core.cut_idioms import Counting, Net, ends, frozen_unless_traced, leak
from tests.examples import engine_of
from tests.predicted_bytes import backward_bytes

DECAY = Optim("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1})


def data() -> sf.data.Dataset:
    drawn = torch.Generator().manual_seed(0)
    return sf.data.Dataset("made", torch.randn(400, 8, generator=drawn), torch.arange(400) % 4, sf.classification(4))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Net(frozen_unless_traced), "gets a gradient, and none in the uncut model"),
        (Counting(ends, steps=0), "forward changes the attribute 'steps' of the model (0 -> 5)"),
    ],
)
def test_a_run_is_refused_before_anything_is_written(model: nn.Module, text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        sf.train(vanilla(model, "a"), data().clients(2), rounds=1, logging=sf.Logging(folder=tmp_path / "run"))
    assert text in str(caught.value)
    assert str(caught.value).startswith(f"{type(model).__name__} cut at 'a' is another model than the uncut one: ")
    assert not (tmp_path / "run").exists()


def test_without_an_example_a_cut_is_compared_only_when_it_is_trained() -> None:
    assert len(cut(Net(frozen_unless_traced), "a")) == 2


def test_a_caller_without_gradients_is_told_so_and_not_that_the_cut_is_another_model() -> None:
    with torch.no_grad(), pytest.raises(InvalidInput, match="gradients are switched off by the caller"):
        sf.train(vanilla(Net(ends), "a"), data().clients(2), rounds=1)


def test_an_example_that_lacks_an_input_is_refused() -> None:
    with pytest.raises(InvalidInput, match="not dict; of rows named '0' and '1' it gets a tuple, of others a table"):
        cut(Net(ends), "a", {"y": torch.randn(4, 8)})


def test_a_model_that_fails_by_itself_is_told_apart_from_its_cut() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.relu(m.a(x))
        return m.c(m.b(torch.relu_(h)))

    with pytest.raises(InvalidInput, match="Net fails by itself in training with 8 rows: one of the variables"):
        cut(Net(forward), "b", torch.randn(8, 8))


@pytest.mark.parametrize(("rows", "told"), [(0, 0), (1, 1), (None, 0)])
def test_an_example_of_fewer_than_two_rows_is_refused(rows: int | None, told: int) -> None:
    example = torch.tensor(1.0) if rows is None else torch.randn(rows, 8)
    with pytest.raises(InvalidInput, match=f"example has {told} rows for the input 'x' of Net; expected at least 2"):
        cut(Net(ends), "a", example)


def test_an_argument_that_forward_never_reads_needs_no_rows() -> None:
    class Described(Net):
        def forward(self, x: Tensor, meta: Any, scale: float = 1.0, *, name: Any) -> Any:
            return self._run(self, x)

    assert len(cut(Described(ends), "a", torch.randn(8, 8))) == 2
    model = Described(frozen_unless_traced)
    with pytest.raises(InvalidInput, match="gets a gradient, and none in the uncut model"):
        check_topology(vanilla(model, "a"), {"x": torch.randn(8, 8)})
    assert len(cut(model, "a", torch.randn(8, 8))) == 2


def test_a_difference_is_told_where_the_model_fails_by_itself_at_a_later_batch() -> None:
    """It takes rows in pairs, and the second batch has five."""
    model = Net(lambda m, x: frozen_unless_traced(m, x).unflatten(0, (-1, 2)).flatten(0, 1))
    with pytest.raises(InvalidInput, match=r"in training weight 'a\.weight' gets a gradient, and none"):
        check_topology(vanilla(model, "a"), {"x": torch.randn(8, 8)})


class Middle(nn.Module):
    """Two layers with a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.first(x)))


def by_hand(bottom: nn.Module, top: nn.Module) -> Topology:
    segments = (
        Segment("bottom", "client", bottom, ("x",), ("h",)),
        Segment("top", "server", top, ("h",), ("out",)),
    )
    return Topology("by hand", segments, {"x": "client"}, (Head("out", "server", "client"),))


@pytest.mark.parametrize("whole", [True, False])
def test_statistics_of_a_backbone_in_evaluation_mode_stay(whole: bool) -> None:
    backbone = Middle().eval()
    bottom = backbone if whole else nn.Sequential(nn.Linear(8, 8), backbone)
    engine = engine_of(by_hand(bottom, nn.Linear(8, 10)), torch.randn(16, 8), torch.arange(16) % 10)
    engine.train(0, 0, [torch.arange(16)] * 3)
    inside = engine.modules(0)["bottom"]
    norm = (inside if whole else inside[1]).norm  # type: ignore[index]
    assert not norm.training
    assert torch.equal(norm.running_mean, torch.zeros(8))
    assert not torch.equal(norm.weight, torch.ones(8)), "frozen statistics, not frozen weights"


def test_segments_that_are_all_in_evaluation_mode_are_trained() -> None:
    engine = engine_of(by_hand(Middle().eval(), nn.Linear(8, 10).eval()), torch.randn(16, 8), torch.arange(16) % 10)
    engine.train(0, 0, [torch.arange(16)])
    assert not torch.equal(engine.modules(0)["bottom"].norm.running_mean, torch.zeros(8))  # type: ignore[arg-type]


def test_a_segment_made_by_hand_whose_copy_is_another_is_refused() -> None:
    bottom = Middle()
    leak(bottom.first.weight, 2)
    topology = by_hand(bottom, nn.Linear(8, 10))
    text = "segment 'bottom' does in its party what it does not do by itself: in training the gradient of weight 'first"
    with pytest.raises(InvalidInput, match=text):
        check_topology(topology, {"x": torch.randn(8, 8)})


def test_a_segment_that_cannot_be_copied_is_refused() -> None:
    bottom = Middle()
    bottom.kept = (number for number in range(3))  # type: ignore[assignment]
    with pytest.raises(InvalidInput, match=r"segment 'bottom' cannot be copied for its party: .*generator"):
        pass_example(by_hand(bottom, nn.Linear(8, 10)), {"x": torch.randn(8, 8)})


def test_a_submodule_that_is_not_read_can_be_drawn_anew() -> None:
    topology = vanilla(Net(ends, spare=nn.Linear(3, 3)), "a")
    drawn = fresh(topology, 5).state_dict()
    assert not torch.equal(drawn["spare.weight"], topology.state_dict()["spare.weight"])


def test_no_topology_of_a_run_leads_to_the_users_model() -> None:
    model = Net(ends)
    run = sf.train(vanilla(model, "a"), data().clients(2), rounds=1)
    assert all(segment.original is None for topology in run.engine.topologies for segment in topology.segments)


def test_behind_a_stopped_gradient_no_party_gets_one_and_decay_leaves_its_weights_alone() -> None:
    """The server stops the gradient, so neither the hop nor the client learns, as in the uncut model."""
    model = Net(lambda m, x: m.c(m.b(torch.relu(m.a(x))).detach()))
    topology = multi_hop(model, ("a", "b"), labels="server")
    x, y = torch.randn(24, 8), torch.arange(24) % 4
    uncut = copy.deepcopy(model)
    engine = engine_of(topology, x, y, optim=DECAY)
    engine.train(0, 0, list(torch.arange(24).split(8)))
    optimizer, _ = DECAY.build(uncut.parameters())
    for rows in torch.arange(24).split(8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(uncut(x[rows]), y[rows]).backward()
        optimizer.step()
    state = topology.state_dict(engine.modules(0))
    assert all(torch.equal(state[name], value) for name, value in uncut.state_dict().items())
    assert torch.equal(state["a.weight"], model.a.weight)
    assert engine.traffic.bytes(kind="gradient") == 0
    assert backward_bytes(topology, pass_example(topology, {"x": x[:4]}), 8) == 0


def test_a_snapshot_finds_and_undoes_what_a_model_does_to_itself() -> None:
    class Busy(nn.Module):
        total = 0

        def __init__(self) -> None:
            super().__init__()
            self.fc, self.seen, self.table = nn.Linear(2, 2), [1], {"a": [1]}
            self.register_buffer("n", torch.zeros(()))
            self.random = random.Random(3)
            self.counts = np.zeros(2)

        def forward(self, x: Tensor) -> Tensor:
            Busy.total += 1
            self.seen[0] += 1
            self.table["a"].append(2)
            self.table["b"] = []
            self.counts[0] += 1
            self.extra = 5
            self.n = self.n + 1
            self.random.random()
            random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
            return self.fc(x)

    model = Busy()
    state = copy.deepcopy(model.state_dict())
    draws, before = model.random.getstate(), generator_states()
    snapshot = ModelSnapshot(model)
    assert snapshot.changes() == []
    model.train(False)(torch.ones(1, 2)).sum().backward()
    assert sorted(change.split(" (")[0] for change in snapshot.changes()) == [
        "attribute 'counts' of the model",
        "attribute 'extra' of the model",
        "attribute 'random' of the model",
        "attribute 'seen' of the model",
        "attribute 'table' of the model",
        "attribute 'total' of class Busy",
    ]
    assert drawn_packages(before, generator_states())[0] == "torch"
    snapshot.restore()
    assert snapshot.changes() == []
    assert drawn_packages(before, generator_states()) == []
    assert (Busy.total, model.seen, model.table, model.counts.tolist()) == (0, [1], {"a": [1]}, [0.0, 0.0])
    assert not hasattr(model, "extra")
    assert model.random.getstate() == draws
    assert model.training
    assert model.fc.weight.grad is None
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


class Makers(OrderedDict[str, type]):
    """Gives a new object of the class that stands under a name."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()


ACTIVATIONS = Makers(relu=nn.ReLU, tanh=nn.Tanh)


def test_a_snapshot_leaves_a_table_that_makes_what_it_is_asked_for_as_it_was() -> None:
    """A global that a model reads, as the activations of the transformers package are."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return ACTIVATIONS["tanh"](self.fc(x))  # type: ignore[operator]

    snapshot = ModelSnapshot(Named())
    assert snapshot.changes() == []
    snapshot.restore()
    assert list(ACTIVATIONS.items()) == [("relu", nn.ReLU), ("tanh", nn.Tanh)]


def test_gradients_left_over_from_training_are_neither_added_to_nor_a_reason_to_refuse() -> None:
    """The parties' copies have none, so that the uncut model must begin without them as well."""
    model = Net(lambda m, x: ends(m, x) * m.scale)
    model.scale = torch.ones(4).requires_grad_()  # type: ignore[assignment]
    model(torch.ones(3, 8)).sum().backward()
    owned = [*model.parameters(), model.scale]
    before = [tensor.grad for tensor in owned]
    numbers = [gradient.clone() for gradient in before]  # type: ignore[union-attr]
    cut(model, "a", torch.randn(8, 8))
    assert all(tensor.grad is gradient for tensor, gradient in zip(owned, before, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(before, numbers, strict=True))  # type: ignore[arg-type]
