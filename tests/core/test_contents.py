"""What a value is made of, found by following rows through every kind of operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.contents import Content, Origin, RowTracking, origin_of, traces_of_input

CONSTANT, MASK, INPUT, FEATURES = Content
LOWEST = torch.finfo(torch.float32).min
X, IDS = torch.rand(4, 6) + 0.1, torch.arange(24).reshape(4, 6) % 9
KEPT = torch.tensor([[1, 1, 1, 0, 0, 0]] * 4)


class Net(nn.Module):
    """Layers and tensors of every kind; `way` says what `forward` does with them."""

    def __init__(self, way: Callable[..., Any]) -> None:
        super().__init__()
        self.way = way
        self.linear, self.words = nn.Linear(6, 6), nn.Embedding(9, 6, padding_idx=0)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(()))
        self.norm, self.plain_norm = nn.BatchNorm1d(6), nn.BatchNorm1d(6, affine=False)
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.register_buffer("mean", torch.full((6,), 0.5))

    def forward(self, x: Tensor) -> Any:
        return self.way(self, x)


class Product(torch.autograd.Function):
    """A product with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], gradients[0]


def fill(net: Net, x: Tensor) -> Tensor:
    empty = torch.zeros(4, 6)
    empty[:, :3] = x[:, :3]
    return empty


def fill_with_features(net: Net, x: Tensor) -> Tensor:
    empty = torch.zeros(4, 6)
    empty[:, :3] = net.linear(x)[:, :3]
    return empty


