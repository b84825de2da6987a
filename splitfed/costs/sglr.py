"""Floats sent in one epoch when the server sends one common cut gradient to a fraction of the clients.

Paper: Pal, Uniyal, Park, Vepakomma, Raskar, Bennis, Jeon, Choi, "Server-side local gradient averaging and learning rate
acceleration for scalable split learning", 2021.
"""

from __future__ import annotations

from splitfed.core.errors import check_number
from splitfed.costs.singh import Sizes


def communication_total(s: Sizes, common_share: float) -> float:
    """Return the floats of all clients in an epoch: (2 - phi) pq + q.

    `common_share` phi in [0, 1]: the fraction of clients that get the common gradient. Activations are pq, gradients of
    the others (1 - phi) pq, and the common one, broadcast, is counted once: q. At phi = 0 the formula still counts the
    broadcast, which no client receives; used as printed. No weights are sent.
    """
    check_number("common_share", common_share, low=0, high=1)
    return (2 - common_share) * s.examples * s.cut_width + s.cut_width
