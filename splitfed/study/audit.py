"""Audits a finished run's private releases: is a release as private as claimed, and as insensitive as claimed?

Two neighbouring rows go through the run's own mechanism many times, and a test tells them apart as well as it can: a
lower bound on epsilon that holds for any mechanism, to set beside the claim. Once with rows of the data through the
run's own segments, and once with the worst that a segment could hand to the mechanism. A bound above the claim proves
the mechanism broken; one below proves nothing, but shows how much of the claim this test can see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from splitfed.accounting.audit import Array, Found, lower_bound
from splitfed.accounting.privacy import compose
from splitfed.chosen import of_client
from splitfed.data.features import feed
from splitfed.defense import Context, Defense
from splitfed.errors import InvalidInput, check_count
from splitfed.privacy import Gaussian, Laplace
from splitfed.run import Run
from splitfed.seeding import generator
from splitfed.study.again import finished
from splitfed.study.progress import watcher
from splitfed.study.runner import trained
from splitfed.upstream import Upstream
from splitfed.uses import counted
from splitfed.view import Stamp

CHUNK = 2**22
PAIRS = 200

Json = dict[str, Any]


@dataclass(frozen=True)
class Route:
    """One value on one edge with the defenses that act on it, as its sender applies them."""

    party: str
    edge: str
    value: str
    guards: tuple[tuple[int, Defense], ...]
    seed: int

    def context(self, position: int, number: int) -> Context:
        """Return a context whose random numbers are those of draw `number`."""
        return Context(self.party, self.edge, Stamp("audit", 0, 0, number), self.seed, position)

    def release(self, z: Tensor, number: int) -> Tensor:
        """Return what leaves for `z` (rows, ...), every row with noise of its own."""
        for position, defense in self.guards:
            z = defense.release(self.value, z, self.context(position, number))
        return z

    def expected(self, z: Tensor) -> Tensor:
        """Return the mean of what leaves for `z`."""
        for position, defense in self.guards:
            z = defense.expected(self.value, z, self.context(position, 0))
        return z


def audit(folder: Path, trials: int = 20_000, confidence: float = 0.95, *, trust: bool = False) -> Json:
    """Audit the run in `folder` with `trials` releases of each of two rows; see `audit_run` and `finished`."""
    check_count("trials", trials, low=40)
    _, cell, data = finished(folder, trust=trust)
    with watcher(1, 0) as told:
        run = trained(cell, data, folder, told)
    return audit_run(run, trials, confidence)


def audit_run(run: Run, trials: int = 20_000, confidence: float = 0.95) -> Json:
    """Return, for every private release of client 0, what was measured and claimed, and whether all claims held.

    Raises `InvalidInput` where no release is private (labels and weights are not audited) or two test rows are missing.
    """
    delta = run.ledger.delta
    paths = _paths(run)
    if not paths:
        raise InvalidInput(
            "the run has no private release to audit; labels, weights and what methods send are not audited"
        )
    found = []
    for path in paths:
        z = _rows(run, path)
        for kind, pair in (("rows of the data", _apart(path, z)), ("worst case", _worst(path, z))):
            found.append({"canaries": kind, **_audited(path, pair, trials, delta, confidence)})
        found[-1]["sensitivity"] = _sensitivity(path, z, run.seed)
    return {"delta": delta, "confidence": confidence, "mechanisms": found, "held": all(_held(one) for one in found)}


def told(found: Mapping[str, Any]) -> str:
    """Return what `audit` found as text for people."""
    lines = []
    for one in found["mechanisms"]:
        bound, claim = one["found"], one["claimed"]
        lines.append(
            f"{one['party']}, {one['edge']}, {one['mechanism']}, {one['canaries']}: epsilon of a release is at least "
            f"{bound['epsilon']:.3g} ({found['confidence']:.0%} sure, at most {one['most']:.3g} could be seen with "
            f"{bound['samples']} samples); claimed {claim:.4g} at delta {found['delta']:.1g}: "
            f"{'holds' if bound['epsilon'] <= claim else 'BROKEN'}"
        )
        sensitivity = one.get("sensitivity")
        if sensitivity is not None:
            verdict = "holds" if sensitivity["measured"] <= sensitivity["claimed"] * (1 + 1e-5) else "BROKEN"
            lines.append(
                f"  sensitivity {sensitivity['norm']} measured over {sensitivity['pairs']} pairs: "
                f"{sensitivity['measured']:.6g}, claimed {sensitivity['claimed']:.6g}: {verdict}"
            )
    return "\n".join(lines)


def _held(one: Mapping[str, Any]) -> bool:
    measured = one.get("sensitivity")
    fine = measured is None or measured["measured"] <= measured["claimed"] * (1 + 1e-5)
    return bool(one["found"]["epsilon"] <= one["claimed"] and fine)


def _paths(run: Run) -> list[Route]:
    engine = run.engine
    topology = engine.topology
    paths = []
    for edge in topology.crossings:
        guards = tuple((i, d) for i, d in enumerate(of_client(engine.defenses, 0)) if edge.name in d.edges(topology))
        if any("activation" in counted(defense) for _, defense in guards):
            party = engine.party(0, topology.role_of(edge.source)).name
            paths += [Route(party, edge.name, value, guards, run.seed) for value in edge.values]
    return paths


def _rows(run: Run, path: Route) -> Tensor:
    """Return what the segments hand to the mechanism for up to 256 of client 0's test rows: (rows, ...)."""
    engine, topology = run.engine, run.engine.topology
    rows = run.data.clients[0].test
    if len(rows) < 2:
        raise InvalidInput(f"client 0 has {len(rows)} test rows to audit with; expected two or more")
    few = rows.rows(range(min(256, len(rows))))
    role = topology.role_of(topology.edge(path.edge).target)
    modules = engine.modules(0, run.schedule.newest(0, run.schedule_state))
    bare = Upstream(topology, engine.all_facts[0], modules, (), role, 0)
    with torch.no_grad():
        found: Tensor = bare(feed(few.x.to(engine.device), topology.inputs, rows.features))[path.value].cpu()
    return found


