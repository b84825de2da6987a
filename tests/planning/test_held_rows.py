"""Arrays that a party holds beside its weights are named, and refused where one of their rows is one of the data."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.storage import TypedStorage

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.rows import RowSource
from splitfed.core.topology import Head, Segment, Topology
from splitfed.data.dataset import Federation
from splitfed.planning.example_passes import ExamplePasses
from splitfed.planning.held_rows import arrays_of, check_held_rows, lines_told
from splitfed.planning.validation import prepare
from splitfed.schedules.base import Training
from splitfed.study.report.exposure import _party_rows, role_holdings
from splitfed.study.results import RunResult
from splitfed.topologies import custom, vanilla
from splitfed.training.description import describe
from tests.thinning import thin

WIDTH = 8
ROWS = torch.rand(24, WIDTH, generator=torch.Generator().manual_seed(1)) - 0.5
# Those that integers and a scale stand for without an error.
EIGHTHS = (8 * ROWS).round() / 8 + torch.eye(24, WIDTH)
LABELS = torch.arange(24) % 3
ANCHORS = torch.rand(6, WIDTH, generator=torch.Generator().manual_seed(2))


def federation(x: Any = ROWS) -> Federation:
    data = (
        sf.data.from_arrays(x, LABELS.numpy())
        if isinstance(x, np.ndarray)
        else sf.data.from_arrays(x.numpy(), LABELS.numpy())
    )
    return data.clients(2, victims=4, auxiliary=4)


class Bank(nn.Module):
    """Weighs the rows of a table by how near they are; by replay, where it is no tensor."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(WIDTH, WIDTH), table

    def forward(self, h: Tensor) -> Tensor:
        table = torch.as_tensor(self.read(), dtype=torch.float32)
        return self.layer(h) + (h @ table.T).softmax(1) @ table

    def read(self) -> Any:
        return self.table() if callable(self.table) else self.table


class Net(nn.Module):
    def __init__(self, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(WIDTH, WIDTH), second, nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).relu()))


class Replayed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(functional.dropout(self.first(x), 0.0, training=self.training)))


def by_hand(second: nn.Module) -> Topology:
    segments = [
        Segment("bottom", "client", nn.Linear(WIDTH, WIDTH), ("x",), ("h",)),
        Segment("top", "server", nn.Sequential(second, nn.Linear(WIDTH, 3)), ("h",), ("out",)),
    ]
    return custom(segments, {"x": "client"}, [Head("out", "server", "client")])


def cut(kind: type[nn.Module], second: nn.Module) -> Topology:
    return vanilla(kind(second), "first", example=torch.zeros(4, WIDTH))


MAKES: dict[str, Callable[[nn.Module], Topology]] = {
    "traced": partial(cut, Net),
    "replayed": partial(cut, Replayed),
    "by hand": by_hand,
}


def start(topology: Topology, data: Federation) -> None:
    prepare(
        topology,
        data,
        schedule="sequential",
        defenses=(),
        optimizer=None,
        training=Training(4),
        example_passes=ExamplePasses(),
    )


@pytest.mark.parametrize(("make", "table"), thin(itertools.product(MAKES, ["a tensor", "an array"]), 3))
def test_a_row_of_the_data_that_a_party_would_hold_is_refused(make: str, table: str) -> None:
    kept = torch.cat([ANCHORS, ROWS[7:8]])
    given = kept if table == "a tensor" else kept.double().numpy()
    text = r"segment 'top' of 'server' holds row \d+ of .*(rows of client|auxiliary|victims).* in .*: a party may only"
    with pytest.raises(InvalidInput, match=text):
        start(MAKES[make](Bank(given)), federation())
    start(MAKES[make](Bank(ANCHORS if table == "a tensor" else ANCHORS.numpy())), federation())


