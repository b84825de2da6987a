"""Drawing of a topology as SVG, with a lane for every role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from itertools import cycle, pairwise

from splitfed.core.errors import check_names
from splitfed.core.topology import Edge, Head, Segment, Topology
from splitfed.drawing.layout import DrawingLayout, Node, Point, Wire, lane_order, plan, text_width

# Tints on which dark text is legible, which differ in lightness as well as in hue.
TINTS = ("#e3eef8", "#fdf0d9", "#e0f2ea", "#f8e6ef", "#f1efe6", "#e9e6f5", "#ddf1f3", "#f9e5df")
STRONG = ("#0072b2", "#b06a00", "#00795a", "#a34d7d", "#6b6440", "#5a4fa0", "#0e6f7c", "#a0401f")
COLOURS = {"inside": "#6b7280", "crossing": "#c2410c", "one way": "#c2410c", "label": "#7c3aed"}
LOOKS = {
    "inside": 'stroke-width="1.4"',
    "crossing": 'stroke-width="2.4"',
    "one way": 'stroke-width="2.4" stroke-dasharray="11 4"',
    "label": 'stroke-width="1.8" stroke-dasharray="5 3"',
}
SAID = {
    "crossing": "between parties: activation forward, gradient back",
    "one way": "between parties, forward only: no gradient back",
    "label": "labels cross",
    "inside": "stays within a party",
}
INK, LEFT, LEGEND = "#1f2933", 118.0, 34.0
SHIELD = "M0 -6 L5 -4 V0 C5 4 2.5 6 0 7 C-2.5 6 -5 4 -5 0 V-4 Z"


def to_svg(topology: Topology, defended: Mapping[str, str] | None = None) -> str:
    """Return a picture of `topology` as one self-contained SVG element.

    It has a lane for each role, segments from left to right as they run, messages between parties in colour, and labels
    at their holders. `defended`: name of an edge -> text such as "noise(0.5)", marked by a shield. Raises
    `InvalidInput` for an edge that is not in the topology.
    """
    layout = plan(topology, *_nodes_and_wires(topology, _check_defended(topology, defended)), LEFT)
    width, height = max(layout.width, 580.0), layout.height + LEGEND
    title = f"Topology {topology.name}: {len(topology.segments)} segments at {', '.join(topology.roles)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" font-family="system-ui, Helvetica, Arial, sans-serif" '
        f'font-size="11.5" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        *_lanes(layout),
        *(_wire(wire, points) for wire, points in zip(layout.wires, layout.paths, strict=True)),
        *(_box(node, layout, topology) for node in layout.nodes),
        *(_wire_labels(wire, points) for wire, points in zip(layout.wires, layout.paths, strict=True)),
        _legend(layout),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part)


def _check_defended(topology: Topology, defended: Mapping[str, str] | None) -> Mapping[str, str]:
    check_names("crossing", [e.name for e in topology.crossings], *(defended or {}))
    return defended or {}


@dataclass
class _Sheet:
    """The boxes placed so far: no two of a role are in the same column."""

    nodes: dict[str, Node] = field(default_factory=dict)
    taken: set[tuple[str, int]] = field(default_factory=set)

    def put(self, key: str, kind: str, role: str, column: int, *text: str, below: str = "") -> None:
        """Place a box in the first free column from `column` on, or `below` another one."""
        while not below and (role, column) in self.taken:
            column += 1
        self.taken.add((role, column))
        self.nodes[key] = Node(key, kind, role, column, text, below)


def _nodes_and_wires(topology: Topology, defended: Mapping[str, str]) -> tuple[tuple[Node, ...], tuple[Wire, ...]]:
    """Return all boxes with their columns, and all wires between them."""
    sheet, wires = _Sheet(), list[Wire]()
    for value, role in topology.inputs.items():
        sheet.put(f"input {value}", "input", role, 0, f"raw data {_shorten(value)}")
    for segment in topology.segments:
        sources = [e.source for e in topology.edges if e.target == segment.name]
        raw = [f"input {v}" for v in segment.inputs if v in topology.inputs]
        before = [sheet.nodes[k].column for k in (*(f"segment {s}" for s in sources), *raw)]
        sheet.put(f"segment {segment.name}", "segment", segment.role, max(before) + 1, *_segment_text(segment))
        wires += [Wire(key, f"segment {segment.name}", "inside") for key in raw]
    wires += [_edge_wire(topology, edge, defended.get(edge.name, "")) for edge in topology.edges]
    maker = {v: s.name for s in topology.segments for v in s.outputs}
    for head in topology.heads:
        wires += _put_head(sheet, head, f"segment {maker[head.value]}")
    return tuple(sheet.nodes.values()), tuple(wires)


def _put_head(sheet: _Sheet, head: Head, made: str) -> list[Wire]:
    """Place the loss of `head` after the box `made`, and its labels with parties that relay them; return the wires."""
    loss, label, stops = f"loss {head.value}", f"label {head.value}", head.path[:-1]
    column = max(sheet.nodes[made].column + 1, len(stops))
    # Relayed labels take one column a party, so that every hop is a separate wire.
    while any((role, column - i) in sheet.taken for i, role in enumerate(reversed(head.path))):
        column += 1
    sheet.put(loss, "loss", head.role, column, "loss" if head.weight == 1 else f"loss x {head.weight:g}")
    labels = f"labels {_shorten(head.target)}" if head.target else "labels"
    if not stops:
        sheet.put(label, "label", head.labels, column, labels, below=loss)
        return [Wire(made, loss, "inside"), Wire(label, loss, "inside")]
    keys = [label, *(f"pass {head.value} {role}" for role in stops[1:])]
    for i, (role, key) in enumerate(zip(stops, keys, strict=True)):
        sheet.put(key, "pass" if i else "label", role, column - len(stops) + i, "sees and passes on" if i else labels)
    words = [(labels, "sent every step"), *((labels, "passed on") for _ in stops[1:])]
    hops = pairwise([*keys, loss])
    return [Wire(made, loss, "inside"), *(Wire(a, b, "label", w) for (a, b), w in zip(hops, words, strict=True))]


def _segment_text(segment: Segment) -> tuple[str, str]:
    count = sum(p.numel() for p in segment.module.parameters())
    return _shorten(segment.name, 26), f"{count:,} parameters" if count else "no parameters"


def _edge_wire(topology: Topology, edge: Edge, guard: str) -> Wire:
    crosses = topology.role_of(edge.source) != topology.role_of(edge.target)
    values = _shorten(edge.values[0], 16) + (f" +{len(edge.values) - 1}" if len(edge.values) > 1 else "")
    returns = edge.name not in topology.forward_only
    text = (f"activation {values}", "⇄ gradient" if returns else "no gradient back") if crosses else (values,)
    kind = ("crossing" if returns else "one way") if crosses else "inside"
    return Wire(
        f"segment {edge.source}",
        f"segment {edge.target}",
        kind,
        text,
        _shorten(guard, 30),
        f"{edge.name}: {', '.join(edge.values)} {guard}".strip(),
    )


def _lanes(layout: DrawingLayout) -> list[str]:
    parts = []
    for (role, top, height), tint, strong in zip(layout.lanes, cycle(TINTS), cycle(STRONG), strict=False):
        parts += [
            f'<rect x="0" y="{top:.1f}" width="{layout.width:.1f}" height="{height:.1f}" rx="8" fill="{tint}"/>',
            f'<rect x="0" y="{top:.1f}" width="6" height="{height:.1f}" rx="3" fill="{strong}"/>',
            f'<text x="18" y="{top + height / 2 + 4:.1f}" font-size="13.5" font-weight="600" fill="{strong}">'
            f"{escape(_shorten(role, 13))}<title>{escape(role)}</title></text>",
        ]
    return parts


def _box(node: Node, layout: DrawingLayout, topology: Topology) -> str:
    box = layout.boxes[node.key]
    strong = STRONG[lane_order(topology).index(node.role) % len(STRONG)]
    look = {
        "segment": f'rx="7" fill="#ffffff" stroke="{strong}" stroke-width="1.6"',
        "input": f'rx="{box.height / 2}" fill="#ffffff" stroke="{strong}" stroke-dasharray="3 2.5"',
        "loss": f'rx="{box.height / 2}" fill="{INK}"',
    }.get(node.kind, f'rx="{box.height / 2}" fill="#ffffff" stroke="{COLOURS["label"]}" stroke-dasharray="3 2.5"')
    left, top = box.x - box.width / 2, box.y - box.height / 2
    rows = [f'<rect x="{left:.1f}" y="{top:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" {look}/>']
    for number, line in enumerate(node.text):
        y = box.y + 4 + 15 * (number - (len(node.text) - 1) / 2)
        style = ' font-weight="600" font-size="13"' if number == 0 and node.kind == "segment" else ""
        style += ' fill="#ffffff"' if node.kind == "loss" else ' fill="#52606d"' if number else ""
        rows.append(f'<text x="{box.x:.1f}" y="{y:.1f}" text-anchor="middle"{style}>{escape(line)}</text>')
    return "\n".join(rows)


def _wire(wire: Wire, points: tuple[Point, ...]) -> str:
    colour, look = COLOURS[wire.kind], LOOKS[wire.kind]
    back = [_arrow(points[1], points[0], colour)] if wire.kind == "crossing" else []
    heads = [_arrow(points[-2], points[-1], colour), *back]
    title = f"<title>{escape(wire.title)}</title>" if wire.title else ""
    return f'<path d="{_rounded_path(points)}" fill="none" stroke="{colour}" {look}>{title}</path>\n' + "\n".join(heads)


def _rounded_path(points: tuple[Point, ...], radius: float = 9.0) -> str:
    """Return a path through `points` whose corners are rounded."""
    text = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        near, far = _point_towards(corner, before, radius), _point_towards(corner, after, radius)
        text += f" L{near[0]:.1f} {near[1]:.1f} Q{corner[0]:.1f} {corner[1]:.1f} {far[0]:.1f} {far[1]:.1f}"
    return f"{text} L{points[-1][0]:.1f} {points[-1][1]:.1f}"


def _point_towards(start: Point, end: Point, distance: float) -> Point:
    """Return the point `distance` from `start` on the way to `end`, at most half way."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = abs(dx) + abs(dy)  # wires run along the axes
    share = min(distance, length / 2) / length if length else 0.0
    return start[0] + dx * share, start[1] + dy * share


