"""Layout of the picture of a topology: a lane for each role, a column for each step, and wires around boxes.

Columns follow the order in which segments run; between two columns is a gutter, wide enough for the text on the wires
that leave there. A wire turns only in gutters and runs only along free stretches of a lane or along the corridor at a
lane's top, so it never passes behind a box.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from splitfed.core.topology import Topology

CHARACTER = 6.4  # a rough mean width in pixels, for the 11.5 pixel type of the picture
PORT_IN, PORT_OUT, PORT_SMALL, TRACK = 16.0, 46.0, 8.0, 9.0
HEIGHTS = {"segment": 54.0, "input": 30.0, "label": 30.0, "pass": 30.0, "loss": 36.0}
STRIDE = 18.0  # from where a wire turns to the box it reaches: an arrow head, and the rounding of the corner
STACK = 44.0  # from the middle of a lane to its lower row: labels that stay at a loss or are passed on

Point = tuple[float, float]


@dataclass(frozen=True)
class Node:
    """A box: `kind` is segment, input, loss, label or pass (labels being relayed); `text` its lines.

    `below`: for labels that stay at a loss, the key of its box.
    """

    key: str
    kind: str
    role: str
    column: int
    text: tuple[str, ...]
    below: str = ""

    @property
    def low(self) -> bool:
        """True if it is in the lower row of its lane, out of the way of wires that leave the segments."""
        return bool(self.below) or self.kind == "pass"


@dataclass(frozen=True)
class Wire:
    """A line between two nodes: `kind` is inside, crossing, one way or label; `guard` is the defense on it."""

    source: str
    target: str
    kind: str
    text: tuple[str, ...] = ()
    guard: str = ""
    title: str = ""


@dataclass(frozen=True)
class Box:
    """Position of a node: its centre, its width and its height."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class DrawingLayout:
    """The finished layout: boxes by node key, points by wire, lanes as (role, top, height), and the total size."""

    nodes: tuple[Node, ...]
    wires: tuple[Wire, ...]
    boxes: Mapping[str, Box]
    paths: tuple[tuple[Point, ...], ...]
    lanes: tuple[tuple[str, float, float], ...]
    width: float
    height: float


def lane_order(topology: Topology) -> tuple[str, ...]:
    """Return the roles from the top lane to the bottom one: owners of data, then as the segments run."""
    named = [*topology.inputs.values(), *(s.role for s in topology.segments), *(h.labels for h in topology.heads)]
    return tuple(dict.fromkeys(named))


def text_width(lines: Sequence[str]) -> float:
    """Return the approximate width of the longest of `lines`, in pixels."""
    return CHARACTER * max((len(line) for line in lines), default=0)


def _node_width(node: Node) -> float:
    """Return the approximate width of the text of `node`, in pixels; the name of a segment is larger and bold."""
    name, *rest = node.text
    return max(text_width([name]) * (1.22 if node.kind == "segment" else 1.0), text_width(rest))


def plan(topology: Topology, nodes: Sequence[Node], wires: Sequence[Wire], left: float) -> DrawingLayout:
    """Return the layout of `nodes` and `wires` of `topology`, with `left` pixels free for the names of the lanes."""
    by_key = {n.key: n for n in nodes}
    lanes = {role: i for i, role in enumerate(lane_order(topology))}
    routes = [_route(w, by_key, nodes) for w in wires]
    ports = _ports(by_key, wires, routes, lanes)
    heights = _heights(nodes, wires, ports)
    tracks = _tracks(by_key, wires, routes)
    columns, width = _columns(nodes, wires, by_key, tracks, left)
    lane_boxes, height = _lanes(nodes, heights, wires, routes, by_key, lanes)
    boxes = {}
    for node in nodes:
        centre, span = columns[node.column]
        wide = max(_node_width(node) + 26, span if node.kind == "segment" else 0)
        middle = lane_boxes[node.role][1] + (STACK if node.low else 0)
        boxes[node.key] = Box(centre, middle, wide, heights[node.key])
    corridors: Counter[str] = Counter()
    paths = []
    for number, (wire, route) in enumerate(zip(wires, routes, strict=True)):
        start, end = boxes[wire.source], boxes[wire.target]
        out_y, in_y = start.y + ports[number][0], end.y + ports[number][1]
        role = by_key[wire.target].role
        level = lane_boxes[role][0] + 24 + 16 * corridors[role]
        corridors[role] += route in ("over", "corridor")
        turns = [_gutter_end(columns, gutter) - STRIDE - TRACK * track for gutter, track in tracks[number]]
        paths.append(_wire_corners(route, start, end, out_y, in_y, level, turns))
    shown = tuple((role, lane_boxes[role][0], lane_boxes[role][2]) for role in lanes)
    return DrawingLayout(tuple(nodes), tuple(wires), boxes, tuple(paths), shown, width, height)


def _route(wire: Wire, by_key: Mapping[str, Node], nodes: Sequence[Node]) -> str:
    """Return the route of a wire: straight, up, over, early (turns where it leaves), late, or along a corridor."""
    source, target = by_key[wire.source], by_key[wire.target]
    if source.below:
        return "up"

    def free(role: str) -> bool:
        between = range(source.column + 1, target.column)
        return not any(n.role == role and n.column in between and not n.below for n in nodes)

    if source.role == target.role:
        return "straight" if free(source.role) else "over"
    if free(target.role):
        return "early"
    return "late" if free(source.role) else "corridor"


