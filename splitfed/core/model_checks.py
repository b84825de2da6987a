"""What a model must be before it is cut: a module with numbers, of which nothing is hidden from whoever runs it.

Wrappers that add nothing to what a model computes are opened: the model within is what is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel

from splitfed.core.errors import InvalidInput, describe_error, others_code
from splitfed.core.object_kinds import OWN
from splitfed.core.payload import not_dense
from splitfed.core.state_round_trip import check_round_trip

_BEFORE = "before:"
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)


def open_wrappers(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the model within `model`, and what the names of its submodules begin with there.

    Opened are the wrappers of torch for several devices, for averaged weights, and of `torch.compile`.
    """
    prefix = ""
    while True:
        if isinstance(model, _PARALLEL):
            name = "module"
        elif type(model).__module__ == "torch._dynamo.eval_frame" and isinstance(model, nn.Module):
            name = "_orig_mod"
        else:
            return model, prefix
        model, prefix = model.get_submodule(name), f"{prefix}{name}."


def without_prefix(model: nn.Module, prefix: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the `names` of cuts as `model` calls its submodules, for those that name them from outside a wrapper."""
    if not prefix:
        return tuple(names)
    inner = {name for name, _ in model.named_modules(remove_duplicate=False)}
    found = []
    for name in names:
        side, target = (_BEFORE, name.removeprefix(_BEFORE)) if name.startswith(_BEFORE) else ("", name)
        known = target.partition("#")[0] in inner
        found.append(name if known else side + target.removeprefix(prefix))
    return tuple(found)


@contextmanager
def naming_what_is_left(model: nn.Module) -> Iterator[None]:
    """Say in a refusal raised inside the block what of `model` no party runs, where there is anything of the kind."""
    try:
        yield
    except InvalidInput as error:
        if left := _left_behind(model):
            error.args = (f"{left} ({error})",)
        raise


def _left_behind(model: nn.Module) -> str:
    kind = type(model).__name__
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Generator):
                return (
                    f"{(f'{path}.{name}' if path else name)!r} of {kind} is a torch.Generator, which parties cannot "
                    "share: draw without generator=, and each party draws from a stream of its own"
                )
    return ""


def refuse_weight_hooks(module: nn.Module, owner: str) -> None:
    """Refuse a hook on a weight or buffer of `module`, which is called `owner`."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            kind = "weight" if isinstance(tensor, nn.Parameter) else "buffer"
            raise InvalidInput(
                f"{kind} {name!r} of {owner} has a hook, which copies of it at parties do not have: take "
                "the hook off (remove() of its handle); clip gradients by splitfed.Optim(..., clip_norm=), freeze a "
                "weight by requires_grad_(False), or change its gradient by a function with a backward of its own in a "
                "parametrization (torch.nn.utils.parametrize)"
            )


_DENSE = "parties send and save dense state alone"
_PACKED = {
    "sparse": f"{_DENSE}: keep it as an attribute or by register_buffer(..., persistent=False), or keep it dense",
    "compressed": "copy.deepcopy makes no copy of its segment for a party: keep it as to_sparse_coo()",
    "nested": f"{_DENSE}: keep it as a list of tensors, or padded",
}


def refuse_packed_state(module: nn.Module, owner: str, *, by_hand: bool = False) -> None:
    """Refuse a sparse tensor in the state of `module`, which is called `owner`, and a nested one wherever it keeps it.

    `by_hand`: it is a segment that is copied as it is, which torch does of no sparse tensors but COO.
    """
    for path, inner in module.named_modules():
        saved = {*inner._parameters, *inner._buffers} - inner._non_persistent_buffers_set
        plain = [(name, value) for name, value in vars(inner).items() if name not in OWN]
        for name, value in (*plain, *inner._parameters.items(), *inner._buffers.items()):
            form = not_dense(value) if isinstance(value, Tensor) else None
            if form == "sparse" and name not in saved:
                form = "compressed" if by_hand and value.layout is not torch.sparse_coo else None
            if form in _PACKED:
                what = value.layout if form == "compressed" else form
                raise InvalidInput(
                    f"{(f'{path}.{name}' if path else name)!r} of {owner} is {what}, and {_PACKED[form]}"
                )


def _cannot_train(what: str, error: BaseException) -> InvalidInput:
    return InvalidInput(
        f"{what} has a train() that fails ({describe_error(error)}), as what torch.export makes: give what it was made "
        "from"
    )


def _calls_itself(kind: type[nn.Module]) -> bool:
    """Return whether a class has a `__call__` of the user's; that of a `GraphModule` says where its forward fails."""
    found: Any = kind.__call__
    return found is not nn.Module.__call__ and getattr(found, "__module__", "") != "torch.fx.graph_module"


def check_model(model: nn.Module) -> None:
    """Refuse what is no module, or one whose weights have no numbers yet, or whose operations nobody sees."""
    if isinstance(model, type):
        raise InvalidInput(f"model is the class {model.__name__}; expected a module of it, {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model is a {type(model).__name__}; expected an nn.Module")
    kind = type(model).__name__
    if "_modules" not in vars(model) and not isinstance(model, torch.jit.ScriptModule):
        raise InvalidInput(f"{kind} was never made a module: call super().__init__() first in its __init__")
    for name, module in model.named_modules():
        what = f"submodule {name!r} of {kind}" if name else f"the model, a {kind},"
        if isinstance(module, torch.jit.ScriptModule):
            raise InvalidInput(
                f"{what} is compiled by TorchScript, which hides what it computes: give what it was compiled from "
                "(before torch.jit.script or torch.jit.trace)"
            )
        if "train" in vars(module):
            with others_code(partial(_cannot_train, what)):
                module.train(module.training)
    inner, _ = open_wrappers(model)
    tables = (inner._forward_pre_hooks, inner._forward_hooks, inner._backward_pre_hooks, inner._backward_hooks)
    around = {
        "hooks": any(tables),
        "a __call__ of its own": _calls_itself(type(inner)),
        "another function in the place of its forward": "forward" in vars(inner),
    }
    if found := [what for what, is_there in around.items() if is_there]:
        raise InvalidInput(
            f"{type(inner).__name__} itself has {found[0]}, which no party runs: do in forward what that does"
        )
    refuse_weight_hooks(inner, type(inner).__name__)
    with others_code(lambda error: InvalidInput(f"state_dict() of {kind} fails by itself: {describe_error(error)}")):
        state = model.state_dict()
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise InvalidInput(
                f"{name!r} in the state of {kind} is a {type(tensor).__name__}; parties keep and send state as tensors "
                "alone: keep it in a buffer, or out of the state"
            )
    refuse_packed_state(model, kind)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise InvalidInput(f"{name!r} of {kind} has no shape yet: run the model once on rows of its input first")
        if tensor.is_meta:
            raise InvalidInput(
                f"{name!r} of {kind} is on the meta device, without numbers: load or draw its weights first (say "
                "model.to_empty(device='cpu') and load_state_dict)"
            )
    # What the model itself has there, no party runs.
    for name, child in inner.named_children():
        check_round_trip(child, kind, f"{name}.")
