"""Floats sent in one epoch of split and of federated learning, and when split learning sends fewer.

Paper: Singh, Vepakomma, Gupta, Raskar, "Detailed comparison of communication efficiency of split learning and federated
learning", 2019, table 1 (also table 19.1 of Vepakomma and Raskar's chapter on split learning, 2022).

All results are numbers of floats: multiply by four for bytes of float32. Labels, headers and buffers are left out, and
federated learning averages once an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from splitfed.core.errors import check_fields, require_count, require_number


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
