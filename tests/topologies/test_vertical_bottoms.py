"""Bottoms of any make: several inputs, token ids, recurrent layers, dropout by function; what is refused of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import splitfed
from splitfed.core.errors import InvalidInput
from splitfed.core.optimizers import Optim
from splitfed.core.random import stream
from splitfed.core.tasks import classification
from splitfed.data import Dataset, Feature, Federation
from splitfed.topologies import Output, extended_vanilla, multi_task, vertical
from splitfed.training.run import Run
from tests.examples import refusal

RANDOM = torch.Generator().manual_seed(0)
X = torch.randn(120, 8, generator=RANDOM)
Y = (X.sum(1) > 0).long()
TABLE = Dataset("table", X, Y, classification(2)).vertical({"a": range(4), "b": range(4, 8)})
IDS = torch.randint(1, 9, (120, 3, 5), generator=RANDOM)
TOKENS = Dataset("tokens", IDS, (IDS[:, 0].sum(1) > 22).long(), classification(2))
POSITIONS = torch.arange(15).reshape(3, 5)
PARTS = TOKENS.with_features({name: Feature(row, (5,)) for name, row in zip("dub", POSITIONS, strict=True)})


class Pair(nn.Module):
    """Two columns of tokens, in the order of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.EmbeddingBag(9, 4), nn.EmbeddingBag(9, 4)

    def forward(self, up: Tensor, down: Tensor) -> Tensor:
        """Return (rows, 8)."""
        return torch.cat([self.one(up), self.other(down)], 1)


class Dropped(nn.Module):
    """Drops by function, in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, 8)."""
        return functional.dropout(self.out(x), 0.5, training=self.training)


