"""Encrypted runs in plans and reports: their cost compared with plain runs, and what their server can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from splitfed.drawing.figure import INK, MUTED, PALETTE, Panel, Series, draw_svg, row_height, wrap_label
from splitfed.encryption.settings import CONSTANT_MASK, PLAIN_GRADIENT, PROTOCOLS, WEIGHT_SHARES
from splitfed.study.report.data import NO_DEFENSE, Json, Setting, Study, Summary, interval_ends
from splitfed.study.report.text import name_of
from splitfed.study.report.units import count_noun, format_bytes, format_seconds
from splitfed.study.results import RunResult

WHAT_PLAIN_TELLS: Mapping[tuple[str, str], str] = {
    (PLAIN_GRADIENT, "gradient"): "the gradients of the layer's result, weight and bias: labels and activations",
    (CONSTANT_MASK, "gradient"): "the gradient of the layer's result: labels",
    (CONSTANT_MASK, "masked weights"): "its weights after every step, behind a mask that it knows: activations",
}
"""(protocol, kind of message) -> what its plain numbers are, and what the server can compute from them."""

ALWAYS = (
    "sizes (rows, features, layout, levels), when messages are sent and in which order, and the bound that encryptions "
    "declare"
)
"""Metadata that every server reads, whatever is encrypted."""

TRUST: Mapping[str, str] = {
    "own": "{holder} parties hold a key pair each; one that colludes with the server reveals what it encrypted itself",
    "shared": "{holder} parties share one key pair; one that colludes with the server reveals what all of them "
    "encrypted",
}
"""Kind of keys -> who holds them, and what a client that colludes with the server reveals."""

MOVED = ("weights", "masked")

LABEL = 20
"""Characters of a setting's name in a line: the figure stays readable on a telephone, 400 pixels wide."""


def report_section(study: Study, summary: Summary) -> Json:
    """Return the report's section on encrypted runs, by name: a table of values, and a figure."""
    section = encryption_section(study, summary)
    figure = plot_encrypted_costs(section["rows"], summary["utility"]["metric"], "encrypted") if section else ""
    return {"encryption": section, "encrypted_costs": figure}


def describe_batch(found: Json) -> str:
    """Return a sentence or two on the cost of a batch of an encrypted run, and on what the other figures leave out."""
    work = ", ".join(f"{times:,} x {kind}" for kind, times in found["operations"].items())
    took = (
        "seconds cannot be estimated without the package tenseal"
        if found["seconds"] is None
        else f"about {format_seconds(found['seconds'])} of {found['machine']}"
    )
    return (
        f"a batch of {count_noun(found['rows'], 'row')} sends {format_bytes(found['bytes'])} (within 1 %) and takes "
        f"{took}: preset {found['parameters']}, layout {found['layout']!r}, {work}; operations and memory in the "
        "table are those of the same segments in plain"
    )


def encryption_section(study: Study, summary: Summary) -> Json | None:
    """Return the rows of the section's tables; None for a study without encrypted runs.

    "rows": the encrypted settings, and for comparison plain ones that are undefended or have a privacy guarantee.
    "readings": one entry for each encryption, with what reaches its server by kind of message.
    """
    pairs = list(zip(study.settings, summary["settings"], strict=True))
    if not any(_batch(setting) for setting, _ in pairs):
        return None
    shown = [(s, told) for s, told in pairs if _batch(s) or told["family"] == NO_DEFENSE or told["privacy"]]
    rows = [{"name": name_of(summary, told), "setting": told, "batch": _batch(s)} for s, told in shown]
    first: dict[str, Setting] = {}
    for setting, _ in pairs:
        if _batch(setting):
            first.setdefault(setting.computation, setting)
    # Rows that do not differ between two encryptions of one protocol appear once.
    readings: list[Json] = []
    for name, setting in first.items():
        new = _reading(setting)
        same = next((old for old in readings if all(old[k] == new[k] for k in ("protocol", "told", "refused"))), None)
        if same is None:
            readings.append({**new, "names": [summary["names"][name]]})
        else:
            same["names"].append(summary["names"][name])
    return {"rows": rows, "readings": readings}


