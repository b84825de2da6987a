"""No party leads to another's weights: not by a hook of a submodule, not by what hangs on a segment made by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.topologies import vanilla, vertical
from tests.examples import engine_of
from tests.thinning import thin

GLOBAL: dict[str, nn.Module] = {}


class Hooked(nn.Module):
    """A frozen layer of the client, and a hook on a layer of the server."""

    def __init__(self, hook: Callable[[Hooked], Any]) -> None:
        super().__init__()
        self.a, self.f = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 4)
        hook(self)

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(torch.relu(self.f(torch.relu(self.a(x)))))))

    def shift(self, module: nn.Module, given: Any, returned: Tensor) -> Tensor:
        return returned + self.f.bias

    def scale(self, module: nn.Module, gradients: Any) -> Any:
        return (gradients[0] * (1 + self.f.bias.abs()),)


def shift(module: nn.Module, given: Any, returned: Tensor, model: Any = None) -> Tensor:
    return returned + (model or GLOBAL["model"]).f.bias


class Rarely:
    """A hook as an object, which needs the client's weight where its own results are large."""

    def __init__(self, held: list[Any]) -> None:
        self.held = held

    def __call__(self, module: nn.Module, given: Any, returned: Tensor) -> Tensor:
        return returned + self.held[0].detach() * (returned > 1e9).float()


def by_default(model: Any) -> None:
    def hook(module: nn.Module, given: Any, returned: Tensor, bias: Tensor = model.f.bias) -> Tensor:
        return returned + bias

    model.b.register_forward_hook(hook)


def by_global(model: Any) -> None:
    GLOBAL["model"] = model
    model.b.register_forward_hook(shift)


HOOKS: dict[str, Callable[[Any], Any]] = {
    "closure": lambda m: m.b.register_forward_hook(lambda _, i, o: o + m.f.bias),
    "closure of a backward hook": lambda m: m.b.register_full_backward_pre_hook(
        lambda _, g: (g[0] * (1 + m.f.bias.abs()),)
    ),
    "method": lambda m: m.b.register_forward_hook(m.shift),
    "method, a backward hook": lambda m: m.b.register_full_backward_pre_hook(m.scale),
    "partial": lambda m: m.b.register_forward_hook(partial(shift, model=m)),
    "object": lambda m: m.b.register_forward_hook(Rarely([m.f.bias])),
    "trained weight": lambda m: m.b.register_forward_hook(Rarely([m.a.bias])),
    "default": by_default,
    "global": by_global,
}


@pytest.mark.parametrize("how", thin(HOOKS, 2))
@pytest.mark.parametrize("example", [None, torch.ones(8, 8)], ids=["trace", "replay"])
def test_a_hook_that_leads_to_another_partys_weights_is_refused(how: str, example: Tensor | None) -> None:
    with pytest.raises(InvalidInput) as caught:
        vanilla(Hooked(HOOKS[how]), "f", task=sf.classification(4), example=example)
    assert "\n" not in str(caught.value)
    if example is None:
        assert "'b'" in str(caught.value)


def test_a_hook_over_the_whole_model_that_reads_no_weights_is_exact_and_leaves_the_users_objects() -> None:
    def kept(model: Any) -> None:
        model.features, model.limit = {}, 0.5
        model.b.register_forward_hook(lambda _, i, o: model.features.__setitem__("b", o.detach()))
        model.b.register_forward_hook(lambda _, i, o, *, owner=model: o.clamp(max=owner.limit))

    x, y = torch.randn(24, 8, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = Hooked(kept)
    topology = vanilla(model, "f", task=sf.classification(4), example=x[:8])
    engine = engine_of(topology, x, y, optim=sf.Optim("SGD", {"lr": 0.1}))
    engine.train(0, 0, [torch.arange(8), torch.arange(8, 16)])
    assert model.features == {}
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    assert not torch.equal(engine.topology.state_dict(engine.modules(0))["b.weight"], before["b.weight"])
    for rows in (slice(8), slice(8, 16)):
        steps.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        steps.step()
    for name, value in engine.topology.state_dict(engine.modules(0)).items():
        assert torch.equal(value, model.state_dict()[name]), name


class Bottom(nn.Module):
    def __init__(self, other: Any = None) -> None:
        super().__init__()
        self.layer, self.others = nn.Linear(6, 8), [other]

    def forward(self, x: Tensor) -> Any:
        return torch.relu(self.layer(x))


def test_a_segment_by_hand_that_leads_to_another_roles_weights_is_refused() -> None:
    bank = Bottom()
    told = (
        r"segment 'bottom_clinic' at role 'clinic' leads to 'bottoms\.bank\.layer\.(weight|bias)' of role 'bank' by "
        "'others' of the model"
    )
    for other in (bank, {"weights": bank.layer.weight[:2]}, lambda: bank):
        with pytest.raises(InvalidInput, match=told):
            vertical(
                {"bank": bank, "clinic": Bottom(other)}, nn.Linear(16, 4), labels="clinic", task=sf.classification(4)
            )


class Consolidated(nn.Module):
    """Holds near where they were the weights that it learns, of all of which it keeps copies."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.before = {name: weight.detach().clone() for name, weight in self.named_parameters()}

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.b(torch.relu(self.a(x))))
        h = h * 1.0 if self.training else h
        return self.c(h) + ((self.b.weight - self.before["b.weight"]) ** 2).mean()


class ConsolidatedThere(Consolidated):
    """The same with what its party has alone."""

    def __init__(self) -> None:
        super().__init__()
        self.before = {"b.weight": self.before["b.weight"]}


class Taught(Consolidated):
    """A weight leads to a layer of another party."""

    def __init__(self) -> None:
        super().__init__()
        self.before = {"b.weight": self.before["b.weight"]}
        self.b.weight.teacher = self.a  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [Consolidated, Taught])
def test_a_copy_of_another_partys_weights_is_refused(kind: type[nn.Module]) -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(InvalidInput, match=r"leads to (a copy of )?'?a\.(weight|bias)'?"):
        vanilla(kind(), "a", example=x)
    vanilla(ConsolidatedThere(), "a", example=x)


class Distilled(nn.Module):
    """Learns from a frozen copy of itself as it was, which it keeps in a list or as a submodule."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        teacher = copy.deepcopy(nn.Sequential(self.a, nn.ReLU(), self.b)).requires_grad_(False)
        self.teacher: Any = teacher if registered else [teacher]

    def forward(self, x: Tensor) -> Any:
        taught = (self.teacher if isinstance(self.teacher, nn.Module) else self.teacher[0])(x)
        h = nn.functional.dropout(torch.relu(self.a(x) + taught.mean(1, keepdim=True)), 0.0, training=self.training)
        return self.b(h)


def test_a_frozen_copy_in_a_list_is_refused_as_what_it_is_and_as_a_submodule_it_is_cut() -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    told = r"'client' leads to a copy of 'b\.(weight|bias)' of role 'server' by 'teacher' .* as a frozen submodule"
    with pytest.raises(InvalidInput, match=told):
        vanilla(Distilled(registered=False), "before:b", example=x)
    vanilla(Distilled(registered=True), "before:b", example=x)