def _apart(path: Route, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two rows whose mean releases are furthest apart: (1, ...) each."""
    distances = torch.cdist(path.expected(z).flatten(1).double(), path.expected(z).flatten(1).double())
    i, j = divmod(int(distances.argmax()), len(z))
    return z[i : i + 1], z[j : j + 1]


def _worst(path: Route, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pair, among some that are built to be hard, whose mean releases are furthest apart: (1, ...) each."""
    if bool(((z == 0) | (z == 1)).all()):
        pairs = [(torch.zeros_like(z[:1]), torch.ones_like(z[:1]))]
        striped = torch.zeros_like(z[:1])
        striped[:, ::2] = 1
        pairs.append((striped, 1 - striped))
    else:
        size = 1e3 * max(1.0, float(z.abs().max()))
        single = torch.zeros_like(z[:1])
        single.view(1, -1)[0, 0] = size
        full = torch.full_like(z[:1], size)
        pairs = [(single, -single), (full, -full)]
    return max(pairs, key=lambda pair: float((path.expected(pair[0]) - path.expected(pair[1])).norm()))


def _audited(path: Route, pair: tuple[Tensor, Tensor], trials: int, delta: float, confidence: float) -> Json:
    means = [path.expected(z).flatten().double() for z in pair]
    scores = _scores(*means)
    drawn = [_sampled(path, z, trials, which, scores) for which, z in enumerate(pair)]
    found: Found = lower_bound(drawn[0], drawn[1], delta, confidence)
    events = [d.event() for _, d in path.guards if "activation" in counted(d)]
    claimed = compose([(event, 1) for event in events if event is not None], delta)
    return {
        "party": path.party,
        "edge": path.edge,
        "value": path.value,
        "mechanism": ", ".join(type(d).__name__ for _, d in path.guards),
        "found": asdict(found),
        "most": found.most,
        "claimed": claimed.epsilon,
        "method": claimed.method,
    }


Score = Callable[[Tensor], Tensor]


def _scores(first: Tensor, second: Tensor) -> dict[str, Score]:
    """Return what tells the two means apart best under Gaussian noise, under Laplace noise, and where bits are sent."""
    found: dict[str, Score] = {
        "linear": lambda z: z @ (second - first),
        "absolute": lambda z: (z - first).abs().sum(1) - (z - second).abs().sum(1),
    }
    if all(bool(((mean > 0) & (mean < 1)).all()) for mean in (first, second)):
        weights = second.logit() - first.logit()
        found["log-odds"] = lambda z: z @ weights
    return found


def _sampled(path: Route, z: Tensor, trials: int, which: int, scores: Mapping[str, Score]) -> dict[str, Array]:
    """Return the scores of `trials` releases of the one row `z`: name -> (trials,)."""
    step = max(1, CHUNK // z.numel())
    found: dict[str, list[Tensor]] = {name: [] for name in scores}
    for number, start in enumerate(range(0, trials, step)):
        copies = z.expand(min(step, trials - start), *z.shape[1:]).clone()
        # The two rows draw from streams of their own.
        released = path.release(copies, 2 * number + which).flatten(1).double()
        for name, score in scores.items():
            found[name].append(score(released))
    return {name: torch.cat(parts).numpy() for name, parts in found.items()}


def _sensitivity(path: Route, z: Tensor, seed: int) -> Json | None:
    """Return the largest change of the mean release that a row in place of another made; None where none is claimed."""
    claims: Sequence[tuple[Defense, Any]] = [(d, d.event()) for _, d in path.guards if hasattr(d, "sensitivity")]
    if len(claims) != 1 or not isinstance(claims[0][1].mechanism, (Gaussian, Laplace)):
        return None
    defense, event = claims[0]
    order = 2 if isinstance(event.mechanism, Gaussian) else 1
    random = generator(seed, "sensitivity")
    hard = torch.randn((PAIRS, *z.shape[1:]), generator=random) * 10 ** torch.empty(PAIRS).uniform_(
        -3, 4, generator=random
    ).view(-1, *[1] * (z.dim() - 1))
    pairs = [(hard, -hard), (hard, hard.flip(0)), (z, z.flip(0))]
    # Only the mechanism itself: what later defenses do to its release is no part of its claim.
    context = path.context(0, 0)
    measured = 0.0
    for pair in pairs:
        first, second = (defense.expected(path.value, rows, context).flatten(1).double() for rows in pair)
        measured = max(measured, float(torch.linalg.vector_norm(first - second, ord=order, dim=1).max()))
    claimed = float(defense.sensitivity)  # type: ignore[attr-defined]
    return {
        "norm": f"L{order}",
        "measured": measured,
        "claimed": claimed,
        "pairs": sum(len(a) for a, _ in pairs),
        "share": measured / claimed if claimed else math.nan,
    }
