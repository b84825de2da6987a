"""Automatic cuts: `cut="auto"` and `cuts="auto"` choose the places by a fixed rule.

Candidates are the places (`splitfed.core.cut_places`) that leave every party a weight, and the client at most half of
the multiply-adds of a row. The rule takes the cut with the fewest bytes a row, forward and back; ties go to the one
with the most multiply-adds at the client, then to the latest, as a deeper release reveals less of the input. For
several cuts the bytes of each alone are added up, and ties go to the latest first cut and the earliest others.
Submodules to depth 2 are searched, and deeper ones if a container there is never called itself (a list of blocks), if
more than half of the work lies within one of them, or if no place was found. If no place leaves the client half of the
work or less, the one with the least work at the client is taken. The rule does not measure how much a party can infer
from what it receives.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise

from torch import nn

from splitfed.core.cut_places import CutPlace, cut_places, deepest
from splitfed.core.cutting import Example
from splitfed.core.errors import InvalidInput
from splitfed.core.model_checks import check_model, open_wrappers
from splitfed.core.topology import Topology

AUTO = "auto"
CLIENT_SHARE = 0.5
"""Largest share of a row's forward multiply-adds at the client."""
_DEPTH = 2  # to which submodules are looked at in any case
_TRIED = 32
"""Number of choices tried at a depth, the cheapest first: one of several cuts may be incompatible with another."""


def asks_auto(model: nn.Module, given: object) -> bool:
    """Return whether `given`, the cuts of a builder, is "auto"; a submodule of that name takes precedence."""
    asked = isinstance(given, str) and given == AUTO
    return asked and not (isinstance(model, nn.Module) and AUTO in dict(open_wrappers(model)[0].named_modules()))


def with_auto_cuts(
    model: nn.Module,
    example: Example | None,
    count: int,
    build: Callable[[tuple[str, ...]], Topology],
    *,
    output: str | None = None,
    sent_inputs: Sequence[str] | None = None,
    client_ends: bool = False,
    places_at: Callable[[int], Sequence[CutPlace]] | None = None,
) -> Topology:
    """Return the result of `build` for the `count` cuts of `model` that the rule selects; `cut_choice` explains them.

    `output` and `sent_inputs` as for `splitfed.cut`. `client_ends`: the client holds the last piece too. `places_at`:
    depth -> the places to that depth, if known already. Raises `InvalidInput` without an example, and if there is no
    place.
    """
    given = f"cut{'s' * (count > 1)}={AUTO!r}"
    if example is None:
        raise InvalidInput(f"{given} tries the places of the model on rows of its input; pass such rows as example")
    check_model(model)
    model, _ = open_wrappers(model)
    refused, last = "", deepest(model)
    for depth in range(min(_DEPTH, last), last + 1):
        if places_at is None:
            found: Sequence[CutPlace] = cut_places(model, example, depth, None, output, sent_inputs or ())
        else:
            found = places_at(depth)
        if depth < last and (
            any(_is_list(model, place) for place in found if place.depth == depth) or _is_coarse(found)
        ):
            continue
        # Only at the last depth is it known that no place is within the limit.
        for limited in (True, False)[: 1 + (depth == last)]:
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

    `limited`: by the client's share of the work; otherwise the least work of the client comes first.
    """
    usable = [place for place in places if place.possible]
    least = min((place.bytes for place in usable), default=0)
    total = max((sum(place.multiply_adds) for place in usable), default=0)
    limit = math.floor(CLIENT_SHARE * total) if limited else total

    def key(taken: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        """Return a lower bound for all choices that begin with `taken`; for a complete choice its own value."""
        nbytes = sum(usable[i].bytes for i in taken) + least * (count - len(taken))
        work = _client_work([usable[i] for i in taken], client_ends and len(taken) == count)
        known = len(taken) == count or (bool(taken) and not client_ends)
        order = tuple(-i if place == 0 else i for place, i in enumerate(taken))
        return (nbytes, -work if known else -limit, order) if limited else (work, nbytes, order)

    # Best-first search: the first complete choice that is popped is the best one.
    pending: list[tuple[tuple[int, int, tuple[int, ...]], tuple[int, ...]]] = [(key(()), ())]
    while pending:
        _, taken = heapq.heappop(pending)
        if len(taken) == count:
            yield tuple(usable[i] for i in taken)
            continue
        whole = len(taken) + 1 == count
        weights = usable[taken[-1]].parameters[0] if taken else 0
        for i in range(taken[-1] + 1 if taken else 0, len(usable)):
            longer, place = (*taken, i), usable[i]
            every_party = place.parameters[0] > weights and (place.parameters[1] > 0 or not whole)
            if every_party and _client_work([usable[j] for j in longer], client_ends and whole) <= limit:
                heapq.heappush(pending, (key(longer), longer))


def _is_list(model: nn.Module, place: CutPlace) -> bool:
    """Return whether a submodule is a container whose members `forward` calls one by one."""
    return not place.called and any(True for _ in model.get_submodule(place.name).children())


def _is_coarse(places: Sequence[CutPlace]) -> bool:
    """Return whether two successive places have more work between them than the client may have."""
    before = sorted({0, *(place.multiply_adds[0] for place in places if place.possible)})
    total = max((sum(place.multiply_adds) for place in places), default=0)
    return any(after - first > CLIENT_SHARE * total for first, after in pairwise((*before, total)))


def _client_work(chosen: Sequence[CutPlace], client_ends: bool) -> int:
    """Return the multiply-adds of a row before the first of the `chosen`, and after the last if `client_ends`."""
    if not chosen:
        return 0
    return chosen[0].multiply_adds[0] + (chosen[-1].multiply_adds[1] if client_ends else 0)


def _explain(chosen: Sequence[CutPlace], places: Sequence[CutPlace], depth: int, client_ends: bool) -> str:
    """Return one line on the chosen cuts and the reason."""
    names = " and ".join(repr(place.name) for place in chosen)
    possible, nbytes = sum(place.possible for place in places), sum(place.bytes for place in chosen)
    work = _client_work(chosen, client_ends)
    total = sum(chosen[0].multiply_adds)
    share = work / max(1, total)
    among = f"of {possible} possible place{'s' * (possible != 1)} to depth {depth} with a weight at every party"
    sent = f"bytes a row ({nbytes:,} both ways)"
    if work <= CLIENT_SHARE * total:
        most = f"at most {CLIENT_SHARE:.0%} of the multiply-adds at the client ({share:.1%} here)"
        return f"auto cut after {names}: {among} and {most}, the fewest {sent}"
    least = f"the fewest multiply-adds at the client ({share:.1%}, none leaves it at most {CLIENT_SHARE:.0%})"
    return f"auto cut after {names}: {among}, {least}, then the fewest {sent}"