def _batch(setting: Setting) -> Json | None:
    """Return the predicted cost of a batch of an encrypted setting; None for a plain one."""
    found: Json | None = (setting.runs[0].predicted or {}).get("encryption")
    return found


def _reading(setting: Setting) -> Json:
    """Return what reaches the server of an encrypted setting, in rows of kind, ciphertexts and plain numbers."""
    batch, run = _batch(setting), setting.runs[0]
    assert batch is not None
    protocol, holder = batch["protocol"], batch["key_holder"]
    rows = [
        {
            "kind": message["kind"],
            "how": _describe_content(message),
            "reads": WHAT_PLAIN_TELLS.get((protocol, message["kind"]), "numbers in plain")
            if message["plain_bytes"]
            else "nothing but sizes",
        }
        for message in batch["messages"]
        if message["receiver"] not in holder.split(", ")
    ]
    context = _largest_message(run, "public context")
    rows.append({"kind": "public context", "how": f"{context}, once a key pair", "reads": "no secret key is in it"})
    return {
        "protocol": protocol,
        "gives_away": PROTOCOLS[protocol],
        "leaks": protocol != WEIGHT_SHARES,
        "rows": rows,
        "rows_of_batch": count_noun(batch["rows"], "row"),
        "always": ALWAYS,
        "holders": TRUST[batch["keys"]].format(holder=holder),
        "weights": _weights_sentence(run, protocol),
        "refused": list(run.refused),
        "told": (batch["keys"], holder, batch["rows"], str(rows), _weights_sentence(run, protocol)),
    }


def _describe_content(message: Mapping[str, Any]) -> str:
    """Return the contents and the length of a message, as text."""
    parts = [
        *([f"ciphertexts, {format_bytes(message['ciphertext_bytes'])}"] if message["ciphertext_bytes"] else []),
        *([f"plain numbers, {format_bytes(message['plain_bytes'])}"] if message["plain_bytes"] else []),
    ]
    return " and ".join(parts)


def _largest_message(run: RunResult, kind: str) -> str:
    sizes = [e["bytes"] for party in run.parties for e in party["receives"] if e["kind"] == kind]
    return format_bytes(max(sizes)) if sizes else "-"


def _weights_sentence(run: RunResult, protocol: str) -> str:
    """Return a sentence on which party sees the clients' weights at successive times; empty if weights do not move."""
    if not any(run.bytes_by_kind.get(kind) for kind in MOVED):
        return ""
    if protocol != WEIGHT_SHARES:
        return "The clients' weights move between clients in plain."
    return (
        "The clients' weights, their share of the server's layer among them, move in plain: whoever receives or "
        "averages them has that share at successive times, and must not be the server."
    )


def plot_encrypted_costs(rows: Sequence[Mapping[str, Any]], metric: str, name: str) -> Markup:
    """Plot the settings `rows`, as `encryption_section` returns them, with a panel each for utility, bytes and seconds.

    Bytes and seconds are on logarithmic axes; bars are intervals. `metric`: the measure of utility. `name` is the
    prefix of the ids in the SVG.
    """
    names = [wrap_label(row["name"], LABEL) for row in rows]
    titles = {"utility": f"test {metric}", "bytes": "bytes of training", "seconds": "seconds of training"}
    panels = [
        Panel(
            [
                Series([found["mean"]], [place], **_look(row), x_ends=[interval_ends(found)])
                for place, row in enumerate(rows)
                if (found := row["setting"][key])
            ],
            axes={"xlabel": title},
            x_axis="" if key == "utility" else "log",
            rows=names,
        )
        for key, title in titles.items()
    ]
    return draw_svg(panels if rows else [], name, 4.4, row_height(names), columns=1)


def _look(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return label and marker style: encrypted, defended, or neither."""
    label, colour, marker = "in plain, private", PALETTE[1] if row["setting"]["privacy"] else MUTED, "D"
    if row["batch"]:
        label, colour, marker = "encrypted", PALETTE[0], "s"
    elif row["setting"]["family"] == NO_DEFENSE:
        label, colour, marker = "in plain, undefended", INK, "o"
    return {"label": label, "look": {"color": colour, "marker": marker, "ls": "", "ms": 7}}
