"""Arguments of optimizers and schedulers checked without making one, which would load torch's compiler.

Names and types are compared with the signature. Ranges are those of torch itself: the constructor of its class is run
as far as the call of its base class, which stands behind the checks of the arguments, and ends there. Torch checks
hardly any argument of a scheduler: it is made over an optimizer without weights, and takes its first steps.
"""

from __future__ import annotations

import collections.abc
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from splitfed.core.argument_kinds import describe, fits
from splitfed.core.errors import InvalidInput, check_names, describe_error, first_line, short

Factory = Callable[..., torch.optim.Optimizer]

# They need a closure or a metric at every step, or other schedulers.
_UNFIT = ("LBFGS", "LRScheduler", "ReduceLROnPlateau", "ChainedScheduler", "SequentialLR")
# True, they ask for what no party does: CUDA graphs, and gradients of a step.
_NEVER = ("capturable", "differentiable")
FIRST_STEPS = 3
"""Steps that a scheduler takes when its options are checked."""
# What arguments that are not allowed raise in torch, which looks at few of them before it computes with them.
_OF_TORCH = (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError)


class _Reached(Exception):
    """The constructor of a class of torch has come to its base: its arguments are allowed."""

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        super().__init__()
        self.defaults = defaults


class _OptimizerEnd(torch.optim.Optimizer):
    """Stands between a class of `torch.optim` and its base."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        raise _Reached(defaults)


def classes_of(module: Any, base: type) -> dict[str, type]:
    """Return the subclasses of `base` in `module` that can be used here, by name."""
    found = {n: c for n, c in vars(module).items() if inspect.isclass(c) and issubclass(c, base) and c is not base}
    return {n: c for n, c in found.items() if not n.startswith("_") and n not in _UNFIT}


def find_optimizer(name: str | Factory) -> Factory:
    """Return the class of `torch.optim` called `name`, or the user's own factory; refuse what is neither."""
    if isinstance(name, str):
        known = classes_of(torch.optim, torch.optim.Optimizer)
        check_names("optimizer", known, name)
        return known[name]
    kind = name if inspect.isclass(name) and issubclass(name, torch.optim.Optimizer) else None
    if not callable(name) or (inspect.isclass(name) and kind is None):
        shown = getattr(name, "__qualname__", repr(name))
        raise InvalidInput(
            f"optimizer {shown} is not allowed; expected a name in torch.optim, a subclass of torch.optim.Optimizer, "
            "or a function that makes one of parameters and options"
        )
    step = {} if kind is None else inspect.signature(kind.step).parameters
    if "closure" in step and step["closure"].default is inspect.Parameter.empty:
        raise InvalidInput(
            f"optimizer {label_of(name)} is not allowed: its step needs a closure, which would run the whole model anew"
        )
    return name


def find_scheduler(name: str) -> type:
    """Return the class of `torch.optim.lr_scheduler` called `name`."""
    known = classes_of(torch.optim.lr_scheduler, LRScheduler)
    check_names("learning-rate scheduler", known, name)
    return known[name]


def label_of(name: str | Factory) -> str:
    """Return an optimizer's name, of a user's own its import path."""
    if isinstance(name, str):
        return name
    kind = name if hasattr(name, "__qualname__") else type(name)
    return f"{kind.__module__}:{kind.__qualname__}"


def check_optimizer(
    name: str | Factory, options: Mapping[str, Any], groups: Sequence[Mapping[str, Any]] = ()
) -> Mapping[str, Any]:
    """Refuse options that the optimizer `name` has not, or that torch does not allow; return all with its defaults.

    `groups`: the options of each parameter group. Of a user's own optimizer the names alone can be checked.
    """
    factory, what = find_optimizer(name), f"optimizer {label_of(name)}"
    defaults: Mapping[str, Any] = {}
    for given in (options, *groups):
        _check_options(what, factory, given)
        defaults = check_ranges(what, factory, [nn.Parameter(torch.zeros(1))], {**options, **given})
    if groups:
        return check_ranges(what, factory, [nn.Parameter(torch.zeros(1))], options)
    return defaults


