"""The tracer of `torch.fx` that follows a model where a graph can, and refuses what it would lose without a word.

A graph keeps operations on tensors alone. Lost are modes of autograd and autocast, functions with a backward of their
own, and the way that `forward` takes where it asks a value what it is, which is no tensor here. No number shows this
before the branch is met: it is seen where it is called, though `forward` may catch what is raised over it.
"""

from __future__ import annotations

import dis
import inspect
import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partialmethod, wraps
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from splitfed.core.aliasing import AUGMENTED
from splitfed.core.code_kinds import is_installed, nested_code
from splitfed.core.replay_passes import ABOUT, VIEWS

_FACTORY_NAMES = """
arange bernoulli eye empty full linspace logspace normal ones rand randint randn randperm range tensor
tril_indices triu_indices zeros as_tensor scalar_tensor hann_window hamming_window
"""
_FACTORIES = frozenset(_FACTORY_NAMES.split())


class _Value(fx.Proxy):
    """A value of the trace, which has no number, and says so whatever the user's code does with the refusal."""

    tracer: ModelTracer

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What `isinstance` asks; the user's code would take another way than with a tensor."""
        code = sys._getframe(1).f_code
        # Functions of torch ask as well, of which the caller's frame tells nothing.
        by_user = "isinstance" in code.co_names and _is_users(code)
        if by_user or code is torch.is_tensor.__code__:
            self.tracer.refuse("is asked whether it is of a class")
        return type(self)

    def __getattr__(self, name: str) -> _Attribute:
        return _Attribute(self, name)

    def __hash__(self) -> int:
        if _is_users(sys._getframe(1).f_code):
            self.tracer.refuse("is looked up in a table or a set")
        return super().__hash__()

    def __repr__(self) -> str:
        if _is_users(sys._getframe(1).f_code):
            self.tracer.refuse("is written as text")
        return super().__repr__()

    def _no_number(self, *_: Any) -> Any:
        self.tracer.refuse("is asked for a number")

    __int__ = __float__ = __complex__ = __len__ = __contains__ = _no_number

    def _augmented(self, other: Any, operation: Callable[[Any, Any], Any]) -> Any:
        made = operation(self, other)
        made.node.meta[AUGMENTED] = True
        return made


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift"):
    # What `x += y` would be without: `x = x + y`, and no word that it writes into `x`.
    setattr(_Value, f"__i{_name.strip('_')}__", partialmethod(_Value._augmented, operation=getattr(operator, _name)))


class _Attribute(_Value, fx.proxy.Attribute):
    """An attribute or a method of a value, such as its shape."""


def _is_users(code: CodeType) -> bool:
    """Return whether it is code of the user's, or of what the user calls, and none of torch or of ours."""
    return not code.co_filename.startswith(_NOT_THE_USERS)


_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<eval_with_key>")


class ModelTracer(fx.Tracer):
    """Follows buffers as it follows weights, and makes constants where `forward` makes them, at every call.

    `refused`: why the trace is not the model, where `forward` caught what was raised over it.
    """

    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__(autowrap_modules=(), autowrap_functions=tuple(_MATH.values()))  # type: ignore[arg-type]
        self.refused: TraceError | None = None

    def refuse(self, why: TraceError | str) -> NoReturn:
        """Raise, and keep, that the trace is not the model; a text says what happens to a value."""
        error = TraceError(f"a value {why}, of which a trace keeps nothing") if isinstance(why, str) else why
        self.refused = self.refused or error
        raise error

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return what stands for the result of `node`."""
        return _Value(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Refuse a branch."""
        try:
            return super().to_bool(obj)
        except TraceError as error:
            self.refuse(error)

    def iter(self, obj: fx.Proxy) -> Any:
        """Refuse a loop of unknown length."""
        try:
            return super().iter(obj)
        except TraceError as error:
            self.refuse(error)

    def create_arg(self, a: Any) -> Any:
        """Return `a` as an argument of an operation of the graph."""
        if isinstance(a, fx.Proxy):
            return a.node
        if isinstance(a, torch.Generator):
            raise TypeError("a torch.Generator is no part of a trace")
        return super().create_arg(a)

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        """Return the graph of `root`; raise what was refused, though `forward` may have caught it."""
        with _Factories(self, root):
            graph = super().trace(root, concrete_args)
        if self.refused is not None:
            raise self.refused
        return graph

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record the functions of `math`, and refuse modes of autograd, in whatever this traces in the block."""
        with _modes_refused(self), _math_recorded():
            yield


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` of plain numbers as an operation of the graph where it is called with a value of the trace."""

    @wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        values, _ = _pytree.tree_flatten((args, given))
        value = next((one for one in values if isinstance(one, fx.Proxy)), None)
        if value is None:
            return function(*args, **given)
        return value.tracer.create_proxy("call_function", function, args, given)

    return call


_MATH = {name: one for name, one in vars(math).items() if not name.startswith("_") and callable(one)}
_MATH_RECORDED = {name: _recorded(one) for name, one in _MATH.items()}


@contextmanager
def _math_recorded() -> Iterator[None]:
    """Let the functions of `math` go into graphs in the block; torch.fx would wrap each of them anew at every trace."""
    before = {name: vars(math)[name] for name in _MATH}
    try:
        vars(math).update(_MATH_RECORDED)
        yield
    finally:
        vars(math).update(before)


