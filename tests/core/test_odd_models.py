"""Whatever a model is and does, what leaves a cut is the library's own error, in one line, and it says what helps."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.core.cutting import cut
from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Head, Segment
from splitfed.topologies import custom, vanilla
from tests.core import odd_models as odd
from tests.core.cut_idioms import Net, ends
from tests.core.idioms import Idiom, check_training
from tests.core.odd_models import MODELS, Applied, chain, fails, make, net
from tests.core.training_beside import built, check_trains_beside
from tests.thinning import thin

ROWS = torch.randn(8, 8, generator=torch.Generator().manual_seed(5))
PLACES = {"names": "größe", "scripted": "0"}


def cut_at(name: str, example: Any) -> str:
    """Cut a model of the table; return what is said of it, nothing where it is cut."""
    model = make(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            cut(model, (PLACES.get(name, "a"),), example)
        except InvalidInput as error:
            return str(error)
    return ""


@pytest.mark.parametrize("example", [None, ROWS], ids=["trace", "example"])
@pytest.mark.parametrize("name", thin(MODELS, 3))
def test_nothing_leaves_a_cut_but_an_error_of_one_line(name: str, example: Any) -> None:
    odd.LEFT.clear()
    said = cut_at(name, example)
    assert "\n" not in said
    assert "Traceback" not in said


EXACT: dict[str, tuple[str, ...]] = {
    "wants a tensor": ("a", "b"),
    "wants a tensor in its own words": ("a", "b"),
    "looks up a place that is not there": ("a", "b"),
    "pruned": ("a", "b"),
    "pruned twice": ("a",),
    "weight norm of old": ("a", "b"),
    "one layer under two names": ("d",),
}
REPLAYED = {"wants a tensor", "wants a tensor in its own words", "looks up a place that is not there"}


@pytest.mark.parametrize("name", thin(EXACT, 2))
def test_what_is_cut_trains_as_the_uncut_model_does(name: str) -> None:
    check_training(Idiom(lambda: make(name), at=EXACT[name], replayed=name in REPLAYED))


@pytest.mark.parametrize("before", ["", "before:"])
def test_what_a_hook_computes_of_weights_is_replayed(before: str) -> None:
    def model() -> Net:
        made = Net(lambda m, x: m.c(torch.relu(m.b(m.a(x) * (2 if m.training else 1)))))
        odd.prune.l1_unstructured(made.b, "weight", 0.3)
        return made

    check_training(Idiom(model, at=(f"{before}b",), replayed=True))


@pytest.mark.parametrize("name", ["parallel", "compiled", "averaged", "averaged and parallel"])
def test_a_wrapper_is_opened_and_its_names_are_taken_with_and_without_its_prefix(name: str) -> None:
    wrapped = make(name)
    prefix = next(n for n, m in wrapped.named_modules() if isinstance(m, Net))
    for at in ("a", f"{prefix}.a", f"before:{prefix}.b"):
        first, second = cut(wrapped, (at,), ROWS)
        assert set(first.module.state_dict()) == {"a.weight", "a.bias"}
        assert first.original is not None
        assert isinstance(first.original.model, Net)
        torch.testing.assert_close(second.module(first.module(ROWS)), wrapped(ROWS), rtol=0, atol=0)


def loaded(model: nn.Module) -> nn.Module:
    model.load_state_dict(net().state_dict())
    return model


def evaluated(model: nn.Module) -> nn.Module:
    """Return `model` after one call."""
    model(ROWS)
    return model


REFUSED: dict[str, tuple[str, Callable[[], nn.Module] | None]] = {
    "a scripted layer": ("submodule 'b' of Net is compiled by TorchScript", net),
    "a traced layer": ("submodule 'b' of Net is compiled by TorchScript", net),
    "a lazy layer": ("'b.weight' of Net has no shape yet: run the model once", lambda: evaluated(make("a lazy layer"))),
    "without numbers": (
        "'a.weight' of Net is on the meta device, without numbers",
        lambda: loaded(net().to("meta").to_empty(device="cpu")),
    ),
    "sparse": (
        "value 'to_sparse' of segment 'piece0' is sparse, and messages carry dense tensors alone: return its",
        lambda: chain(lambda x: x.to_sparse().to_dense(), lambda x: x.to_sparse().to_dense()),
    ),
    "quantized value": (
        "value 'a' of segment 'piece0' is quantized",
        lambda: chain(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize(), lambda x: x),
    ),
    "complex": (
        "value 'fft_rfft' of segment 'piece0' is torch.complex64, and messages carry real numbers alone: return torch",
        lambda: chain(
            lambda x: torch.view_as_real(torch.fft.rfft(x)), lambda x: torch.fft.irfft(torch.view_as_complex(x), n=8)
        ),
    ),
    "a scripted function": (
        "'b' reads a tensor of which it is not seen what made it: ",
        lambda: net(lambda m, h: odd.shifted(h)),
    ),
    "a class of tensors of its own": (
        "cut 'a' leaves an empty segment before 'a': nothing there is seen",
        None,
    ),
    "vmap": (
        "'b' reads a tensor of which it is not seen what made it: ",
        lambda: net(lambda m, h: m.d(h), d=Applied(lambda h: torch.vmap(torch.relu)(h))),
    ),
    "fails on five rows": ("Net fails by itself in training with 5 rows: OwnError: not five", None),
    "always fails": ("OwnError: never ever", None),
    "not copied, by replay": ("NotCopied cannot be copied for its parties: OwnError: nobody copies this", None),
    "forward hook that fails": ("OwnError: no hook", None),
    "backward hook that fails": ("OwnError: no hook", None),
    "never made": ("NeverMade was never made a module: call super().__init__() first", None),
    "a function": ("model is a function; expected an nn.Module", None),
    "a class": ("model is the class Tables; expected a module of it, Tables(...)", None),
    "quantized": ("'a._packed_params.dtype' in the state of Net is a dtype", None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_what_it_is_and_a_way_out_that_is_one(name: str) -> None:
    text, mended = REFUSED[name]
    assert text in cut_at(name, ROWS)
    if mended is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cut(mended(), ("a",), ROWS)


ROWS_REFUSED: dict[str, tuple[Any, str]] = {
    "a list": ([ROWS], "example is a list; expected a tensor of rows"),
    "an array": (ROWS.numpy(), "example is a ndarray; expected a tensor of rows"),
    "nothing": ({"x": None}, "example['x'] is a NoneType; expected a tensor of rows"),
    "sparse": (ROWS.to_sparse(), "example is sparse; expected a dense tensor of rows"),
    "shapes": (ROWS.to("meta"), "example is on the meta device, without numbers"),
    "another argument": ({"y": ROWS}, "must be Tensor, not dict; of rows named '0' and '1' it gets a tuple"),
    "one row": (ROWS[:1], "example has 1 rows for the input 'x' of Net; expected at least 2"),
}


@pytest.mark.parametrize("name", ROWS_REFUSED)
def test_rows_that_are_none_are_refused_in_a_line(name: str) -> None:
    example, text = ROWS_REFUSED[name]
    with pytest.raises(InvalidInput) as error:
        cut(Net(ends), ("a",), example)
    assert text in str(error.value)


@pytest.mark.parametrize("example", [None, ROWS], ids=["trace", "example"])
def test_an_interrupt_goes_on_and_leaves_the_model_as_it_was(example: Any) -> None:
    model = fails(odd.Interrupted("stop"))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(odd.Interrupted):
        cut(model, ("a",), example)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("view", ["T", "mT", "H", "mH"])
def test_a_view_by_attribute_is_an_operation_whose_source_crosses(view: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.a(x)) * (0.2 if m.training else 0.1)
        k = m.b(h)
        return m.c(k @ torch.tanh(getattr(h, view) @ h))

    check_training(Idiom(lambda: Net(forward), at=("b",), replayed=True))


@pytest.mark.parametrize("example", [None, torch.ones(8, 8)], ids=["trace", "example"])
def test_a_generator_at_work_is_refused_before_it_has_moved(example: Tensor | None) -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
            self.kept = [zip(range(3), (number for number in range(9)), strict=False)]

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(x)) * next(self.kept[0])[1])

    model = Held()
    with pytest.raises(InvalidInput, match=r"attribute 'kept' of the model is a generator at work, .* in a buffer"):
        cut(model, ["a"], example)
    assert next(model.kept[0]) == (0, 0)


class Graph(nn.Module):
    """Numbers of nodes go along the edges of a graph, kept in `form`."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.a, self.b, self.form = nn.Linear(8, 8), nn.Linear(8, 4), form
        edges = torch.eye(8).roll(1, 0).to_sparse().coalesce()
        self.register_buffer("ends", edges.indices()[0])
        self.register_buffer("begins", edges.indices()[1])
        self.register_buffer("sizes", edges.values())
        held = {"coo": edges, "csr": edges.to_dense().to_sparse_csr(), "csc": edges.to_dense().to_sparse_csc()}
        kept, _, how = form.partition(" ")
        if how == "attribute":
            self.edges = held[kept]
        elif how == "weight":
            self.edges = nn.Parameter(held[kept], requires_grad=False)
        else:
            held["dense"] = edges.to_dense()
            self.register_buffer("edges", held.get(kept), persistent=how != "constant")
        if form == "nested":
            self.kept = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.edges is not None:
            return self.b((self.edges @ h.T).T)  # type: ignore[no-any-return]
        return self.b(torch.zeros_like(h).index_add(1, self.ends, h[:, self.begins] * self.sizes))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:(Sparse CS. tensor support|The PyTorch API of nested):UserWarning")