def check_scheduler(name: str, options: Mapping[str, Any], defaults: Mapping[str, Any], groups: int = 1) -> None:
    """Refuse options that the scheduler `name` has not, or that torch does not allow over such an optimizer.

    `defaults`: all options of the optimizer, none where they are not known; `groups`: how many it has.
    """
    kind, what = find_scheduler(name), f"scheduler {name}"
    _check_options(what, kind, options)
    for name, value in options.items():
        required = name in _required(kind)
        low = -1 if name == "last_epoch" else 1 if required and isinstance(value, int) else 0
        if isinstance(value, (int, float)) and not low <= value <= (-1 if name == "last_epoch" else math.inf):
            raise InvalidInput(f"{name}={value} of {what} is not allowed; expected {'-1' if low < 0 else f'>= {low}'}")
    optimizer = object.__new__(torch.optim.SGD)
    optimizer.defaults = dict(defaults)
    optimizer.param_groups = [{"params": [], "lr": 0.0, **defaults} for _ in range(groups)]
    try:
        inspect.signature(kind).bind(optimizer, **options)
        # A function of the user's is not called before training.
        if defaults and not any(map(callable, options.values())):
            _take_first_steps(kind(optimizer, **options))
    except _OF_TORCH as error:
        raise _refusal(what, options, error) from error


def _take_first_steps(scheduler: LRScheduler) -> None:
    """Take `FIRST_STEPS` steps, fewer where it ends before: that is compared with the rounds of a run, later."""
    with warnings.catch_warnings(action="ignore"):
        # No optimizer takes a step here.
        for _ in range(min(FIRST_STEPS, getattr(scheduler, "total_steps", FIRST_STEPS))):
            scheduler.step()


def check_ranges(what: str, kind: Any, first: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Run the constructor of an optimizer of torch up to its base; return the defaults that it hands over there.

    A user's own class or function is not run: nothing is returned.
    """
    if not inspect.isclass(kind) or not kind.__module__.startswith("torch.optim"):
        return {}
    checked = type(f"Checked{kind.__name__}", (kind, _OptimizerEnd), {})
    try:
        checked(first, **options)
    except _Reached as reached:
        return reached.defaults
    except _OF_TORCH as error:
        raise _refusal(what, options, error) from error
    return {}


def construct(what: str, factory: Any, first: Any, options: Mapping[str, Any], own: bool = False) -> Any:
    """Return what `factory` makes of `first` and `options`; `own`: whether it is the user's, and may raise anything."""
    try:
        return factory(first, **options)
    except InvalidInput:
        raise
    except Exception as error:
        # A factory of the user's own may raise anything; of one of torch's other errors than these are no refusals.
        if not own and not isinstance(error, (ValueError, TypeError, RuntimeError)):
            raise
        raise _refusal(what, options, error, own) from error


def _refusal(what: str, options: Mapping[str, Any], error: Exception, own: bool = False) -> InvalidInput:
    shown = ", ".join(f"{k}={v!r}" for k, v in options.items())
    who = "cannot be built" if own else "is refused by torch"
    name = what.partition(" ")[2]
    reason = describe_error(error) if own else first_line(error).replace(f"Checked{name}.", f"{name}.")
    return InvalidInput(f"{what}({shown}) {who}: {reason}")


def _check_options(what: str, factory: Any, options: Mapping[str, Any]) -> None:
    parameters = list(inspect.signature(factory).parameters.values())
    any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    allowed = [p.name for p in parameters[1:]]
    hints = _hints(factory)
    for option, value in options.items():
        if not any_name:
            check_names(f"option of {what}", allowed, option)
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidInput(f"{option}={value} of {what} is not allowed; expected a finite number")
        if not fits(value, hint := hints.get(option, Any)):
            raise InvalidInput(f"{option}={short(value)} of {what} is not allowed; expected {describe(hint)}")
        if option in _NEVER and value:
            raise InvalidInput(f"{option}={value} of {what} is not allowed; expected False")
    if options.get("foreach") and options.get("fused"):
        raise InvalidInput(f"foreach=True of {what} is not allowed with fused=True; expected one of them")


def _hints(factory: Any) -> Mapping[str, Any]:
    """Return the types of the arguments of a class of torch, by name; none of a user's own."""
    if not inspect.isclass(factory) or not factory.__module__.startswith("torch.optim"):
        return {}
    try:
        # Names that torch imports for type checkers alone.
        return get_type_hints(
            factory.__init__, localns={n: getattr(collections.abc, n) for n in ("Iterable", "Callable")}
        )
    except (NameError, TypeError):
        return {}


def options_of(name: str | Factory) -> list[str]:
    """Return the options that the optimizer `name` takes."""
    return [p.name for p in list(inspect.signature(find_optimizer(name)).parameters.values())[1:]]


def _required(kind: Any) -> set[str]:
    parameters = list(inspect.signature(kind).parameters.values())[1:]
    return {p.name for p in parameters if p.default is inspect.Parameter.empty}
