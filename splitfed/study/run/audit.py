"""Audits the mechanisms of a finished run that carry a claim and have a game: are they as private as they say?

Two neighbouring inputs go through the run's own mechanism many times, and a test tells them apart as well as it can: a
lower bound on epsilon, to set beside the claim. A bound above the claim refutes it; one below proves nothing, but
beside it stands the largest claim that so many samples could have refuted. Audited are, for every client: releases at a
cut and messages to the aggregation server, each once and ten in a row; class means that a method makes private itself;
private training steps; and training labels.
Where the claim is that of a Gaussian mechanism its trade-off curve is used, elsewhere a bound that holds for any
mechanism.

The confidence is that of the whole audit: with so many mechanisms each is tested at so much more of it (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from splitfed.core.defense import privacy_event
from splitfed.core.errors import InvalidInput, check_count, check_number
from splitfed.study.run.audit_class_sums import class_sum_games
from splitfed.study.run.audit_game import Game, Json, format_line
from splitfed.study.run.audit_labels import label_games
from splitfed.study.run.audit_releases import release_games
from splitfed.study.run.audit_steps import step_games
from splitfed.study.run.reattack import rebuild_run
from splitfed.training.run import Run


def audit_folder(folder: Path, trials: int = 20_000, confidence: float = 0.95, *, trust: bool = False) -> Json:
    """Audit the run in `folder` with `trials` releases of each of two inputs; see `audit`, `load_finished_run`."""
    check_count("trials", trials, low=40)
    return audit(rebuild_run(folder, trust=trust), trials, confidence)


def audit(run: Run, trials: int = 20_000, confidence: float = 0.95) -> Json:
    """Return what was measured of the mechanisms that have a game, whether these claims held, and what has no game.

    `trials`: samples of each of two inputs, >= 40. `confidence`: the probability, in (0, 1), with which a run that
    keeps all its claims passes. Raises `InvalidInput` if nothing carries a claim.
    """
    check_count("trials", trials, low=40)
    check_number("confidence", confidence, low=0.0, high=1.0, open_low=True, open_high=True)
    kinds = (release_games, class_sum_games, step_games, label_games)
    games = [game for client in range(run.engine.replicas) for play in kinds for game in play(run, client)]
    missed = _unaudited_defenses(run, games)
    if not games:
        why = f"there is no game for {missed[0]}" if missed else "nothing in it carries a claim"
        raise InvalidInput(f"the run has no private mechanism to audit: {why}")
    each, delta = 1 - (1 - confidence) / len(games), run.ledger.delta
    lines = [game.play(trials, delta, each) for game in games]
    return {
        "delta": delta,
        "confidence": confidence,
        "mechanisms": lines,
        "unaudited": missed,
        "held": all(line["held"] for line in lines),
    }


def format_audit(found: Mapping[str, Any]) -> str:
    """Return what `audit` found as text for people."""
    lines = [format_line(line) for line in found["mechanisms"]]
    lines += [f"{name}: not audited, there is no game for it" for name in found["unaudited"]]
    verdict = "every claim that was audited holds" if found["held"] else "a claim is violated"
    return "\n".join([*lines, f"{verdict}, as far as {found['confidence']:.0%} confidence in all lines together shows"])


def _unaudited_defenses(run: Run, games: Sequence[Game]) -> list[str]:
    """Return the names of the defenses that carry a claim that no game is about."""
    found = {name for game in games for name in game.mechanism.split(", ")}
    claiming = dict.fromkeys(
        type(defense).__name__ for defense in run.engine.defenses if privacy_event(defense) is not None
    )
    return [name for name in claiming if name not in found]
