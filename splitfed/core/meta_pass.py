"""A pass through a user's `forward` in which what others compute has shapes alone: what a party runs, and its plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from splitfed.core.model_snapshot import generator_states, set_generators
from splitfed.core.nested_tensors import replace_tensors, tensors_of
from splitfed.core.payload import not_dense
from splitfed.core.replay_passes import ABOUT, Pass, Stop
from splitfed.core.shape_rules import result_by_rule

_LIKE_NAMES = "zeros_like ones_like full_like new_zeros new_ones new_full new_tensor new_empty empty_like"
LIKE = frozenset(_LIKE_NAMES.split())
"""Functions that ask a tensor for its shape and type alone."""
_MOVES = frozenset(("to", "cpu", "cuda", "type_as", "pin_memory"))


class MetaPass(Pass):
    """A pass in which what others compute has shapes alone, on the meta device, and constants are real.

    `device`: where tensors without numbers say that they are. `stop`: the number of the operation before which it ends;
    `draws`: the numbers of those that draw random numbers, which nobody else draws -> the packages that they draw from.
    """

    def __init__(self, device: torch.device, stop: int, draws: Mapping[int, frozenset[str]]) -> None:
        super().__init__()
        self.device, self.stop, self.draws = device, stop, draws
        self.overwritten: Collection[int] = frozenset()
        """Operations on memory that is not what constants made it: what they are given and return has shapes alone."""

    def operation(self, name: str, func: Any, args: Any, kwargs: Mapping[str, Any], module: nn.Module | None) -> Any:
        """Run it on shapes."""
        if self.number >= self.stop:
            raise Stop
        overwritten = self.number in self.overwritten
        if overwritten:
            args, kwargs = _on_meta((args, dict(kwargs)))
        self.number += 1
        packages = self.draws.get(self.number - 1)
        # Those of NumPy and Python take longer to read than most operations.
        states = None if packages is None or packages == {"torch"} else generator_states()
        generator = None if packages is None else torch.default_generator.get_state()
        whole = module is not None
        returned = self.whole(func, args, kwargs) if whole else self.on_shapes(name, func, args, kwargs)
        if overwritten:
            returned = _on_meta(returned)
        if generator is None:
            return returned
        torch.default_generator.set_state(generator)
        if states is not None:
            set_generators(states)
        # What it hands through is not drawn.
        given = {id(tensor) for tensor in tensors_of((args, dict(kwargs)))}
        if not whole and name.endswith("_") and not name.endswith("__"):
            # It draws into its first argument (bernoulli_, normal_).
            given.discard(id(args[0]))
        drawn = {i: t.to("meta") for i, t in enumerate(tensors_of(returned)) if id(t) not in given}
        return replace_tensors(returned, drawn)

    def within(self, name: str, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run a call within an operation on shapes."""
        return self.read(func, args, kwargs) if name in ABOUT else self.on_shapes(name, func, args, kwargs)

    def read(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Say of a tensor without numbers that it is where the party computes."""
        found = func(*args, **kwargs)
        return self.device if isinstance(found, torch.device) and found.type == "meta" else found

    def on_shapes(self, name: str, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return what a function makes of tensors of which some have no numbers."""
        given = tensors_of((args, kwargs))
        if not any(tensor.is_meta for tensor in given):
            return func(*args, **kwargs)
        found = result_by_rule(func, args, kwargs, given)
        if found is not NotImplemented:
            return found
        if name in LIKE and kwargs.get("device") is None and given[0].is_meta:
            # Of such a tensor the shape alone is asked.
            return func(*args, **{**kwargs, "device": self.device})
        if name in LIKE:
            return func(*args, **kwargs)
        if name in ("to", "type_as") and not given[0].is_meta:
            # Of the other tensor the type alone is asked.
            like = torch.empty(0, dtype=given[1].dtype, device=self.device)
            return func(*replace_tensors(args, {1: like}), **kwargs)
        moves = name in _MOVES and isinstance(args[0], Tensor) and args[0].is_meta
        if moves and name in ("cpu", "cuda", "pin_memory"):
            return args[0]
        if not moves and all(tensor.is_meta for tensor in given):
            return func(*args, **kwargs)

        def changed(value: Any) -> Any:
            if isinstance(value, Tensor) and not value.is_meta and (value.dim() or moves):
                return _without_numbers(value)
            if moves and (isinstance(value, torch.device) or (isinstance(value, str) and name == "to")):
                return torch.device("meta")
            return value

        plain_args, plain_kwargs = _pytree.tree_map(changed, (args, dict(kwargs)))
        return func(*plain_args, **plain_kwargs)


def _on_meta(value: Any) -> Any:
    """Return `value` with all tensors in it without numbers."""
    real = {place: _without_numbers(one) for place, one in enumerate(tensors_of(value)) if not one.is_meta}
    return replace_tensors(value, real, copies=True) if real else value


def _without_numbers(tensor: Tensor) -> Tensor:
    """Return `tensor` on the meta device; a sparse one, with which nothing is computed there, as a dense one."""
    if not_dense(tensor) == "sparse":
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return tensor.to("meta")
