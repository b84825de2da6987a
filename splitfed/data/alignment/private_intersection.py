"""Private set intersection: the leader learns which of its keys each other party holds, and no other key.

Paper: Meadows, "A More Efficient Cryptographic Matchmaking Protocol for Use in the Absence of a Continuously Available
Third Party", IEEE Symposium on Security and Privacy, 1986: keys raised to two secret powers, here on an elliptic curve,
by the library openmined.psi.

What it reveals to parties that follow the protocol: to the leader the number of keys of every other party and its
intersection with each of them (also of keys that a third party lacks); to every other party the number of the leader's
keys and the keys that all parties hold, which it needs to bring its rows into order. A malicious leader can add guesses
to its keys and test them, one for each key that it sends. The setup transmits every key of a party in full (`RAW`): the
smaller Bloom filter and Golomb set have false positives, which would join two different people.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from splitfed.core.errors import InvalidInput
from splitfed.data.alignment.keys import AlignmentMessage, Intersection, Key, key_text, pack_keys


def private_intersection(keys: Mapping[str, Sequence[Key]], leader: str) -> Intersection:
    """Return the keys common to `leader` and all other parties, intersected one party at a time; rows sorted by key.

    Needs the extra `psi`; raises `InvalidInput` without it. Bytes are those that the library serialises.
    """
    library = _library()
    own = [key_text(key) for key in keys[leader]]
    shared = set(range(len(own)))
    crossings: list[AlignmentMessage] = []
    others = [party for party in keys if party != leader]
    for party in others:
        shared_positions, sizes = _intersect(library, own, [key_text(key) for key in keys[party]])
        shared &= shared_positions
        crossings += [
            AlignmentMessage(leader, party, "request", sizes[0]),
            AlignmentMessage(party, leader, "setup", sizes[1]),
            AlignmentMessage(party, leader, "response", sizes[2]),
        ]
    common_keys = sorted(keys[leader][i] for i in shared)
    crossings += [AlignmentMessage(leader, party, "common keys", len(pack_keys(common_keys))) for party in others]
    places = {party: {key: i for i, key in enumerate(mine)} for party, mine in keys.items()}
    return Intersection(
        {party: [place[key] for key in common_keys] for party, place in places.items()}, tuple(crossings)
    )


def _intersect(library: Any, client: list[str], server: list[str]) -> tuple[set[int], tuple[int, int, int]]:
    """Return the positions in `client` of keys that `server` holds too; bytes of request, setup and response."""
    asking, answering = library.client.CreateWithNewKey(True), library.server.CreateWithNewKey(True)
    request = asking.CreateRequest(client)
    # The rate of false positives applies to the two compressed forms only; RAW has none.
    setup = answering.CreateSetupMessage(1e-9, len(client), server, library.DataStructure.RAW)
    response = answering.ProcessRequest(request)
    sizes = (request.ByteSize(), setup.ByteSize(), response.ByteSize())
    return set(asking.GetIntersection(setup, response)), sizes


def _library() -> Any:
    try:
        import private_set_intersection.python as library
    except ImportError:
        raise InvalidInput("private_intersection needs the package openmined.psi: install splitfed[psi]") from None
    return library
