"""The weights that clients start training from: one state for all of them, or a draw of its own for each.

What the aggregation server or the schedule sends to a client before it first trains is the same under either: a
broadcast replaces whatever was there.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.random import derive, stream
from splitfed.core.topology import Topology

GIVEN = "given"
"""Topologies that were given one a client keep their weights, whatever those are."""


def resolve_starts(starts: str | None, topologies: Sequence[Topology], local: Sequence[str]) -> str:
    """Return "shared", "own" or "given": from which weights the clients of `topologies`, one each, really start.

    `local`: the client segments that nothing replaces before a client trains (`local_segments`); where there are none,
    everybody starts from what is broadcast, and that is "shared".
    """
    kinds = {id(topology) for topology in topologies}
    if not local or len(topologies) == 1:
        return "shared"
    if starts is None or starts == GIVEN:
        return "shared" if len(kinds) == 1 else GIVEN
    return starts


def local_segments(
    topology: Topology, kept: Collection[str], broadcast: Collection[str], moved: bool
) -> tuple[str, ...]:
    """Return the segments that clients hold and whose first weights nothing replaces before they train.

    `kept`: those that never leave their client; `moved`: whether the schedule averages or hands on all others;
    `broadcast`: those that the federated method sends to all clients before the first round.
    """
    own = [s.name for s in topology.segments if s.role in topology.data_roles and s.name not in broadcast]
    return tuple(name for name in own if name in kept or not moved)


def first_weights(
    starts: str, topologies: Sequence[Topology], local: Sequence[Sequence[str]], seed: int
) -> list[dict[str, Tensor]]:
    """Return each client's initial weights of its segments in `local`, `segment/name` -> tensor; {}: they stay.

    "own": of a topology that several clients have, each draws its weights anew from `seed` and its number, as torch
    draws layers of their kind; frozen ones stay. "shared": everybody takes those of the first client. Raises
    `InvalidInput` for a layer that cannot be drawn anew, and for clients that cannot share one state.
    """
    if starts == "own":
        holders = [sum(other is topology for other in topologies) for topology in topologies]
        return [
            _draw_weights(topology, names, derive(seed, "starts", replica)) if holders[replica] > 1 else {}
            for replica, (topology, names) in enumerate(zip(topologies, local, strict=True))
        ]
    if starts == GIVEN or len({id(topology) for topology in topologies}) == 1:
        return [{} for _ in topologies]
    first = _contents(topologies[0], local[0])
    for replica, (topology, names) in enumerate(zip(topologies, local, strict=True)):
        if {n: t.shape for n, t in _contents(topology, names).items()} != {n: t.shape for n, t in first.items()}:
            raise InvalidInput(
                f"starts='shared' gives every client the weights of the first; those of client {replica} are of "
                "another make: leave starts out, or take 'own'"
            )
    return [dict(first) for _ in topologies]


def redraw_weights(
    who: str,
    modules: Mapping[str, nn.Module],
    seed: int,
    instead: str = "give the second model as a module",
    frozen: bool = True,
) -> dict[str, nn.Module]:
    """Return copies of `modules` with weights drawn anew from `seed`, as torch draws them for layers of this kind.

    `frozen`: whether layers all of whose weights are frozen are drawn anew as well. Refuses a module with weights that
    knows no way to draw them (`reset_parameters`); `instead`: what to do then.
    """
    copies = copy.deepcopy(dict(modules))
    with stream(seed):
        for name, module in copies.items():
            for inner in module.modules():
                weights = list(inner.parameters(recurse=False))
                if not frozen and weights and not any(w.requires_grad for w in weights):
                    continue
                reset = getattr(inner, "reset_parameters", None)
                if callable(reset):
                    reset()
                elif weights:
                    raise InvalidInput(
                        f"{who} cannot draw the weights of {type(inner).__name__} in segment {name!r} anew (it has no "
                        f"reset_parameters): {instead}"
                    )
    return copies


def _draw_weights(topology: Topology, names: Sequence[str], seed: int) -> dict[str, Tensor]:
    """Return weights and buffers of these segments drawn anew; frozen weights as they are."""
    modules = {name: topology.segment(name).module for name in names}
    fresh = redraw_weights("starts='own'", modules, seed, "give one topology a client", frozen=False)
    fixed = {f"{s}/{n}" for s, module in modules.items() for n, w in module.named_parameters() if not w.requires_grad}
    state = {f"{s}/{n}": tensor for s, module in fresh.items() for n, tensor in module.state_dict().items()}
    return {name: tensor for name, tensor in state.items() if name not in fixed}


def _contents(topology: Topology, names: Sequence[str]) -> dict[str, Tensor]:
    return {f"{s}/{n}": t for s in names for n, t in topology.segment(s).module.state_dict().items()}
