"""Optimizers of `torch.optim` or of one's own, with parameter groups, gradient clipping and a scheduler.

All is checked before anything runs; the optimizer itself is made when training begins.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from splitfed.core.errors import InvalidInput, check_fields, check_kind, require_name, require_number, short
from splitfed.core.optimizer_arguments import (
    Factory,
    check_optimizer,
    check_scheduler,
    construct,
    find_optimizer,
    find_scheduler,
    label_of,
)
from splitfed.core.parameter_groups import ParameterGroup, divide_weights

SCHEDULER_EVERY = ("round", "step")


class _OptionsOfSgd(dict[str, Any]):
    """Options that nobody has given: those of "SGD" alone, any other optimizer has its own defaults."""


@dataclass(frozen=True, repr=False)
class Optim:
    """An optimizer to be built by each party for itself.

    `name` is a class of `torch.optim`, or one's own: a subclass of `torch.optim.Optimizer`, or a function that makes
    one of the parameters and `options` (lr, momentum, weight_decay, ...; default: of SGD rate 0.05 and momentum 0.9,
    of any other its own). What it remembers from step to step has to
    stand in its `state`, as torch's does, to be kept in checkpoints. `groups`: weights with options of their own, by
    their names; each party divides the weights that it holds. `scheduler`: a class of `torch.optim.lr_scheduler` with
    `scheduler_options`, stepped `scheduler_every` "round" (for all parties alike), or "step": each after its own
    optimizer's, of which parties may take different numbers. `clip_norm`, > 0: largest 2-norm of the gradient of all
    weights of the party in a step, as `torch.nn.utils.clip_grad_norm_` scales it, behind what a federated method adds
    to it. Each party clips by its own gradient: it is told no other's norm, so that the whole model's gradient may be
    longer, and is bent towards the parties that clipped less. Without noise there is no privacy in it. Raises
    `InvalidInput` for names and options that are unknown, and for values that torch does not allow.
    """

    name: str | Factory = "SGD"
    options: Mapping[str, Any] = field(default_factory=lambda: _OptionsOfSgd(lr=0.05, momentum=0.9))
    scheduler: str | None = None
    scheduler_options: Mapping[str, Any] = field(default_factory=dict)
    scheduler_every: str = field(default="round", metadata=require_name("scheduler_every", SCHEDULER_EVERY))
    clip_norm: float | None = field(default=None, metadata=require_number("clip_norm", low=0.0, open_low=True))
    groups: Sequence[ParameterGroup] = ()

    def __post_init__(self) -> None:
        """Refuse names and arguments that torch does not know; nothing is built yet."""
        check_fields(self)
        if not (isinstance(self.name, str) or callable(self.name)):
            raise InvalidInput(f"optimizer {short(self.name)} is not allowed; expected a class of torch.optim")
        if isinstance(self.options, _OptionsOfSgd):
            object.__setattr__(self, "options", dict(self.options) if self.name == "SGD" else {})
        if self.scheduler_every != "round" and self.scheduler is None:
            raise InvalidInput(f"scheduler_every={self.scheduler_every!r} is not allowed without a scheduler; name one")
        for name in ("options", "scheduler_options"):
            check_kind(name, getattr(self, name), Mapping, "a table of arguments by name")
        groups = tuple(self.groups) if isinstance(self.groups, (list, tuple)) else (self.groups,)
        for wrong in (one for one in groups if not isinstance(one, ParameterGroup)):
            raise InvalidInput(f"groups={short(wrong)} is not allowed; expected ParameterGroup(match, options)")
        object.__setattr__(self, "groups", groups)
        defaults = check_optimizer(self.name, self.options, [group.options for group in groups])
        if self.scheduler is not None:
            check_scheduler(self.scheduler, self.scheduler_options, defaults, 1 + len(groups))

    def __repr__(self) -> str:
        """The call that makes it, which folders keep, without schedule, clipping and groups that were not given."""
        later = ("scheduler_every", "clip_norm", "groups")
        given = [(one.name, getattr(self, one.name), one.default) for one in fields(self)]
        shown = [
            f"{name}={(self.label if name == 'name' else value)!r}"
            for name, value, default in given
            if name not in later or value != default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def label(self) -> str:
        """The name in `torch.optim`; of one's own the import path of its class or function."""
        return label_of(self.name)

    @property
    def rate(self) -> float:
        """The learning rate that it begins with; raises `InvalidInput` for one's own without a parameter lr."""
        if "lr" in self.options:
            return float(self.options["lr"])
        parameter = inspect.signature(find_optimizer(self.name)).parameters.get("lr")
        if parameter is None or not isinstance(parameter.default, (int, float)):
            raise InvalidInput(f"optimizer {self.label} has no learning rate lr, which is needed here; give one")
        return float(parameter.default)

    def scaled(self, factor: float) -> Optim:
        """Return this optimizer at `factor` times its learning rate."""
        if factor == 1.0:
            return self
        groups = tuple(
            replace(group, options={**group.options, "lr": group.options["lr"] * factor})
            if "lr" in group.options
            else group
            for group in self.groups
        )
        return replace(self, options={**self.options, "lr": self.rate * factor}, groups=groups)

    def build(
        self, parameters: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]]
    ) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
        """Build the optimizer over `parameters`, and the scheduler where there is one.

        Groups ask for weights with their names in the whole model; one without a name has the name "".
        """
        named = [one if isinstance(one, tuple) else ("", one) for one in parameters]
        weights, own = [weight for _, weight in named], not isinstance(self.name, str)
        first: list[Any] = divide_weights(named, self.groups) if self.groups else weights
        what = f"optimizer {self.label}"
        optimizer: torch.optim.Optimizer = construct(what, find_optimizer(self.name), first, self.options, own)
        if own and not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidInput(f"{what} returned a {type(optimizer).__name__}; expected a torch.optim.Optimizer")
        if all(weight.device.type == "cpu" for weight in weights):
            # What torch chooses there, but it would look at every weight at every step to find that out.
            for group in optimizer.param_groups:
                if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                    group["foreach"] = False
        if self.clip_norm is not None:
            optimizer.register_step_pre_hook(partial(_clip, self.clip_norm))
        if self.scheduler is None:
            return optimizer, None
        kind = find_scheduler(self.scheduler)
        scheduler: LRScheduler = construct(f"scheduler {self.scheduler}", kind, optimizer, self.scheduler_options)
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


def last_step(optim: Optim) -> int | None:
    """Return how many steps the scheduler of `optim` has; None where it has no last one."""
    if optim.scheduler != "OneCycleLR":
        return None
    options = optim.scheduler_options
    if options.get("total_steps") is not None:
        return int(options["total_steps"])
    return int(options["epochs"]) * int(options["steps_per_epoch"])
