"""Who sees what: for every role of a topology what it holds, what it receives, from whom, and what guards it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from torch import Tensor

from splitfed.attacks.base import STEPS
from splitfed.core.probe import Facts
from splitfed.core.topology import Topology
from splitfed.core.traffic import Flow
from splitfed.costs.bytes import value_bytes

Json = dict[str, Any]
SUMMING = ("keys", "shares", "survivors", "unmasking")
"""What a secure sum sends besides what is summed."""


def role_holdings(
    topology: Topology,
    facts: Facts,
    labels: Mapping[str, Tensor],
    guards: Mapping[str, str],
    back: Mapping[str, str],
    flows: Mapping[Flow, tuple[int, int]],
    roles: Mapping[str, str],
) -> list[Json]:
    """Return an entry a role: its segments, data and labels, and everything that reaches it in training.

    `labels`: head -> labels (rows, ...), for their size; `guards`: edge -> what acts on its releases, `back`: on its
    gradients; `flows`: messages and bytes counted, from which weights that moved are told; `roles`: party -> role.
    Bytes of a received value are those of a row, of weights those of a message.
    """
    received = _received_in_steps(topology, facts, labels, guards, back)
    for role, entries in _received_between_steps(topology, flows, roles, guards).items():
        received.setdefault(role, []).extend(entries)
    return [
        {
            "role": role,
            "parties": sum(known == role for known in roles.values()),
            "segments": [
                {"name": s.name, "parameters": sum(p.numel() for p in s.module.parameters())}
                for s in topology.segments_of(role)
            ],
            "data": [value for value, owner in topology.inputs.items() if owner == role],
            "labels": [head.value for head in topology.heads if head.labels == role],
            "losses": [head.value for head in topology.heads if head.role == role],
            "receives": received.get(role, []),
        }
        for role in dict.fromkeys([*topology.roles, *received])
    ]


def _received_in_steps(
    topology: Topology,
    facts: Facts,
    labels: Mapping[str, Tensor],
    guards: Mapping[str, str],
    back: Mapping[str, str],
) -> dict[str, list[Json]]:
    found: dict[str, list[Json]] = {role: [] for role in topology.roles}
    for edge in topology.crossings:
        source, target = topology.role_of(edge.source), topology.role_of(edge.target)
        returns = edge.name not in topology.forward_only
        for value in edge.values:
            shape, size = list(facts.shapes[value]), value_bytes(facts, value)
            there = _entry("activation", value, shape, size, source, edge.name)
            found[target].append({**there, "returns": returns, "guard": guards.get(edge.name, "")})
            if returns:
                here = _entry("gradient", value, shape, size, target, edge.name)
                found[source].append({**here, "guard": back.get(edge.name, "")})
    for head in topology.heads:
        y = labels[head.value]
        for sender, receiver in pairwise(head.path):
            size = y.element_size() * y[0].numel()
            found[receiver].append(_entry("label", f"labels of {head.value}", list(y.shape[1:]), size, sender))
    return found


def _received_between_steps(
    topology: Topology, flows: Mapping[Flow, tuple[int, int]], roles: Mapping[str, str], guards: Mapping[str, str]
) -> dict[str, list[Json]]:
    """Return receiver -> what it gets between steps, as it was counted: segments, and what a federated method sends."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for flow, counted in flows.items():
        if flow.kind not in (*STEPS, *SUMMING) and flow.phase == "train":
            ends = roles.get(flow.receiver, flow.receiver), roles.get(flow.sender, flow.sender)
            found.setdefault((flow.kind, *ends), []).append(counted[1] // counted[0])
    received: dict[str, list[Json]] = {}
    for (kind, receiver, sender), sizes in found.items():
        owner, edge = sender if sender in topology.data_roles else receiver, f"{kind}->{receiver}"
        value = f"segments of {owner}" if kind in ("weights", "masked") else "for the federated method"
        entry = _entry(kind, value, None, max(sizes), sender, edge)
        received.setdefault(receiver, []).append({**entry, "guard": guards.get(edge, "")})
    return received


def _entry(kind: str, value: str, shape: list[int] | None, size: int, source: str, edge: str = "") -> Json:
    return {
        "kind": kind,
        "value": value,
        "shape": shape,
        "bytes": size,
        "from": source,
        "edge": edge,
        "returns": False,
        "guard": "",
    }