def without_gradients(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        return net.linear(x)


def found(way: Callable[..., Any], rows: Tensor) -> Origin:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Net(way)
    given = rows.clone()
    zeros = () if bool(rows.any()) else ("x",)
    with RowTracking(net, [(given, traces_of_input("x", given))], zeros) as follow:
        made = net(given)
    return origin_of(follow.traces(made))


ROWS: list[tuple[str, Tensor, Content, Callable[[Any, Tensor], Any]]] = [
    # Rows through no weight.
    ("affine", X, INPUT, lambda n, x: x * 2 - 1),
    ("itself", X, INPUT, lambda n, x: x),
    ("a view", X, INPUT, lambda n, x: x.flip(1)[:, None].expand(4, 2, 6)),
    ("a buffer", X, INPUT, lambda n, x: (x - n.mean) / 0.2),
    ("statistics of the batch", X, INPUT, lambda n, x: n.plain_norm(x)),
    ("beside features", X, INPUT, lambda n, x: torch.cat([n.linear(x), x], 1)),
    ("stacked with features", X, INPUT, lambda n, x: torch.stack([n.linear(x), x], 1).relu()),
    ("threshold", X, INPUT, lambda n, x: x > 0.5),
    ("additive threshold", X, INPUT, lambda n, x: (x > 0.5) * -1e9),
    ("in place", X, INPUT, lambda n, x: x.mul_(2)),
    ("written into zeros", X, INPUT, fill),
    ("chosen by features", X, INPUT, lambda n, x: x.gather(1, n.linear(x).argsort(1))),
    ("kept by features", X, INPUT, lambda n, x: torch.where(n.linear(x) > 0, x, 0.0)),
    ("with noise", X, INPUT, lambda n, x: functional.dropout(x + torch.randn_like(x), 0.5)),
    ("by NumPy", X, INPUT, lambda n, x: torch.from_numpy(x.numpy() * 2)),
    ("by a list", X, INPUT, lambda n, x: torch.tensor(x.tolist())),
    ("ids", IDS, INPUT, lambda n, x: x[:, None]),
    ("ids as numbers", IDS, INPUT, lambda n, x: x.float() / 9),
    ("ids of zeros as numbers", torch.zeros_like(IDS), INPUT, lambda n, x: x * 3.0),
    ("one hot", IDS, INPUT, lambda n, x: functional.one_hot(x, 9).float()),
    ("order of ids", IDS, INPUT, lambda n, x: x.argsort(1)),
    ("a table of constants", IDS, INPUT, lambda n, x: torch.arange(9.0)[x]),
    ("factors of a mask", KEPT, INPUT, lambda n, x: x.float()),
    # Lengths, masks and comparisons of ids.
    ("comparison", IDS, MASK, lambda n, x: x != 0),
    ("comparison as numbers", IDS, MASK, lambda n, x: (x != 0).float()),
    ("places", IDS, MASK, lambda n, x: (x != 0).cumsum(1)),
    ("lengths", IDS, MASK, lambda n, x: (x != 0).sum(1, keepdim=True)),
    ("place of the largest", IDS, MASK, lambda n, x: x.argmax(1)),
    ("additive", KEPT, MASK, lambda n, x: (1 - x) * LOWEST),
    ("additive, older", KEPT, MASK, lambda n, x: (1.0 - x[:, None, None].float()) * -10000.0),
    ("additive, inverted", KEPT, MASK, lambda n, x: (1.0 - x).masked_fill((1.0 - x).bool(), LOWEST)),
    ("additive, causal", KEPT, MASK, lambda n, x: (1.0 - x) * LOWEST + torch.full((6, 6), -1e9).triu(1)[0]),
    ("filled", KEPT, MASK, lambda n, x: torch.zeros(4, 6).masked_fill(x == 0, float("-inf"))),
    ("where", KEPT, MASK, lambda n, x: torch.where(x == 0, LOWEST, 0.0)),
    ("pairs", KEPT, MASK, lambda n, x: (x[:, None] * x[:, :, None]) == 0),
    ("no padding in these rows", torch.ones_like(KEPT), MASK, lambda n, x: (1 - x) * LOWEST),
    ("a number of the batch", X, INPUT, lambda n, x: x.max()),
    ("a sum of rows with weights of somebody's choice", X, INPUT, lambda n, x: (x * torch.rand(4, 6)).sum()),
    ("a question to the batch", X, MASK, lambda n, x: (x > 1).any()),
    ("a number of each row", X, INPUT, lambda n, x: torch.stack([x[0].sum(), x[1].sum()])),
    # Shapes and constants.
    ("shape", X, CONSTANT, lambda n, x: torch.arange(x.shape[1]).expand(4, 6)),
    ("like", X, CONSTANT, lambda n, x: torch.ones_like(x).triu() + x.new_zeros(4, 6)),
    ("buffer alone", X, CONSTANT, lambda n, x: n.mean.expand(4, 6)),
    # Rows through weights.
    ("linear", X, FEATURES, lambda n, x: n.linear(x)),
    ("frozen", X, FEATURES, lambda n, x: n.frozen(x)),
    ("no_grad", X, FEATURES, without_gradients),
    ("residual", X, FEATURES, lambda n, x: x + n.linear(x)),
    ("gated", X, FEATURES, lambda n, x: x * n.linear(x).sigmoid()),
    ("a single weight", X, FEATURES, lambda n, x: x * n.gain),
    ("affine batch norm", X, FEATURES, lambda n, x: n.norm(x)),
    ("words", IDS, FEATURES, lambda n, x: n.words(x)),
    ("words, masked", IDS, FEATURES, lambda n, x: n.words(x).masked_fill((x == 0)[:, :, None], 0.0)),
    ("weights alone", X, FEATURES, lambda n, x: n.words(torch.arange(4))),
    ("own backward", X, FEATURES, lambda n, x: Product.apply(x, n.linear.weight)),
    ("transformer", X, FEATURES, lambda n, x: n.layer(x[:, None])),
    ("recurrent", X, FEATURES, lambda n, x: n.lstm(x[:, None])[0]),
    ("vmap", X, FEATURES, lambda n, x: torch.vmap(n.linear)(x)),
    ("features written into zeros", X, FEATURES, fill_with_features),
    ("features that rows choose", X, FEATURES, lambda n, x: n.linear(x).gather(1, x.argsort(1))),
]


@pytest.mark.parametrize(("rows", "wanted", "way"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_what_a_value_is_made_of(rows: Tensor, wanted: Content, way: Callable[[Any, Tensor], Any]) -> None:
    made = found(way, rows)
    assert made.content is wanted
    assert made.inputs == (("x",) if wanted in (MASK, INPUT) else ())
    assert made.is_data is (wanted in (INPUT, FEATURES))


def test_what_is_followed_computes_the_same_bits() -> None:
    net = Net(lambda n, x: n.layer(n.norm(n.linear(x))[:, None])).eval()
    plain = net(X)
    with RowTracking(net, [(X, traces_of_input("x", X))]):
        assert torch.equal(net(X), plain)
