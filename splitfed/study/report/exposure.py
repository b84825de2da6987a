"""Who sees what: for every role of a topology what it holds, what it receives, from whom, and what guards it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from markupsafe import Markup
from torch import Tensor

from splitfed.aggregation.lookup import kinds_of_sums
from splitfed.attacks.base import STEPS
from splitfed.core.equivalence import describe_proof
from splitfed.core.errors import InvalidInput
from splitfed.core.grouping import group_pairs, nest
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.core.traffic import Flow
from splitfed.costs.bytes import value_bytes
from splitfed.planning.held_rows import arrays_of
from splitfed.registry import EXTENSIONS, resolve
from splitfed.study.report.data import Json, Setting, Study, Summary
from splitfed.study.report.topology_data import draw_graph
from splitfed.study.results import RunResult


def role_holdings(
    topology: Topology,
    facts: TopologyFacts,
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
    received = group_pairs(
        [
            *_received_in_steps(topology, facts, labels, guards, back),
            *_received_between_steps(topology, flows, roles, guards),
        ]
    )
    return [
        {
            "role": role,
            "parties": sum(known == role for known in roles.values()),
            "segments": [
                {"name": s.name, "parameters": sum(p.numel() for p in s.module.parameters())}
                for s in topology.segments_of(role)
            ],
            **({"arrays": arrays} if (arrays := arrays_of(topology, role)) else {}),
            "data": [value for value, owner in topology.inputs.items() if owner == role],
            "labels": [head.value for head in topology.heads if head.labels == role],
            "losses": [head.value for head in topology.heads if head.role == role],
            "receives": received.get(role, []),
        }
        for role in dict.fromkeys([*topology.roles, *received])
    ]


def _received_in_steps(
    topology: Topology,
    facts: TopologyFacts,
    labels: Mapping[str, Tensor],
    guards: Mapping[str, str],
    back: Mapping[str, str],
) -> Iterator[tuple[str, Json]]:
    """Yield receiver, and what it gets in a step: releases and gradients at the cuts, and labels."""
    secure = topology.computation
    hidden = {} if secure is None else dict.fromkeys(secure.hidden, secure.name)
    told = {(one.edge, one.value): one.what for one in facts.told(topology)}
    for edge in topology.crossings:
        source, target = topology.role_of(edge.source), topology.role_of(edge.target)
        data = facts.data(edge.values)
        for value in edge.values:
            shape, size = list(facts.shapes[value]), value_bytes(facts, value)
            returns = value in data and edge.name not in topology.forward_only
            acting = guards.get(edge.name, "") if value in data else ""
            guard = hidden.get("activation", acting)
            entry = _entry("activation", value, shape, size, source, edge.name, guard, returns)
            yield target, {**entry, **({"tells": told[edge.name, value]} if (edge.name, value) in told else {})}
            if returns:
                guard = hidden.get("gradient", back.get(edge.name, ""))
                yield source, _entry("gradient", value, shape, size, target, edge.name, guard)
    for head in topology.heads:
        y = labels[head.value]
        for sender, receiver in pairwise(head.path):
            yield receiver, _entry("label", f"labels of {head.value}", list(y.shape[1:]), y[0].nbytes, sender)


def _received_between_steps(
    topology: Topology, flows: Mapping[Flow, tuple[int, int]], roles: Mapping[str, str], guards: Mapping[str, str]
) -> Iterator[tuple[str, Json]]:
    """Yield receiver, and what it gets between steps, as counted: segments, and what a federated method sends."""
    sums, overhead = kinds_of_sums()
    computations = map(resolve, EXTENSIONS["computations"].values())
    own = {kind: held for computation in computations for kind, held in computation.own_messages.items()}
    found = group_pairs(
        ((flow.kind, roles.get(flow.receiver, flow.receiver), roles.get(flow.sender, flow.sender)), nbytes // messages)
        for flow, (messages, nbytes) in flows.items()
        if flow.kind not in (*STEPS, *overhead) and flow.phase == "train"
    )
    for (kind, receiver, sender), sizes in found.items():
        owner, edge = sender if sender in topology.data_roles else receiver, f"{kind}->{receiver}"
        others = f"segments of {owner}" if kind in ("weights", *sums) else "for the federated method"
        value = own.get(kind, others)
        yield receiver, _entry(kind, value, None, max(sizes), sender, edge, guards.get(edge, ""))


def _entry(
    kind: str,
    value: str,
    shape: list[int] | None,
    size: int,
    source: str,
    edge: str = "",
    guard: str = "",
    returns: bool = False,
) -> Json:
    return {
        "kind": kind,
        "value": value,
        "shape": shape,
        "bytes": size,
        "from": source,
        "edge": edge,
        "returns": returns,
        "guard": guard,
    }


def topology_sections(study: Study, summary: Summary) -> list[Json]:
    """Return drawing and table for every place of the study; places that look the same stand together."""
    found: list[Json] = []
    for place in summary["places"]:
        settings = [s for s in study.settings if s.place == place]
        runs = [run for s in settings for run in s.runs]
        run = next((r for r in runs if not r.defense.parts), runs[0])
        new = {
            "labels": [place],
            "svg": _draw_topology(run),
            "parties": _party_rows(run, settings, summary),
            "cut_choice": run.topology.cut_choice,
            "proof": describe_proof(sum(s["parameters"] for p in run.parties for s in p["segments"])),
        }
        same = next((old for old in found if all(old[k] == new[k] for k in ("svg", "parties", "cut_choice"))), None)
        if same is None:
            found.append(new)
        else:
            same["labels"].append(place)
    return found


def _draw_topology(run: RunResult) -> Markup:
    """Draw the topology that the result describes; markup that a file brings along is never shown."""
    if run.topology_graph == {}:
        return Markup("<p>(no drawing: this run was made by a version that kept no data for one)</p>")
    try:
        return Markup(draw_graph(run.topology_graph))
    except InvalidInput as error:
        return Markup("<p>(no drawing: {})</p>").format(str(error))


def _party_rows(run: RunResult, settings: Sequence[Setting], summary: Summary) -> list[Json]:
    """Return the table's rows; a value is guarded by what stands there in some setting of the place."""
    guards = nest(
        (
            (party["role"], entry["kind"], entry["value"]),
            entry["guard"] if entry["guard"] in EXTENSIONS["computations"] else summary["names"][setting.defense],
            None,
        )
        for setting in settings
        for party in setting.runs[0].parties
        for entry in party["receives"]
        if entry["guard"]
    )
    return [
        {
            "name": party["role"],
            "count": party["parties"],
            "holds": [
                *(f"{s['name']} ({s['parameters']:,} parameters)" for s in party["segments"]),
                *party.get("arrays", ()),
                *(f"raw data {value}" for value in party["data"]),
                *(f"labels of {head}" for head in party["labels"]),
                *(f"the loss at {head}" for head in party["losses"]),
            ],
            "receives": [
                entry | {"guards": list(guards.get((party["role"], entry["kind"], entry["value"]), {}))}
                for entry in party["receives"]
            ],
        }
        for party in run.parties
    ]
