"""Parameter groups: weights by patterns of their names, with arguments of the optimizer that are their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from splitfed.core.errors import InvalidInput, check_fields as check_metadata, require_count, unknown


@dataclass(frozen=True)
class ParameterGroup:
    """Weights that an optimizer treats apart, such as biases without weight decay.

    `match`: one shell pattern or several, such as "*.bias" or "fc2.*", of names as in the state dict of the whole
    model; `*` stands for any characters, dots among them. `options`: arguments of the optimizer in place of those that
    all other weights have. `max_dims`: the most dimensions that a weight of the group has, 1 for biases and the weights
    of norms alone; None: any. Raises `InvalidInput` for no pattern, for no option, and for what is neither.
    """

    match: str | Sequence[str] = "*"
    options: Mapping[str, Any] = field(default_factory=dict)
    max_dims: int | None = field(default=None, metadata=require_count("max_dims"))

    def __post_init__(self) -> None:
        """Refuse patterns that are no text, and a group that changes nothing."""
        check_metadata(self)
        patterns = (self.match,) if isinstance(self.match, str) else self.match
        if not isinstance(patterns, Sequence) or not patterns or not all(isinstance(p, str) and p for p in patterns):
            raise InvalidInput(f"match={self.match!r} is not allowed; expected a pattern such as '*.bias', or several")
        if not isinstance(self.options, Mapping) or not self.options:
            raise InvalidInput(
                f"a parameter group with options={self.options!r} is not allowed; expected arguments of the optimizer "
                "of their own, such as {'weight_decay': 0.0}"
            )
        object.__setattr__(self, "match", tuple(patterns))

    def holds(self, name: str, weight: nn.Parameter) -> bool:
        """Return whether the weight called `name` belongs to the group."""
        fits = self.max_dims is None or weight.dim() <= self.max_dims
        return fits and any(fnmatchcase(name, pattern) for pattern in self.match)


def divide_weights(named: Iterable[tuple[str, nn.Parameter]], groups: Sequence[ParameterGroup]) -> list[dict[str, Any]]:
    """Return the weights as torch takes parameter groups: first those of no group, then each of `groups` in order.

    A weight belongs to the first group that it fits. Groups without a weight stay, empty, so that the n-th is the same
    one at every party: schedulers may be given a number a group.
    """
    found: list[dict[str, Any]] = [{"params": []}, *({"params": [], **group.options} for group in groups)]
    for name, weight in named:
        place = next((i for i, group in enumerate(groups, 1) if group.holds(name, weight)), 0)
        found[place]["params"].append(weight)
    return found


def check_groups(
    weights_of_role: Mapping[str, Sequence[tuple[str, nn.Parameter]]],
    groups_of_role: Mapping[str, Sequence[ParameterGroup]],
) -> None:
    """Refuse a pattern that fits no weight of any role whose optimizer has the group.

    `weights_of_role`: role -> its weights with their names in the whole model.
    """
    holders: list[tuple[ParameterGroup, list[str]]] = []
    for role, groups in groups_of_role.items():
        for group in groups:
            known = next((roles for one, roles in holders if one == group), None)
            if known is None:
                holders.append((group, [role]))
            else:
                known.append(role)
    for group, roles in holders:
        named = [one for role in roles for one in weights_of_role[role]]
        for pattern in group.match:
            if not any(fnmatchcase(name, pattern) for name, _ in named):
                raise unknown("name of weights in a parameter group", pattern, dict.fromkeys(name for name, _ in named))
        if not any(group.holds(name, weight) for name, weight in named):
            raise InvalidInput(
                f"a parameter group of {', '.join(group.match)} with max_dims={group.max_dims} holds no weight"
            )
