"""Models that are written as few people write them, or that are broken: whatever they do, a cut says it in one line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

from tests.core.cut_idioms import Net, ends

Change = Callable[[Any, Tensor], Any]


class OwnError(Exception):
    """No error of torch's, with a text of two lines."""


class Interrupted(KeyboardInterrupt):
    """What stops a process."""


def net(change: Change = lambda m, h: h, **extra: Any) -> Net:
    """Return three layers with `change` behind the first."""
    return Net(lambda m, x: m.c(torch.relu(m.b(change(m, m.a(x))))), **extra)


def returns(result: Callable[[Tensor], Any]) -> Net:
    """Return three layers whose result is turned into something else."""
    return Net(lambda m, x: result(ends(m, x)))


def fails(error: BaseException, when: Change = lambda m, h: type(h) is not Tensor or h.is_meta) -> Net:
    """Return three layers that raise `error`: where they are given something else than numbers, unless said."""

    def change(m: Any, h: Tensor) -> Tensor:
        if when(m, h):
            raise error
        return h

    return net(change)


def wants_tensor(m: Any, x: Tensor) -> Tensor:
    assert isinstance(x, Tensor), "not a tensor"
    return ends(m, x)


def wants_tensor_in_own_words(m: Any, x: Tensor) -> Tensor:
    if not isinstance(x, Tensor):
        raise OwnError("expected a tensor\nnothing else")
    return ends(m, x)


def looks_up(m: Any, x: Tensor) -> Tensor:
    return ends(m, x * (1, 2)[0 if isinstance(x, Tensor) else 2])


def pruned(*names: str) -> Net:
    model = net()
    for name in names:
        prune.l1_unstructured(model.get_submodule(name), "weight", 0.3)
    return model


def changed(change: Callable[[Net], object], **extra: Any) -> Net:
    """Return three layers, after `change` of them."""
    model = net(**extra)
    change(model)
    return model


def old_weight_norm(*names: str) -> Net:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return changed(lambda m: [nn.utils.weight_norm(m.get_submodule(name)) for name in names])


def replaced(**modules: nn.Module) -> Net:
    """Return three layers with some of them replaced."""
    return changed(lambda m: [setattr(m, name, module) for name, module in modules.items()])


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def chain(first: Callable[[Tensor], Any], second: Callable[[Any], Tensor]) -> nn.Module:
    """Return layers, of which the first ends in one function and the second begins with another."""
    model = nn.Sequential()
    model.add_module("a", nn.Sequential(nn.Linear(8, 8), Applied(first)))
    model.add_module("b", nn.Sequential(Applied(second), nn.Linear(8, 8)))
    model.add_module("c", nn.Linear(8, 4))
    return model


class CalledOtherwise(Net):
    """Calls itself on twice its input."""

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x * 2)


class LayerCalledOtherwise(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x * 2)


class Arguments(Net):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return ends(self, args[0])


class NoArgument(Net):
    def forward(self) -> Any:  # type: ignore[override]
        return ends(self, torch.ones(2, 8))


class NoForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)


class NeverMade(nn.Module):
    def __init__(self) -> None:
        pass


class NotCopied(Net):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise OwnError("nobody copies\nthis")


class Difficult:
    """An object that nobody can compare, print or look up."""

    def __eq__(self, other: object) -> bool:
        raise OwnError("==")

    def __hash__(self) -> int:
        raise OwnError("hash")

    def __repr__(self) -> str:
        raise OwnError("repr")


class Tied(Net):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__(lambda m, x: m.c(torch.relu(m.d(m.a(x)))))
        self.d = self.b


class Tables(Net):
    """Weights and buffers in tables and lists."""

    def __init__(self) -> None:
        super().__init__(lambda m, x: m.c(torch.relu(m.b(m.a(x) * m.table["one"]) * m.table["two"])) * m.row[0])
        self.table = nn.ParameterDict({name: nn.Parameter(torch.ones(8)) for name in ("one", "two")})
        self.row = nn.ParameterList([nn.Parameter(torch.ones(4))])


class Stale(Net):
    """Computes with what was computed from a weight when it was made."""

    def __init__(self) -> None:
        super().__init__(lambda m, x: m.c(functional.linear(m.a(x), m.doubled)))
        self.doubled = self.b.weight * 2


class Fresh(Stale):
    """Computes that anew."""

    def forward(self, x: Tensor) -> Any:
        self.doubled = self.b.weight * 2
        return super().forward(x)


