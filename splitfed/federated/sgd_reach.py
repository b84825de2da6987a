"""How far steps of SGD carry: what a method must know that reads gradients out of the change of weights."""

from __future__ import annotations

from splitfed.core.errors import InvalidInput
from splitfed.core.optimizers import Optim, default_rate


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
        name = optim.name if optim.name != "SGD" else "SGD with maximize"
        raise InvalidInput(f"{who} follows the steps of SGD; optimizer {name} is not allowed{instead}")
    if optim.clip_norm is not None:
        raise InvalidInput(
            f"{who} reads gradients off the change of weights; clip_norm={optim.clip_norm:g}, which shortens them, is "
            f"not allowed{instead}"
        )
    if optim.scheduler_every == "step":
        raise InvalidInput(
            f"{who} takes one learning rate for all steps of a round; scheduler_every='step' is not allowed{instead}"
        )


def first_rate(optim: Optim) -> float:
    """Return the learning rate at which an optimizer begins."""
    return float(optim.options.get("lr", default_rate(optim.name)))
