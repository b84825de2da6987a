"""A report is safe to open: a policy lets nothing run or load but its own, and nothing in a result becomes markup."""

from __future__ import annotations

import copy
import io
import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from splitfed.cli import main
from splitfed.core import digests
from splitfed.core.errors import InvalidInput
from splitfed.drawing.figure import as_svg, canvas
from splitfed.drawing.inline_svg import PRESENTATION, inline_svg
from splitfed.drawing.svg import to_svg
from splitfed.study.config.toml import dumps
from splitfed.study.report.data import escape_invisible, make_visible, read_study
from splitfed.study.report.document import shade_percent, stack_bars, write_report
from splitfed.study.report.exposure import _draw_topology
from splitfed.study.report.figures.images import read_pairs
from splitfed.study.report.topology_data import draw_graph, graph_of
from splitfed.study.results import RunResult
from tests.drawing.test_svg import ONE_WAY, SIX, TASKS, U_SHAPED, VANILLA
from tests.study.report_page import Page
from tests.study.test_report import parsed, put, result

pytestmark = pytest.mark.drawn

PAYLOADS = (
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "</style><script>alert(1)</script>",
    "</title></svg><img src=x onerror=alert(1)>",
    "\"><svg/onload=alert(1)>'",
    'x" style="position:fixed" onmouseover="alert(1)',
    "]]><!--<script>alert(1)</script>",
    "{{ 7 * 7 }}{% raw %}",
    "$\\frac{1$ $\\broken{$",
    "&lt;b&gt;&#60;script&#62;",
    'url(#x) id="a" href="#b"',
    "a\u202eb\u2066c\x00d\x1be\ud800\ufffe",
)


TOGETHER = "</script>\"><svg/onload=alert(1)>'{{7*7}}$x$\u202e\x00"


def tainted(value: Any, payload: str, kept: tuple[str, ...]) -> Any:
    """Return `value` with `payload` behind every text in it, but below the keys `kept`, by which it is found."""
    if isinstance(value, dict):
        return {key: item if key in kept else tainted(item, payload, kept) for key, item in value.items()}
    if isinstance(value, list):
        return [tainted(item, payload, kept) for item in value]
    return value + payload if isinstance(value, str) else value


@pytest.mark.parametrize(
    "payload",
    [TOGETHER, *(pytest.param(text, marks=pytest.mark.exhaustive) for text in PAYLOADS)],
    ids=range(len(PAYLOADS) + 1),
)
def test_every_text_of_a_result_stays_text(tmp_path: Path, payload: str) -> None:
    folder = tmp_path / "study"
    found = result("none", 0, 0.0, 0.9, {"psnr": 20.0})
    put(folder, found, (3, 8, 8), 0)
    found = digests.read(folder / "runs" / found["id"] / "result.json", "")
    bad = tainted(found, payload, ("id", "file", "sha256", "topology_graph")) | {"topology_svg": payload}
    (folder / "runs" / found["id"] / "result.json").write_bytes(digests.json_with_digest(bad))
    failed = folder / "runs" / re.sub(r"[/\x00\ud800]", "", payload)[:80]
    failed.mkdir()
    (failed / "result.json").write_bytes(digests.json_with_digest({"id": failed.name, "failed": payload}))
    name = payload.encode(errors="replace").decode()
    (folder / "config.toml").write_bytes(digests.toml_with_digest(dumps({"study": {"name": name}})))
    (folder / "environment.json").write_bytes(
        digests.json_with_digest({payload: payload, "packages": {payload: payload}})
    )
    text = write_report(folder).read_text("utf-8")
    parsed(text)
    page = Page(text)
    assert not re.search("[\u202e\u2066\x00\x1b\ufffe]", text)
    svg = {"svg", "g", "path", "defs", "use", "text", "title", "rect", "clippath", "tspan"}
    html = {"html", "head", "meta", "title", "style", "script", "body", "main", "header", "section", "footer", "nav"}
    html |= {"h1", "h2", "h3", "p", "b", "a", "ul", "li", "code", "pre", "br", "wbr", "span", "img", "figure"}
    assert {tag for tag, _ in page.tags} <= svg | html | {"table", "thead", "tbody", "tr", "th", "td", "div"}
    # In the headline, at the failed run, in tables, in figures and in the environment.
    assert unescape(re.sub(r"<(wbr|/?b)>", "", text)).count(escape_invisible(payload)) > 10
    assert "alert(1)" not in "".join(page.inside["script"])


def test_a_name_in_a_figure_is_no_formula_and_no_reference() -> None:
    texts = ("$x^2$", 'id="a" url(#b) style="x" font: 9px y', "</text><script>")
    with canvas(1) as (figure, (axis,)):
        axis.plot([1, 10], [1, 1000], label=texts[0])
        axis.set(xlabel=texts[1], title=texts[2], yscale="log")
        figure.legend()
        svg = as_svg(figure, "name")
    found = unescape("".join(re.findall(r"<text[^>]*>.*?</text>", svg, re.DOTALL)))
    assert all(text in found for text in texts)
    assert "mathdefault" not in svg
    assert "<script" not in svg
    assert 'style="' not in svg.replace(unescape("style=&quot;x&quot;"), "").replace('style="x"', "")