@pytest.mark.parametrize("example", [None, torch.ones(8, 8)], ids=["trace", "example"])
def test_a_graph_that_is_sparse_in_the_state_is_refused_with_ways_out_that_are_some(example: Tensor | None) -> None:
    """A buffer that is sparse, or a nested attribute, ended in an error of torch."""
    for form in ("coo", "csr", "coo weight", "csr weight"):
        with pytest.raises(InvalidInput, match=r"'edges' of Graph is sparse, .*: keep it as an attribute or by regis"):
            cut(Graph(form), ("a",), example)
    with pytest.raises(InvalidInput, match="'kept' of Graph is nested"):
        cut(Graph("nested"), ("a",), example)
    for form in ("dense", "edges"):
        assert len(cut(Graph(form), ("a",), example)) == 2


class Crash(sf.Callback):
    """Stands for a crash in the second round, before its checkpoint."""

    def on_round_end(self, run: sf.Run, metrics: Any) -> None:
        if len(run.history) == 2:
            raise odd.OwnError


KEPT = ["coo attribute", "csr attribute", "csc attribute", "coo constant", "csr constant"]


class ReplayedGraph(Graph):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 0 if x.isnan().any() else x)


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support:UserWarning")
@pytest.mark.parametrize(("kind", "form"), thin(itertools.product([Graph, ReplayedGraph], KEPT), 6))
def test_a_graph_that_is_kept_sparse_beside_the_state_is_trained_and_resumed(
    kind: type[Graph], form: str, tmp_path: Path
) -> None:
    """Its comparison, its copies and the digest of a run ended in errors of torch."""
    data = sf.data.from_arrays(torch.randn(24, 8).numpy(), torch.arange(24).numpy() % 4).clients(
        2, victims=4, auxiliary=4
    )

    def train(form: str, factor: float = 1.0, **logging: Any) -> sf.Run:
        torch.manual_seed(0)
        model = kind(form)
        model.edges = model.edges * factor
        topology = vanilla(model, "a", example=torch.ones(8, 8))
        return sf.train(topology, data, rounds=2, batch_size=8, logging=sf.Logging(**logging))

    whole, dense = train(form), train("dense")
    for name, value in dense.state_dict().items():
        if name != "edges":
            torch.testing.assert_close(whole.state_dict()[name], value, msg=name)
    with pytest.raises(odd.OwnError):
        train(form, folder=tmp_path / "run", callbacks=(Crash(),))
    again = train(form, folder=tmp_path / "run", resume=True)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in whole.state_dict().items())
    with pytest.raises(InvalidInput, match="changed since it began"):
        train(form, 2.0, folder=tmp_path / "run", resume=True)


