"""Rebuilds, from what an aggregation server has received, the model that it exchanges with a client, and public scores.

Weights go down and come back ("weights"), or changes of them ("update", in factors, after the weights went down once),
or a gradient ("weight gradient"): then the weights that come back are those that went down, moved along it by a
hundredth of their length. A segment can be run if all its weights are exchanged, and from raw rows if all before it
can. Where scores of classes cannot be reached so, what the last segment that can be run makes are features.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    """Return what can be run of what `view`, the messages of one client, exchanges; None where that is nothing.

    `everybody`: the messages of all clients.
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
    out = heads[0] if heads else learning[-1].outputs[-1]
    makers = topology.makers((out,))
    used = tuple(replace(s, original=None) for s in segments if s.name in makers)
    others = () if heads else _others_rounds(view, everybody, rounds[-1], device)
    return ExchangedModel(used, feed, out, bool(heads), rounds, others).copy()


def _others_rounds(
    view: View, everybody: View, like: ExchangedRound, device: torch.device
) -> tuple[tuple[ExchangedRound, ...], ...]:
    """Return the rounds of the other clients that exchange weights of the same names and shapes."""
    own, layout = view.messages[0].stamp.replica, {name: t.shape for name, t in like.after.items()}
    by_client = group_pairs((m.stamp.replica, m) for m in everybody.messages if m.stamp.replica != own)
    found = (exchanged_rounds(messages, device) for _, messages in sorted(by_client.items()))
    return tuple(r for r in found if r and {name: t.shape for name, t in r[-1].after.items()} == layout)


def exchanged_rounds(messages: Iterable[Message], device: torch.device) -> tuple[ExchangedRound, ...]:
    """Return what went down to a client and came back from it, round by round, of the rounds that are there whole."""
    found: dict[int, ExchangedRound] = {}
    sent: tuple[int, dict[str, Tensor]] | None = None
    cluster = ""
    for message in messages:
        tensors, number = {n: t.to(device) for n, t in message.tensors.items()}, message.stamp.epoch
        if message.sender == FED:
            if message.kind == "weights":
                sent = number, tensors
            elif message.kind == "update" and sent is not None:
                sent = number, add_update(sent[1], decompress_update(tensors, sent[1]))
            continue
        if message.kind == "cluster":
            cluster = str(int(next(iter(tensors.values()))))
        if sent is None or sent[0] != number or message.kind not in ("weights", "update", WEIGHT_GRADIENT):
            continue
        before = sent[1]
        if message.kind == "update":
            after = add_update(before, decompress_update(tensors, before))
        elif message.kind == WEIGHT_GRADIENT:
            after = move_along(before, tensors)
        else:
            if not tensors.keys() <= before.keys():
                # Several models went down, and the client said which one it took.
                before = {n: before[f"{cluster}/{n}"] for n in tensors if f"{cluster}/{n}" in before}
            # What comes beside a gradient are buffers.
            after = {**(found[number].after if number in found else {}), **tensors}
        if before.keys() & after.keys():
            found[number] = ExchangedRound(number, before, after)
    return tuple(found.values())


def public_scores(batch: PublicBatch, view: View, client: int, seed: int, device: torch.device) -> PublicScores | None:
    """Return what the clients made of public rows, in all messages of `view` to the aggregation server.

    None where `client` scored none, or nobody else did.
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
