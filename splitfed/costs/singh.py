"""Floats sent in one epoch of split and of federated learning, and when split learning sends fewer.

Paper: Singh, Vepakomma, Gupta, Raskar, "Detailed comparison of communication efficiency of split learning and federated
learning", 2019, table 1 (also table 19.1 of Vepakomma and Raskar's chapter on split learning, 2022).

All results are numbers of floats: multiply by four for bytes of float32. Labels, headers and buffers are left out, and
federated learning averages once an epoch.

Paper of SGLR: Pal, Uniyal, Park, Vepakomma, Raskar, Bennis, Jeon, Choi, "Server-side local gradient averaging and
learning rate acceleration for scalable split learning", 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from splitfed.core.errors import InvalidInput, check_fields, check_number, require_count, require_number
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.costs.bytes import forward_bytes

_FLOAT = 4  # bytes of a float32, the paper's unit


@dataclass(frozen=True)
class Sizes:
    """Quantities in the formulas.

    `clients` K; `parameters` N of the whole model; `client_share` in [0, 1], the fraction of them that a client holds;
    `examples` p of all clients together; `cut_width` q, floats an example sends at the cut.
    """

    clients: int = field(metadata=require_count("clients", low=1))
    parameters: float = field(metadata=require_number("parameters", low=0, open_low=True))
    client_share: float = field(metadata=require_number("client_share", low=0, high=1))
    examples: float = field(metadata=require_number("examples", low=0, open_low=True))
    cut_width: float = field(metadata=require_number("cut_width", low=0, open_low=True))

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for a size that is not positive and a share outside [0, 1]."""
        check_fields(self)


def split_client(s: Sizes, hand_over: bool = True) -> float:
    """Return the floats of one client: activations and gradients, (2p/K) q, and aN for weights it hands over."""
    return 2 * s.examples / s.clients * s.cut_width + (s.client_share * s.parameters if hand_over else 0.0)


def split_total(s: Sizes, hand_over: bool = True) -> float:
    """Return the floats of all clients: 2pq, and aNK for weights handed over."""
    return s.clients * split_client(s, hand_over)


def federated_client(s: Sizes) -> float:
    """Return the floats of one client of federated learning: the model up and down, 2N."""
    return 2.0 * s.parameters


def federated_total(s: Sizes) -> float:
    """Return the floats of all clients of federated learning: 2NK."""
    return s.clients * federated_client(s)


def crossover(s: Sizes, hand_over: bool = True) -> float:
    """Return the number of clients times parameters, KN, above which split learning sends fewer floats.

    2pq / (2 - a) with hand-over, pq without: there the totals of both are equal. `s.clients` and `s.parameters` are not
    used.
    """
    return 2 * s.examples * s.cut_width / (2 - (s.client_share if hand_over else 0.0))


def common_gradient_total(s: Sizes, common_share: float) -> float:
    """Return the floats of all clients in an epoch of SGLR: (2 - phi) pq + q, by Pal et al., 2021.

    `common_share` phi in [0, 1]: the fraction of clients that get one common cut gradient. Activations are pq,
    gradients of the others (1 - phi) pq, and the common one, broadcast, is counted once: q. At phi = 0 the formula
    still counts the broadcast, which no client receives; used as printed. No weights are sent.
    """
    check_number("common_share", common_share, low=0, high=1)
    return (2 - common_share) * s.examples * s.cut_width + s.cut_width


@dataclass(frozen=True)
class Crossover:
    """Bytes of an epoch for all clients, at each of `values` of the number of clients.

    `threshold`: the number of clients above which split learning sends fewer bytes; a real number.
    """

    values: tuple[float, ...]
    split: tuple[float, ...]
    federated: tuple[float, ...]
    threshold: float


def over_clients(sizes: Sizes, clients: Sequence[int], hand_over: bool = True) -> Crossover:
    """Return both costs in bytes of float32 over numbers of `clients`, with a fixed total of examples."""
    if not clients:
        raise InvalidInput(f"clients={clients!r} is not allowed; expected at least one value")
    each = [replace(sizes, clients=number) for number in clients]
    return Crossover(
        tuple(float(number) for number in clients),
        tuple(split_total(s, hand_over) * _FLOAT for s in each),
        tuple(federated_total(s) * _FLOAT for s in each),
        crossover(sizes, hand_over) / sizes.parameters,
    )


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


def _weights(topology: Topology, role: str) -> int:
    found = {id(p): p for s in topology.segments_of(role) for p in s.module.parameters()}
    return sum(p.numel() for p in found.values())
