"""Audits every mechanism of a finished run that carries a claim: is it as private as it says?

Two neighbouring inputs go through the run's own mechanism many times, and a test tells them apart as well as it can: a
lower bound on epsilon, to set beside the claim. A bound above the claim refutes it; one below proves nothing, but
beside it stands the largest claim that so many samples could have refuted. Audited are, for every client: releases at a
cut and messages to the fed server, each once and ten in a row; private training steps; and training labels. Where the
claim is that of a Gaussian mechanism its trade-off curve is used, elsewhere a bound that holds for any mechanism.

The confidence is that of the whole audit: with so many mechanisms each is tested at so much more of it (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitfed.errors import InvalidInput, check_count, check_number
from splitfed.run import Run
from splitfed.study.again import finished
from splitfed.study.audit_game import Game, Json
from splitfed.study.audit_game import told as line_told
from splitfed.study.audit_labels import label_games
from splitfed.study.audit_releases import release_games
from splitfed.study.audit_steps import step_games
from splitfed.study.progress import watcher
from splitfed.study.runner import trained


def audit(folder: Path, trials: int = 20_000, confidence: float = 0.95, *, trust: bool = False) -> Json:
    """Audit the run in `folder` with `trials` releases of each of two inputs; see `audit_run` and `finished`."""
    check_count("trials", trials, low=40)
    _, cell, data = finished(folder, trust=trust)
    with watcher(1, 0) as told:
        run = trained(cell, data, folder, told)
    return audit_run(run, trials, confidence)


def audit_run(run: Run, trials: int = 20_000, confidence: float = 0.95) -> Json:
    """Return, for every mechanism of the run that carries a claim, what was measured, and whether all claims held.

    `confidence`: with which a run that keeps all its claims passes. Raises `InvalidInput` where there is no claim.
    """
    check_count("trials", trials, low=40)
    check_number("confidence", confidence, low=0.0, high=1.0, open_low=True, open_high=True)
    games = [game for client in range(run.engine.lanes) for game in _games(run, client)]
    if not games:
        raise InvalidInput("the run has no private mechanism to audit: nothing in it carries a claim")
    each, delta = 1 - (1 - confidence) / len(games), run.ledger.delta
    lines = [game.played(trials, delta, each) for game in games]
    return {
        "delta": delta,
        "confidence": confidence,
        "mechanisms": lines,
        "held": all(line["held"] for line in lines),
    }


def told(found: Mapping[str, Any]) -> str:
    """Return what `audit` found as text for people."""
    lines = [line_told(line) for line in found["mechanisms"]]
    verdict = "every claim holds" if found["held"] else "a claim is violated"
    return "\n".join([*lines, f"{verdict}, as far as {found['confidence']:.0%} confidence in all lines together shows"])


def _games(run: Run, client: int) -> list[Game]:
    return [*release_games(run, client), *step_games(run, client), *label_games(run, client)]
