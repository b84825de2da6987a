"""How far steps of SGD carry: what a method must know that reads gradients out of the change of weights."""

from __future__ import annotations

from splitfed.core.errors import InvalidInput
from splitfed.core.optimizers import Optim
from splitfed.federated.base import MethodContext


def sum_step_weights(optim: Optim, steps: int, held: float | None = None) -> tuple[float, float | None]:
    """Return the sum of the a_i, how often a constant gradient, times the rate, is taken in `steps` steps of SGD.

    And what the momentum holds of that gradient after them. `held`: what it holds before, None where it is empty: the
    first gradient then enters whole, as torch has it, and dampening begins with the second. Without momentum the sum is
    `steps`. Weight decay is taken for a part of the gradient.
    """
    momentum, dampening = (float(optim.options.get(name, 0.0)) for name in ("momentum", "dampening"))
    if not momentum:
        return float(steps), None
    nesterov = bool(optim.options.get("nesterov", False))
    total = 0.0
    for _ in range(steps):
        held = 1.0 if held is None else momentum * held + 1.0 - dampening
        total += 1.0 + momentum * held if nesterov else held
    return total, held


def check_sgd(who: str, optim: Optim, instead: str = "") -> None:
    """Refuse an optimizer whose steps are no sums of gradients."""
    if optim.name != "SGD" or optim.options.get("maximize"):
        name = optim.label if optim.name != "SGD" else "SGD with maximize"
        raise InvalidInput(f"{who} follows the steps of SGD; optimizer {name} is not allowed{instead}")
    if optim.clip_norm is not None:
        raise InvalidInput(
            f"{who} reads gradients off the change of weights; clip_norm={optim.clip_norm:g}, which shortens them, is "
            f"not allowed{instead}"
        )
    if optim.groups:
        raise InvalidInput(
            f"{who} takes one step of SGD for all weights; parameter groups with their own {_listed(optim)} are not "
            f"allowed{instead}"
        )
    if optim.scheduler_every == "step":
        raise InvalidInput(
            f"{who} takes one learning rate for all steps of a round; scheduler_every='step' is not allowed{instead}"
        )


def _listed(optim: Optim) -> str:
    return ", ".join(dict.fromkeys(option for group in optim.groups for option in group.options))


def check_rates(context: MethodContext, rate: float | None) -> None:
    """Refuse, where a method's `rate` is None, clients whose optimizer has no learning rate that it could take."""
    for optim in context.optimizers.values() if rate is None else ():
        first_rate(optim)


def first_rate(optim: Optim) -> float:
    """Return the learning rate at which an optimizer begins."""
    return optim.rate
