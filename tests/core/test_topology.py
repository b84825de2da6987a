"""A topology refuses a graph that could not run, in one line that names what is wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from splitfed.core.errors import InvalidInput
from splitfed.core.tasks import classification, regression
from splitfed.core.topology import Edge, Head, Segment, Topology
from splitfed.topologies import vertical


def segment(name: str, role: str, reads: tuple[str, ...], returns: tuple[str, ...], **more: Any) -> Segment:
    return Segment(name, role, more.pop("module", nn.Linear(2, 2)), reads, returns, **more)


BOTTOM = segment("bottom", "client", ("x",), ("h",))
TOP = segment("top", "server", ("h",), ("out",))
HEAD = Head("out", "server", "client")
GOOD = Topology("good", (BOTTOM, TOP), {"x": "client"}, (HEAD,))
TIED = nn.Linear(2, 2)

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no segment": ({"segments": ()}, "topology 'good' has no segment"),
    "no head": ({"heads": ()}, "topology 'good' has no head: nothing would be learnt"),
    "segment twice": (
        {"segments": (BOTTOM, replace(TOP, name="bottom"))},
        "segment 'bottom' appears twice; every segment needs a name of its own",
    ),
    "value twice": ({"segments": (BOTTOM, replace(TOP, outputs=("h",)))}, "value 'h' appears twice"),
    "value named like an input": ({"segments": (BOTTOM, replace(TOP, outputs=("x",)))}, "value 'x' appears twice"),
    "reads nothing": ({"segments": (replace(BOTTOM, inputs=()), TOP)}, "segment 'bottom' must read and return"),
    "order": (
        {"segments": (TOP, BOTTOM)},
        "segment 'top' reads 'h', which 'bottom' returns only later: segments must stand in the order they run",
    ),
    "cycle": (
        {"segments": (replace(BOTTOM, inputs=("x", "out")), TOP)},
        "segment 'bottom' reads 'out', which 'top' returns only later",
    ),
    "unknown value": (
        {"segments": (BOTTOM, replace(TOP, inputs=("hh",)))},
        "unknown value read by segment 'top': 'hh'; did you mean 'h'? (allowed: h, x)",
    ),
    "raw data": (
        {"segments": (BOTTOM, replace(TOP, inputs=("h", "x")))},
        "segment 'top' at role 'server' reads 'x', raw data of role 'client': raw data never crosses; cut where "
        "'client' alone reads it, or allow it where 'server' may see it: sent_inputs=('x',), with rows as example",
    ),
    "unread value": (
        {"segments": (replace(BOTTOM, outputs=("h", "spare")), TOP)},
        "value 'spare' is read by no segment and no head",
    ),
    "unread input": ({"inputs": {"x": "client", "z": "client"}}, "value 'z' is read by no segment and no head"),
    "head on nothing": (
        {"heads": (HEAD, replace(HEAD, value="outt"))},
        "unknown value at a head: 'outt'; did you mean 'out'",
    ),
    "head on an input": ({"heads": (HEAD, replace(HEAD, value="x"))}, "unknown value at a head: 'x'"),
    "head twice": ({"heads": (HEAD, HEAD)}, "head on value 'out' appears twice"),
    "head elsewhere": (
        {"heads": (replace(HEAD, role="client"),)},
        "the head on 'out' computes its loss at role 'client', but role 'server' makes that value",
    ),
    "weight zero": ({"heads": (replace(HEAD, weight=0.0),)}, "weight of the head on 'out'=0.0 is not allowed"),
    "weight negative": ({"heads": (replace(HEAD, weight=-1.0),)}, "expected a number in (0, inf)"),
    "tied weights": (
        {"segments": (replace(BOTTOM, module=TIED), replace(TOP, module=nn.Sequential(TIED)))},
        "parameter 'bottom.weight' would be shared by roles 'client' and 'server': weights tied across a cut "
        "cannot stay equal without crossing it; cut so that one of them holds all that read 'bottom.weight'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case: str) -> None:
    changes, text = REFUSED[case]
    with pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        replace(GOOD, **changes)
    assert "\n" not in str(caught.value)


def test_roles_edges_and_crossings() -> None:
    middle = segment("middle", "hop", ("h",), ("m",))
    local = segment("local", "client", ("h", "m"), ("n",))
    top = segment("top", "server", ("n", "h"), ("out",))
    topology = Topology("t", (BOTTOM, middle, local, top), {"x": "client"}, (HEAD,))
    assert topology.roles == ("client", "hop", "server")
    assert topology.data_roles == ("client",)
    names = ["bottom->middle", "bottom->local", "middle->local", "bottom->top", "local->top"]
    assert [e.name for e in topology.edges] == names
    assert [e.name for e in topology.crossings] == [n for n in names if n != "bottom->local"]
    assert topology.edge("bottom->top") == Edge("bottom", "top", ("h",))
    assert [s.name for s in topology.segments_of("client")] == ["bottom", "local"]
    assert [s.name for s in topology.upstream("hop")] == ["bottom"]
    assert [s.name for s in topology.upstream("server")] == ["bottom", "middle", "local"]


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(InvalidInput, match="unknown segment 'botom'; did you mean 'bottom'"):
        GOOD.segment("botom")
    with pytest.raises(InvalidInput, match="unknown edge 'bottom->to'; did you mean 'bottom->top'"):
        GOOD.edge("bottom->to")


def test_a_task_of_its_own_stays_with_its_head() -> None:
    own = regression(2)
    heads = (replace(HEAD, value="h", role="client", task=own), HEAD)
    given = classification(2)
    assert [h.task for h in replace(GOOD, heads=heads).with_task(given).heads] == [own, given]


def test_prefixes_name_the_parameters_of_segments_made_by_hand() -> None:
    topology = replace(GOOD, segments=(replace(BOTTOM, prefix="low."), replace(TOP, prefix="high.")))
    state = topology.state_dict()
    assert list(state) == ["low.weight", "low.bias", "high.weight", "high.bias"]
    wanted = {name: torch.full_like(t, float(i)) for i, (name, t) in enumerate(state.items())}
    fresh = {s.name: nn.Linear(2, 2) for s in topology.segments}
    topology.load_state_dict(wanted, fresh)
    assert bool((fresh["top"].weight == 2.0).all())
    assert bool((fresh["bottom"].bias == 1.0).all())


def test_a_state_that_does_not_fit_is_refused_before_anything_is_loaded() -> None:
    topology = replace(GOOD, segments=(replace(BOTTOM, prefix="low."), replace(TOP, prefix="high.")))
    state = {name: torch.zeros_like(t) for name, t in topology.state_dict().items()}
    before = {name: t.clone() for name, t in topology.state_dict().items()}
    with pytest.raises(InvalidInput, match=re.escape("unknown parameter 'high.wieght'; did you mean 'high.weight'")):
        topology.load_state_dict({**state, "high.wieght": torch.zeros(2, 2)})
    with pytest.raises(InvalidInput, match=re.escape("the state has no 'high.bias' (shape (2,))")):
        topology.load_state_dict({n: t for n, t in state.items() if n != "high.bias"})
    with pytest.raises(InvalidInput, match=re.escape("'high.weight' has shape (3, 2); this topology needs (2, 2)")):
        topology.load_state_dict({**state, "high.weight": torch.zeros(3, 2)})
    assert all(torch.equal(before[n], t) for n, t in topology.state_dict().items())


def test_two_tensors_under_one_name_are_refused() -> None:
    """The whole model's state would silently lose one of them."""
    assert list(GOOD.state_dict()) == ["bottom.weight", "bottom.bias", "top.weight", "top.bias"]
    with pytest.raises(InvalidInput, match="segments 'bottom' and 'top' both have a 'weight'; give one of them a pref"):
        replace(GOOD, segments=(replace(BOTTOM, prefix=""), replace(TOP, prefix="")))


def test_a_topology_tells_of_a_party_that_holds_labels_alone() -> None:
    """A misspelt holder of labels is a party of its own, which nothing else would show."""
    bottoms = {"bank": nn.Linear(2, 3), "shop": nn.Linear(2, 3)}
    texts = {holder: repr(vertical(bottoms, nn.Linear(6, 2), labels=holder)) for holder in ("bank", "server", "bnak")}
    assert {name: "a party with labels only" in text for name, text in texts.items()} == {
        "bank": False,
        "server": False,
        "bnak": True,
    }
