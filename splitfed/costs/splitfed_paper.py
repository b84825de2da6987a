"""Floats sent and time of one epoch of federated, split and SplitFed learning, by the formulas of SplitFed's authors.

Paper: Thapa, Chamikara, Camtepe, Sun, "SplitFed: When federated learning meets split learning", AAAI 2022, table of
communication and training time.

They count the client's weights twice, to a server and back, where Singh et al. count a hand-over once
(`singh.split_client`). The links of all clients run in parallel at `rate` floats a second each. That averaging takes
half as long in version 2, where only the clients' segments are averaged, is quoted from memory of their table.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from splitfed.core.errors import check_fields, check_names, require_number
from splitfed.costs.singh import Sizes, federated_client

METHODS = ("federated", "split", "splitfed_v1", "splitfed_v2")


@dataclass(frozen=True)
class Times:
    """`train` T, seconds of computing an epoch; `rate` R, floats a second; `average` seconds of federated averaging."""

    train: float = field(metadata=require_number("train", low=0))
    rate: float = field(metadata=require_number("rate", low=0, open_low=True))
    average: float = field(default=0.0, metadata=require_number("average", low=0))

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for negative times and a rate that is not positive."""
        check_fields(self)


def communication_client(method: str, s: Sizes) -> float:
    """Return the floats of one client: 2N for federated learning, (2p/K) q + 2aN for the three others."""
    check_names("method", METHODS, method)
    if method == "federated":
        return federated_client(s)
    return 2 * s.examples / s.clients * s.cut_width + 2 * s.client_share * s.parameters


def communication_total(method: str, s: Sizes) -> float:
    """Return the floats of all clients: K times those of one."""
    return s.clients * communication_client(method, s)


def epoch_time(method: str, s: Sizes, t: Times) -> float:
    """Return the seconds of one epoch.

    Federated: T + 2N/R + T_avg. Split: T + 2pq/R + 2aNK/R, one client after another. SplitFed: T + 2pq/(KR) + 2aN/R and
    T_avg for version 1, half of it for version 2. T is given, the same for all: it excludes waiting for turns.
    """
    sent = communication_total(method, s) if method == "split" else communication_client(method, s)
    average = {"split": 0.0, "splitfed_v2": t.average / 2}.get(method, t.average)
    return t.train + sent / t.rate + average
