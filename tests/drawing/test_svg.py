"""Drawings: valid XML that shows every part; no boxes overlap and no wire passes behind a box."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from torch import nn

from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Head, Segment, Topology
from splitfed.drawing.layout import DrawingLayout, Point, plan
from splitfed.drawing.svg import LEFT, _nodes_and_wires, to_svg
from splitfed.topologies import extended_vanilla, multi_hop, multi_task, u_shaped, vertical

SVG = "{http://www.w3.org/2000/svg}"


def segment(name: str, role: str, inputs: str, outputs: str) -> Segment:
    return Segment(name, role, nn.Linear(4, 4), tuple(inputs.split()), tuple(outputs.split()))


def hops(count: int) -> Topology:
    names = ["x", *(f"z{i}" for i in range(1, count)), "out"]
    roles = ["client", *(f"hop{i}" for i in range(1, count))]
    segments = [segment(f"s{i}", roles[i], names[i], names[i + 1]) for i in range(count)]
    return Topology("hops", tuple(segments), {"x": "client"}, (Head("out", roles[-1], "client"),))


VANILLA = Topology(
    "vanilla",
    (segment("bottom", "client", "x", "z"), segment("top", "server", "z", "out")),
    {"x": "client"},
    (Head("out", "server", "client"),),
)
U_SHAPED = Topology(
    "u_shaped",
    (segment("a", "client", "x", "p skip"), segment("b", "server", "p", "q"), segment("c", "client", "q skip", "out")),
    {"x": "client"},
    (Head("out", "client", "client"),),
)
VERTICAL = Topology(
    "vertical",
    (
        segment("scans", "radiology", "ct", "z1"),
        segment("tests", "pathology", "blood", "z2"),
        segment("fusion", "server", "z1 z2", "f"),
        segment("answer", "radiology", "f", "out"),
    ),
    {"ct": "radiology", "blood": "pathology"},
    (Head("out", "radiology", "radiology"),),
)
MULTITASK = Topology(
    "multitask",
    (segment("bottom", "client", "x", "z"), segment("age", "left", "z", "a"), segment("sex", "right", "z", "b")),
    {"x": "client"},
    (Head("a", "left", "client", weight=0.5), Head("b", "right", "client")),
)
SKIPS = Topology(
    "skips",
    (
        segment("a", "client", "x", "p q r"),
        segment("b", "client", "p", "s"),
        segment("c", "server", "q s", "t"),
        segment("d", "server", "t", "u v"),
        segment("e", "server", "u", "w"),
        segment("f", "server", "v w r", "out"),
    ),
    {"x": "client"},
    (Head("out", "server", "third party"),),
)
ODD = Topology(
    "odd & <bad>",
    (segment('a "quoted" <b>', "client & co", "x&y", "z<1>"), segment("top#1", "server", "z<1>", "out")),
    {"x&y": "client & co"},
    (Head("out", "server", "client & co"),),
)
PARTIES = ("radiology", "pathology", "genetics", "billing", "pharmacy", "ward")


def parts(count: int) -> dict[str, nn.Module]:
    return {party: nn.Linear(4, 4) for party in PARTIES[:count]}


def chain(*cuts: str, labels: str = "relayed") -> Topology:
    return multi_hop(nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))), cuts, labels=labels)


SIX = vertical(parts(6), nn.Linear(4, 4), labels="registry")
ONE_WAY = replace(
    vertical(parts(3), nn.Linear(4, 4), labels="billing"), forward_only=frozenset({"bottom_genetics->fusion"})
)
TASKS = multi_task(
    parts(2),
    {server: nn.Linear(4, 4) for server in ("risk", "stay", "cost")},
    targets={"risk": None, "stay": "length of stay", "cost": "cost"},
    labels={"risk": "pathology", "cost": "billing"},
    weights={"stay": 0.5},
)
BUILT = [
    u_shaped(nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))), ("0", "1", "2", "3")),
    chain("0", "1", "2"),
    chain("0", "1", "2", "3", "4"),
    replace(chain("0", "1", "2"), name="multi_hop one way", forward_only=frozenset({"hop1->hop2"})),
    replace(chain("0", "1", "2", "3", labels="client"), name="multi_hop back"),
    replace(chain("0", "1", labels="server"), name="multi_hop server"),
    SIX,
    replace(ONE_WAY, name="one way"),
    replace(vertical(parts(3), nn.Linear(4, 4), labels="pathology", head=nn.Linear(4, 4)), name="vertical head"),
    extended_vanilla(parts(4), nn.Linear(4, 4), nn.Linear(4, 4), labels="radiology"),
    TASKS,
    # More parties on the labels' way than columns before the loss.
    Topology(
        "detour",
        (segment("a", "one", "x", "p"), segment("b", "two", "x2", "q"), segment("c", "server", "p q", "out")),
        {"x": "one", "x2": "two"},
        (Head("out", "server", "registry", via=("one", "two")),),
    ),
]
ALL = [VANILLA, U_SHAPED, VERTICAL, MULTITASK, SKIPS, ODD, hops(6), *BUILT]


def planned(topology: Topology) -> DrawingLayout:
    return plan(topology, *_nodes_and_wires(topology, {}), LEFT)


@pytest.mark.parametrize("topology", ALL, ids=lambda t: t.name)
def test_svg_is_valid_and_shows_every_part(topology: Topology) -> None:
    root = ElementTree.fromstring(to_svg(topology))
    texts = ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]
    for part in topology.segments:
        assert part.name in texts
    assert texts.count("⇄ gradient") == len(topology.crossings) - len(topology.forward_only)
    assert texts.count("no gradient back") == len(topology.forward_only)
    assert texts.count("sent every step") == sum(h.labels != h.role for h in topology.heads)
    assert texts.count("passed on") == texts.count("sees and passes on") == sum(len(h.via) for h in topology.heads)
    sizes = [sum(p.numel() for p in part.module.parameters()) for part in topology.segments]
    assert max(sizes) >= 20
    written = sorted(text for text in texts if text.endswith(" parameters"))
    assert written == sorted(f"{size or 'no'} parameters" for size in sizes)
    named = [e for e in root.iter(f"{SVG}title") if e.text in topology.roles]
    assert len(named) == len(topology.roles)
    assert not [e for e in root.iter() for attribute in e.attrib if "href" in attribute]


@pytest.mark.parametrize("topology", ALL, ids=lambda t: t.name)
def test_boxes_stand_apart_inside_the_lane_of_their_role(topology: Topology) -> None:
    found = planned(topology)
    lanes = {role: (top, top + height) for role, top, height in found.lanes}
    for node in found.nodes:
        box, (top, bottom) = found.boxes[node.key], lanes[node.role]
        assert top < box.y - box.height / 2
        assert box.y + box.height / 2 < bottom
        assert box.x - box.width / 2 > LEFT
        assert box.x + box.width / 2 < found.width
    for one, other in combinations(found.boxes.values(), 2):
        apart = abs(one.x - other.x) >= (one.width + other.width) / 2
        assert apart or abs(one.y - other.y) >= (one.height + other.height) / 2


@pytest.mark.parametrize("topology", ALL, ids=lambda t: t.name)
def test_wires_run_along_the_axes_and_behind_no_box(topology: Topology) -> None:
    found = planned(topology)
    for wire, points in zip(found.wires, found.paths, strict=True):
        for start, end in pairwise(points):
            assert start[0] == end[0] or start[1] == end[1], wire
            for key, box in found.boxes.items():
                inside = (
                    min(start[0], end[0]) < box.x + box.width / 2 - 0.01
                    and max(start[0], end[0]) > box.x - box.width / 2 + 0.01
                    and min(start[1], end[1]) < box.y + box.height / 2 - 0.01
                    and max(start[1], end[1]) > box.y - box.height / 2 + 0.01
                )
                assert not inside, (wire, key)


def test_columns_follow_the_order_of_running() -> None:
    nodes, _ = _nodes_and_wires(VANILLA, {})
    columns = {node.key: (node.role, node.column) for node in nodes}
    assert columns == {
        "input x": ("client", 0),
        "segment bottom": ("client", 1),
        "segment top": ("server", 2),
        "loss out": ("server", 3),
        "label out": ("client", 2),
    }


def test_a_skip_that_jumps_a_segment_goes_over_it() -> None:
    found = planned(SKIPS)
    number = next(i for i, w in enumerate(found.wires) if (w.source, w.target) == ("segment d", "segment f"))
    between = found.boxes["segment e"]
    highest = min(y for _, y in found.paths[number])
    assert highest < between.y - between.height / 2


def test_only_defended_edges_bear_a_shield() -> None:
    plain, defended = to_svg(U_SHAPED), to_svg(U_SHAPED, {"a->b": "noise(0.5) & <more>"})
    assert "noise" not in plain
    texts = ["".join(e.itertext()) for e in ElementTree.fromstring(defended).iter(f"{SVG}text")]
    assert texts.count("noise(0.5) & <more>") == 1
    assert defended.count("translate(") == 1


def test_what_crosses_is_drawn_unlike_what_stays() -> None:
    paths = [e.attrib for e in ElementTree.fromstring(to_svg(U_SHAPED)).iter(f"{SVG}path") if e.get("fill") == "none"]
    strokes = sorted((p["stroke"], p["stroke-width"]) for p in paths)
    # x->a, a->c, c->loss and labels->loss stay; a->b and b->c cross. The legend shows one more of each.
    assert strokes == [("#6b7280", "1.4")] * (4 + 1) + [("#c2410c", "2.4")] * (2 + 1)


def arrows(svg: str, colour: str) -> int:
    paths = [e.attrib for e in ElementTree.fromstring(svg).iter(f"{SVG}path")]
    return sum(path.get("fill") == colour for path in paths)


def test_a_gradient_that_does_not_come_back_has_no_arrow_head() -> None:
    """Three crossings: two with two heads and one with one; the legend shows one of each kind."""
    svg = to_svg(ONE_WAY)
    assert arrows(svg, "#c2410c") == 2 * 2 + 1 + 2 + 1
    texts = ["".join(e.itertext()) for e in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert texts.count("between parties, forward only: no gradient back") == 1
    assert "between parties, forward only: no gradient back" not in to_svg(SIX)
    assert arrows(to_svg(SIX), "#c2410c") == 6 * 2 + 2
    beside = texts.index("activation z_genetics")
    assert texts[beside + 1] == "no gradient back"


def test_labels_that_are_passed_on_go_by_every_hop() -> None:
    found = planned(BUILT[1])
    labels = [(w.source, w.target) for w in found.wires if w.kind == "label"]
    assert labels == [("label _5", "pass _5 hop1"), ("pass _5 hop1", "pass _5 hop2"), ("pass _5 hop2", "loss _5")]
    columns = {n.key: (n.role, n.column) for n in found.nodes if n.kind in ("label", "pass", "loss")}
    assert columns == {
        "label _5": ("client", 2),
        "pass _5 hop1": ("hop1", 3),
        "pass _5 hop2": ("hop2", 4),
        "loss _5": ("server", 5),
    }
    texts = ["".join(e.itertext()) for e in ElementTree.fromstring(to_svg(BUILT[1])).iter(f"{SVG}text")]
    assert texts.count("sees and passes on") == 2
    assert list(pairwise(texts)).count(("labels", "passed on")) == 2


def test_a_label_set_is_named_where_its_labels_are() -> None:
    texts = ["".join(e.itertext()) for e in ElementTree.fromstring(to_svg(TASKS)).iter(f"{SVG}text")]
    assert texts.count("labels length of stay") == 1
    # In its box, and on the wire that takes it to the server.
    assert texts.count("labels cost") == 2
    assert texts.count("loss x 0.5") == 1


def test_lanes_of_eight_parties_are_told_apart() -> None:
    rects = [e.attrib for e in ElementTree.fromstring(to_svg(SIX)).iter(f"{SVG}rect") if e.get("x") == "0"]
    assert len({r["fill"] for r in rects if r.get("rx") == "8"}) == 8


def test_no_two_lines_lie_on_each_other() -> None:
    """Wires may cross, but where two run along the same axis they keep apart, save where they start or end together."""
    for topology in BUILT:
        found = planned(topology)
        pieces = [
            (wire, piece) for wire, points in zip(found.wires, found.paths, strict=True) for piece in pairwise(points)
        ]
        for (one, a), (other, b) in combinations(pieces, 2):
            if one is not other:
                assert not collinear(a, b), (topology.name, one.source, one.target, other.source, other.target)


def collinear(one: tuple[Point, Point], other: tuple[Point, Point]) -> bool:
    """Tell whether two pieces share more than a point."""
    for along, across in ((0, 1), (1, 0)):
        if one[0][across] == one[1][across] == other[0][across] == other[1][across]:
            low = max(min(p[along] for p in one), min(p[along] for p in other))
            high = min(max(p[along] for p in one), max(p[along] for p in other))
            return high > low
    return False


def test_an_edge_that_does_not_cross_cannot_be_defended() -> None:
    with pytest.raises(InvalidInput, match=r"unknown crossing 'a->c'; did you mean .*\(allowed: a->b, b->c\)"):
        to_svg(U_SHAPED, {"a->c": "noise"})
