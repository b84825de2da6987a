"""Who sees what, for a report: the drawing of each topology and, beneath it, what every party holds and receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from splitfed.core.errors import InvalidInput
from splitfed.study.report.data import Setting, Study
from splitfed.study.report.topology_data import draw_graph

Json = dict[str, Any]
Summary = Mapping[str, Any]


def topology_sections(study: Study, summary: Summary) -> list[Json]:
    """Return drawing and table for every place of the study; places that look the same stand together."""
    found: list[Json] = []
    for place in summary["places"]:
        settings = [s for s in study.settings if s.place == place]
        runs = [run for s in settings for run in s.runs]
        run = next((r for r in runs if not r["defense"]["parts"]), runs[0])
        new = {"labels": [place], "svg": _draw_topology(run), "parties": _party_rows(run, settings, summary)}
        same = next((old for old in found if all(old[key] == new[key] for key in ("svg", "parties"))), None)
        if same is None:
            found.append(new)
        else:
            same["labels"].append(place)
    return found


def _draw_topology(run: Mapping[str, Any]) -> Markup:
    """Draw the topology that the result describes; markup that a file brings along is never shown."""
    if "topology_graph" not in run:
        return Markup("<p>(no drawing: this run was made by a version that kept no data for one)</p>")
    try:
        return Markup(draw_graph(run["topology_graph"]))
    except InvalidInput as error:
        return Markup("<p>(no drawing: {})</p>").format(str(error))


def _party_rows(run: Mapping[str, Any], settings: Sequence[Setting], summary: Summary) -> list[Json]:
    """Return the table's rows; a value is guarded by what stands there in some setting of the place."""
    guards: dict[tuple[str, str, str], dict[str, None]] = {}
    for setting in settings:
        for party in setting.runs[0].get("parties", []):
            for entry in party["receives"]:
                if entry["guard"]:
                    key = (party["role"], entry["kind"], entry["value"])
                    guards.setdefault(key, {})[summary["names"][setting.defense]] = None
    return [
        {
            "name": party["role"],
            "count": party["parties"],
            "holds": _list_holdings(party),
            "receives": [
                entry | {"guards": list(guards.get((party["role"], entry["kind"], entry["value"]), {}))}
                for entry in party["receives"]
            ],
        }
        for party in run.get("parties", [])
    ]


def _list_holdings(party: Mapping[str, Any]) -> list[str]:
    held = [f"{s['name']} ({s['parameters']:,} parameters)" for s in party["segments"]]
    held += [f"raw data {value}" for value in party["data"]]
    held += [f"labels of {head}" for head in party["labels"]]
    return held + [f"the loss at {head}" for head in party["losses"]]
