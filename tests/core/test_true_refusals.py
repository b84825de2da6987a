"""Refusals name what is at fault; what only seemed to be is cut exactly."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.equivalence_sides import StepResult
from splitfed.core.errors import InvalidInput
from splitfed.core.model_snapshot import generator_states
from splitfed.core.outcome_differences import Difference, check_same
from splitfed.core.replay import ReplayedSegment
from splitfed.topologies import u_shaped, vanilla
from tests.core.idioms import DECAY, train
from tests.core.training_beside import check_trains_beside
from tests.examples import engine_of


class Layers(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


def rows() -> Tensor:
    return torch.randn(24, 8, generator=torch.Generator().manual_seed(5))


class KeptByAHook(Layers):
    """A hook's closure keeps what a layer returned in the model that it was made for, not in copies."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}

        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            self.kept["a"] = output

        self.a.register_forward_hook(hook)

    def forward(self, x: Tensor) -> Any:
        h = self.b(torch.relu(self.a(x)))
        return {"y": self.c(h + self.kept["a"])}


def test_a_hook_whose_closure_holds_the_model_keeps_in_its_copies_what_it_keeps() -> None:
    model = KeptByAHook()
    topology = vanilla(model, "a", example=rows())
    assert model.kept == {}
    sent = topology.segments[0].module(rows())
    (result,) = topology.segments[1].module(*sent) if isinstance(sent, tuple) else (topology.segments[1].module(sent),)
    assert model.kept == {}
    assert torch.equal(result, model(rows())["y"])


class KeptByAnObject(KeptByAHook):
    """The same by an object that was handed the model."""

    def __init__(self) -> None:
        super().__init__()
        self.a._forward_hooks.clear()
        table = {"of": self}
        self.a.register_forward_hook(lambda _module, _inputs, output: table["of"].kept.update(a=output))


def test_a_hook_that_leads_to_the_model_itself_is_named() -> None:
    text = "'_forward_hooks' of 'a' is a function or a reference that leads to a KeptByAnObject: .*make it a method"
    with pytest.raises(InvalidInput, match=text):
        vanilla(KeptByAnObject(), "a", example=rows())


class Normalised(Layers):
    """Shortens a weight in every pass."""

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.a(x))
        with torch.no_grad():
            self.c.weight.mul_(0.99)
        return self.c(self.b(h))


class NormalisedOutside(Layers):
    """The same by the caller's mode."""

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.a(x))
        self.c.weight.mul_(0.99)
        return self.c(self.b(h))


class NormalisedByData(Layers):
    """The same by its data, which a trace shows."""

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.a(x))
        self.c.weight.data.mul_(0.99)
        return self.c(self.b(h))


def test_a_weight_changed_under_no_grad_is_named_by_a_trace() -> None:
    with pytest.raises(InvalidInput, match=r"'with torch.no_grad\(\):' .* a value is computed under no_grad\(\)"):
        vanilla(Normalised(), "a")
    text = r"changes the weight 'c\.weight' in place, by 'mul_', which takes a torch.no_grad\(\) that a trace does not"
    with pytest.raises(InvalidInput, match=text):
        vanilla(NormalisedOutside(), "a")
    assert not isinstance(vanilla(NormalisedByData(), "a").segments[0].module, ReplayedSegment)


class Experts(Layers):
    """No row is routed to the last of three experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        nn.init.constant_(self.gate.bias[2:], -100.0)

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.a(x))
        chosen, out = self.gate(h).argmax(-1), torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if rows.numel():
                out = out.index_add(0, rows, expert(h[rows]))
        return self.c(out)


def test_an_expert_without_rows_is_told_as_one() -> None:
    text = r"submodule 'experts\.2' is not called by Experts with this example, .* no row is routed to it; give rows"
    with pytest.raises(InvalidInput, match=text):
        vanilla(Experts(), "experts.2", example=rows())


class Block(nn.Module):
    """A residual block that works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm, self.relu = (
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.BatchNorm1d(8),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.relu(self.norm(self.a(x))))
        h += x
        return self.relu(h)