def _arrow(before: Point, tip: Point, colour: str) -> str:
    """Return an arrow head at `tip`, for a line that comes from `before` along an axis."""
    base = _point_towards(tip, before, 8.0)
    dx, dy = (tip[0] - base[0]) / 2, (tip[1] - base[1]) / 2
    a, b = (base[0] - dy, base[1] + dx), (base[0] + dy, base[1] - dx)
    return f'<path d="M{tip[0]:.1f} {tip[1]:.1f} L{a[0]:.1f} {a[1]:.1f} L{b[0]:.1f} {b[1]:.1f} Z" fill="{colour}"/>'


def _wire_labels(wire: Wire, points: tuple[Point, ...]) -> str:
    """Return the text on a wire: above and below its first horizontal stretch, with a shield where defended."""
    if not wire.text:
        return ""
    colour = COLOURS[wire.kind]
    level = next(i for i, (a, b) in enumerate(pairwise(points)) if a[1] == b[1])
    (x, y), (end, _) = points[level], points[level + 1]
    x = (x + end) / 2 if level else x + 12
    halo = 'stroke="#ffffff" stroke-opacity="0.75" stroke-width="3" paint-order="stroke"'
    anchor = 'text-anchor="middle" ' if level else ""
    rows = [
        f'<text x="{x:.1f}" y="{y + dy:.1f}" {anchor}fill="{colour}" {halo}>{escape(line)}</text>'
        for line, dy in zip(wire.text, (-6.0, 15.0), strict=False)
    ]
    if wire.guard:
        rows += [
            f'<path transform="translate({x + 6:.1f} {y + 26:.1f})" d="{SHIELD}" fill="#00795a"/>',
            f'<text x="{x + 16:.1f}" y="{y + 30:.1f}" font-weight="600" fill="#00795a" {halo}>'
            f"{escape(wire.guard)}</text>",
        ]
    return "\n".join(rows)


def _legend(layout: DrawingLayout) -> str:
    """Return a sample of every kind of wire in the picture, with its meaning."""
    x, y, parts = 8.0, layout.height + 22, []
    for kind in [kind for kind in SAID if any(w.kind == kind for w in layout.wires)]:
        parts += [
            _wire(Wire("", "", kind), ((x, y - 4), (x + 34, y - 4))),
            f'<text x="{x + 41:.0f}" y="{y:.0f}" fill="#52606d">{SAID[kind]}</text>',
        ]
        x += 41 + text_width([SAID[kind]]) + 14
    return "\n".join(parts)


def _shorten(text: str, most: int = 20) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
