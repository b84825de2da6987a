"""The `[training.speeds]` table of a study: machines and links of the parties, by which a simulated clock runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from splitfed.core.errors import check_count
from splitfed.core.topology import Topology
from splitfed.costs.clock import party_names
from splitfed.costs.speeds import Machine, Speeds
from splitfed.engines.base import FED
from splitfed.schedules.base import Schedule
from splitfed.study.config.lookup import check_parameters_strictly
from splitfed.study.config.mistakes import Mistakes, short_repr
from splitfed.study.config.parameters import parameters_of

EXAMPLE = "{compute = 1e9, up = 1e6, down = 1e6, latency = 0.01}"


def parse_speeds(mistakes: Mistakes, where: str, given: Any) -> tuple[dict[str, Any] | None, Speeds | None]:
    """Return the table `given` with defaults, and what it means; None for both where there is none."""
    if given is None:
        return None, None
    own = mistakes.fresh()
    table = _check_table(own, where, given, f"default = {EXAMPLE}")
    allowed = parameters_of(Speeds)
    names = ("stragglers", "spread", "seed")
    rest = {key: value for key, value in table.items() if key not in ("default", "named")}
    points = check_parameters_strictly(
        own, where, {name: allowed[name] for name in names}, rest, keys=["default", "named"]
    )
    default_written, default = _parse_machine(own, f"{where}.default", table.get("default", {}))
    each = _check_table(own, f"{where}.named", table.get("named", {}), f"server = {EXAMPLE}")
    machines = {name: _parse_machine(own, f"{where}.named.{name}", one) for name, one in each.items()}
    speeds = None
    if not own:
        with own.at(where):
            check_count("seed", points.points[0]["seed"])
            named = {name: machine for name, (_, machine) in machines.items()}
            speeds = Speeds(default, named, **points.points[0])
    mistakes.take(own)
    return {"default": default_written, "named": {n: w for n, (w, _) in machines.items()}, **points.written}, speeds


class PartyNames:
    """The parties of one run and their roles: those of the topology, and the fed server where there is one.

    `meeting`: whether a federated method brings one.
    """

    def __init__(self, topology: Topology, schedule: Schedule, clients: int, meeting: bool = False) -> None:
        replicas = party_names(topology, clients)
        others = [FED] if meeting or schedule.placement(topology).fused else []
        self.parties = {*others, *(party for names in replicas.values() for party in names.values())}
        self.roles = {*others, *topology.roles}

    def of(self, speeds: Speeds | None) -> Speeds | None:
        """Return `speeds` without those of parties that this run does not have, but another of its study may."""
        if speeds is None:
            return None
        present = self.parties | self.roles
        return replace(
            speeds,
            named={name: machine for name, machine in speeds.named.items() if name in present},
            stragglers={name: factor for name, factor in speeds.stragglers.items() if name in self.parties},
        )


def _parse_machine(mistakes: Mistakes, where: str, given: Any) -> tuple[dict[str, Any], Machine]:
    own = mistakes.fresh()
    found = check_parameters_strictly(
        own, where, parameters_of(Machine), _check_table(own, where, given, EXAMPLE.strip("{}"))
    )
    machine = Machine()
    if not own:
        with own.at(where):
            machine = Machine(**found.points[0])
    mistakes.take(own)
    return found.written, machine


def _check_table(mistakes: Mistakes, where: str, given: Any, example: str) -> Mapping[str, Any]:
    if isinstance(given, Mapping):
        return given
    mistakes.add(where, f"{short_repr(given)} is not allowed; expected a table such as {{{example}}}")
    return {}