def _ports(
    by_key: Mapping[str, Node], wires: Sequence[Wire], routes: Sequence[str], lanes: Mapping[str, int]
) -> list[tuple[float, float]]:
    """Return for each wire the offsets, above (-) or below (+) the centre, at which it leaves and arrives."""
    leaving: dict[int, float] = {}
    arriving: dict[int, float] = {}
    level = [i for i, route in enumerate(routes) if route not in ("over", "up")]
    for key, node in by_key.items():

        def drop(other: str, role: str = node.role) -> int:
            return lanes[by_key[other].role] - lanes[role]

        there = [(drop(wires[i].target), by_key[wires[i].target].column, i) for i in level if wires[i].source == key]
        here = [(drop(wires[i].source), by_key[wires[i].source].column, i) for i in level if wires[i].target == key]
        # A wire from nearby arrives above one from further left, so that the two do not cross.
        here = [(lane, column if lane > 0 else -column, i) for lane, column, i in here]
        wide = node.kind == "segment"
        leaving.update(_stack_ports(sorted(there), PORT_OUT if wide else PORT_SMALL))
        arriving.update(_stack_ports(sorted(here), PORT_IN if wide else PORT_SMALL))
    return [(leaving.get(i, 0.0), arriving.get(i, 0.0)) for i in range(len(wires))]


def _stack_ports(sides: Sequence[tuple[int, int, int]], gap: float) -> dict[int, float]:
    """Return the offsets of wires, stacked from the highest lane to the lowest; one in its own lane is centred."""
    middle = next((i for i, (lane, _, _) in enumerate(sides) if lane == 0), (len(sides) - 1) / 2)
    return {number: (i - middle) * gap for i, (_, _, number) in enumerate(sides)}


def _heights(nodes: Sequence[Node], wires: Sequence[Wire], ports: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the height of every box: fixed by its kind, for a segment growing with its wires."""
    heights = {n.key: HEIGHTS[n.kind] for n in nodes}
    for wire, (leaving, arriving) in zip(wires, ports, strict=True):
        for key, offset in ((wire.source, leaving), (wire.target, arriving)):
            if key.startswith("segment"):
                heights[key] = max(heights[key], 2 * abs(offset) + 20)
    return heights


def _tracks(by_key: Mapping[str, Node], wires: Sequence[Wire], routes: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Return for each wire the gutters in which it turns, with its index among the wires that turn there."""
    used: Counter[int] = Counter()
    tracks = []
    for wire, route in zip(wires, routes, strict=True):
        first, last = by_key[wire.source].column, by_key[wire.target].column - 1
        gutters = {"early": [first], "late": [last], "corridor": [first, last]}.get(route, [])
        tracks.append([(gutter, used[gutter]) for gutter in gutters])
        used.update(gutters)
    return tracks


def _columns(
    nodes: Sequence[Node],
    wires: Sequence[Wire],
    by_key: Mapping[str, Node],
    tracks: Sequence[Sequence[tuple[int, int]]],
    left: float,
) -> tuple[list[tuple[float, float]], float]:
    """Return the centre and width of every column, and the total width."""
    columns, x = [], left + 18
    for column in range(max(n.column for n in nodes) + 1):
        wide = max((_node_width(n) + 32 for n in nodes if n.column == column), default=40.0)
        columns.append((x + wide / 2, wide))
        words = [text_width([*w.text, "...." + w.guard]) for w in wires if w.text and by_key[w.source].column == column]
        turning = sum(gutter == column for found in tracks for gutter, _ in found)
        x += wide + max([0.0, *words]) + TRACK * turning + 32 + STRIDE
    return columns, x - 26


def _lanes(
    nodes: Sequence[Node],
    heights: Mapping[str, float],
    wires: Sequence[Wire],
    routes: Sequence[str],
    by_key: Mapping[str, Node],
    lanes: Mapping[str, int],
) -> tuple[dict[str, tuple[float, float, float]], float]:
    """Return the top, the centre line and the height of every role's lane, and the total height."""
    lane_boxes, y = {}, 0.0
    for role in lanes:
        over = sum(
            r in ("over", "corridor") and by_key[w.target].role == role for w, r in zip(wires, routes, strict=True)
        )
        own = [n for n in nodes if n.role == role]
        half = max((heights[n.key] / 2 for n in own if not n.low), default=27.0)
        below = max([half, *(STACK + heights[n.key] / 2 for n in own if n.low), 34.0])
        top = 22 + 16 * over + half
        lane_boxes[role] = (y, y + top, top + below + 22)
        y += lane_boxes[role][2] + 8
    return lane_boxes, y - 8


def _gutter_end(columns: Sequence[tuple[float, float]], gutter: int) -> float:
    """Return the right end of a gutter, where the next column starts."""
    middle, wide = columns[gutter + 1]
    return middle - wide / 2


def _wire_corners(
    route: str, start: Box, end: Box, out_y: float, in_y: float, level: float, turns: Sequence[float]
) -> tuple[Point, ...]:
    """Return the corners of a wire, from the edge of one box to the edge of the other."""
    right, left = start.x + start.width / 2, end.x - end.width / 2
    if route == "up":
        return ((start.x, start.y - start.height / 2), (end.x, end.y + end.height / 2))
    if route == "over":
        rise, fall = right - 14, left + 14
        tops = start.y - start.height / 2, end.y - end.height / 2
        return ((rise, tops[0]), (rise, level), (fall, level), (fall, tops[1]))
    # A wire that turns once goes straight to its height; one that turns twice crosses on the corridor.
    levels = [out_y, *([level] * (len(turns) - 1)), in_y]
    corners = [point for x, (y, to) in zip(turns, pairwise(levels), strict=False) for point in ((x, y), (x, to))]
    return ((right, out_y), *corners, (left, in_y))
