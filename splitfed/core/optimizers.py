"""Optimizers by name: any of `torch.optim`, with a learning-rate scheduler, checked before anything runs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from splitfed.core.errors import InvalidInput, check_names, first_line


@dataclass(frozen=True)
class Optim:
    """An optimizer to be built by each party for itself.

    `name` is a class of `torch.optim`, `options` its arguments (lr, momentum, weight_decay, ...); `scheduler` a
    class of `torch.optim.lr_scheduler`, stepped once a round, with `scheduler_options`.
    """

    name: str = "SGD"
    options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.05, "momentum": 0.9})
    scheduler: str | None = None
    scheduler_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse names and arguments that torch does not know, by building one on a dummy weight."""
        self.build([nn.Parameter(torch.zeros(1))])

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
        if self.scheduler is None:
            return optimizer, None
        schedulers = _classes(torch.optim.lr_scheduler, LRScheduler)
        check_names("learning-rate scheduler", schedulers, self.scheduler)
        name = f"scheduler {self.scheduler}"
        return optimizer, _construct(name, schedulers[self.scheduler], (optimizer,), self.scheduler_options)


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
