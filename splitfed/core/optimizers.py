"""Optimizers by name: any of `torch.optim`, with gradient clipping and a scheduler, checked before anything runs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from splitfed.core.errors import (
    InvalidInput,
    check_fields,
    check_names,
    first_line,
    require_name,
    require_number,
)

SCHEDULER_EVERY = ("round", "step")


@dataclass(frozen=True, repr=False)
class Optim:
    """An optimizer to be built by each party for itself.

    `name` is a class of `torch.optim`, `options` its arguments (lr, momentum, weight_decay, ...); `scheduler` a
    class of `torch.optim.lr_scheduler` with `scheduler_options`, stepped `scheduler_every` "round" (for all parties
    alike), or "step": each after its own optimizer's, of which parties may take different numbers. `clip_norm`, > 0:
    largest 2-norm of the gradient of all weights of the party in a step, as `torch.nn.utils.clip_grad_norm_` scales it,
    behind what a federated method adds to it. Each party clips by its own gradient: it is told no other's norm, so that
    the whole model's gradient may be longer, and is bent towards the parties that clipped less. Without noise there is
    no privacy in it.
    """

    name: str = "SGD"
    options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.05, "momentum": 0.9})
    scheduler: str | None = None
    scheduler_options: Mapping[str, Any] = field(default_factory=dict)
    scheduler_every: str = field(default="round", metadata=require_name("scheduler_every", SCHEDULER_EVERY))
    clip_norm: float | None = field(default=None, metadata=require_number("clip_norm", low=0.0, open_low=True))

    def __post_init__(self) -> None:
        """Refuse names and arguments that torch does not know, by building one on a dummy weight."""
        check_fields(self)
        if self.scheduler_every != "round" and self.scheduler is None:
            raise InvalidInput(f"scheduler_every={self.scheduler_every!r} is not allowed without a scheduler; name one")
        self.build([nn.Parameter(torch.zeros(1))])

    def __repr__(self) -> str:
        """The call that makes it, which folders keep: what the first release did not have is left out at a default."""
        later = ("scheduler_every", "clip_norm")
        given = [(one.name, getattr(self, one.name), one.default) for one in fields(self)]
        shown = [f"{name}={value!r}" for name, value, default in given if name not in later or value != default]
        return f"{type(self).__name__}({', '.join(shown)})"

    def scaled(self, factor: float) -> Optim:
        """Return this optimizer at `factor` times its learning rate."""
        if factor == 1.0:
            return self
        rate = self.options.get("lr", default_rate(self.name))
        return replace(self, options={**self.options, "lr": rate * factor})

    def build(self, parameters: Iterable[nn.Parameter]) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
        """Build the optimizer over `parameters`, and the scheduler where there is one."""
        optimizers = _classes(torch.optim, torch.optim.Optimizer)
        check_names("optimizer", optimizers, self.name)
        weights, kind = list(parameters), optimizers[self.name]
        optimizer = _construct(f"optimizer {self.name}", kind, (weights,), self.options)
        if all(weight.device.type == "cpu" for weight in weights):
            # What torch chooses there, but it would look at every weight at every step to find that out.
            for group in optimizer.param_groups:
                if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                    group["foreach"] = False
        if self.clip_norm is not None:
            optimizer.register_step_pre_hook(partial(_clip, self.clip_norm))
        if self.scheduler is None:
            return optimizer, None
        schedulers = _classes(torch.optim.lr_scheduler, LRScheduler)
        check_names("learning-rate scheduler", schedulers, self.scheduler)
        name = f"scheduler {self.scheduler}"
        scheduler: LRScheduler = _construct(name, schedulers[self.scheduler], (optimizer,), self.scheduler_options)
        if self.scheduler_every == "step":
            optimizer.register_step_post_hook(partial(advance, scheduler))
        return optimizer, scheduler


def _clip(norm: float, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Scale the gradients that `optimizer` is about to step on to a 2-norm of at most `norm` in all."""
    nn.utils.clip_grad_norm_([weight for group in optimizer.param_groups for weight in group["params"]], norm)


def advance(scheduler: LRScheduler, *_: Any) -> None:
    """Step `scheduler`; raises `InvalidInput` behind the last step of one that has a last, such as OneCycleLR."""
    try:
        scheduler.step()
    except ValueError as error:
        raise InvalidInput(f"scheduler {type(scheduler).__name__} has too few steps for the run: {error}") from error


def default_rate(name: str) -> float:
    """The learning rate that torch gives an optimizer whose options name none."""
    return float(inspect.signature(_classes(torch.optim, torch.optim.Optimizer)[name]).parameters["lr"].default)


# They need a closure, or a metric, at every step.
_UNFIT = ("LBFGS", "LRScheduler", "ReduceLROnPlateau")


def _classes(module: Any, base: type) -> dict[str, type]:
    found = {n: c for n, c in vars(module).items() if inspect.isclass(c) and issubclass(c, base) and c is not base}
    return {n: c for n, c in found.items() if not n.startswith("_") and n not in _UNFIT}


def _construct(what: str, kind: type, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    allowed = list(inspect.signature(kind).parameters)[len(args) :]
    for option in options:
        check_names(f"option of {what}", allowed, option)
        if isinstance(options[option], float) and not math.isfinite(options[option]):
            raise InvalidInput(f"{option}={options[option]} of {what} is not allowed; expected a finite number")
    try:
        return kind(*args, **options)
    except (ValueError, TypeError, RuntimeError) as error:
        options_text = ", ".join(f"{k}={v!r}" for k, v in options.items())
        raise InvalidInput(f"{what}({options_text}) is refused by torch: {first_line(error)}") from error
