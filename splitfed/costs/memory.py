"""Estimated memory of training at each role, from one real forward pass of each segment.

Counted are weights and buffers, a gradient of every weight that is trained, the optimizer's own copies, and what one
batch keeps for the backward pass: inputs, outputs and tensors saved by autograd, each storage once. Left out are
temporary memory of kernels, gradients of activations, the data set, and Python itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitfed.core.errors import check_count, check_names, check_number
from splitfed.core.optimizers import Optim
from splitfed.core.plain_values import dense_parts
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.costs.measure import rehearsal


class RoleMemory(NamedTuple):
    """Bytes of one party while it trains on one batch of one replica."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Total bytes."""
        return sum(self)


def role_memory(
    topology: Topology, facts: TopologyFacts, batch_size: int, optim_copies: float | Mapping[str, float]
) -> dict[str, RoleMemory]:
    """Return role -> memory of one party, in bytes.

    `batch_size`: rows; `optim_copies`: copies of each trained weight that the optimizer keeps (see `optim_copies`), for
    all roles or by role. A party that serves several replicas in one joint step keeps the activations of all, and a
    copied role one set of weights for each replica: the caller multiplies.
    """
    check_count("batch_size", batch_size, low=1)
    copies = optim_copies if isinstance(optim_copies, Mapping) else dict.fromkeys(topology.roles, optim_copies)
    for role in topology.roles:
        check_names("role in optim_copies: nothing is said of", copies, role)
        check_number(f"optim_copies of role {role!r}", copies[role], low=0)
    return {role: _of_role(topology, facts, role, batch_size, copies[role]) for role in topology.roles}


COPIES: Mapping[str, Callable[[Mapping[str, Any]], int]] = {
    "SGD": lambda options: int(bool(options.get("momentum"))),
    "Adam": lambda options: 2 + bool(options.get("amsgrad")),
    "AdamW": lambda options: 2 + bool(options.get("amsgrad")),
    "Adagrad": lambda options: 1,
    "RMSprop": lambda options: 1 + bool(options.get("momentum")) + bool(options.get("centered")),
}
"""Optimizer of torch -> how many numbers it keeps for each weight, by its options; the usual ones."""


def optim_copies(optim: Optim) -> int:
    """Return how many numbers `optim` keeps for each weight: 0 for plain SGD, 1 with momentum, 2 for Adam.

    For one that is not in `COPIES` it is measured by a step. An optimizer that keeps less for matrices than for vectors
    (Adafactor) is counted as for vectors, which overestimates it.
    """
    if isinstance(optim.name, str) and optim.name in COPIES:
        # Creating an optimizer imports torch's compiler, which takes longer than the rest of a plan.
        return COPIES[optim.name](optim.options)
    weight = nn.Parameter(torch.ones(16))
    optimizer, _ = Optim(optim.name, optim.options).build([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return sum(isinstance(t, Tensor) and t.shape == weight.shape for t in optimizer.state.get(weight, {}).values())


def _of_role(topology: Topology, facts: TopologyFacts, role: str, batch_size: int, copies: float) -> RoleMemory:
    segments = topology.segments_of(role)
    state = {id(t): t for s in segments for t in (*s.module.parameters(), *s.module.buffers())}
    gradients = sum(t.nbytes for t in state.values() if t.requires_grad)
    # A line through two points: kept memory is linear in the rows, plus a constant (means and variances of batch norm).
    two, four = (sum(_activation_bytes(topology, s.name, facts, rows) for s in segments) for rows in (2, 4))
    activations = two + (four - two) * (batch_size - 2) // 2
    return RoleMemory(sum(t.nbytes for t in state.values()), gradients, round(gradients * copies), activations)


def _activation_bytes(topology: Topology, name: str, facts: TopologyFacts, rows: int) -> int:
    """Return the bytes that a forward pass of `rows` rows through a segment keeps, without weights and buffers."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with rehearsal(topology, topology.segment(name), facts, rows) as run:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            outputs = run.forward()
        own = set(_storages((*run.module.parameters(), *run.module.buffers())))
        storages = _storages((*run.inputs, *saved, *outputs))
    return sum(storage.nbytes() for place, storage in storages.items() if place not in own)


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the storages of the numbers of `tensors`, by their address."""
    return {part.untyped_storage().data_ptr(): part.untyped_storage() for t in tensors for part in dense_parts(t)}