class Blocks(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.one, self.two, self.c = nn.Linear(8, 8), Block(), Block(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.c(self.two(self.one(self.a(x))))


def check_exact(kind: type[nn.Module], at: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = kind()
        torch.manual_seed(3)
        whole = kind()
    x, y, steps = rows(), torch.arange(24) % 4, [chosen for _ in range(3) for chosen in torch.arange(24).split(8)]
    topology = vanilla(model, at, example=x)
    engine = engine_of(topology, x, y, optim=DECAY)
    engine.train(0, 0, steps)
    train(whole, x, y, steps)
    state = topology.state_dict(engine.modules(0))
    for name, value in whole.state_dict().items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("at", ["one.relu#1", "one.relu#2", "two.relu#1", "one"])
def test_a_cut_behind_what_is_changed_in_place_is_exact(at: str) -> None:
    check_exact(Blocks, at)


class Catching(Layers):
    """Goes on where a factorisation fails, which a trace cannot."""

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.b(torch.relu(self.a(x))))
        try:
            torch.linalg.cholesky(torch.eye(2) * (LARGE - h.detach().max()))
        except RuntimeError:
            h = h * 0.5
        return self.c(h)


LARGE = 10.0


@pytest.mark.parametrize("at", ["a", "b", "before:c"])
def test_what_forward_catches_is_refused_by_a_trace_and_exact_by_a_replay(at: str) -> None:
    with pytest.raises(InvalidInput, match=r"Catching\.forward catches errors, .*torch\.linalg\.cholesky_ex"):
        vanilla(Catching(), at)
    topology, whole = vanilla(Catching(), at, example=rows()), Catching()
    whole.load_state_dict(topology.state_dict({s.name: s.module for s in topology.segments}))
    below, above = (segment.module for segment in topology.segments)
    for factor in (1.0, 1000.0):
        assert torch.equal(above(below(rows() * factor)), whole(rows() * factor))


class Clamped(Layers):
    """Has a backward hook on a layer, and is replayed."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.get_submodule(layer).register_full_backward_hook(lambda _m, given, _r: (given[0].clamp(-0.01, 0.01),))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x * 1.01 if self.training else x)


def test_a_backward_hook_on_what_returns_the_result_is_named() -> None:
    text = (
        "Clamped returns view_as with gradients, c without: a full backward hook on the submodule that makes a result"
    )
    with pytest.raises(InvalidInput, match=text):
        vanilla(Clamped("c"), "a", example=rows())
    torch.manual_seed(1)
    check_trains_beside(model := Clamped("b"), vanilla(model, "a", example=rows()), {"x": rows()})


@pytest.mark.parametrize(
    ("factor", "text"),
    [(1 + 2**-20, "differs by rounding alone; sums of what comes back"), (2.0, "differs; hooks on weights")],
)
def test_gradients_that_are_rounded_otherwise_are_named_as_such(factor: float, text: str) -> None:
    states = generator_states()
    uncut, cut = (StepResult(gradients={"b": torch.ones(3) * one}, generators=states) for one in (1.0, factor))
    with pytest.raises(Difference, match="the gradient of weight 'b'") as caught:
        check_same(uncut, cut, ())
    assert text in f"{caught.value}; {caught.value.advice}"


class DropPath(Layers):
    """Leaves out a layer for some rows, drawn in place as published models do."""

    def drop(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = x.new_empty((x.shape[0], *(1,) * (x.ndim - 1))).bernoulli_(0.8)
        return x * kept.div_(0.8)

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.a(x))
        return {"y": self.c(h + self.drop(self.b(h)))}


@pytest.mark.parametrize("at", ["a", "b"])
def test_draws_in_place_are_compared_and_accepted(at: str) -> None:
    found = vanilla(DropPath(), at, example=rows())
    assert all(isinstance(segment.module, ReplayedSegment) for segment in found.segments)
    u_shaped(DropPath(), ("a", "b"), example=rows())


class CountedByAHook(Layers):
    """A hook counts its calls outside of the module, by which its gradient is another in later steps."""

    def __init__(self) -> None:
        super().__init__()
        calls = itertools.count()
        self.b.register_full_backward_hook(
            lambda _m, gradients, _g: (gradients[0] * (1.0 if next(calls) < 30 else 0.5),)
        )


class CountedInItsModule(Layers):
    """The same by an attribute of the module, which a checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.b.calls = 0  # type: ignore[assignment]

        def hook(module: Any, gradients: Any, _: Any) -> Any:
            module.calls += 1
            return (gradients[0] * (1.0 if module.calls < 30 else 0.5),)

        self.b.register_full_backward_hook(hook)


def test_what_a_hook_changes_outside_of_its_module_is_refused_before_training() -> None:
    with pytest.raises(InvalidInput, match=r"a backward pass changes .*'calls'.*, which a checkpoint cannot hold"):
        vanilla(CountedByAHook(), "a", example=rows())
    vanilla(CountedInItsModule(), "a", example=rows())


class Sparse(Layers):
    """Gradients of its embedding are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 8, sparse=True)

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.a(x))
        return self.c(h + self.words((h[:, 0] > 0.1).long()))


class Observed(Layers):
    """A layer that saves more than its tables hold."""

    def __init__(self) -> None:
        super().__init__()
        self.quantize = torch.ao.quantization.FakeQuantize()

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.a(x))
        h = h * 1.0 if self.training else h
        return self.c(self.quantize(self.b(h)))


@pytest.mark.filterwarnings("ignore:Please use quant_min")
@pytest.mark.parametrize("kind", [Sparse, Observed])
def test_gradients_that_are_sparse_and_states_that_are_written_by_hand(kind: type[nn.Module]) -> None:
    x, y = rows(), torch.arange(24) % 4
    topology = vanilla(kind(), "a", example=x)
    engine = engine_of(topology, x, y)
    engine.train(0, 0, [torch.arange(8)])
    for party in engine.parties.values():
        states = [module.state_dict() for module in party.state.modules.values()]
        assert not any(tensor.is_meta for state in states for tensor in state.values())
    assert set(engine.topology.state_dict(engine.modules(0))) == set(kind().state_dict())


class Stepped(nn.Module):
    """What lies between two layers is one of those below; `statistics` keeps on itself what it is asked for again."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.gru, self.c, self.state = nn.Linear(4, 4), nn.GRU(4, 6, batch_first=True), nn.Linear(6, 3), None
        self.statistics, self.between = Statistics(), between

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.between(self, x))  # type: ignore[no-any-return]


class Statistics(nn.Module):
    def forward(self, h: Tensor, back: bool = False) -> Tensor:
        if back:
            return h * self.std
        self.std = h.std(1, keepdim=True)
        return h / self.std


def kept_on_a_submodule(m: Any, x: Tensor) -> Tensor:
    h = m.a(m.statistics(x))
    return m.gru(m.statistics(h, back=True))[0][:, -1]  # type: ignore[no-any-return]


def given_weights(m: Any, x: Tensor) -> Tensor:
    weights = {name: functional.normalize(w, dim=-1) for name, w in m.gru.named_parameters()}
    return torch.func.functional_call(m.gru, weights, (m.a(x),))[0][:, -1]  # type: ignore[no-any-return]


def none_at_first(m: Any, x: Tensor) -> Tensor:
    h = m.gru(m.a(x))[0][:, -1]
    h = h if m.state is None else h + m.state
    if m.training:
        m.state = h.detach().mean(0)
    return h  # type: ignore[no-any-return]


def gradient_of_the_input(m: Any, x: Tensor) -> Tensor:
    moved = torch.zeros_like(x).requires_grad_()
    (found,) = torch.autograd.grad(m.a(x + moved).square().sum(), moved)
    return m.gru(m.a(x + found))[0][:, -1]  # type: ignore[no-any-return]


def conditional(m: Any, x: Tensor) -> Tensor:
    h = m.gru(m.a(x))[0][:, -1]
    return torch.cond(h.mean() > 0.1, lambda v: v * 2.0, lambda v: v - 1.0, (h,))  # type: ignore[no-any-return]


def folded(m: Any, x: Tensor) -> Tensor:
    return m.gru(m.a(x.reshape(-1, 1, 4)))[0][:, -1].view(len(x), -1, 6).mean(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("between", "at", "text"),
    [
        (
            kept_on_a_submodule,
            "statistics#1",
            "reads what another party holds .a tensor that a submodule sets on itself",
        ),
        (given_weights, "a", "reads what another party holds .* weights that functional_call is given"),
        (
            none_at_first,
            "a",
            "than the mode cannot be cut .state that is None at first can begin as zeros",
        ),
        (gradient_of_the_input, "a#1", "Stepped fails without gradients, as predictions are made, at .*: RuntimeError"),
        (conditional, "a", "Stepped cannot be followed at .*: Uncaptured.*; write that otherwise, or pass segments"),
        (folded, "a", "the first dimension must be the batch .*: cut where it is, or keep it first in what crosses"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_a_refusal_names_what_is_at_fault_and_a_way_out(
    between: Callable[[Any, Tensor], Tensor], at: str, text: str
) -> None:
    with pytest.raises(InvalidInput, match=text):
        vanilla(Stepped(between), at, example=torch.randn(8, 5, 4))