@contextmanager
def _modes_refused(tracer: ModelTracer) -> Iterator[None]:
    """Refuse, in the block, what a graph does not hold: modes of autograd, and functions with a backward of their own.

    All these are found by what they call, as the user may have taken hold of them before.
    """

    def refuse(what: str) -> Callable[..., NoReturn]:
        def refused(*args: Any, **given: Any) -> NoReturn:
            tracer.refuse(f"is computed {what}")

        return refused

    own_backward, parent = refuse("by a function with a backward of its own"), torch.autograd.Function.__mro__[1]
    places: list[tuple[Any, str, Any]] = [
        (parent, "apply", classmethod(own_backward)),
        # From torch 2.14 on `apply` is no function of Python's; what it makes first is the node of the backward pass.
        (torch.autograd.function.BackwardCFunction, "__init__", own_backward),
        (torch.inference_mode, "__enter__", refuse("under inference_mode()")),
        (torch.autocast, "__enter__", refuse("under autocast()")),
    ]
    kept = [(owner, name, vars(owner).get(name)) for owner, name, _ in places]
    try:
        for owner, name, put in places:
            setattr(owner, name, put)
        yield
    finally:
        for owner, name, before in kept:
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


class _Factories(TorchFunctionMode):
    """Records calls that make a tensor from plain numbers, which would otherwise become constants of the trace.

    Refuses what is computed of a weight or buffer itself, as `parameters()` gives them, which would be one too.
    """

    def __init__(self, tracer: ModelTracer, model: nn.Module) -> None:
        super().__init__()
        self._tracer = tracer
        self._state = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return a proxy of what `func` would make."""
        name, given = str(getattr(func, "__name__", "")), kwargs or {}
        if func is torch._C._set_grad_enabled:
            self._tracer.refuse("is computed under no_grad() or enable_grad()")
        if name in _FACTORIES and getattr(torch, name) is func:
            return self._tracer.create_proxy("call_function", func, args, given)
        if (name not in ABOUT or func in VIEWS) and not any(isinstance(one, fx.Proxy) for one in args):
            values, _ = _pytree.tree_flatten((args, given))
            if any(id(one) in self._state for one in values) and not any(isinstance(one, fx.Proxy) for one in values):
                self._tracer.refuse("is made of a weight or buffer that is read by parameters() or the like")
        return func(*args, **given)


_PLAIN = fx.Tracer()


def find_untraceable_code(model: nn.Module) -> str | None:
    """Return what code of the user's does in a pass of which a graph keeps nothing: `type`, `case`, `except`."""
    for function in _functions_run(model):
        if _asks_type(function.__code__):
            return f"{function.__qualname__} asks for the type of something, which may be that of a value: {_SHAPE}"
        if _catches(function.__code__):
            return f"{function.__qualname__} catches errors, which numbers alone may raise: {_BEFORE}"
    return None


def catches_errors(model: nn.Module) -> bool:
    """Return whether code of the user's that a pass may run goes on where an operation fails."""
    return any(_catches(function.__code__) for function in _functions_run(model))


_SHAPE = "ask for its shape or dtype"
_BEFORE = "ask before, as torch.linalg.cholesky_ex does"


def _functions_run(model: nn.Module) -> Iterator[FunctionType]:
    """Yield the functions of the user's that a pass may run: `forward`, hooks, and what these name."""
    followed = [module for path, module in model.named_modules() if not path or not _PLAIN.is_leaf_module(module, path)]
    methods: dict[str, list[Any]] = {}
    for kind in {kind for module in followed for kind in type(module).__mro__}:
        # Of an installed package that is read alone which runs in any case.
        for name in ("forward",) if is_installed(kind) else vars(kind):
            methods.setdefault(name, []).append(vars(kind).get(name))
    waiting = [*methods.get("forward", ())]
    waiting += [hook for one in followed for table in _hooks(one) for hook in table.values()]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        one = getattr(one, "fget", None) or getattr(one, "func", one)
        one = inspect.unwrap(getattr(one, "__func__", one))
        if not isinstance(one, FunctionType) or id(one) in seen or (one.__module__ or "").partition(".")[0] == "torch":
            continue
        seen.add(id(one))
        yield one
        for name in {name for code in nested_code(one.__code__) for name in code.co_names}:
            met = one.__globals__.get(name)
            waiting += methods.get(name, ())
            waiting += [met] if isinstance(met, FunctionType) and not is_installed(met) else []


def _hooks(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return module._forward_pre_hooks, module._forward_hooks


def _steps(code: CodeType) -> Iterator[tuple[dis.Instruction, dis.Instruction]]:
    """Yield each instruction of `code`, and of functions within it, with the next one."""
    for one in nested_code(code):
        yield from itertools.pairwise(s for s in dis.get_instructions(one) if s.opname not in ("PUSH_NULL", "CACHE"))


@cache
def _asks_type(code: CodeType) -> bool:
    """Return whether it calls `type` with another argument than `self`, or has a `case` of a class or a sequence."""
    return any(
        step.opname.startswith("MATCH_")
        or (step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval == "type" and then.argval != "self")
        for step, then in _steps(code)
    )


@cache
def _catches(code: CodeType) -> bool:
    """Return whether it has an `except`, or suppresses errors."""
    return any(
        step.opname in ("CHECK_EXC_MATCH", "CHECK_EG_MATCH")
        or (step.opname == "PUSH_EXC_INFO" and then.opname == "POP_TOP")
        or step.argval == "suppress"
        for step, then in _steps(code)
    )
