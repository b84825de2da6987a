"""Copies of a model in which what other parties hold has shapes alone, on the meta device."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from torch import nn

from splitfed.core.errors import InvalidInput, describe_failure, others_code
from splitfed.core.module_copies import copy_computed, deep_copy, open_compiled
from splitfed.core.replay_passes import AllMembers


def meta_copy(model: nn.Module, own: Collection[str], real: Collection[str]) -> nn.Module:
    """Return a copy of `model` that shares the weights and buffers `own`; of all others but `real` it has shapes alone.

    Those others are no parameters and buffers of the copy: they stand on the meta device, as plain attributes. Names
    of one tensor go together. Raises `InvalidInput` for a model that cannot be copied.
    """
    memo = copy_computed(model, numbers=False)
    for name, weight in model.named_parameters(remove_duplicate=False):
        if name in own:
            memo[id(weight)] = weight
        elif name not in real:
            memo[id(weight)] = nn.Parameter(weight.detach().to("meta"), weight.requires_grad)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in own:
            memo[id(buffer)] = buffer
        elif name not in real:
            memo[id(buffer)] = buffer.detach().to("meta")
    with others_code(partial(not_copied, model)):
        made: nn.Module = deep_copy(model, (model,), memo)
    open_compiled(made)
    for module in made.modules():
        vars(module)["_named_members"] = AllMembers(module)
    for path, module in made.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for key, tensor in list(table.items()):
                full = f"{path}.{key}" if path else key
                if tensor is not None and full not in own:
                    if full in real:
                        module._non_persistent_buffers_set.add(key)
                    else:
                        del table[key]
                        vars(module)[key] = tensor
        if not any(t is not None for table in (module._parameters, module._buffers) for t in table.values()):
            # Batch normalisation would look for its count in every state that is loaded.
            vars(module)["_load_from_state_dict"] = _load_nothing
    return made


def not_copied(model: nn.Module, error: BaseException) -> InvalidInput:
    """Return what is told of a model of which no copy can be made."""
    return InvalidInput(f"{type(model).__name__} cannot be copied for its parties: {describe_failure(error)}")


def _load_nothing(*given: Any) -> None:
    """Load nothing: the module is another party's."""
