"""Latency, communication and computing of one global round, for federated, split, SplitFed and local-loss training.

Paper: Han, Bhatti, Lee, Moon, "Accelerating federated learning with split learning on locally generated losses", ICML
workshop on federated learning 2021, table 1 and its optimal cut.

One operation a parameter and example, forward and backward together; K clients that send at once share the rate R. The
times of the stages are added, without overlap of one client's sending with another's computing: the simulated clock,
which allows overlap, is never slower for SplitFed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from splitfed.core.errors import InvalidInput, check_fields, require_count, require_number


@dataclass(frozen=True)
class HanSetting:
    """Quantities in the formulas.

    `parameters` |w|; `client_share` a in [0, 1], the fraction of them at the client; `cut_width` q, floats an example
    sends; `examples` |D| of each client; `clients` K; `client_power` P_C and `server_power` P_S, operations a second;
    `rate` R, floats a second; `forward_share` beta in [0, 1], the forward's part of the computing.
    """

    parameters: float = field(metadata=require_number("parameters", low=0, open_low=True))
    client_share: float = field(metadata=require_number("client_share", low=0, high=1))
    cut_width: float = field(metadata=require_number("cut_width", low=0, open_low=True))
    examples: float = field(metadata=require_number("examples", low=0, open_low=True))
    clients: int = field(metadata=require_count("clients", low=1))
    client_power: float = field(default=1.0, metadata=require_number("client_power", low=0, open_low=True))
    server_power: float = field(default=100.0, metadata=require_number("server_power", low=0, open_low=True))
    rate: float = field(default=1.0, metadata=require_number("rate", low=0, open_low=True))
    forward_share: float = field(default=0.2, metadata=require_number("forward_share", low=0, high=1))

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for quantities that are not positive, and for fractions outside [0, 1]."""
        check_fields(self)


def client_compute(s: HanSetting, whole: bool = False) -> float:
    """Return the operations of one client: a |D| |w|, or |D| |w| if it trains the `whole` model."""
    return (1.0 if whole else s.client_share) * s.examples * s.parameters


def federated_communication(s: HanSetting) -> float:
    """Return the floats of all clients of federated learning: 2 |w| K."""
    return 2 * s.parameters * s.clients


def splitfed_communication(s: HanSetting) -> float:
    """Return the floats of all clients of SplitFed: (2q|D| + 2a|w|) K."""
    return (2 * s.cut_width * s.examples + 2 * s.client_share * s.parameters) * s.clients


def local_loss_communication(s: HanSetting) -> float:
    """Return the floats of all clients with local losses: (q|D| + 2a|w|) K, as no gradient is sent back."""
    return (s.cut_width * s.examples + 2 * s.client_share * s.parameters) * s.clients


def federated_latency(s: HanSetting) -> float:
    """Return the seconds of a round of federated learning: 2|w|K/R + |D||w|/P_C."""
    return federated_communication(s) / s.rate + client_compute(s, whole=True) / s.client_power


def splitfed_latency(s: HanSetting) -> float:
    """Return the seconds of a round of SplitFed: (2q|D| + 2a|w|)K/R + a|D||w|/P_C + (1-a)|D||w|K/P_S."""
    return splitfed_communication(s) / s.rate + client_compute(s) / s.client_power + _server_time(s)


def local_loss_latency(s: HanSetting) -> float:
    """Return the seconds of a round with local losses; the client's backward and upload overlap with the server.

    (q|D| + a|w|)K/R + a beta |D||w|/P_C + max{a|w|K/R + a(1-beta)|D||w|/P_C, (1-a)|D||w|K/P_S}.
    """
    before = (s.cut_width * s.examples + s.client_share * s.parameters) * s.clients / s.rate
    forward = s.forward_share * client_compute(s) / s.client_power
    upload = s.client_share * s.parameters * s.clients / s.rate
    back = (1 - s.forward_share) * client_compute(s) / s.client_power
    return before + forward + max(upload + back, _server_time(s))


def split_latency(s: HanSetting) -> float:
    """Return the seconds of one turn of all clients in vanilla split learning, with hand-over.

    K (2q|D|/R + a|D||w|/P_C + (1-a)|D||w|/P_S + a|w|/R): one client at a time uses the link and the server. Not in the
    paper's table; combined from its terms.
    """
    alone = replace(s, clients=1)
    sent = (2 * s.cut_width * s.examples + s.client_share * s.parameters) / s.rate
    return s.clients * (sent + client_compute(s) / s.client_power + _server_time(alone))


def inner_cut_pays(s: HanSetting) -> bool:
    """Return whether some client share a > 0 has a lower local-loss latency than a = 0.

    This holds for P_S <= 1 / (1/(R|D|) + beta/(P_C K)): the latency then decreases in a up to the optimal cut.
    `s.client_share`, the a of the setting itself, is not used.
    """
    per_row = 1 / (s.rate * s.examples)
    return s.server_power <= 1 / (per_row + s.forward_share / (s.client_power * s.clients))


def optimal_client_share(s: HanSetting) -> float:
    """Return the a that minimises the local-loss latency: 1 / (P_S (1/(R|D|) + (1-beta)/(P_C K)) + 1).

    At this a both sides of the maximum in `local_loss_latency` are equal, which follows from the table; the cut is
    assumed to have the same width everywhere. Raises `InvalidInput` if `inner_cut_pays` does not hold: the latency then
    increases in a, and the smallest client is the fastest. `s.client_share` is not used.
    """
    if not inner_cut_pays(s):
        raise InvalidInput(
            f"server_power={s.server_power!r} is too large for an optimal cut inside the model; the latency rises "
            "with client_share, so choose the smallest"
        )
    back = 1 / (s.rate * s.examples) + (1 - s.forward_share) / (s.client_power * s.clients)
    return 1 / (s.server_power * back + 1)


def _server_time(s: HanSetting) -> float:
    return (1 - s.client_share) * s.examples * s.parameters * s.clients / s.server_power
