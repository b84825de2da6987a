"""Comparison of the bytes of split and federated learning, over numbers of clients or over model sizes.

Paper: Singh, Vepakomma, Gupta, Raskar, "Detailed comparison of communication efficiency of split learning and federated
learning", 2019.

By their formulas, for one epoch: activations and gradients of the cut and one hand-over a client, against the model
sent down and up for every client. The threshold is the number of clients or of parameters at which both are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from splitfed.core.errors import InvalidInput, check_count
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.costs.bytes import forward_bytes
from splitfed.costs.singh import Sizes, crossover, federated_total, split_total

_FLOAT = 4  # bytes of a float32, the paper's unit


@dataclass(frozen=True)
class Crossover:
    """Bytes of an epoch for all clients, at each of `values` of the varied quantity (`over`: clients or parameters).

    `threshold`: the value above which split learning sends fewer bytes; a real number.
    """

    over: str
    values: tuple[float, ...]
    split: tuple[float, ...]
    federated: tuple[float, ...]
    threshold: float


def over_clients(sizes: Sizes, clients: Sequence[int], hand_over: bool = True, itemsize: int = 4) -> Crossover:
    """Return both costs over numbers of `clients`, with a fixed total of examples; `itemsize`: bytes of a float."""
    return _sweep("clients", clients, sizes, hand_over, itemsize, crossover(sizes, hand_over) / sizes.parameters)


def over_parameters(sizes: Sizes, parameters: Sequence[float], hand_over: bool = True, itemsize: int = 4) -> Crossover:
    """Return both costs over model sizes, with a fixed cut width and client share; `itemsize`: bytes of a float."""
    return _sweep("parameters", parameters, sizes, hand_over, itemsize, crossover(sizes, hand_over) / sizes.clients)


def sizes_of(topology: Topology, facts: TopologyFacts, clients: int, examples: float) -> Sizes:
    """Return the sizes of `topology`, with its data owners' weights as the client's; buffers are left out.

    The width of the cut is all forward traffic of a row, in floats of 4 bytes. Raises `InvalidInput` for cuts without a
    gradient (`topology.forward_only`), to which the formulas do not apply.
    """
    if edges := ", ".join(sorted(topology.forward_only)):
        raise InvalidInput(f"no gradient is sent back on {edges} of topology {topology.name!r}; the formulas need one")
    at = {role: _weights(topology, role) for role in topology.roles}
    if not (total := sum(at.values())):
        raise InvalidInput(f"topology {topology.name!r} has no weights to compare with its activations")
    share = sum(at[role] for role in topology.data_roles) / total
    return Sizes(clients, total, share, examples, forward_bytes(topology, facts, 1) / _FLOAT)


def _sweep(
    over: str, values: Sequence[Any], sizes: Sizes, hand_over: bool, itemsize: int, threshold: float
) -> Crossover:
    check_count("itemsize", itemsize, low=1)
    if not values:
        raise InvalidInput(f"{over}={values!r} is not allowed; expected at least one value")
    each = [replace(sizes, **{over: value}) for value in values]
    return Crossover(
        over,
        tuple(float(v) for v in values),
        tuple(split_total(s, hand_over) * itemsize for s in each),
        tuple(federated_total(s) * itemsize for s in each),
        threshold,
    )


def _weights(topology: Topology, role: str) -> int:
    found = {id(p): p for s in topology.segments_of(role) for p in s.module.parameters()}
    return sum(p.numel() for p in found.values())