def test_all_that_matplotlib_styles_has_an_attribute() -> None:
    with canvas(2) as (figure, (left, right)):
        left.errorbar([1, 2], [3, 4], yerr=[1, 1], alpha=0.5, linestyle="--", marker="o", label="x")
        left.fill_between([1, 2], [1, 2], [3, 4], alpha=0.2, hatch="/")
        left.text(1, 1, "x", weight="bold", style="italic", alpha=0.3, rotation=30)
        right.imshow([[1, 2], [3, 4]])
        right.bar([0, 1], [1, 2])
        figure.legend()
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg")
    found = {
        d.split(":")[0].strip() for style in re.findall(r'style="([^"]*)"', buffer.getvalue()) for d in style.split(";")
    }
    assert found - {"", "font"} <= PRESENTATION
    assert len(found) > 10


def test_a_figure_keeps_its_looks_without_styles() -> None:
    svg = inline_svg(
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"><metadata>m</metadata>'
        '<defs><style type="text/css">*{stroke-linejoin: round}</style><path id="m1" style="stroke: #66727f"/></defs>'
        '<g id="a" clip-path="url(#p)"><use xlink:href="#m1" style="fill: #fff; stroke-width: .8"/>'
        '<text style="font: bold 10.5px \'DejaVu Sans\', serif; text-anchor: middle">url(#p) id="a"</text>'
        "<text style=\"font-size: 9px; font-family: 'DejaVu Sans'; cursor: help\">x</text></g></svg>",
        "n",
    )
    font = "system-ui, Helvetica, Arial, sans-serif"
    assert svg == (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" stroke-linejoin="round" '
        'stroke-linecap="butt"><defs><path id="n-m1" stroke="#66727f" /></defs>'
        '<g id="n-a" clip-path="url(#n-p)"><use xlink:href="#n-m1" fill="#fff" stroke-width=".8" />'
        f'<text font-weight="bold" font-size="10.5px" font-family="{font}" text-anchor="middle">url(#p) id="a"</text>'
        f'<text font-size="9px" font-family="{font}">x</text></g></svg>'
    )


@pytest.mark.parametrize("topology", [VANILLA, U_SHAPED, SIX, ONE_WAY, TASKS], ids=lambda t: t.name)
def test_a_picture_drawn_from_data_is_the_picture_of_the_topology(topology: Any) -> None:
    defended = {edge.name: f"<{edge.name}>" for edge in topology.crossings}
    stored = json.loads(json.dumps(graph_of(topology, defended)))
    assert draw_graph(stored) == to_svg(topology, defended)


@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
def test_names_in_a_graph_stay_text(payload: str) -> None:
    """Every name in the graph holds the payload, without the few signs that no name may hold."""
    name = re.sub(r"[/\\\x00-\x1f\ud800\ufffe]|->", "", payload)
    stored = tainted(graph_of(VANILLA, {}), name, ())
    stored["inputs"] = {key + name: role for key, role in stored["inputs"].items()}
    stored["defended"] = {f"bottom{name}->top{name}": escape_invisible(payload)}
    svg = draw_graph(stored)
    found = list(ElementTree.fromstring(svg).iter())
    assert {element.tag.partition("}")[2] for element in found} == {"svg", "title", "rect", "path", "text"}
    assert not [key for element in found for key in element.attrib if key == "style" or key.startswith("on")]
    titles = [element.text for element in found if element.tag.endswith("title")]
    assert f"client{name}" in titles
    assert any(title and title.endswith(escape_invisible(payload)) for title in titles)


@pytest.mark.parametrize("graph", [*PAYLOADS, [], {}, None, 3], ids=range(len(PAYLOADS) + 4))
def test_what_is_no_graph_is_not_shown(graph: Any) -> None:
    shown = _draw_topology(RunResult("run", topology_graph=graph))
    assert shown.startswith("<p>(no drawing: the topology is no part of a drawing: ") or graph == {}
    assert "<" not in shown[3:-4]


WRONG_GRAPHS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda g: "<svg></svg>", "the topology is no part of a drawing: "),
    (lambda g: {k: v for k, v in g.items() if k != "heads"}, "heads is no part of a drawing: Field required"),
    (lambda g: g | {"segments": g["segments"] * 200}, "segments is no part of a drawing: List should have at most"),
    (lambda g: g | {"name": "x" * 501}, "name is no part of a drawing: String should have at most"),
    (lambda g: g | {"segments": []}, "topology 'vanilla' has no segment"),
    (lambda g: g | {"segments": g["segments"][::-1]}, "segment 'top' reads"),
    (lambda g: g | {"defended": {"a->b": "x"}}, "unknown crossing 'a->b'"),
]