class Returns(nn.Module):
    """Returns whatever `wrap` makes of a layer's output."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.out, self.wrap = nn.Linear(4, 8), wrap

    def forward(self, x: Tensor) -> Any:
        """Return anything."""
        return self.wrap(self.out(x))


def linear() -> nn.Module:
    with stream(0):
        return nn.Linear(4, 8)


def go(bottom: nn.Module, data: Federation | None = None, **options: Any) -> Run:
    with stream(0):
        topology = vertical({"a": bottom, "b": linear()}, nn.Linear(16, 2), labels="server")
    return splitfed.train(topology, data or TABLE.clients(1), schedule="joint", rounds=1, **options)


def test_a_party_feeds_several_inputs() -> None:
    with stream(0):
        pair, bag, top = Pair(), nn.EmbeddingBag(9, 8), nn.Linear(16, 2)
    topology = vertical({"a": pair, "b": bag}, top, labels="server", inputs={"a": ["u", "d"]})
    assert topology.inputs == {"d": "a", "u": "a", "b": "b"}
    assert topology.segment("bottom_a").inputs == ("u", "d")
    data = PARTS.clients(1, validation=0.0, test=0.25)
    run = splitfed.train(
        topology, data, schedule="joint", rounds=1, batch_size=1000, optimizer=Optim("SGD", {"lr": 0.5})
    )
    rows = data.clients[0].train
    # The same step of the model that nobody cut: "u" is the second row of tokens, and the pair's first argument.
    scores = top(torch.cat([pair(rows.x[:, 1], rows.x[:, 0]), bag(rows.x[:, 2])], 1))
    weights = [p for module in (pair, bag, top) for p in module.parameters()]
    gradients = torch.autograd.grad(functional.cross_entropy(scores, rows.y), weights)
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            weight -= 0.5 * gradient
        expected = top(torch.cat([pair(IDS[:, 1], IDS[:, 0]), bag(IDS[:, 2])], 1))
    assert torch.allclose(run.predict(IDS), expected, atol=1e-5)
    (found,) = run.attack("token_decoder", adversary="server0")
    assert found.truth.shape[1:] == (3, 5)


def test_other_topologies_with_bottoms_take_inputs_too() -> None:
    bottoms = {"a": Pair(), "b": nn.EmbeddingBag(9, 8)}
    given = {"a": ["u", "d"]}
    relayed = extended_vanilla(bottoms, nn.Linear(16, 4), nn.Linear(4, 2), labels="server", inputs=given)
    tasks = multi_task(bottoms, {"s": nn.Linear(16, 2)}, targets={"s": None}, inputs=given)
    assert relayed.inputs == tasks.inputs == {"u": "a", "d": "a", "b": "b"}


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"c": ["u"]}, "unknown party in inputs 'c' (allowed: a, b)"),
        ({"a": "ud"}, "inputs of 'a' are 'ud'; expected a list of parts of a row, each once"),
        ({"a": []}, "inputs of 'a' are []; expected a list of parts of a row, each once"),
        ({"a": ["u", "u"]}, "inputs of 'a' are ['u', 'u']; expected a list of parts of a row, each once"),
        ({"a": ["u", "b"]}, "input 'b' is read by 'a' and by 'b'; expected one party each"),
    ],
)
def test_inputs_refused(inputs: Any, text: str) -> None:
    assert refusal(vertical, {"a": Pair(), "b": linear()}, linear(), labels="server", inputs=inputs) == text


@pytest.mark.parametrize(
    "bottom",
    [
        nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 8)),
        nn.Sequential(nn.Unflatten(1, (2, 2)), Output(nn.GRU(2, 4, batch_first=True)), nn.Flatten()),
        nn.Sequential(nn.Unflatten(1, (4, 1)), Output(nn.LSTM(1, 2, batch_first=True), 0), nn.Flatten()),
        Output(Returns(lambda z: (None, [z.relu(), z])), (1, 0)),
        Returns(lambda z: (z,)),
    ],
)
def test_bottoms_of_any_make_learn(bottom: nn.Module) -> None:
    run = go(bottom)
    trained = run.engine.parties["a0"].state.modules["bottom_a"].state_dict()
    assert all(not torch.equal(trained[name], p) for name, p in bottom.named_parameters())


def test_dropout_by_function_acts_in_training_alone() -> None:
    with stream(0):
        bottom = Dropped()
    run = go(bottom, logging=splitfed.Logging(record=splitfed.Recording(("server0",))))
    sent = run.engine.view("server0").select(phase="train", kind="activation").messages
    zeros = torch.cat([m.tensors["z_a"].flatten() for m in sent if "z_a" in m.tensors]) == 0
    # 560 numbers or so.
    assert 0.4 < zeros.double().mean() < 0.6
    seen = run.observe("server0").tensors()["z_a"]
    assert not bool((seen == 0).any())
    assert torch.equal(seen, run.observe("server0", seed=9).tensors()["z_a"])


REFUSED = [
    (lambda z: (z, z), "segment 'bottom_a' returned 2 values; it names 1: z_a"),
    (lambda z: {"z": z}, "value 'z_a' of segment 'bottom_a' is a dict, no tensor"),
    (lambda z: None, "value 'z_a' of segment 'bottom_a' is a NoneType, no tensor"),
    (lambda z: z.mean(0), "value 'z_a' of segment 'bottom_a' has shape (8,); the first dimension must be the batch"),
    (lambda z: z.T, "value 'z_a' of segment 'bottom_a' has shape (8, 4); the first dimension must be the batch"),
]


@pytest.mark.parametrize(("wrap", "text"), REFUSED)
def test_what_a_bottom_may_not_return(wrap: Any, text: str) -> None:
    assert refusal(go, Returns(wrap)).startswith(text)


def test_recurrent_bottoms_say_what_they_hand_on() -> None:
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        name = kind.__name__
        assert refusal(go, kind(4, 8, batch_first=True)) == (
            f"bottom of 'a' is {name}, which returns its output and its state: hand on one, "
            f"Output({name}(..., batch_first=True), 0)"
        )
        # Else the rows of a batch would be taken for moments.
        assert refusal(Output, kind(4, 8)) == (
            f"Output of {name} with batch_first=False is not allowed: it takes rows of a batch for moments of one "
            "sequence; give batch_first=True"
        )


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (2, "Output at=(2,) of Returns finds 2 values there"),
        ((1, 0), "Output at=(1, 0) of Returns finds a Tensor there"),
        (0, "Output at=(0,) of Returns is a NoneType; expected a tensor"),
    ],
)
def test_output_refused(at: Any, text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Output(Returns(lambda z: (None, z)), at)(torch.zeros(3, 4))
    assert str(caught.value) == text
