"""Trained weights for the user's own uncut model: the whole state under the model's names, and a strict load of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.planning.computation import plan_of
from splitfed.threats.knowledge import KnowledgeGrants

Model = TypeVar("Model", bound=nn.Module)


def state_of(grants: KnowledgeGrants, client: int | None = None) -> dict[str, Tensor]:
    """Return the state of the model that `client` would answer with now: name -> a copy on the CPU.

    None: what all clients would use; raises `InvalidInput`, with the first name that differs, where they do not agree.
    """
    clients = grants.engine.replicas
    if client is not None:
        if isinstance(client, bool) or not isinstance(client, int) or not 0 <= client < clients:
            raise InvalidInput(f"client={client!r} is not allowed; expected 0 to {clients - 1}")
        return {name: tensor.detach().cpu().clone() for name, tensor in _state(grants, client).items()}
    first = state_of(grants, 0)
    for other in range(1, clients):
        found = _state(grants, other)
        # Two that are no number are the same here: the question is which model is meant.
        differs = [n for n in {**first, **found} if n not in first or n not in found or not _same(first[n], found[n])]
        if differs:
            raise InvalidInput(
                f"clients 0 and {other} use different weights ({differs[0]!r}{_more(differs)}): "
                f"say whose, client=0 to {clients - 1}"
            )
    return first


def export(grants: KnowledgeGrants, model: Model, client: int | None = None) -> Model:
    """Load the trained state into `model`, which must have the same names and shapes, and return it; see `state_of`."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model={model!r} is not allowed; expected the torch.nn.Module that was cut")
    state, wanted = state_of(grants, client), model.state_dict()
    missing, more = [n for n in wanted if n not in state], [n for n in state if n not in wanted]
    name = type(model).__name__
    if more:
        raise InvalidInput(
            f"the run has trained {more[0]!r}{_more(more)}, which {name} has not: a layer that a method or a defense "
            "put in, or another model; run.state_dict() has all of it"
        )
    if missing:
        raise InvalidInput(f"{name} has {missing[0]!r}{_more(missing)}, which the run has not trained")
    for key, tensor in wanted.items():
        if isinstance(tensor, Tensor) and tensor.shape != state[key].shape:
            raise InvalidInput(
                f"{key!r} has shape {tuple(state[key].shape)} in the run and {tuple(tensor.shape)} in {name}"
            )
    model.load_state_dict(state, strict=True)
    return model


def _state(grants: KnowledgeGrants, client: int) -> dict[str, Tensor]:
    """Return the state of what the client answers with, without second models that serve training alone."""
    topology = grants.engine.topologies[client]
    modules = grants.engine.modules(client, borrow=grants.newest(client))
    # A module that mixes two, as that of apfl, says itself which one it answers as.
    mixing = {name: merge for name, module in modules.items() if callable(merge := getattr(module, "merged", None))}
    if merged := {name: merge() for name, merge in mixing.items()}:
        modules |= merged
        segments = (replace(s, module=merged.get(s.name, s.module)) for s in topology.segments)
        topology = replace(topology, segments=tuple(segments))
    state = plan_of(topology).model_state(topology, modules)
    if not topology.training_only:
        return state
    # A second model may pass segments of the first, under their names.
    first = [s for s in topology.segments if s.name not in topology.training_only]
    names = {s.full(name) for s in first for name in modules[s.name].state_dict()}
    return {name: tensor for name, tensor in state.items() if name in names}


def _same(one: Tensor, other: Tensor) -> bool:
    other = other.detach().cpu()
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
