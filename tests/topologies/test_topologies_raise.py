"""Every mistake in a topology is one line that names what is wrong, before anything is computed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.optimizers import Optim
from splitfed.core.topology import Head, Segment, Topology
from splitfed.data.alignment.align import align
from splitfed.data.alignment.table import Table
from splitfed.topologies import Fusion, extended_vanilla, heterogeneous, multi_hop, multi_task, u_shaped, vertical
from tests.examples import SmallUNet, block, toy_data

TOP = nn.Linear(8, 10)


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), *(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 10))


def two(one: int = 4, other: int = 4) -> dict[str, nn.Module]:
    return {"a": nn.Linear(3, one), "b": nn.Linear(5, other)}


def wide() -> sf.Dataset:
    """Columns 0 to 2 for a, 3 to 7 for b."""
    data = toy_data(60)
    plain = sf.Dataset("wide", data.x.flatten(1)[:, :8].clone(), data.y, data.task)
    return plain.vertical({"a": range(3), "b": range(3, 8)})


def trained(topology: Any, data: sf.Dataset, clients: int = 1, **options: Any) -> Any:
    parts = data.clients(clients, auxiliary=0, victims=1, validation=0.0, test=0.1)
    return sf.train(topology, parts, rounds=1, **options)


def graph(*segments: tuple[str, str, str, str], heads: tuple[Head, ...] = (), **inputs: str) -> Topology:
    made = [Segment(n, role, nn.Linear(2, 2), tuple(r.split()), tuple(v.split())) for n, role, r, v in segments]
    return Topology("drawn", tuple(made), inputs, heads or (Head("out", "server", "client"),))


BOTTOM, SERVER = ("bottom", "client", "x", "z"), ("top", "server", "z", "out")

DRAWN: dict[str, tuple[Callable[[], object], str]] = {
    "a cycle": (
        lambda: graph(("bottom", "client", "x back", "z"), ("top", "server", "z", "back out"), x="client"),
        "segment 'bottom' reads 'back', which 'top' returns only later: segments must stand in the order they run, "
        "without a cycle",
    ),
    "a segment that reads itself": (
        lambda: graph(("bottom", "client", "x z", "z"), SERVER, x="client"),
        "segment 'bottom' reads 'z', which 'bottom' returns only later",
    ),
    "a segment that nobody feeds": (
        lambda: graph(BOTTOM, ("top", "server", "z w", "out"), x="client"),
        "unknown value read by segment 'top': 'w' (allowed: x, z)",
    ),
    "an input that nobody owns": (
        lambda: graph(BOTTOM, SERVER, y="client"),
        "unknown value read by segment 'bottom': 'x' (allowed: y)",
    ),
    "two holders of one output's labels": (
        lambda: graph(
            BOTTOM, SERVER, x="client", heads=(Head("out", "server", "client"), Head("out", "server", "registry"))
        ),
        "head on value 'out' appears twice, with labels of 'client' and of 'registry'; expected one head a value",
    ),
    "labels through an unknown role": (
        lambda: graph(BOTTOM, SERVER, x="client", heads=(Head("out", "server", "client", via=("hop",)),)),
        "unknown role that passes the labels of 'out' on: 'hop' (allowed: client, server)",
    ),
    "labels that pass a role twice": (
        lambda: graph(BOTTOM, SERVER, x="client", heads=(Head("out", "server", "client", via=("server",)),)),
        "the labels of 'out' go client -> server -> server; expected every role once",
    ),
    "one way where nothing crosses": (
        lambda: Topology(
            "drawn",
            vertical(two(), TOP, labels="a").segments,
            {"a": "a", "b": "b"},
            (Head("top_out", "server", "a"),),
            frozenset({"fusion->top"}),
        ),
        "unknown crossing in forward_only 'fusion->top'",
    ),
    "a role that is no name": (
        lambda: vertical({1: nn.Linear(3, 4)}, TOP, labels="server"),  # type: ignore[dict-item]
        "role 1 is not allowed: no slash, no '->'",
    ),
    "a top that is no module": (
        lambda: vertical(two(), "mlp", labels="a"),  # type: ignore[arg-type]
        "segment 'top' has a str as its module; expected an nn.Module",
    ),
    "no bottoms": (lambda: vertical({}, TOP, labels="a"), "bottoms must name at least one role with its module"),
    "a list of bottoms": (
        lambda: vertical([TOP], TOP, labels="a"),  # type: ignore[arg-type]
        "bottoms must name at least one role with its module",
    ),
    "an unknown fusion": (
        lambda: vertical(two(), TOP, labels="a", fusion="concta"),
        "unknown fusion 'concta'; did you mean 'concat'? (allowed: concat, mean, sum)",
    ),
    "a server with features": (
        lambda: vertical(two(), TOP, labels="a", server="b"),
        "server='b' is not allowed; that role is a feature party: a, b",
    ),
    "a relay with features": (
        lambda: extended_vanilla(two(), TOP, TOP, labels="a", relay="a"),
        "relay='a' is not allowed; that role is a feature party: a, b",
    ),
    "a relay that is the server": (
        lambda: extended_vanilla(two(), TOP, TOP, labels="a", relay="server"),
        "relay='server' is not allowed; it must be another party than the server",
    ),
    "one module at two parties": (
        lambda: vertical({"a": TOP, "b": TOP}, nn.Linear(20, 10), labels="a"),
        "parameter 'bottoms.a.weight' would be shared by roles 'a' and 'b'",
    ),
    "no tops": (lambda: multi_task(two(), {}, targets={}), "tops must name at least one server with its module"),
    "a server without a target": (
        lambda: multi_task(two(), {"one": TOP}, targets={}),
        "targets has no entry for server 'one'; expected a label set, or None for the main one",
    ),
    "a target of no server": (
        lambda: multi_task(two(), {"one": TOP}, targets={"one": None, "on": None}),
        "unknown server in targets 'on'; did you mean 'one'? (allowed: one)",
    ),
    "labels of no server": (
        lambda: multi_task(two(), {"one": TOP}, targets={"one": None}, labels={"two": "a"}),
        "unknown server in labels 'two'",
    ),
    "weights of no server": (
        lambda: multi_task(two(), {"one": TOP}, targets={"one": None}, weights={"two": 1.0}),
        "unknown server in weights 'two'",
    ),
    "a weight of zero": (
        lambda: multi_task(two(), {"one": TOP}, targets={"one": None}, weights={"one": 0.0}),
        "weight of the head on 'out_one'=0.0 is not allowed",
    ),
    "an odd number of cuts": (
        lambda: u_shaped(net(), ("1", "2", "3")),
        "cuts=('1', '2', '3') is not allowed; expected an even number of submodules, two a round trip",
    ),
    "no cut": (lambda: u_shaped(net(), ()), "cuts=() is not allowed; expected an even number"),
    "a cut for a list": (lambda: u_shaped(net(), "12"), "cuts='12' is not allowed; expected an even number"),
    "one cut for a hop": (
        lambda: multi_hop(net(), ("1",)),
        "cuts=('1',) is not allowed; expected a list of at least 2 submodules",
    ),
    "two cuts for a way back": (
        lambda: multi_hop(net(), ("1", "2"), labels="client"),
        "cuts=('1', '2') is not allowed; expected a list of at least 3 submodules",
    ),
    "too few roles": (
        lambda: multi_hop(net(), ("1", "2"), roles=("client", "server")),
        "roles=('client', 'server') is not allowed; 2 cuts need 3 different roles",
    ),
    "a role twice": (
        lambda: multi_hop(net(), ("1", "2"), roles=("client", "hop", "client")),
        "roles=('client', 'hop', 'client') is not allowed; 2 cuts need 3 different roles",
    ),
    "letters for roles": (
        lambda: multi_hop(net(), ("1", "2"), roles="abc"),
        "roles='abc' is not allowed; expected a list",
    ),
    "labels nowhere": (
        lambda: multi_hop(net(), ("1", "2"), labels="clinet"),
        "unknown labels of a multi-hop topology 'clinet'; did you mean 'client'?",
    ),
}


@pytest.mark.parametrize("case", DRAWN)
def test_a_builder_refuses_in_one_line(case: str) -> None:
    build, text = DRAWN[case]
    with pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        build()
    assert "\n" not in str(caught.value)


def client(bottom: nn.Module, top: nn.Module, **options: Any) -> Topology:
    return vertical({"client": bottom}, top, labels="client", **options)


DIFFERENT: dict[str, tuple[Callable[[], object], str]] = {
    "none": (lambda: heterogeneous([]), "heterogeneous needs at least one topology"),
    "another module": (
        lambda: heterogeneous([client(block(3, 8), nn.Linear(8, 10)), client(block(3, 8), nn.Linear(8, 10))]),
        "segment 'top' of client 1 is another module than the first client's",
    ),
    "another fusion": (
        lambda: heterogeneous([client(block(3, 8), TOP), client(block(3, 8), TOP, fusion="sum")]),
        "segment 'fusion' of client 1 is another module than the first client's",
    ),
    "another role": (
        lambda: heterogeneous([client(block(3, 8), TOP), client(block(3, 8), TOP, server="cloud")]),
        "client 1 has segments ['bottom_client at client', 'fusion at cloud', 'top at cloud']; the first client has "
        "['bottom_client at client', 'fusion at server', 'top at server']",
    ),
    "other inputs": (
        lambda: heterogeneous([vertical({"a": block(3, 8)}, TOP, labels="a"), vertical(two(), TOP, labels="a")]),
        "client 1 has inputs ['a of a', 'b of b']; the first client has ['a of a']",
    ),
    "another value": (
        lambda: heterogeneous([u_shaped(net(), ("1", "2")), u_shaped(net(), ("2", "3"))]),
        "client 1 has crossings ['bottom->middle with _2', 'middle->head with _3']; the first client has "
        "['bottom->middle with _1', 'middle->head with _2']",
    ),
    "other labels": (
        lambda: heterogeneous(
            [vertical(two(), TOP, labels="a"), vertical({"a": block(3, 4), "b": block(5, 4)}, TOP, labels="b")]
        ),
        'client 1 has heads ["top_out with labels by b -> server, the data\'s task, weight 1"]',
    ),
    "nothing shared": (
        lambda: heterogeneous([vertical(two(), TOP, labels="server")]),
        "topology 'vertical' has no segment that clients share",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_clients_that_do_not_meet_are_refused(case: str) -> None:
    build, text = DIFFERENT[case]
    with pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        build()
    assert "\n" not in str(caught.value)


def makes(width: int = 8, top: nn.Module | None = None) -> tuple[Topology, ...]:
    """Two clients of different make on one server, the second of which releases `width` numbers; rows of 64."""
    top = nn.Linear(8, 10) if top is None else top
    second = nn.Sequential(nn.Flatten(), block(64, 5), nn.Linear(5, width))
    bottoms = nn.Sequential(nn.Flatten(), nn.Linear(64, 8)), second
    return heterogeneous([client(bottom, top) for bottom in bottoms])


MISFITS: dict[str, tuple[dict[str, nn.Module], nn.Module, str, str]] = {
    "a sum of unlike widths": (
        two(4, 7),
        TOP,
        "sum",
        "segment 'fusion' cannot take what arrives on edges bottom_a->fusion, bottom_b->fusion (z_a (6, 4), "
        "z_b (6, 7)): fusion 'sum' needs releases of one shape; got [(4,), (7,)]",
    ),
    "a mean that would stretch": (
        two(4, 1),
        TOP,
        "mean",
        "fusion 'mean' needs releases of one shape; got [(4,), (1,)]",
    ),
    "a row of numbers beside a picture": (
        {"a": nn.Linear(3, 4), "b": nn.Unflatten(1, (1, 5))},
        TOP,
        "concat",
        "fusion 'concat' needs releases that differ in dimension 1 only; got [(4,), (1, 5)]",
    ),
    "a top of another width": (
        two(),
        nn.Linear(9, 10),
        "concat",
        "segment 'top' cannot take what arrives on edge fusion->top (fusion_out (6, 8)): TORCH(6x8 and 9x10)",
    ),
    "a bottom of another width": (
        {"a": nn.Linear(4, 4), "b": nn.Linear(5, 4)},
        TOP,
        "concat",
        "segment 'bottom_a' cannot take what arrives on input of 'bottom_a' (a (6, 3)): TORCH(6x3 and 4x4)",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_shapes_that_do_not_join_are_named_with_their_edges(case: str) -> None:
    bottoms, top, fusion, text = MISFITS[case]
    # What torch says before the two shapes differs between its releases.
    with pytest.raises(InvalidInput, match=re.escape(text).replace("TORCH", ".+")) as caught:
        pass_example(vertical(bottoms, top, labels="a", fusion=fusion), {"a": torch.rand(6, 3), "b": torch.rand(6, 5)})
    assert "\n" not in str(caught.value)


def test_pictures_may_differ_in_their_channels() -> None:
    joined = Fusion("concat")(torch.zeros(2, 1, 4, 4), torch.zeros(2, 3, 4, 4))
    assert joined.shape == (2, 4, 4, 4)


TRAINED: dict[str, tuple[Callable[[], object], str]] = {
    "undivided data": (
        lambda: trained(vertical(two(), TOP, labels="a"), wide().with_features({})),
        "inputs 'a' of a, 'b' of b: the data has no features, so every role would get each whole row",
    ),
    "an input that is no feature": (
        lambda: trained(vertical({"a": nn.Linear(3, 4), "c": nn.Linear(5, 4)}, TOP, labels="a"), wide()),
        "unknown feature for an input: 'c' (allowed: a, b)",
    ),
    "no input that is a feature": (
        lambda: trained(vertical({"c": nn.Linear(3, 4), "d": nn.Linear(5, 4)}, TOP, labels="c"), wide()),
        "unknown feature for an input: 'c' (allowed: a, b)",
    ),
    "an unknown label set": (
        lambda: trained(multi_task(two(), {"one": TOP}, targets={"one": "stay"}), wide()),
        "unknown label set of the head on 'out_one': 'stay' (allowed: None, the main one)",
    ),
    "an output of another width": (
        lambda: trained(vertical(two(), nn.Linear(8, 3), labels="a"), wide()),
        "the model returns (3,) a row at 'top_out'; classification here needs (10,)",
    ),
    "an optimizer for nobody": (
        lambda: trained(vertical(two(), TOP, labels="a"), wide(), optimizer={"sever": Optim()}),
        "unknown role in optimizer 'sever'; did you mean 'server'? (allowed: a, b, server)",
    ),
    "a schedule that hands segments on": (
        lambda: trained(makes(), toy_data(60), 2, schedule="sequential"),
        "schedule Sequential hands client segments on, which differ here",
    ),
    "a schedule that averages segments": (
        lambda: trained(makes(), toy_data(60), 2, schedule="splitfed_v1"),
        "schedule SplitFedV1 averages client segments, which differ here",
    ),
    "a client whose release does not fit": (
        lambda: trained(makes(5), toy_data(60), 2, schedule="splitfed_v3"),
        "segment 'top' cannot take what arrives on edge fusion->top (fusion_out (4, 5))",
    ),
    "a client whose release fits by accident": (
        lambda: trained(
            makes(5, nn.Sequential(nn.AdaptiveAvgPool1d(8), nn.Linear(8, 10))), toy_data(60), 2, schedule="blind"
        ),
        "client 1 sends 'z_client' as (5,) of torch.float32 a row, client 0 as (8,) of torch.float32: the segment that "
        "reads it serves them all",
    ),
    "a topology too many": (
        lambda: trained(makes(), toy_data(60), 3, schedule="splitfed_v3"),
        "2 topologies were given for 3 clients; expected one a client, or one",
    ),
    "tables of unlike length": (
        lambda: align({"a": Table(x=torch.zeros(4, 2)), "b": Table(x=torch.zeros(5, 2), y=torch.arange(5))}, "b"),
        "tables without keys differ in length: 'a' has 4, 'b' has 5 rows; give keys to align them by",
    ),
}


@pytest.mark.parametrize("case", TRAINED)
def test_a_run_is_refused_before_it_starts(case: str) -> None:
    call, text = TRAINED[case]
    with pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_what_is_refused_above_trains_when_it_is_put_right() -> None:
    """The same pieces without the mistake: so the mistake is what was refused."""
    assert trained(vertical(two(), TOP, labels="a"), wide()).bytes > 0
    # A feature that no input is named after stays with nobody.
    assert trained(vertical({"b": nn.Linear(5, 8)}, TOP, labels="registry"), wide()).bytes > 0
    assert trained(makes(), toy_data(60), 2, schedule="splitfed_v3").bytes > 0
    assert multi_hop(SmallUNet(), ("down1.0", "join1")).roles == ("client", "hop1", "server")
