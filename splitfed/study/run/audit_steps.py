"""Audits of private training steps: canary gradients through a run's own clipping, noise and sampling of rows.

A canary's gradient is one coordinate of its own at every guarded party, as long as clipping lets it be. Three games:
one step that the row takes part in, ten such steps in a row, and steps whose rows are drawn as the run draws them. Ten
steps have canaries of alternating signs, so that noise that is repeated over steps or epochs cancels. Canaries need a
layer of their own; beside them stands what a row moves at most in the run's own parties, with its model and its loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from splitfed.core.defense import WeightDefense
from splitfed.core.privacy_events import Event, Gaussian, Neighbours
from splitfed.core.random import derive
from splitfed.privacy.canaries import Canaries, CanaryParty, diagonal
from splitfed.study.run.audit_game import SLACK, Draw, Game, Measure, Scores, SensitivityCheck, class_names
from splitfed.study.run.own_parties import SIGNS, TURNS, OwnSteps
from splitfed.training.run import Run

TEN = "ten steps in a row that the row takes part in"

CANARIES = 250
"""Canaries a step, each with a coordinate of its own; neighbours without one have as many."""


def step_games(run: Run, client: int) -> Iterator[Game]:
    """Yield what is to be audited of the training steps of `client`."""
    engine, topology = run.engine, run.engine.topologies[client]
    guards = [(position, d) for position, d in enumerate(engine.defenses) if isinstance(d, WeightDefense)]
    for position, defense in guards:
        uses = defense.weight_uses(client, 1, 1)
        if uses is None or not isinstance(uses[0].mechanism, Gaussian):
            continue
        event, _ = uses
        norms = defense.norms(topology)
        canary_parties = tuple(
            CanaryParty(engine.party(client, role).name, role, tuple(to for sender, to in norms if sender == role))
            for role in defense.guards(topology)
        )
        canaries = Canaries(defense, position, canary_parties, engine.run_parties.replicas[client].pseudonym, run.seed)
        yield from _party_games(run, client, canaries, event)


def _party_games(run: Run, client: int, canaries: Canaries, event: Event) -> Iterator[Game]:
    parties, mechanism = ", ".join(seat.party for seat in canaries.seats), class_names([canaries.defense])
    scales, always = canaries.deviations(), replace(event, sampling_rate=1.0)

    def line(audited: str, claim: Event, times: int, draw: Draw, measure: Measure | None = None) -> Game:
        kind = "gradients of one coordinate"
        return Game(parties, "weights", mechanism, audited, kind, ((claim, times),), draw, None, measure)

    present = partial(_present_row_scores, canaries, scales, event.neighbours is Neighbours.REPLACE)
    own_steps = OwnSteps(run, client, [seat.role for seat in canaries.seats], event.neighbours is Neighbours.REPLACE)
    for times, audited in ((1, "one step that the row takes part in"), (len(TURNS), TEN)):
        distance = partial(_measure_distance, own_steps, event, times)
        yield line(audited, always, times, partial(present, times), distance)
    if event.sampling_rate < 1:
        yield line(
            "one step with its rows drawn", event, 1, partial(_sampled_row_scores, run, client, canaries, scales)
        )


def _present_row_scores(
    canaries: Canaries, scales: dict[str, float], replaced: bool, times: int, which: int, trials: int
) -> Scores:
    """Return the scores of canaries that are in every one of `times` steps (input 0), or are replaced, or are not."""
    score_parts: list[Tensor] = []
    for sequence in range(-(-trials // CANARIES)):
        count = min(CANARIES, trials - sequence * CANARIES)
        rows = diagonal(count, count)
        # The neighbour of a row that is replaced points to the other side; that of one that is added is not there.
        signs = [sign if which == 0 else -sign for sign in SIGNS[:times]]
        gradients = [sign * rows if replaced or which == 0 else rows[:0] for sign in signs]
        noisy_sums = canaries.sums(gradients, TURNS[:times], ("present", times, which, sequence), 1.0)
        scored = [sign * canaries.scores(one, scales) for sign, one in zip(SIGNS, noisy_sums, strict=False)]
        score_parts.append(torch.stack(scored).sum(0))
    return {"sum": torch.cat(score_parts).numpy()}


def _sampled_row_scores(
    run: Run, client: int, canaries: Canaries, scales: dict[str, float], which: int, trials: int
) -> Scores:
    """Return the scores of canaries that are rows of the client (input 0), or are not, in steps drawn as the run's."""
    training = run.training
    rows = run.engine.rows(client, "train")
    count, epoch = min(CANARIES, rows), 0
    score_parts: list[Tensor] = []
    gradients = torch.cat([diagonal(count, count), torch.zeros(rows - count, count)])
    # Draws of an audit's own, by the run's own sampler.
    audit_training = replace(training.of_client(client), seed=derive(run.seed, "audit", "drawn", which))
    while count * len(score_parts) < trials:
        batches = audit_training.batches(rows, epoch, client)
        # The neighbour's data do not have the canaries, whoever else is drawn.
        batch_gradients = [gradients[batch] if which == 0 else gradients[batch[:0]] for batch in batches]
        turns = [(epoch, step) for step in range(len(batch_gradients))]
        noisy = canaries.sums(batch_gradients, turns, ("drawn", which, epoch), audit_training.expected(rows) or 1.0)
        score_parts += [canaries.scores(left, scales) for left in noisy]
        epoch += 1
    return {"sum": torch.cat(score_parts)[:trials].numpy()}


def _measure_distance(own_steps: OwnSteps, event: Event, times: int) -> SensitivityCheck:
    assert isinstance(event.mechanism, Gaussian)
    measured, pairs = own_steps.loudest(times)
    # A row in place of another moves what one taken away and one added move together.
    moves = 2 if own_steps.replaced and event.neighbours is Neighbours.ADD_REMOVE else 1
    claimed = moves * math.sqrt(times) / event.mechanism.noise_multiplier
    what = "two of the run's own steps" if times == 1 else f"{times} of the run's own steps in a row"
    return SensitivityCheck(f"distance of {what} in deviations", measured, claimed, pairs, SLACK)
