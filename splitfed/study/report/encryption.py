"""Encrypted runs in a report: what they cost beside runs in plain, and what their server could read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splitfed.core.encryption_settings import CONSTANT_MASK, PLAIN_GRADIENT, PROTOCOLS, WEIGHT_SHARES
from splitfed.study.report.data import NO_DEFENSE, Json, Setting, Study, Summary
from splitfed.study.report.text import name_of
from splitfed.study.report.units import count_noun, format_bytes
from splitfed.study.results import RunResult

WHAT_PLAIN_TELLS: Mapping[tuple[str, str], str] = {
    (PLAIN_GRADIENT, "gradient"): "the gradients of the layer's result, weight and bias: labels and activations",
    (CONSTANT_MASK, "gradient"): "the gradient of the layer's result: labels",
    (CONSTANT_MASK, "masked weights"): "its weights after every step, behind a mask that it knows: activations",
}
"""Protocol and kind of message -> what numbers in plain are, and what the server works out from them."""

ALWAYS = (
    "sizes (rows, features, layout, levels), when messages are sent and in which order, and the bound that encryptions "
    "declare"
)
"""What every server reads, whatever is encrypted."""

TRUST: Mapping[str, str] = {
    "own": "{holder} parties hold a key pair each; one that colludes with the server gives away what it encrypted "
    "itself",
    "shared": "{holder} parties hold one key pair together; one that colludes with the server gives away what all of "
    "them encrypted",
}
"""Kind of keys -> who holds them, and what a client that colludes with the server gives away."""

MOVED = ("weights", "masked")


def encryption_section(study: Study, summary: Summary) -> Json | None:
    """Return the rows of the section's tables; None for a study without encrypted runs.

    "rows": the encrypted settings, and beside them those in plain that are undefended or promise privacy. "readings":
    an entry an encryption, with what reaches its server by kind of message.
    """
    pairs = list(zip(study.settings, summary["settings"], strict=True))
    if not any(_batch(setting) for setting, _ in pairs):
        return None
    shown = [(s, told) for s, told in pairs if _batch(s) or told["family"] == NO_DEFENSE or told["privacy"]]
    rows = [{"name": name_of(summary, told), "setting": told, "batch": _batch(s)} for s, told in shown]
    first: dict[str, Setting] = {}
    for setting, _ in pairs:
        if _batch(setting):
            first.setdefault(setting.encryption, setting)
    # What does not differ between two encryptions of one protocol is told once.
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
    """Return what was predicted of a batch of an encrypted setting; None of one in plain."""
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
    """Tell what is in a message and how long it is."""
    parts = [
        *([f"ciphertexts, {format_bytes(message['ciphertext_bytes'])}"] if message["ciphertext_bytes"] else []),
        *([f"plain numbers, {format_bytes(message['plain_bytes'])}"] if message["plain_bytes"] else []),
    ]
    return " and ".join(parts)


def _largest_message(run: RunResult, kind: str) -> str:
    sizes = [e["bytes"] for party in run.parties for e in party["receives"] if e["kind"] == kind]
    return format_bytes(max(sizes)) if sizes else "-"


def _weights_sentence(run: RunResult, protocol: str) -> str:
    """Say who has the clients' weights at successive times, where weights move."""
    if not any(run.bytes_by_kind.get(kind) for kind in MOVED):
        return ""
    if protocol != WEIGHT_SHARES:
        return "The clients' weights move between clients in plain."
    return (
        "The clients' weights, their share of the server's layer among them, move in plain: whoever receives or "
        "averages them has that share at successive times, and must not be the server."
    )
