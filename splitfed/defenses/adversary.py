"""The adversary in a defense's training: a decoder from releases to raw inputs, kept at the sender.

It is a training aid that does not change a release, so it is neither averaged nor sent, only saved. A single released
image is decoded to a single image by convolutions; all else by a multilayer perceptron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from splitfed.core.defense import concatenate_values
from splitfed.core.defense_context import Context, DefenseSite
from splitfed.core.errors import InvalidInput
from splitfed.core.random import derive, stream
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts

Shape = tuple[int, ...]


def check_raw(name: str, topology: Topology, edges: Sequence[str], facts: TopologyFacts) -> None:
    """Raise `InvalidInput` for edges whose sender has no raw input of real numbers to train a decoder on."""
    owners = set(topology.inputs.values())
    for edge in edges:
        role = topology.role_of(topology.edge(edge).source)
        if role not in owners:
            raise InvalidInput(f"{name} cannot guard edge {edge!r}: role {role!r} has no raw input to reconstruct")
        for value, owner in topology.inputs.items():
            if owner == role and not facts.dtypes[value].is_floating_point:
                raise InvalidInput(
                    f"{name} trains a decoder of real numbers, and input {value!r} of {role!r} has whole ones, such as "
                    "token ids: use distance_correlation"
                )


class Adversary:
    """A decoder of `width`, trained by Adam at rate `lr` on its mean squared error, for one edge.

    Several released values are concatenated by `concatenate_values`.
    """

    def __init__(self, place: DefenseSite, width: int, lr: float) -> None:
        source, target = (
            shapes[0] if len(shapes) == 1 else (sum(map(prod, shapes)),)
            for shapes in (list(place.shapes.values()), list(place.inputs.values()))
        )
        with stream(derive(place.seed, "adversary")):
            self.net = _decoder(source, target, width).to(place.device)
        self._optimizer = torch.optim.Adam(self.net.parameters(), lr=lr)

    def decode(self, z: Tensor) -> Tensor:
        """Return the reconstruction of the raw inputs from `z`; its gradient flows to `z`, not to the decoder."""
        fixed = {name: p.detach() for name, p in self.net.named_parameters()}
        found: Tensor = functional_call(self.net, fixed, (z,))
        return found

    def error(self, z: Tensor, context: Context) -> Tensor:
        """Return the mean squared error of `decode`, a scalar in squared units of the data."""
        return functional.mse_loss(self.decode(z), concatenate_inputs(context.inputs))

    def accumulate_gradient(self, z: Tensor, context: Context) -> None:
        """Accumulate the gradient of the decoder's error on `z` for the next `step`; in training only."""
        if context.stamp.phase != "train":
            return
        with torch.enable_grad():
            loss = functional.mse_loss(self.net(z.detach()), concatenate_inputs(context.inputs))
        parameters = list(self.net.parameters())
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = g if p.grad is None else p.grad + g

    def step(self) -> None:
        """Take a step with the accumulated gradient, if there is one."""
        if any(p.grad is not None for p in self.net.parameters()):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of weights and optimizer state."""
        weights = {name: t.clone() for name, t in self.net.state_dict().items()}
        return {"net": weights, "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore weights and optimizer from `state`."""
        self.net.load_state_dict(state["net"])
        self._optimizer.load_state_dict(state["optimizer"])


def concatenate_inputs(inputs: Mapping[str, Tensor]) -> Tensor:
    """Return all raw inputs of a party as one tensor: (batch, ...)."""
    return concatenate_values(list(inputs.values()))


def _decoder(source: Shape, target: Shape, width: int) -> nn.Sequential:
    if len(source) == len(target) == 3:
        return nn.Sequential(
            nn.Conv2d(source[0], width, 3, padding=1), nn.ReLU(), nn.Upsample(target[1:]),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, target[0], 3, padding=1),
        )  # fmt: skip
    hidden = 16 * width
    return nn.Sequential(
        nn.Flatten() if source else nn.Unflatten(0, (-1, 1)),
        nn.Linear(prod(source), hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
        nn.Linear(hidden, prod(target)), nn.Unflatten(1, target),
    )  # fmt: skip
