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
from splitfed.study.config.mistakes import Mistakes, short_repr
from splitfed.study.config.parameters import check_parameters, parameters_of

EXAMPLE = "{compute = 1e9, up = 1e6, down = 1e6, latency = 0.01}"


def parse_speeds(mistakes: Mistakes, where: str, given: Any) -> tuple[dict[str, Any] | None, Speeds | None]:
    """Return the table `given` with defaults, and what it means; None for both where there is none."""
    if given is None:
        return None, None
    allowed = parameters_of(Speeds)
    with mistakes.part() as own:
        table = _check_table(own, where, given, f"default = {EXAMPLE}")
        rest = {key: value for key, value in table.items() if key not in ("default", "named")}
        plain = {name: allowed[name] for name in ("stragglers", "spread", "seed")}
        found = check_parameters(own, where, plain, rest, keys=["default", "named"])
        default_written, default = _parse_machine(own, f"{where}.default", table.get("default", {}))
        each = _check_table(own, f"{where}.named", table.get("named", {}), f"server = {EXAMPLE}")
        machines = {name: _parse_machine(own, f"{where}.named.{name}", one) for name, one in each.items()}
        speeds = None
        if not own:
            with own.at(where):
                check_count("seed", found.points[0].full["seed"])
                speeds = Speeds(default, {name: one for name, (_, one) in machines.items()}, **found.points[0].full)
    return {"default": default_written, "named": {n: w for n, (w, _) in machines.items()}, **found.written}, speeds


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
    machine = Machine()
    with mistakes.part() as own:
        table = _check_table(own, where, given, EXAMPLE.strip("{}"))
        found = check_parameters(own, where, parameters_of(Machine), table)
        if not own:
            with own.at(where):
                machine = Machine(**found.points[0].full)
    return found.written, machine


def _check_table(mistakes: Mistakes, where: str, given: Any, example: str) -> Mapping[str, Any]:
    if isinstance(given, Mapping):
        return given
    mistakes.add(where, f"{short_repr(given)} is not allowed; expected a table such as {{{example}}}")
    return {}