@pytest.mark.parametrize(("change", "text"), WRONG_GRAPHS, ids=range(len(WRONG_GRAPHS)))
def test_a_graph_that_is_none_is_refused(change: Callable[[dict[str, Any]], Any], text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        draw_graph(change(copy.deepcopy(graph_of(VANILLA, {}))))
    assert str(caught.value).startswith(text)


def test_a_result_of_an_earlier_version_is_read_without_its_drawing(tmp_path: Path) -> None:
    found = result("none", 0, 0.0, 0.9, {"psnr": 20.0})
    del found["topology_graph"]
    put(tmp_path / "old", found | {"topology_svg": "<svg><rect id='old'/></svg>"}, (3, 8, 8), 0)
    text = write_report(tmp_path / "old").read_text("utf-8")
    assert "(no drawing: this run was made by a version that kept no data for one)" in text
    assert "id='old'" not in text
    parsed(text)


def test_pictures_come_from_the_runs_own_folder(tmp_path: Path) -> None:
    found = result("none", 0, 0.0, 0.9, {"psnr": 20.0})
    for name in ("secret", "study"):
        put(tmp_path / name, found, (1, 8, 8), 0)
    found = digests.read(tmp_path / "study" / "runs" / found["id"] / "result.json", "")
    (attack,) = found["attacks"]
    inner = f"runs/{found['id']}/{attack['file']}"
    home = tmp_path / "study" / "runs" / found["id"]
    (home / "out.safetensors").symlink_to(tmp_path / "secret" / inner)
    (home / "in.safetensors").symlink_to(attack["file"])
    for file, there in (
        (str(tmp_path / "secret" / inner), False),
        (f"../../../secret/{inner}", False),
        ("out.safetensors", False),
        ("in.safetensors", True),
    ):
        (home / "result.json").write_bytes(digests.json_with_digest(found | {"attacks": [attack | {"file": file}]}))
        settings = read_study(tmp_path / "study", trust=True).settings
        assert bool(read_pairs(settings, attack["label"], 0)) == there, file


UNDEFENDED = result("none", 0, 0.0, 0.9, {})["id"]
LINKS = ("runs/a", "config.toml", "environment.json", "report.html", f"runs/{UNDEFENDED}/prototypes.safetensors")


@pytest.mark.parametrize("link", LINKS)
def test_a_folder_with_a_link_that_leads_out_of_it_is_not_reported(
    tmp_path: Path, link: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = result("none", 0, 0.0, 0.9, {"psnr": 20.0})
    for name in ("secret", "study"):
        put(tmp_path / name, found, (1, 8, 8), 0)
    secret = tmp_path / "secret"
    (secret / "file").write_text("mine")
    place = tmp_path / "study" / link
    place.unlink(missing_ok=True)
    place.symlink_to(secret / "runs" / found["id"] if link == "runs/a" else secret / "file")
    assert main(["report", str(tmp_path / "study")]) == 2
    assert capsys.readouterr().err == (
        f"{str(tmp_path / 'study')!r} holds a link that leads out of it, {link!r}, which a report does not follow; "
        "put what it leads to in its place, or remove it\n"
    )
    assert (secret / "file").read_text() == "mine"
    # A folder that is a link itself is followed.
    place.unlink()
    if link != "config.toml":
        (tmp_path / "latest").symlink_to(tmp_path / "study")
        assert main(["report", str(tmp_path / "latest")]) == 0


def test_writing_a_report_follows_no_link(tmp_path: Path) -> None:
    """Not even one that is trusted."""
    folder, victim = tmp_path / "study", tmp_path / "victim"
    put(folder, result("none", 0, 0.0, 0.9, {"psnr": 20.0}), (1, 8, 8), 0)
    victim.write_text("mine")
    for name in (".report.html.tmp", "report.html"):
        (folder / name).symlink_to(victim)
    assert write_report(folder, trust=True).read_text("utf-8").startswith("<!DOCTYPE html>")
    assert victim.read_text() == "mine"


def test_hidden_signs_are_spelled_out() -> None:
    assert escape_invisible("a\u202eb\x1b[2J\ud800") == "a\\u202eb\\u001b[2J\\ud800"
    assert escape_invisible("naïve ☕ 日本 👩\u200d🔬\nb\tc") == "naïve ☕ 日本 👩\u200d🔬\nb\tc"
    assert make_visible({"a\u2066": ["\u200e", 1, None, 2.5, True]}) == {"a\\u2066": ["\\u200e", 1, None, 2.5, True]}


def test_shades_and_bars_by_hand() -> None:
    assert [shade_percent(v) for v in (-3.0, 0.0, 0.5, 1.0, 7.0, float("nan"))] == [0, 0, 38, 75, 75, 0]
    assert stack_bars({"a": 1.0, "c": 2.0}, ["a", "b", "c"], 4.0) == [
        ("0.00", "25.00"),
        ("25.00", "0.00"),
        ("25.00", "50.00"),
    ]
