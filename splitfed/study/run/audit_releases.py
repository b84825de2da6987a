"""Audits of what leaves a data owner at a cut or goes to the aggregation server: one release, and ten in a row.

Ten releases of one row are of whatever its segments made of it then, so the two inputs to distinguish are sequences:
one of two canaries at each release, the other one in the neighbouring sequence. The order is one in which canaries of
opposite signs cancel whatever noise is repeated over steps, over epochs, or between training and scoring, while noise
that is drawn afresh adds up in squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from splitfed.core.defense import UPLOAD, ReleaseDefense, privacy_event
from splitfed.core.defense_context import Context
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Stamp
from splitfed.core.per_client_defenses import of_client
from splitfed.core.privacy_events import Event, Gaussian, Laplace, Neighbours, Protects
from splitfed.core.random import derive, generator
from splitfed.core.upload_defenses import Keeper, Sent, apply_upload_defenses, find_upload_defenses
from splitfed.core.usage_counts import counted_kinds
from splitfed.data.features import feed
from splitfed.engines.base import FED
from splitfed.study.run.audit_game import ONE, TEN, Game, Scores, SensitivityCheck, class_names
from splitfed.threats.segment_runner import SegmentRunner
from splitfed.training.run import Run

CHUNK = 2**22
PAIRS = 200
ROWS = 256
WIDTH = 16
"""Numbers of a canary among a client's messages to the aggregation server."""

# Four epochs of two steps, and two steps of scoring; canaries of opposite signs at those that noise may repeat at.
TURNS = tuple(("train", epoch, step, "train") for epoch in range(4) for step in range(2))
TURNS += tuple(("evaluate", 0, step, "test") for step in range(2))
SIGNS = tuple((-1) ** (epoch + step + (phase == "evaluate")) for phase, epoch, step, _ in TURNS)

