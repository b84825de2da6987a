"""Attacks on recorded training: on updates of weights, and on what the adversary received of every row in each epoch.

A row comes back in every epoch, with gradients by other weights and with new draws of a random defense. Noise on
gradients protects a label only as far as it survives their mean over all epochs, so label attacks may read recorded
training if the adversary knows which rows were in which step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from splitfed.attacks.base import Attack, Needs, Outcome, Phase, Target
from splitfed.attacks.gradients.local_training import check_one_step
from splitfed.attacks.scoring.prediction_scores import score_prediction
from splitfed.attacks.scoring.reconstruction_metrics import assignment
from splitfed.core.errors import InvalidInput, check_count
from splitfed.core.grouping import group_pairs
from splitfed.core.messages import WEIGHT_GRADIENT, Message, Stamp, View
from splitfed.core.random import derive, generator
from splitfed.engines.engine import Engine
from splitfed.threats.attack_phase import AttackPhase, Case, Scored
from splitfed.threats.attack_requests import AttackRequest
from splitfed.threats.knowledge import check_client

Batches = Callable[[int], Sequence[Tensor]]
"""Epoch -> the rows of every step in it."""


def reads_steps(attack: Attack) -> bool:
    """Return whether `attack` may read recorded steps: it predicts labels from the messages of a training step."""
    return attack.target is Target.LABELS and attack.phase is Phase.STEP


def reads_training(attack: Attack) -> bool:
    """Return whether `attack` may read recorded training, so that a request may name a round."""
    return attack.phase is Phase.TRAINING or reads_steps(attack)


class _Piece(NamedTuple):
    """Messages of a step for `rows` (n,): `values` (n, ...), and the occurrence number of each row so far, (n,)."""

    rows: Tensor
    times: Tensor
    values: Tensor


def recorded_passes(view: View, batches: Batches) -> tuple[Tensor, list[View]]:
    """Return the positions of training rows (victims,) and the recorded views of them, one for each pass, oldest first.

    `view`: the messages of one client, recorded in training; `batches`: epoch -> the rows of every step in it. The
    number of passes is the median number of steps that a row took part in; rows with fewer steps are left out.
    Gradients are scaled to a mean loss over all `victims`, as if these were one step. Raises `InvalidInput` if no step
    was recorded, or if the recorded steps do not match `batches`.
    """
    steps = group_pairs(
        ((m.stamp.epoch, m.stamp.step), m)
        for m in view.messages
        if m.receiver == view.party and m.kind in ("activation", "gradient")
    )
    if not steps:
        raise InvalidInput(f"no training step was recorded at party {view.party!r}")
    epochs = group_pairs((epoch, step) for epoch, step in sorted(steps))
    counts = torch.zeros(1 + max(int(rows.max()) for e in epochs for rows in batches(e)), dtype=torch.int64)
    pieces: dict[tuple[str, str, str, str], list[_Piece]] = {}
    for epoch, numbers in epochs.items():
        planned = batches(epoch)
        if len(planned) != len(numbers):
            raise InvalidInput(
                f"{len(numbers)} steps of epoch {epoch} were recorded of {view.party!r}, and its client takes "
                f"{len(planned)}: whose rows they were is not known"
            )
        for step, rows in zip(numbers, planned, strict=True):
            for message in steps[epoch, step]:
                _add(pieces, message, rows, counts[rows])
            counts[rows] += 1
    passes = int(counts[counts > 0].median())
    victims = (counts >= passes).nonzero()[:, 0]
    return victims, _passes(view, pieces, victims, counts, passes)


def _add(pieces: dict[tuple[str, str, str, str], list[_Piece]], message: Message, rows: Tensor, times: Tensor) -> None:
    for name, z in message.tensors.items():
        if name in message.dataless:
            continue
        if len(z) != len(rows):
            raise InvalidInput(
                f"{name!r} arrived for {len(z)} rows in a step of {len(rows)}: whose they were is not known"
            )
        key = (message.sender, message.kind, message.edge, name)
        values = z * len(z) if message.kind == "gradient" else z
        pieces.setdefault(key, []).append(_Piece(rows, times, values))


def _passes(
    view: View, pieces: dict[tuple[str, str, str, str], list[_Piece]], victims: Tensor, counts: Tensor, passes: int
) -> list[View]:
    """Return the newest `passes` of what arrived for each of the `victims`, one view each."""
    place = torch.full((len(counts),), -1)
    place[victims] = torch.arange(len(victims))
    tensors: dict[tuple[str, str, str, str], Tensor] = {}
    for key, parts in pieces.items():
        found = parts[0].values.new_zeros(passes, len(victims), *parts[0].values.shape[1:])
        for rows, times, values in parts:
            number = times - counts[rows] + passes
            kept = (place[rows] >= 0) & (number >= 0)
            found[number[kept], place[rows[kept]]] = values[kept]
        tensors[key] = found / len(victims) if key[1] == "gradient" else found
    return [
        View(
            view.party,
            tuple(
                Message(sender, view.party, kind, edge, {name: z[number]}, Stamp("train", 0, number, 0))
                for (sender, kind, edge, name), z in tensors.items()
            ),
            view.segments,
        )
        for number in range(passes)
    ]


def recorded_view(engine: Engine, party: str, client: int, number: int | None = None) -> View:
    """Return copies of what `party` received of `client` in training, up to round `number` (default: all rounds)."""
    if party not in engine.link.recorders:
        raise InvalidInput(f"{party!r} was not recorded in training: record=Recording(parties=({party!r},))")
    check_client(engine, client)
    if number is not None:
        check_count("round", number)
    seen = engine.view(party).select(phase="train")
    kept = [m for m in seen.messages if m.stamp.replica == client and (number is None or m.stamp.epoch <= number)]
    return View(party, tuple(kept), copy.deepcopy(dict(seen.segments)))


class RecordedUpdates(AttackPhase):
    """Attacks on the weight update that a client sent in a round; scored by the rows it trained on in that round."""

    def check(self, request: AttackRequest) -> None:
        """Raise `InvalidInput` for a party that receives no weight updates of a single step."""
        if (local := self.grants.local(request.party, request.client)) is None:
            raise InvalidInput(
                f"{type(request.attack).__name__} needs {Needs.UPDATES}; only an aggregation server gets those, in a "
                "schedule that has one, such as 'splitfed_v1'"
            )
        self._check_updates(request.attack)
        recorded_view(self.engine, request.party, request.client)
        check_one_step(local)

    def case(self, request: AttackRequest) -> Case:
        """Return the updates that the party recorded up to the requested or newest round, and that round's rows."""
        self._check_updates(request.attack)
        party, client, number = request.party, request.client, request.number
        view = recorded_view(self.engine, party, client, number)
        method = self.grants.method
        gradients = method is not None and method.traits(self.engine.topology).sends_gradients
        kind = WEIGHT_GRADIENT if gradients else "weights"
        uploads = [m.stamp.epoch for m in view.messages if m.kind == kind and m.receiver == party]
        stream = derive(request.seed, "queries", request.name)
        knowledge = replace(self.grants.knowledge(party, client, stream), local=self.grants.local(party, client))
        rows = self.data.clients[client].train
        if uploads and number in (None, uploads[-1]):
            trained = torch.cat(self.grants.batches(client, uploads[-1])).unique()
            return Case(view, knowledge, rows.rows(trained), draws=(client, uploads[-1]))
        when = "" if number is None else f" in round {number}"
        absent = (
            f"client {client} sent {party!r} no weights{when} that were recorded: take a schedule or method by "
            "which that party averages weights (splitfed_v1, fedavg), with Recording(parties=(...))"
        )
        return Case(view, knowledge, rows, absent=absent)

    def score(self, request: AttackRequest, case: Case, outcome: Outcome) -> Scored:
        """Match the predictions to the true rows (their order is unknown to the attack), and score them."""

        def match_and_score(prediction: Tensor, classifier: bool) -> Scored:
            ordered, drawn = case.victims.rows(assignment(case.victims.x, prediction)), generator(request.seed, "grade")
            target, auxiliary = request.attack.target, self.data.auxiliary
            return Scored(*score_prediction(target, prediction, ordered, auxiliary, drawn, classifier=classifier))

        found = match_and_score(outcome.prediction, request.classifier)
        if len(auxiliary := self.data.auxiliary):
            # Matching favours the prediction, so the rows of somebody blind are matched in the same way.
            drawn = generator(request.seed, "blind")
            blind_rows = torch.randint(len(auxiliary), (len(case.victims),), generator=drawn)
            found.scores["random_pairing"] = match_and_score(auxiliary.x[blind_rows], False).scores["attack"]
        return found

    def _check_updates(self, attack: Attack) -> None:
        """Raise `InvalidInput` if clients do not send the plain weight update that `attack` reads."""
        if any(client.train.source.couples for client in self.data.clients):
            raise InvalidInput(
                f"{type(attack).__name__} is scored by the rows that a client trained on, and these were mixed with "
                "one another (mixup): there is no such row to find"
            )
        placement, method = self.engine.run_parties.placement, self.grants.method
        traits = None if method is None else method.traits(self.engine.topology)
        aggregation = None if traits is None else traits.aggregation
        if placement.secure is not None or (aggregation is not None and aggregation.sum is not None):
            raise InvalidInput(
                f"{type(attack).__name__} needs {Needs.UPDATES}; under a secure sum the aggregation server learns the "
                "sum of all clients' uploads alone"
            )
        if traits is None:
            return
        needs, who = f"{type(attack).__name__} needs {Needs.UPDATES};", type(method).__name__
        if traits.own_steps:
            raise InvalidInput(
                f"{needs} clients of {who} take steps of the method's own, and their update is no gradient"
            )
        if not (placement.averaged or traits.sends_gradients or traits.returns_weights):
            raise InvalidInput(f"{needs} clients of {who} send no weights to be held against those they were sent")
        if not (traits.plain_update or traits.soft_labels or traits.hidden_gradients):
            raise InvalidInput(f"{needs} what {who} may add to a client's gradient is in its update too")
