"""Networks of a training attack, by name, each with its optimizer, and the states of imitated defenses."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from splitfed.attacks.local_models import DefenseStates


@contextmanager
def evaluation_mode(*nets: nn.Module) -> Iterator[None]:
    """Put `nets` into evaluation mode inside the block, and back into the mode that each was in."""
    modes = [net.training for net in nets]
    try:
        for net in nets:
            net.eval()
        yield
    finally:
        for net, mode in zip(nets, modes, strict=True):
            net.train(mode)


class AttackNetworks(dict[str, nn.Module]):
    """Networks by name, on `device`; `optimizers` has those of the networks that were added.

    `defenses`: states of imitated defenses, by the name of the network that imitates their party.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.defenses: dict[str, DefenseStates] = {}

    def add(self, name: str, net: nn.Module, lr: float, momentum: float = 0.9) -> None:
        """Add `net` as `name`, trained by Adam at rate `lr`; `momentum` is its first decay rate."""
        self[name] = net.to(self.device)
        self.optimizers[name] = torch.optim.Adam(net.parameters(), lr=lr, betas=(momentum, 0.999))

    def descend(self, losses: Mapping[str, Tensor]) -> None:
        """Take one step of every named network down its own loss, after computing all gradients."""
        # A layout that is not the attacker's own may have weights that nothing flows through.
        gradients = {
            name: torch.autograd.grad(loss, list(self[name].parameters()), retain_graph=True, allow_unused=True)
            for name, loss in losses.items()
        }
        for name, found in gradients.items():
            for weight, gradient in zip(self[name].parameters(), found, strict=True):
                weight.grad = gradient
            self.optimizers[name].step()
            self.optimizers[name].zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the weights, the optimizers' states and the learned states of defenses."""
        return {
            "nets": {n: {k: t.detach().clone() for k, t in net.state_dict().items()} for n, net in self.items()},
            "optimizers": {name: copy.deepcopy(found.state_dict()) for name, found in self.optimizers.items()},
            "defenses": {name: found.state_dict() for name, found in self.defenses.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the networks from `state`."""
        for name, net in self.items():
            net.load_state_dict(state["nets"][name])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        for name, held in self.defenses.items():
            held.load_state_dict(state["defenses"][name])
