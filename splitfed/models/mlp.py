"""MLP: fully connected layers with ReLUs, for tables and small images.

Paper: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
2017, section 3, whose "2NN" (two hidden layers of 200) is the default.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from splitfed.core.errors import InvalidInput, check_count
from splitfed.core.random import initialization


class Mlp(nn.Sequential):
    """Multilayer perceptron; `cuts` depends on the number of hidden layers, so each instance has its own."""

    cuts: tuple[str, ...] = ()


def mlp(
    shape: tuple[int, ...],
    outputs: int,
    hidden: Sequence[int] = (200, 200),
    identity_head: bool = False,
    *,
    seed: int | None = 0,
) -> Mlp:
    """Return flatten, then fc1, relu1, fc2, ... for rows of any `shape`; `hidden`: the widths of the hidden layers.

    `identity_head`: adds an identity, `head`, after the last linear layer, so that a model can be cut there too: in
    `u_shaped` the server may then hold that layer, and the client adds softmax and loss to the logits.

    Weights depend on `seed` only, without a change of torch's global generator; None draws them from that generator.
    """
    check_count("outputs", outputs, low=1)
    if not shape or min(shape) < 1:
        raise InvalidInput(f"mlp cannot take rows of shape {tuple(shape)}; expected at least one value a row")
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    width = math.prod(shape)
    with initialization(seed):
        for i, units in enumerate(hidden, start=1):
            check_count("hidden", units, low=1)
            layers[f"fc{i}"] = nn.Linear(width, units)
            layers[f"relu{i}"] = nn.ReLU()
            width = units
        layers[f"fc{len(hidden) + 1}"] = nn.Linear(width, outputs)
        if identity_head:
            layers["head"] = nn.Identity()
        model = Mlp(layers)
        model.cuts = tuple(name for name in layers if name != "flatten")[:-1]
        return model