class TwiceGraph(Graph):
    """Numbers go along the edges on both sides of a cut; `asks`: in a forward that no trace follows."""

    def __init__(self, form: str, asks: bool) -> None:
        super().__init__(form)
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        h = (torch.sparse.mm(self.edges, self.a(x).T) if "constant" in self.form else self.edges @ self.a(x).T).T.relu()
        return super().forward(h * 0 if self.asks and h.isnan().any() else h)


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support:UserWarning")
@pytest.mark.parametrize(("form", "asks"), thin(itertools.product([*KEPT[:2], *KEPT[3:]], [False, True]), 3))
def test_a_sparse_graph_that_is_read_on_both_sides_of_a_cut_is_held_by_both(form: str, asks: bool) -> None:
    topology = vanilla(built(TwiceGraph, form, asks), "a", example=ROWS)
    check_trains_beside(built(TwiceGraph, form, asks), topology, {"x": ROWS})


class Followed(nn.Module):
    """What torch.fx and torch.export follow; what is kept is read on both sides of a cut, so that replay cuts it."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.shared = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), shared
        self.register_buffer("kept", torch.ones(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.a(x)) * self.kept
        return self.b(h.relu() * self.kept if self.shared else h.relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize("shared", [False, True])
def test_a_module_that_torch_fx_made_is_cut_as_any_other(shared: bool) -> None:
    model = torch.fx.symbolic_trace(built(Followed, shared))
    check_trains_beside(model, vanilla(copy.deepcopy(model), "norm", example=ROWS), {"x": ROWS})


def test_a_module_that_torch_export_made_is_refused_with_a_way_out() -> None:
    made = torch.export.export(Followed(False), (ROWS,)).module()
    for model, what in ((made, "the model, a GraphModule,"), (nn.Sequential(made), "submodule '0' of Sequential")):
        with pytest.raises(InvalidInput, match=f"{what} has a train.. that fails .*: give what it was made from"):
            cut(model, ("0",), ROWS)


def test_a_compressed_graph_in_a_segment_by_hand_is_one_line() -> None:
    layer = nn.Linear(8, 4)
    layer.edges = torch.eye(8).to_sparse_csr()
    segments = [
        Segment("low", "client", nn.Linear(8, 8), ("x",), ("h",)),
        Segment("up", "server", layer, ("h",), ("y",)),
    ]
    with pytest.raises(
        InvalidInput, match=r"'edges' of segment 'up' is torch.sparse_csr, and .*: keep it as to_sparse_c"
    ):
        custom(segments, {"x": "client"}, [Head("y", "server", "client")])
    layer.edges = layer.edges.to_sparse_coo()
    custom(segments, {"x": "client"}, [Head("y", "server", "client")])


class Shy(nn.Linear):
    def __repr__(self) -> str:
        raise AttributeError("what is elsewhere")


def test_a_submodule_that_cannot_show_itself_is_described_by_its_classes(tmp_path: Path) -> None:
    data = sf.data.from_arrays(torch.randn(24, 8).numpy(), torch.arange(24).numpy() % 4).clients(
        2, victims=4, auxiliary=4
    )
    segments = [
        Segment("low", "client", nn.Sequential(Shy(8, 8)), ("x",), ("h",)),
        Segment("up", "server", nn.Linear(8, 4), ("h",), ("y",)),
    ]
    topology = custom(segments, {"x": "client"}, [Head("y", "server", "client")])
    run = sf.train(topology, data, rounds=1, batch_size=8, logging=sf.Logging(folder=tmp_path / "run"))
    assert len(run.history) == 1
