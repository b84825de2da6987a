"""A `forward` that takes its rows as a table, a tuple, by place or by any name is cut as any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitfed.core.cutting import cut
from splitfed.core.errors import InvalidInput
from splitfed.core.replay import ReplayedSegment
from splitfed.topologies import u_shaped, vanilla
from tests.core.training_beside import built, check_trains_beside
from tests.thinning import thin


class Layers(nn.Module):
    """Two inputs enter at the client."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.z, self.b, self.c = nn.Linear(6, 8), nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def run(self, x: Tensor, z: Tensor) -> dict[str, Tensor]:
        h = torch.relu(self.a(x) + self.z(z))
        return {"logits": self.c(torch.relu(self.b(h)))}


class Table(Layers):
    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.run(batch["x"], batch["z"])


class TableAndMore(Layers):
    def forward(self, batch: Mapping[str, Tensor], scale: float = 1.0, **rest: Any) -> dict[str, Tensor]:
        return self.run(batch["x"] * scale, **{k: v for k, v in batch.items() if k == "z"})


class Pair(Layers):
    def forward(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, z = batch
        return self.run(x, z)


class Places(Layers):
    def forward(self, *args: Tensor) -> dict[str, Tensor]:
        return self.run(*args)


class PlacesAfterOne(Layers):
    def forward(self, x: Tensor, *rest: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        return self.run(x * scale, *rest)


class PlacesAlone(Layers):
    def forward(self, x: Tensor, z: Tensor, /) -> dict[str, Tensor]:
        return self.run(x, z)


class AnyNames(Layers):
    def forward(self, **kwargs: Tensor) -> dict[str, Tensor]:
        return self.run(**kwargs)


class NamesAfterOne(Layers):
    def forward(self, x: Tensor, **kwargs: Tensor) -> dict[str, Tensor]:
        return self.run(x, kwargs["z"])


Call = Callable[[nn.Module, Mapping[str, Tensor]], Any]
CALLS: dict[type[Layers], Call] = {
    Table: lambda model, rows: model(dict(rows)),
    TableAndMore: lambda model, rows: model(dict(rows)),
    Pair: lambda model, rows: model((rows["0"], rows["1"])),
    Places: lambda model, rows: model(rows["x"], rows["z"]),
    PlacesAfterOne: lambda model, rows: model(rows["x"], rows["z"]),
    PlacesAlone: lambda model, rows: model(rows["x"], rows["z"]),
    AnyNames: lambda model, rows: model(x=rows["x"], z=rows["z"]),
    NamesAfterOne: lambda model, rows: model(rows["x"], z=rows["z"]),
}


def rows(kind: type[Layers]) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    names = ("0", "1") if kind is Pair else ("x", "z")
    return {name: torch.randn(16, size, generator=drawn) for name, size in zip(names, (6, 3), strict=True)}


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize(("builder", "at"), thin([(vanilla, "b"), (u_shaped, ("z", "b"))], 2))
def test_it_trains_as_the_uncut_model(kind: type[Layers], builder: Any, at: Any) -> None:
    model, x = built(kind), rows(kind)
    topology = builder(model, at, example={name: part[:8] for name, part in x.items()})
    assert set(topology.inputs) == set(x)
    check_trains_beside(model, topology, x, call=CALLS[kind])


def test_one_tensor_without_a_name_goes_to_what_takes_any_number() -> None:
    class Single(Layers):
        def forward(self, *args: Tensor) -> dict[str, Tensor]:
            return self.run(args[0], args[0][:, :3])

    model, x = built(Single), torch.randn(8, 6)
    pieces = cut(model, ("b",), x)
    assert all(isinstance(piece.module, ReplayedSegment) for piece in pieces)
    assert pieces[0].inputs == ("args",)
    assert torch.equal(pieces[1].module(pieces[0].module(x)), model(x)["logits"])


def test_rows_that_are_taken_as_a_tuple_need_numbers_as_names() -> None:
    with pytest.raises(InvalidInput, match="of rows named '0' and '1' it gets a tuple, of others a table"):
        vanilla(built(Pair), "b", example={"x": torch.randn(8, 6), "z": torch.randn(8, 3)})


class Graph(Layers):
    """Convolutions along edges, which are no rows, over the nodes of dimension `dim`."""

    def along(self, h: Tensor, edges: Tensor, dim: int) -> Tensor:
        return torch.zeros_like(h).index_add(dim, edges[1], h.index_select(dim, edges[0]))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = torch.relu(self.along(self.a(x), edges, 0))
        return self.c(torch.relu(self.along(self.b(h), edges, 0)))


class GraphInEveryRow(Graph):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 1], [1, 2, 3, 0, 3]]))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.relu(self.along(self.a(x), self.edges, 1))
        return {"logits": self.c(torch.relu(self.along(self.b(h), self.edges, 1)).mean(1))}


@pytest.mark.parametrize(("builder", "at"), [(vanilla, "a"), (u_shaped, ("a", "b"))])
def test_edges_are_no_rows_and_the_way_that_is_named_is_exact(builder: Any, at: Any) -> None:
    drawn = torch.Generator().manual_seed(0)
    with pytest.raises(InvalidInput, match=r"have 8 rows \(x\), 2 rows \(edges\): .* let a row be a whole graph"):
        builder(built(Graph), at, example={"x": torch.randn(8, 6), "edges": torch.randint(0, 8, (2, 12))})
    model, x = built(GraphInEveryRow), torch.randn(16, 4, 6, generator=drawn)
    check_trains_beside(model, builder(model, at, example=x[:8]), {"x": x})
