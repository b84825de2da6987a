"""Reconstruction of gradients from the change of weights under SGD: step weights, and the settings that allow it."""

from __future__ import annotations

from splitfed.core.errors import InvalidInput
from splitfed.core.optimizers import Optim
from splitfed.federated.base import MethodContext


def sum_step_weights(optim: Optim, steps: int, held: float | None = None) -> tuple[float, float | None]:
    """Return the sum of the a_i: the change of a weight in `steps` SGD steps, over rate times a constant gradient.

    The second value is the multiple of that gradient that the momentum holds afterwards. `held`: the multiple it holds
    before; None if it is empty: the first gradient is then not dampened, as in torch. Without momentum the sum is
    `steps`. Weight decay counts as part of the gradient.
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
    """Raise `InvalidInput` for an optimizer whose change of weights is not a weighted sum of gradients."""
    if optim.name != "SGD" or optim.options.get("maximize"):
        name = optim.label if optim.name != "SGD" else "SGD with maximize"
        raise InvalidInput(f"{who} needs SGD; optimizer {name} is not allowed{instead}")
    if optim.clip_norm is not None:
        raise InvalidInput(
            f"{who} derives gradients from the change of weights; clip_norm={optim.clip_norm:g}, which changes their "
            f"length, is not allowed{instead}"
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
    """Raise `InvalidInput` if a method's `rate` is None and a client's optimizer has no learning rate either."""
    for optim in context.optimizers.values() if rate is None else ():
        first_rate(optim)


def first_rate(optim: Optim) -> float:
    """Return the initial learning rate of an optimizer."""
    return optim.rate
