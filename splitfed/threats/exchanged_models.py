"""Rebuilds the model that a client exchanges with an aggregation server, and the scores that clients publish.

Weights are sent down and come back ("weights"), or changes of them ("update", in factors, after one full download), or
a gradient ("weight gradient"): the weights that come back are then taken as those sent down, moved along the gradient
by a hundredth of their norm. A segment can be run if all its weights are exchanged, and from raw rows if all segments
before it can. If class scores cannot be reached this way, the output of the last runnable segment serves as features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from splitfed.attacks.uploads.exchanged_model import ExchangedModel, ExchangedRound, PublicScores, move_along
from splitfed.core.grouping import group_pairs
from splitfed.core.messages import WEIGHT_GRADIENT, Message, View
from splitfed.core.topology import Segment, Topology, weights
from splitfed.engines.base import FED
from splitfed.federated.low_rank import add_update, decompress_update
from splitfed.federated.public_rows import PublicBatch
from splitfed.threats.imitated_defenses import Feed


def exchanged_model(
    topology: Topology, feed: Feed, view: View, everybody: View, device: torch.device
) -> ExchangedModel | None:
    """Return the runnable part of the model that one client exchanges with the server; None if there is none.

    `view`: the messages of this client; `everybody`: the messages of all clients.
    """
    rounds = exchanged_rounds(view.messages, device)
    if not rounds:
        return None
    named, made, segments = set(rounds[-1].after), set(topology.inputs), list[Segment]()
    for segment in topology.segments:
        sent = all(f"{segment.name}/{name}" in named for name in weights(segment.module))
        if sent and made.issuperset(segment.inputs):
            segments.append(segment)
            made.update(segment.outputs)
    learning = [s for s in segments if weights(s.module)]
    heads = [head.value for head in topology.heads if head.value in made]
    heads = [value for value in heads if any(s.name in topology.makers((value,)) for s in learning)]
    if not learning:
        return None
    out = heads[0] if heads else _features(topology, segments, learning)
    makers = topology.makers((out,))
    used = tuple(replace(s, original=None) for s in segments if s.name in makers)
    others = () if heads else _others_rounds(view, everybody, rounds[-1], device)
    return ExchangedModel(used, feed, out, bool(heads), rounds, others).copy()


def _features(topology: Topology, segments: Sequence[Segment], learning: Sequence[Segment]) -> str:
    """Return the last value that comes from exchanged weights; in a group, the one that most parties contribute to."""
    last, names = learning[-1].outputs[-1], {s.name for s in learning}
    return max((last, *(s.outputs[-1] for s in segments)), key=lambda value: len(names & {*topology.makers((value,))}))


def _others_rounds(
    view: View, everybody: View, like: ExchangedRound, device: torch.device
) -> tuple[tuple[ExchangedRound, ...], ...]:
    """Return the rounds of the other clients that exchange weights of the same names and shapes."""
    own, layout = view.messages[0].stamp.replica, {name: t.shape for name, t in like.after.items()}
    by_client = group_pairs((m.stamp.replica, m) for m in everybody.messages if m.stamp.replica != own)
    found = (exchanged_rounds(messages, device) for _, messages in sorted(by_client.items()))
    return tuple(r for r in found if r and {name: t.shape for name, t in r[-1].after.items()} == layout)


def exchanged_rounds(messages: Iterable[Message], device: torch.device) -> tuple[ExchangedRound, ...]:
    """Return the weights sent to a client and returned by it, for every round that was recorded completely."""
    found: dict[int, ExchangedRound] = {}
    sent: tuple[int, dict[str, Tensor]] | None = None
    cluster = ""
    for message in messages:
        tensors, number = {n: t.to(device) for n, t in message.tensors.items()}, message.stamp.epoch
        if message.sender == FED:
            if message.kind == "weights":
                # The parties of a group are each sent what they hold.
                sent = number, {**(sent[1] if sent is not None and sent[0] == number else {}), **tensors}
            elif message.kind == "update" and sent is not None:
                sent = number, add_update(sent[1], decompress_update(tensors, sent[1]))
            continue
        if message.kind == "cluster":
            cluster = str(int(next(iter(tensors.values()))))
        if sent is None or sent[0] != number or message.kind not in ("weights", "update", WEIGHT_GRADIENT):
            continue
        before, earlier = sent[1], found[number].after if number in found else {}
        if message.kind == "update":
            after = add_update(before, decompress_update(tensors, before))
        elif message.kind == WEIGHT_GRADIENT:
            after = move_along({**before, **earlier}, tensors)
        else:
            if not tensors.keys() <= before.keys():
                # Several models went down, and the client said which one it took.
                before = {n: before[f"{cluster}/{n}"] for n in tensors if f"{cluster}/{n}" in before}
            # What comes beside a gradient are buffers.
            after = {**earlier, **tensors}
        if before.keys() & after.keys():
            found[number] = ExchangedRound(number, before, after)
    return tuple(found.values())


def public_scores(batch: PublicBatch, view: View, client: int, seed: int, device: torch.device) -> PublicScores | None:
    """Return the scores of public rows that `client`, and the others on average, sent to the aggregation server.

    `view`: all messages to that server. None if `client` sent no scores, or no other client did.
    """
    shown, told = dict[int, Message](), dict[int, dict[tuple[int, int], Tensor]]()
    for message in view.messages:
        if message.receiver != FED:
            continue
        if message.kind == "data":
            shown[message.stamp.replica] = message
        elif message.kind == "soft labels":
            replica = message.stamp.replica
            counts = {k: len(m.tensors["y"]) for k, m in sorted(shown.items()) if m.stamp.epoch <= message.stamp.epoch}
            places = [(k, row) for k, rows in counts.items() for row in range(rows)]
            ((name, scores),) = message.tensors.items()
            known = scores.double() if name == "probabilities" else scores.double().softmax(1)
            chosen = batch(seed, replica, counts, message.stamp.epoch).tolist()
            told.setdefault(replica, {}).update({places[i]: row for i, row in zip(chosen, known, strict=True)})
    own, others = told.pop(client, {}), dict[tuple[int, int], list[Tensor]]()
    for found in told.values():
        for place, row in found.items():
            others.setdefault(place, []).append(row)
    if not own or not others:
        return None
    rows = {k: m.tensors["x"] for k, m in shown.items()}
    return PublicScores(
        torch.stack([rows[k][i] for k, i in own]).to(device),
        torch.stack(list(own.values())).to(device),
        torch.stack([rows[k][i] for k, i in others]).to(device),
        torch.stack([torch.stack(part).mean(0) for part in others.values()]).to(device),
    )