PLACES: dict[str, Callable[[], Any]] = {
    "list": lambda: ROWS[3:9].tolist(),
    "columns": lambda: ROWS[3:5].T.contiguous(),
    "closure": lambda: lambda rows=ROWS[3:9]: rows,
    "partial": lambda: partial(torch.add, ROWS[3:9], 0.0),
    "in a box": lambda: {"known": [ROWS[3:9]]},
    "objects": lambda: np.array(ROWS[3:9].tolist(), dtype=object),
    "in an array of objects": lambda: np.array([ROWS[3:9], "rows"], dtype=object),
    "bytes": lambda: ROWS[3:9].numpy().tobytes(),
    "a file in memory": lambda: io.BytesIO(ROWS[3:9].numpy().tobytes()),
    "a storage": lambda: ROWS[3:9].clone().untyped_storage(),
    "a typed storage": lambda: TypedStorage(
        wrap_storage=ROWS[3:9].clone().untyped_storage(), dtype=torch.float32, _internal=True
    ),
    "nested": lambda: [torch.nested.nested_tensor([ROWS[3], ROWS[5]])],
    "sparse": lambda: ROWS[3:9].to_sparse(),
    "compressed": lambda: [ROWS[3:9].to_sparse_csc()],
    "sparse, of too many numbers": lambda: [ROWS[3:9].repeat(2**17, 1).to_sparse_csr()],
    "quantized": lambda: torch.quantize_per_tensor(EIGHTHS[3:9], 0.125, 0, torch.qint8),
    "quantized by column": lambda: torch.quantize_per_channel(
        EIGHTHS[3:9], torch.full((WIDTH,), 0.125), torch.zeros(WIDTH), 1, torch.qint8
    ),
    "records": lambda: np.rec.fromarrays(ROWS[3:9].numpy().T),
    "records beside texts": lambda: np.array([("a", ROWS[3].numpy())], dtype=[("name", "U4"), ("x", "f4", (WIDTH,))]),
    "columns of records": lambda: np.rec.fromarrays(ROWS[3:5].numpy()),
    "complex, real parts first": lambda: torch.complex(ROWS[3:9, :4], ROWS[3:9, 4:]),
    "complex, side by side": lambda: torch.view_as_complex(ROWS[3:9].reshape(6, 4, 2)),
    "conjugates": lambda: torch.view_as_complex(ROWS[3:9].reshape(6, 4, 2)).conj_physical().conj(),
    "a complex array": lambda: torch.complex(ROWS[3:9, :4], ROWS[3:9, 4:]).numpy(),
    "a complex array, side by side": lambda: torch.view_as_complex(ROWS[3:9].reshape(6, 4, 2)).numpy(),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("place", thin(PLACES, 3))
def test_rows_are_found_wherever_a_segment_leads_to_them(place: str) -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    vars(layer)["rows"] = PLACES[place]()
    x = EIGHTHS if "quantized" in place else ROWS
    with pytest.raises(InvalidInput, match=r"'top' of 'server' holds row \d+ of .* in 'rows' of '0'"):
        check_held_rows(by_hand(layer), federation(x))


def test_a_buffer_that_holds_rows_is_refused_too() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_buffer("bank", ROWS[:2].clone())
    with pytest.raises(InvalidInput, match=r"holds row \d+ of .* in buffer '0\.bank' \(2, 8\)"):
        check_held_rows(by_hand(layer), federation())
    pairs = nn.Linear(WIDTH, WIDTH)
    pairs.register_buffer("pairs", torch.complex(ROWS[:2, :4], ROWS[:2, 4:]))
    with pytest.raises(InvalidInput, match=r"holds row \d+ of .* in buffer '0\.pairs' \(2, 4\)"):
        check_held_rows(by_hand(pairs), federation())
    vector = nn.Linear(WIDTH, WIDTH)
    vector.register_buffer("row", ROWS[3].clone())
    with pytest.raises(InvalidInput, match=r"holds row \d+ of .* in buffer '0\.row' \(8,\)"):
        start(by_hand(vector), federation())
    with torch.no_grad():
        vector.row.copy_(ANCHORS[0])
        vector.bias.copy_(ROWS[4])
    with pytest.raises(InvalidInput, match=r"holds row \d+ of .* in weight '0\.bias' \(8,\)"):
        start(by_hand(vector), federation())


def test_a_weight_that_holds_rows_or_leads_to_them_is_refused_too() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        layer.weight[3] = ROWS[5]
    with pytest.raises(InvalidInput, match=r"holds row \d+ of .* in weight '0\.weight' \(8, 8\)"):
        check_held_rows(by_hand(layer), federation())
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.rows = ROWS[3:9]  # type: ignore[attr-defined]
    with pytest.raises(InvalidInput, match=r"holds row \d+ of .* in 'weight\.rows' of '0'"):
        check_held_rows(by_hand(layer), federation())


@pytest.mark.parametrize("part", ["train", "validation", "test", "auxiliary", "victims"])
def test_every_part_of_the_data_is_compared(part: str) -> None:
    data = federation()
    rows = getattr(data, part) if part in ("auxiliary", "victims") else getattr(data.clients[1], part)
    with pytest.raises(
        InvalidInput, match=f"{part} rows of client1" if rows is not getattr(data, part, None) else part
    ):
        check_held_rows(by_hand(Bank(rows.x[-1:])), data)


def test_patterns_that_anybody_would_write_are_no_rows() -> None:
    kinds = [[1] * 5 + [0] * 3, list(range(8)), [0, 0, 1, 0, 0, 0, 0, 0], [7] * 8, [5, 9, 2, 2, 8, 1, 0, 0]]
    ids = np.array((kinds * 5)[:24])
    data = federation(ids.astype(np.float32))
    for pattern in (torch.arange(8), torch.eye(8), torch.ones(8, 8).tril(), torch.full((2, 8), 7)):
        check_held_rows(by_hand(Bank(pattern)), data)
    with pytest.raises(InvalidInput, match=r"holds row \d+"):
        check_held_rows(by_hand(Bank(ids[4].tolist())), data)


def test_data_is_read_only_where_an_array_of_its_width_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[RowSource] = []

    def watched(source: RowSource) -> Any:
        read.append(source)
        return iter(())

    monkeypatch.setattr("splitfed.planning.held_rows.blocks", watched)
    convolution: nn.Module = nn.BatchNorm1d(WIDTH)
    convolution.register_buffer("mask", torch.rand(3, 5))
    vars(convolution)["widths"] = [1.5, 2.5, 4.5]
    data = federation(torch.rand(24, 7))
    check_held_rows(by_hand(convolution), data)
    assert read == []
    check_held_rows(by_hand(Bank(torch.rand(6, 7))), data)
    assert read


@pytest.mark.parametrize("make", thin(MAKES, 2))
def test_an_array_that_is_held_is_named(make: str) -> None:
    topology = MAKES[make](Bank(ANCHORS))
    facts = pass_example(topology, {next(iter(topology.inputs)): torch.rand(4, WIDTH)})
    names = {"traced": "'second.table' of the model", "replayed": "'table' of 'second'", "by hand": "'table' of '0'"}
    name = names[make]
    assert f"server holds the array {name} (6, 8)" in lines_told(topology, facts)
    assert f"the array {name} (6, 8)" in arrays_of(topology, "server")
    assert arrays_of(topology, "client") == []


class Spare(nn.Linear):
    """A user's layer that nothing runs."""


def test_a_traced_piece_leaves_behind_what_its_submodules_do_not_read() -> None:
    net = Net(nn.Linear(WIDTH, WIDTH))
    net.spare = Spare(WIDTH, WIDTH)
    vars(net.second)["train_x"], vars(net.spare)["train_x"] = ROWS, {"rows": ROWS.numpy()}
    net.train_x = ROWS
    topology = vanilla(net, "first")
    assert all(arrays_of(topology, role) == [] for role in ("client", "server"))
    start(topology, federation())
    top = topology.segment("top").module
    assert not any("train_x" in vars(module) for module in top.modules())
    assert top.get_parameter("second.weight") is net.second.weight
    # The user's own model is left as it is.
    assert net.second.train_x is ROWS
    assert "rows" in net.spare.train_x


def test_a_traced_piece_keeps_what_a_hook_may_read() -> None:
    net = Net(nn.Linear(WIDTH, WIDTH))
    vars(net.second)["anchors"] = ANCHORS
    net.second.register_forward_hook(lambda module, _, out: out + module.anchors.sum(0))
    topology = vanilla(net, "first")
    assert arrays_of(topology, "server") == ["the array 'anchors' of 'second' (6, 8)"]
    start(topology, federation())


def test_report_and_run_name_what_is_held() -> None:
    data, topology = federation(), by_hand(Bank(ANCHORS))
    prepared = prepare(
        topology,
        data,
        schedule="sequential",
        defenses=(),
        optimizer=None,
        training=Training(4),
        example_passes=ExamplePasses(),
    )
    line = "the array 'table' of '0' (6, 8)"
    assert describe(prepared, 1, None, "cpu")["told"] == [f"server holds {line}"]
    labels = {"out": LABELS}
    client, server = role_holdings(prepared.topology, prepared.facts[0], labels, {}, {}, {}, {"server": "server"})
    assert "arrays" not in client
    assert server["arrays"] == [line]
    assert line in _party_rows(RunResult("run", parties=(server,)), [], {"names": {}})[0]["holds"]
