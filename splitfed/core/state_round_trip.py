"""Whether a module comes back from its own state dict: tried once, where somebody's code has a say in that.

Parties hand over, average and resume segments by `state_dict` and `load_state_dict`. Hooks of these, and methods that a
class has in their place, may rename what is stored; they may not give back other numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput, describe_failure, others_code
from splitfed.core.module_copies import copy_computed, deep_copy
from splitfed.core.plain_values import same_tensors
from splitfed.core.random import generator

_HOOKS = {
    "_state_dict_pre_hooks": "state_dict pre-hook",
    "_state_dict_hooks": "state_dict hook",
    "_load_state_dict_pre_hooks": "load_state_dict pre-hook",
    "_load_state_dict_post_hooks": "load_state_dict post-hook",
}
_METHODS = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict")


def check_round_trip(module: nn.Module, owner: str, prefix: str = "") -> None:
    """Refuse a `module` that gives or takes other numbers by its state dict than it holds.

    Tried on a copy with other numbers than its own, which a hook may happen to leave as they are. It is a part of
    `owner`, where all names begin with `prefix`.
    """
    acting = {path: kind for path, inner in module.named_modules() if (kind := _acting(inner)) is not None}
    if not acting:
        return

    def refusal(path: str, what: str) -> InvalidInput:
        name = f"{prefix}{path}".rstrip(".")
        place = f"submodule {name!r} of {owner}" if name else owner
        return InvalidInput(
            f"{place} has a {acting[path]}, with which {what}: parties hand over and resume by state dicts; take it "
            "off, and change numbers in forward or by a parametrization (torch.nn.utils.parametrize)"
        )

    with others_code(
        lambda error: refusal(next(iter(acting)), f"its own state dict fails ({describe_failure(error)})")
    ):
        one, other = (deep_copy(module, (module,), copy_computed(module)) for _ in range(2))
        random = generator(0, "state dict")
        with torch.no_grad():
            for _, tensor in stored_tensors(one):
                if tensor.is_floating_point():
                    tensor.copy_(3 * torch.randn(tensor.shape, generator=random))
        held = {name: tensor.detach().clone() for name, tensor in stored_tensors(one)}
        other.load_state_dict(one.state_dict())
    # Loading, and saving, may change either.
    for end in (one, other):
        found = dict(stored_tensors(end))
        for name, tensor in held.items():
            if name not in found or not same_tensors(tensor, found[name]):
                within = [p for p in acting if not p or name.startswith(f"{p}.")] or list(acting)
                raise refusal(within[-1], f"{prefix + name!r} comes back from its own state dict as another tensor")


def _acting(module: nn.Module) -> str | None:
    """Return what of other people's code acts on the state dict of `module` itself, None where nothing does."""
    for table, kind in _HOOKS.items():
        if vars(module).get(table):
            return kind
    for name in _METHODS:
        if name in vars(module):
            return f"{name} of its own"
        maker = next(kind for kind in type(module).__mro__ if name in vars(kind))
        if maker.__module__.partition(".")[0] not in ("torch", "splitfed"):
            return f"{name} of its own"
    return None


def stored_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of all that belongs into the state dict, as the module itself holds it."""
    for path, inner in module.named_modules():
        lasting = {n: b for n, b in inner._buffers.items() if n not in inner._non_persistent_buffers_set}
        for name, tensor in (inner._parameters | lasting).items():
            if tensor is not None and not tensor.is_meta:
                yield (f"{path}.{name}" if path else name), tensor
