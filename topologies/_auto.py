"""Cuts that nobody named: `cut="auto"` and `cuts="auto"` take the cheapest place by a fixed rule.

Of the possible places (`splitfed.core.cut_places`) those count that leave every party a weight, and the client at most
half of the multiply-adds of a row. The cut with the fewest bytes a row, there and back, is taken; of equals the one
that leaves the client the fewest multiply-adds, then the earliest. With several cuts the bytes of each by itself are
added up. The model's own submodules are looked at first, those inside them only where nothing was found; where no place
at all leaves the client half of the work or less, the one that leaves it the least is taken. The rule knows costs
alone: what a party can tell from what crosses, it does not ask.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from torch import nn

from splitfed.core.cut_places import CutPlace, cut_places, deepest
from splitfed.core.cutting import Example
from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Topology

AUTO = "auto"
CLIENT_SHARE = 0.5
"""The most of a row's multiply-adds, forward, that the client is left with."""
_TRIED = 32
"""How many choices are tried at a depth, the cheapest first: with several cuts one may be refused beside another."""


def asks_auto(model: nn.Module, given: object) -> bool:
    """Return whether `given`, the cuts of a builder, leaves them to the rule; a submodule of that name goes before."""
    return given == AUTO and isinstance(given, str) and AUTO not in dict(model.named_modules())


def with_auto_cuts(
    model: nn.Module,
    example: Example | None,
    count: int,
    build: Callable[[tuple[str, ...]], Topology],
    *,
    client_ends: bool = False,
    places: Sequence[CutPlace] | None = None,
) -> Topology:
    """Return what `build` makes of the `count` cuts of `model` that the rule takes; `cut_choice` says why.

    `client_ends`: the client holds the last piece too. `places`: those of the model, where they are known already.
    Raises `InvalidInput` without an example, and where no place is good enough.
    """
    given = f"cut{'s' * (count > 1)}={AUTO!r}"
    if example is None:
        raise InvalidInput(f"{given} tries the places of the model on rows of its input; give them as example")
    found, refused = tuple(places or ()), ""
    for depth in range(1, deepest(model) + 1):
        found = cut_places(model, example, depth) if places is None else tuple(p for p in places if p.depth <= depth)
        # Whether no place is light enough is known when all have been seen.
        for limited in (True, False)[: 1 + (depth == deepest(model))]:
            for chosen in islice(rank_cuts(found, count, client_ends, limited=limited), _TRIED):
                names = tuple(place.name for place in chosen)
                try:
                    topology = build(names)
                except InvalidInput as error:
                    refused = refused or f"; after {', '.join(map(repr, names))}: {error}"
                    continue
                return replace(topology, cut_choice=_explain(chosen, found, depth, client_ends))
    wanted = "no place" if count == 1 else f"no {count} places"
    raise InvalidInput(
        f"{given} finds {wanted} in {type(model).__name__} with a weight at every party; name the cuts yourself "
        f"(`splitfed cuts` lists the places){refused}"
    )


def rank_cuts(
    places: Sequence[CutPlace], count: int, client_ends: bool, *, limited: bool = True
) -> Iterator[tuple[CutPlace, ...]]:
    """Yield all choices of `count` of `places`, in the order they run, that the rule allows, the best one first.

    `limited`: by the client's share of the work; else the client's work is what counts first, and then the bytes.
    """
    usable = [place for place in places if place.possible]
    least = min((place.bytes for place in usable), default=0)
    limit = CLIENT_SHARE * max((sum(place.multiply_adds) for place in usable), default=0) if limited else math.inf
    # Bounds on bytes and on the client's work that no longer choice undercuts, so that the first one popped is best.
    pending: list[tuple[tuple[int, int], tuple[int, ...]]] = [
        ((count * least, 0) if limited else (0, count * least), ())
    ]
    while pending:
        bound, taken = heapq.heappop(pending)
        nbytes, work = bound if limited else bound[::-1]
        if len(taken) == count:
            yield tuple(usable[i] for i in taken)
            continue
        last = len(taken) + 1 == count
        before = usable[taken[-1]].parameters[0] if taken else 0
        for i in range(taken[-1] + 1 if taken else 0, len(usable)):
            place = usable[i]
            total = (work if taken else place.multiply_adds[0]) + place.multiply_adds[1] * (last and client_ends)
            every_party = place.parameters[0] > before and (place.parameters[1] > 0 or not last)
            if every_party and total <= limit:
                cost = nbytes - least + place.bytes
                heapq.heappush(pending, ((cost, total) if limited else (total, cost), (*taken, i)))


def _explain(chosen: Sequence[CutPlace], places: Sequence[CutPlace], depth: int, client_ends: bool) -> str:
    """Return what was chosen and why, in a line."""
    names = " and ".join(repr(place.name) for place in chosen)
    possible, nbytes = sum(place.possible for place in places), sum(place.bytes for place in chosen)
    work = chosen[0].multiply_adds[0] + chosen[-1].multiply_adds[1] * client_ends
    total = sum(chosen[0].multiply_adds)
    share = work / max(1, total)
    among = f"{possible} possible place{'s' * (possible != 1)} to depth {depth}, with a weight at every party"
    if work <= CLIENT_SHARE * total:
        why = f"the fewest bytes a row of {among} and at most {CLIENT_SHARE:.0%} of the multiply-adds at the client"
    else:
        why = f"the fewest multiply-adds at the client of {among}, as none leaves it at most {CLIENT_SHARE:.0%}"
    return f"auto cut after {names}: {why} ({nbytes:,} bytes both ways, {share:.1%} of the multiply-adds)"
