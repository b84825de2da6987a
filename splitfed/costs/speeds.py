"""Speeds of machines and links: by party, by role, or by default; with stragglers and a random spread."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from splitfed.core.argument_kinds import guard_constructor
from splitfed.core.errors import InvalidInput, check_count, check_names, check_number
from splitfed.core.random import generator


@dataclass(frozen=True)
class Machine:
    """One party's machine: `compute` in operations a second, `up` and `down` in bytes a second (math.inf: no delay).

    `latency`: the seconds a message takes beyond its bytes, one way.
    """

    compute: float = math.inf
    up: float = math.inf
    down: float = math.inf
    latency: float = 0.0

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for speeds that are not positive and a latency that is negative or infinite."""
        for name in ("compute", "up", "down"):
            if not (isinstance(value := getattr(self, name), float) and value == math.inf):
                check_number(name, value, low=0, open_low=True)
        check_number("latency", self.latency, low=0)


@guard_constructor
@dataclass(frozen=True)
class Speeds:
    """The machines of all parties: `named` has those of single parties or of roles, `default` that of all others.

    A party's own entry overrides its role's. `stragglers`: party -> factor on its computing time. `spread`: standard
    deviation of the logarithm of every client's computing time (0: none), drawn once a party from `seed`; parties that
    are the only one in their role are not spread.
    """

    default: Machine = Machine()
    named: Mapping[str, Machine] = field(default_factory=dict)
    stragglers: Mapping[str, float] = field(default_factory=dict)
    spread: float = 0.0
    seed: int = field(default=0, metadata={"check": partial(check_count, "seed", high=math.inf)})

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for factors that are not positive, and for a spread below 0 or above 10."""
        for party, factor in self.stragglers.items():
            check_number(f"stragglers[{party!r}]", factor, low=0, open_low=True)
        check_number("spread", self.spread, low=0, high=10)
        for name, machine in self.named.items():
            if not isinstance(machine, Machine):
                raise InvalidInput(f"named[{name!r}]={machine!r} is not allowed; expected a Machine")

    def check(self, parties: Iterable[str], roles: Iterable[str]) -> None:
        """Raise `InvalidInput` for a name that is neither in `parties` nor in `roles`, and for an unknown straggler."""
        known = set(parties)
        check_names("party or role with a speed", known.union(roles), *self.named)
        check_names("straggler", known, *self.stragglers)

    def of(self, party: str, role: str | None = None) -> Machine:
        """Return the machine of `party` in `role` (None: a role of the party's name)."""
        machine = self.named.get(party) or self.named.get(role or party) or self.default
        slowness = self.stragglers.get(party, 1.0)
        if self.spread and role not in (None, party):
            drawn = torch.randn((), dtype=torch.float64, generator=generator(self.seed, "speed", party))
            slowness *= math.exp(self.spread * float(drawn))
        return replace(machine, compute=machine.compute / slowness)