class BackwardFails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise OwnError("no way\nback")


class Kept(Tensor):
    """A tensor of a class of its own."""


def endless(x: Tensor) -> Tensor:
    return endless(x + 1)


def nested(depth: int) -> nn.Module:
    layer: nn.Module = nn.Linear(8, 8)
    for _ in range(depth):
        layer = nn.Sequential(layer)
    return replaced(b=layer)


def hooked(kind: str, hook: Callable[..., Any], name: str = "b") -> Net:
    return changed(lambda m: getattr(m.get_submodule(name), f"register_{kind}")(hook))


def raises(*_: Any) -> None:
    raise OwnError("no\nhook")


def shifted(x: Tensor) -> Tensor:
    return x + 1


def named_otherwise() -> nn.Module:
    model = nn.Sequential()
    for name in ("größe", "class", "a b", "2x"):
        model.add_module(name, nn.Linear(8, 8))
    return model


def quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(net(), {nn.Linear})  # type: ignore[no-any-return]


def compiled(module: Any, *rows: Tensor) -> Any:
    """Return `module` compiled by TorchScript: traced on `rows`, where there are any."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(module, rows) if rows else torch.jit.script(module)


def vector_map(m: Any, h: Tensor) -> Tensor:
    return torch.vmap(functional.relu)(h)


SCRIPTED = compiled(shifted, torch.ones(2))
GENERATOR = torch.Generator().manual_seed(4)
LEFT: dict[str, Any] = {}


def leaves_behind(m: Any, h: Tensor) -> Tensor:
    """Put a value into a global, and branch on a number, so that no trace gets through."""
    LEFT.setdefault("first", h)
    return h * 2 if h.sum() > 1e9 else h


def draw(m: Any, h: Tensor) -> Tensor:
    return h + torch.randn(h.shape, generator=m.generator)


def draw_globally(m: Any, h: Tensor) -> Tensor:
    return h + torch.randn(h.shape, generator=GENERATOR)


MODELS: dict[str, Callable[[], Any]] = {
    "wants a tensor": lambda: Net(wants_tensor),
    "wants a tensor in its own words": lambda: Net(wants_tensor_in_own_words),
    "looks up a place that is not there": lambda: Net(looks_up),
    "pruned": lambda: pruned("a", "b"),
    "pruned twice": lambda: changed(lambda m: [prune.random_unstructured(m.b, "weight", 0.2) for _ in range(2)]),
    "weight norm of old": lambda: old_weight_norm("a", "b", "c"),
    "spectral norm of old": lambda: changed(lambda m: nn.utils.spectral_norm(m.b)),
    "weight norm": lambda: changed(lambda m: nn.utils.parametrizations.weight_norm(m.b)),
    "spectral norm": lambda: changed(lambda m: nn.utils.parametrizations.spectral_norm(m.b)),
    "orthogonal": lambda: changed(lambda m: nn.utils.parametrizations.orthogonal(m.b)),
    "a generator of its own": lambda: net(draw, generator=torch.Generator().manual_seed(3)),
    "a global generator": lambda: net(draw_globally),
    "a scripted layer": lambda: replaced(b=compiled(nn.Linear(8, 8))),
    "a traced layer": lambda: replaced(b=compiled(nn.Linear(8, 8), torch.ones(2, 8))),
    "scripted": lambda: compiled(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))),
    "a scripted function": lambda: net(lambda m, h: SCRIPTED(h)),
    "a scripted function in a submodule": lambda: net(lambda m, h: m.d(h), d=Applied(lambda h: SCRIPTED(h))),
    "a lazy layer": lambda: replaced(b=nn.LazyLinear(8)),
    "a lazy first layer": lambda: replaced(a=nn.LazyLinear(8)),
    "without numbers": lambda: net().to("meta"),
    "half without numbers": lambda: replaced(b=nn.Linear(8, 8, device="meta")),
    "sparse": lambda: chain(lambda x: x.to_sparse(), lambda x: x.to_dense()),
    "quantized value": lambda: chain(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), Tensor.dequantize),
    "nested value": lambda: chain(
        lambda x: torch.nested.nested_tensor(list(x.unbind(0))), lambda x: torch.nested.to_padded_tensor(x, 0.0)
    ),
    "complex": lambda: chain(torch.fft.rfft, lambda x: torch.fft.irfft(x, n=8)),
    "complex result": lambda: returns(torch.fft.rfft),
    "quantized": quantized,
    "parallel": lambda: nn.DataParallel(net()),
    "compiled": lambda: torch.compile(net(), backend="eager"),
    "averaged": lambda: AveragedModel(net()),
    "averaged and parallel": lambda: AveragedModel(nn.DataParallel(net())),
    "tables": Tables,
    "one layer under two names": Tied,
    "called otherwise": lambda: CalledOtherwise(ends),
    "a layer that is called otherwise": lambda: replaced(b=LayerCalledOtherwise(8, 8)),
    "arguments without names": lambda: Arguments(ends),
    "no argument": lambda: NoArgument(ends),
    "no forward": NoForward,
    "never made": NeverMade,
    "not copied": lambda: NotCopied(ends),
    "not copied, by replay": lambda: NotCopied(lambda m, x: ends(m, x * 2 if m.training else x)),
    "difficult attributes": lambda: Net(
        lambda m, x: ends(m, x * 2 if m.training else x), one=Difficult(), many=[Difficult()]
    ),
    "stale": Stale,
    "fresh": Fresh,
    "a backward that fails": lambda: net(lambda m, h: BackwardFails.apply(h)),
    "a class of tensors of its own": lambda: Net(lambda m, x: ends(m, x.as_subclass(Kept))),
    "vmap": lambda: net(vector_map),
    "endless": lambda: net(lambda m, h: endless(h)),
    "deep": lambda: nested(400),
    "forward hook that fails": lambda: hooked("forward_hook", raises),
    "forward pre-hook that fails": lambda: hooked("forward_pre_hook", raises),
    "backward hook that fails": lambda: hooked("full_backward_hook", raises),
    "backward pre-hook that fails": lambda: hooked("full_backward_pre_hook", raises),
    "state hook that fails": lambda: hooked("state_dict_post_hook", raises),
    "forward hook of the model": lambda: hooked("forward_hook", lambda m, given, y: y * 2, name=""),
    "forward pre-hook of the model": lambda: hooked("forward_pre_hook", lambda m, given: (given[0] * 2,), name=""),
    "backward hook of the model": lambda: hooked("full_backward_hook", lambda m, one, other: None, name=""),
    "weight hook": lambda: changed(lambda m: m.b.weight.register_hook(lambda g: g * 2)),
    "names": named_otherwise,
    "mixed types": lambda: changed(lambda m: m.b.double()),
    "half": lambda: net().half(),
    "a function": lambda: ends,
    "a class": lambda: Tables,
    "none": lambda: None,
    "leaves a value behind": lambda: net(leaves_behind),
    "fails in evaluation": lambda: fails(OwnError("not\nnow"), lambda m, h: not m.training),
    "fails on five rows": lambda: fails(OwnError("not\nfive"), lambda m, h: isinstance(h, Tensor) and len(h) == 5),
    "fails without gradients": lambda: fails(OwnError("not\nso"), lambda m, h: not torch.is_grad_enabled()),
    "always fails": lambda: fails(OwnError("never\never"), lambda m, h: True),
    "returns None": lambda: returns(lambda y: None),
    "returns a number": lambda: returns(lambda y: 3),
    "returns an item": lambda: returns(lambda y: y.sum().item()),
    "returns a text": lambda: returns(lambda y: "text"),
    "returns a generator": lambda: returns(lambda y: (one for one in [y])),
    "returns a set": lambda: returns(lambda y: {y}),
    "returns a class": lambda: returns(lambda y: OwnError),
    "returns an object": lambda: returns(lambda y: Applied(lambda x: x)),
    "returns nothing in a list": lambda: returns(lambda y: []),
    "returns a nested table": lambda: returns(lambda y: {"one": {"two": [y]}}),
    "returns a scalar": lambda: returns(torch.sum),
    "returns classes": lambda: returns(lambda y: y.argmax(1)),
    "returns it twice": lambda: returns(lambda y: (y, y)),
    **{
        f"raises {type(error).__name__}": lambda error=error: fails(error)  # type: ignore[misc]
        for error in (
            OwnError("one\ntwo"),
            OwnError(),
            SystemExit(3),
            StopIteration("stop"),
            RecursionError("deep"),
            MemoryError("full"),
            NotImplementedError("later"),
            FileNotFoundError(2, "no file"),
            ZeroDivisionError("by nought"),
            LookupError("where"),
            UserWarning("beware"),
            UnicodeDecodeError("utf8", b"\xff", 0, 1, "bad"),
        )
    },
}


def make(name: str) -> Any:
    """Return a model, with the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return MODELS[name]()
