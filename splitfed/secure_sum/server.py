"""The server of a secure sum, which adds up masked uploads and removes the remaining masks by means of shares."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from splitfed.core.errors import InvalidInput
from splitfed.secure_sum.base import Residues
from splitfed.secure_sum.keys import as_bytes, as_number, mask, pad, xor_bytes
from splitfed.secure_sum.shamir import reconstruct

Rows = Mapping[int, Mapping[int, bytes]]


def unmask_sum(masked: Mapping[int, Residues], revealed: Rows, rows: Rows, threshold: int) -> Residues:
    """Return the unmasked sum of the uploads in `masked`, modulo 2^64.

    `revealed`: member -> its revealed share of every member; `rows`: the public row of every member. Raises
    `InvalidInput` if fewer than `threshold` members reveal shares.
    """
    if len(revealed) < threshold:
        raise InvalidInput(
            f"{len(revealed)} clients remain in a secure sum that needs {threshold}: the sum cannot be recovered"
        )
    count = len(next(iter(masked.values())))
    total = np.zeros(count, dtype=np.uint64)
    for upload in masked.values():
        total += upload
    for member in rows:
        shares = {holder: as_number(found[member]) for holder, found in revealed.items()}
        secret = as_bytes(reconstruct(shares, threshold))
        if member in masked:
            total -= mask(secret, count)
            continue
        for survivor in masked:
            common = mask(xor_bytes(rows[member][survivor], pad(secret, survivor)), count)
            # What the survivor did with it is undone.
            total = total - common if survivor < member else total + common
    return total