Score = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Route:
    """One value at one place with the defenses that act on it, as its sender applies them.

    `replica`: that messages of the client carry. `kind`: of a message to the aggregation server, "" on an edge.
    """

    party: str
    place: str
    value: str
    guards: tuple[Keeper, ...]
    seed: int
    replica: int
    kind: str = ""

    @property
    def claim(self) -> list[Event]:
        """What one release costs."""
        counted = [d for _, d in self.guards if self.kind or "activation" in counted_kinds(d)]
        events = [event for event in map(privacy_event, counted) if event is not None]
        if not self.kind:
            return events
        return [replace(event, protects=Protects.MESSAGES, neighbours=Neighbours.SAME_CLASS) for event in events]

    def context(self, position: int, turn: int, seed: int) -> Context:
        """Return a context of the run's own shape for release `turn`, whose random numbers come from `seed`."""
        phase, epoch, step, part = TURNS[turn]
        return Context(self.party, self.place, Stamp(phase, self.replica, epoch, step, part), seed, position)

    def release(self, z: Tensor, turn: int, words: Sequence[str | int]) -> Tensor:
        """Return what leaves for `z` (rows, ...) at release `turn`, every row with noise of its own."""
        seed = derive(self.seed, "audit", *words)
        if self.kind:
            sent = Sent(self.kind, {self.value: z}, self.party, self.replica, turn // 2, turn % 2)
            return apply_upload_defenses(sent, self.guards, seed).tensors[self.value]
        for position, defense in self.guards:
            z = defense.release(self.value, z, self.context(position, turn, seed))
        return z

    def expected(self, z: Tensor) -> Tensor:
        """Return the mean of what leaves for `z`."""
        for position, defense in self.guards:
            z = defense.expected(self.value, z, self.context(position, 0, self.seed))
        return z


def release_games(run: Run, client: int) -> Iterator[Game]:
    """Yield what is to be audited of the releases of `client`, and of its messages to the aggregation server."""
    for route in _edge_routes(run, client):
        z = _mechanism_inputs(run, route, client)
        yield _release_game(route, "rows of the data", _most_distant_rows(route, z), 1)
        yield from _worst_case_games(run, route, z)
    for route in _upload_routes(run, client):
        yield from _worst_case_games(run, route, torch.full((1, WIDTH), 0.5))


def _worst_case_games(run: Run, route: Route, z: Tensor) -> Iterator[Game]:
    """Yield what is to be audited with the hardest inputs: one release, with its sensitivity, and ten in a row."""
    pair = _worst_case_pair(route, z)
    yield _release_game(route, "worst case", pair, 1, partial(_measure_sensitivity, route, z, run.seed))
    yield _release_game(route, "worst case", pair, len(TURNS))


def _release_game(
    route: Route,
    canaries: str,
    pair: tuple[Tensor, Tensor],
    times: int,
    measure: Callable[[], SensitivityCheck | None] | None = None,
) -> Game:
    scores = _score_functions(*(route.expected(z).flatten().double() for z in pair))

    def draw(which: int, trials: int) -> Scores:
        return _sample_scores(route, pair, times, which, trials, scores)

    mechanism, claim = class_names([d for _, d in route.guards]), tuple((event, times) for event in route.claim)
    # Ten releases show more, and cost ten times as much.
    audited, share = (ONE, 1) if times == 1 else (TEN, 4)
    return Game(route.party, route.place, mechanism, audited, canaries, claim, draw, None, measure, share)


def _edge_routes(run: Run, client: int) -> Iterator[Route]:
    engine = run.engine
    topology, pseudonym = engine.topologies[client], engine.run_parties.replicas[client].pseudonym
    for edge in topology.crossings:
        mine = enumerate(of_client(engine.defenses, client))
        guards = tuple(
            Keeper(i, d) for i, d in mine if isinstance(d, ReleaseDefense) and edge.name in d.edges(topology)
        )
        if any("activation" in counted_kinds(defense) for _, defense in guards):
            party = engine.party(client, topology.role_of(edge.source)).name
            defended = engine.all_facts[client].defended(edge.values)
            yield from (Route(party, edge.name, value, guards, run.seed, pseudonym) for value in defended)


def _upload_routes(run: Run, client: int) -> Iterator[Route]:
    engine, topology = run.engine, run.engine.topologies[client]
    kinds = dict.fromkeys(kind for d in engine.defenses if privacy_event(d) is not None for kind in d.uploads)
    party = engine.party(client, topology.data_roles[0]).name
    for kind in kinds if FED in engine.parties or engine.run_parties.fed else ():
        guards = tuple(find_upload_defenses(engine.defenses, kind, client))
        if any(privacy_event(keeper.defense) is not None for keeper in guards):
            yield Route(party, f"{kind}{UPLOAD}", "canary", guards, run.seed, client, kind)


def _mechanism_inputs(run: Run, route: Route, client: int) -> Tensor:
    """Return what the segments hand to the mechanism for some rows of the client, (rows, ...): test rows if it can."""
    engine, topology = run.engine, run.engine.topologies[client]
    client_data = run.data.clients[client]
    rows = next((part for part in (client_data.test, client_data.validation, client_data.train) if len(part) > 1), None)
    if rows is None:
        raise InvalidInput(f"client {client} has no two rows to audit with")
    batch = rows.rows(range(min(ROWS, len(rows))))
    role = topology.role_of(topology.edge(route.place).target)
    modules = engine.modules(client, run.schedule.newest(client, run.trainer.schedule_state))
    inputs = partial(feed, names=topology.inputs, features=rows.features)
    undefended = SegmentRunner(topology, engine.all_facts[client], modules, inputs, role=role)
    with torch.no_grad():
        return undefended(batch.x.to(engine.device))[route.value].cpu()


def _most_distant_rows(route: Route, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two rows whose mean releases are furthest apart: (1, ...) each."""
    means = route.expected(z).flatten(1).double()
    i, j = divmod(int(torch.cdist(means, means).argmax()), len(z))
    return z[i : i + 1], z[j : j + 1]


def _worst_case_pair(route: Route, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pair, among some that are built to be hard, whose mean releases are furthest apart: (1, ...) each.

    Signs that alternate come first: they cancel noise that the numbers of a row have in common.
    """
    striped = torch.zeros_like(z[:1])
    striped.view(1, -1)[:, ::2] = 1
    if bool(((z == 0) | (z == 1)).all()):
        pairs = [(striped, 1 - striped), (torch.zeros_like(striped), torch.ones_like(striped))]
    else:
        size = 1e3 * max(1.0, float(z.abs().max()))
        single = torch.zeros_like(striped)
        single.view(1, -1)[0, 0] = size
        pairs = [(size * (2 * striped - 1), size * (1 - 2 * striped)), (single, -single)]
        pairs.append((torch.full_like(single, size), torch.full_like(single, -size)))
    distances = [float((route.expected(one) - route.expected(two)).norm()) for one, two in pairs]
    return next(pair for pair, far in zip(pairs, distances, strict=True) if far >= 0.999 * max(distances))


def _score_functions(first: Tensor, second: Tensor) -> dict[str, Score]:
    """Return what tells the two means apart best under Gaussian noise, under Laplace noise, and where bits are sent."""
    functions: dict[str, Score] = {
        "linear": lambda z: z @ (second - first),
        "absolute": lambda z: (z - first).abs().sum(1) - (z - second).abs().sum(1),
    }
    if all(bool(((mean > 0) & (mean < 1)).all()) for mean in (first, second)):
        weights = second.logit() - first.logit()
        functions["log-odds"] = lambda z: z @ weights
    return functions


def _sample_scores(
    route: Route, pair: tuple[Tensor, Tensor], times: int, which: int, trials: int, scores: Mapping[str, Score]
) -> Scores:
    """Return the scores of `trials` sequences of `times` releases that begin with canary `which`: name -> (trials,)."""
    step = max(1, CHUNK // pair[0].numel())
    sequences: list[dict[str, Tensor]] = []
    for number, start in enumerate(range(0, trials, step)):
        size = min(step, trials - start)
        totals = {name: torch.zeros(size, dtype=torch.float64) for name in scores}
        for turn, sign in enumerate(SIGNS[:times]):
            z = pair[which if sign > 0 else 1 - which]
            # The two inputs draw from streams of their own.
            flat = route.release(z.expand(size, *z.shape[1:]).clone(), turn, (which, number)).flatten(1).double()
            for name, score in scores.items():
                totals[name] += sign * score(flat)
        sequences.append(totals)
    return {name: torch.cat([totals[name] for totals in sequences]).numpy() for name in scores}


def _measure_sensitivity(route: Route, z: Tensor, seed: int) -> SensitivityCheck | None:
    """Return the largest change of the mean release that a row in place of another made; None where none is claimed."""
    claims: Sequence[tuple[ReleaseDefense, Any]] = [
        (d, privacy_event(d)) for _, d in route.guards if hasattr(d, "sensitivity")
    ]
    if len(claims) != 1 or not isinstance(claims[0][1].mechanism, (Gaussian, Laplace)):
        return None
    defense, event = claims[0]
    order = 2 if isinstance(event.mechanism, Gaussian) else 1
    random = generator(seed, "sensitivity")
    random_rows = torch.randn((PAIRS, *z.shape[1:]), generator=random) * 10 ** torch.empty(PAIRS).uniform_(
        -3, 4, generator=random
    ).view(-1, *[1] * (z.dim() - 1))
    pairs = [(random_rows, -random_rows), (random_rows, random_rows.flip(0)), (z, z.flip(0))]
    # Only the mechanism itself: what later defenses do to its release is no part of its claim.
    context = route.context(0, 0, seed)
    expected = [[defense.expected(route.value, rows, context).flatten(1).double() for rows in pair] for pair in pairs]
    changes = [torch.linalg.vector_norm(first - second, ord=order, dim=1).max() for first, second in expected]
    measured, claimed = max([0.0, *map(float, changes)]), float(defense.sensitivity)  # type: ignore[attr-defined]
    assert math.isfinite(claimed)
    return SensitivityCheck(f"sensitivity L{order}", measured, claimed, sum(len(a) for a, _ in pairs))
