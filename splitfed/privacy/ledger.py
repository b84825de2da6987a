"""The privacy ledger of a run: the uses of each private mechanism, and their total privacy cost for a row.

A use is one release of one row by one mechanism. Clients hold different rows, so the cost of a run is the maximum over
clients; the costs of releases of a row by several parties of one client add up.

The cost of a row is that of its own releases only if the segments that compute releases do not learn from rows: all
later releases of a segment that is trained on a row depend on it. So there are two ways to count.

- "per row": everything before the mechanism is frozen (no weight is trained, no batch norm looks at its batch), or its
  weights are guarded by dp_sgd, whose own cost is then added. A row costs what its own releases cost.
- "all releases": something before the mechanism learns, or mixes the rows of a batch. Then every release of the party
  may depend on each row, and only the composition of all of them is bounded; if the schedule relays or averages
  weights, of all clients. The figure bounds these releases together, not other messages, and is usually too large to be
  useful. To avoid it, freeze the segments before the mechanism, preferably after pretraining on public data, or guard
  their weights with dp_sgd too.

Training and scoring are counted. Rows of later queries (predictions, victims of an attack) are not, as they do not
belong to the run: if the segments are frozen or guarded, releases of such rows have no further cost for rows of the
run. If segments learn unguarded, each such release depends on training rows too and adds the cost of one use.

Noise on labels themselves is counted per row in any case, as all further steps are post-processing. Costs are added
only if they protect the same values, with the same unit and neighbours; others are listed separately.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.grouping import group_pairs
from splitfed.core.privacy_events import Event, Gaussian, Laplace, Neighbours, Protects, Unit
from splitfed.core.private_values import PrivateValues
from splitfed.privacy.accountants import Bound, compose

PER_ROW = "per row"
ALL_RELEASES = "all releases"
STEPS = "steps"

WARNING = (
    "the segments before the mechanism learn from private rows, or mix those of a batch, so each release may depend on "
    "every row and only the composition of all releases is provable: freeze them (pretrained on public data), or guard "
    "their weights too"
)

UNCHARGED = (
    "statistics of all rows, where the data were standardised with them",
    "the choice of a setting by the results of a study",
)
"""Further dependence on rows that is not counted, as the ledger cannot detect it."""

Group = tuple[Protects, Any, Neighbours]


@dataclass(frozen=True)
class Charge:
    """The uses of one mechanism at one place for the rows of one client.

    `counts`: part of the data -> number of uses of each row (rows,); or `every`: uses that concern all training rows
    alike. `learns`: whether a segment before the mechanism is trained without a guard; `travels`: whether its weights
    reach other clients. `guarded`: whether a segment before it is trained under a guard of its weights. `some`: whether
    only some clients have the mechanism.
    """

    client: int
    party: str
    place: str
    defense: str
    event: Event
    counts: Mapping[str, Tensor] = field(default_factory=dict)
    every: int = 0
    learns: bool = False
    travels: bool = False
    guarded: bool = False
    some: bool = False

    @property
    def group(self) -> Group:
        """Protected values, unit and neighbours; charges with equal groups can be added."""
        return self.event.protects, self.event.unit, self.event.neighbours

    @property
    def most(self) -> int:
        """Largest number of uses of any row."""
        return self.every + max((int(c.max()) for c in self.counts.values() if len(c)), default=0)

    @property
    def sum(self) -> int:
        """Total number of uses of all rows."""
        return self.every + sum(int(c.sum()) for c in self.counts.values())


@dataclass(frozen=True)
class Line:
    """One mechanism at one place: the counted `uses` of the row (or of all rows), and their cost.

    `clients`: number of clients with this mechanism at this place; the figures are those of the client with the largest
    cost.
    """

    party: str
    place: str
    defense: str
    mechanism: str
    protects: str
    unit: str
    neighbours: str
    clients: int
    uses: int
    epsilon: float
    delta: float
    counted: str
    method: str


@dataclass(frozen=True)
class Total:
    """Total cost of all lines that can be added, for the client with the largest cost.

    `only`: the clients it holds for, if others lack a mechanism and have no guarantee; empty for all.
    """

    protects: str
    unit: str
    neighbours: str
    client: int
    epsilon: float
    delta: float
    counted: str
    method: str
    note: str = ""
    only: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ledger:
    """Privacy ledger of a run: what is released to whom, and with which guarantee.

    `lines` and `totals`; `open`: description of what leaves a data owner without a guarantee -> the private values it
    depends on. `replaced`: places where rows that were not finite were replaced by zeros, with their number.
    `uncharged`: further dependence on rows that no figure includes. `carried`: values that contain an input, whatever
    guards them.
    """

    delta: float
    lines: tuple[Line, ...] = ()
    totals: tuple[Total, ...] = ()
    open: Mapping[str, str] = field(default_factory=dict)
    replaced: tuple[str, ...] = ()
    uncharged: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()

    @property
    def epsilon(self) -> float | None:
        """Total epsilon of all that crosses; None if a part of it, or some client, has no guarantee.

        None also if guarantees cannot be added. `totals` has the guarantees of parts, and `str(ledger)` states them
        together with what is not covered.
        """
        if len(self.totals) != 1 or self.totals[0].only or related_exposure(asdict(self.totals[0]), self.open):
            return None
        return self.totals[0].epsilon

    def as_dict(self) -> dict[str, Any]:
        """Return the ledger as JSON values."""
        return {"epsilon": self.epsilon, **asdict(self)}

    def __str__(self) -> str:
        """Return one line of text for each total, with what crosses beside it without a guarantee."""
        return "\n".join(describe_ledger(asdict(self)))


def describe_ledger(ledger: Mapping[str, Any]) -> list[str]:
    """Return lines of text that state a ledger's guarantees, unprotected messages, and uncounted dependence."""
    carried = list(ledger.get("carried", ()))
    if not ledger["totals"]:
        return ["no formal guarantee", *carried]
    said = [describe_total(total, ledger["open"]) for total in ledger["totals"]]
    said += [*ledger["replaced"], *carried]
    return [*said, f"not charged: {'; '.join(ledger['uncharged'])}"]


def related_exposure(total: Mapping[str, Any], unprotected: Mapping[str, str] | Sequence[str]) -> list[str]:
    """Return the part of `unprotected` that depends on what `total` protects, both as JSON values.

    For a label only messages that depend on labels, since features count as known; for an example or a client all
    messages. If `unprotected` is a list of places, as in older reports, all are returned, as their private values are
    unknown.
    """
    if total["unit"] != str(Unit.LABEL) or not isinstance(unprotected, Mapping):
        return list(unprotected)
    return [place for place, told in unprotected.items() if told != str(PrivateValues.FEATURES)]


def describe_total(total: Mapping[str, Any], unprotected: Mapping[str, str] | Sequence[str]) -> str:
    """Return a text that states a total's guarantee, and what of `unprotected` crosses beside it without one."""
    # JSON knows no infinity.
    epsilon = "without bound" if total["epsilon"] is None else f"{total['epsilon']:.4g}"
    counted = PER_ROW if total["counted"] == PER_ROW else f"over {total['counted']}"
    alone = f", for client {', '.join(map(str, total['only']))} alone" if total.get("only") else ""
    left = related_exposure(total, unprotected)
    # Of labels alone features count as known, which is no word on whether they are open.
    features = [place for place in unprotected if place not in left]
    return (
        f"epsilon {epsilon} at delta {total['delta']:.1g} for {total['protects']}, unit: {total['unit']} "
        f"({total['neighbours']}), counted {counted}, {total['method']}{alone}"
        f"{': ' if total['note'] else ''}{total['note']}; "
        + (f"without a promise: {', '.join(left)}" if left else "nothing else crosses that depends on it")
        + (f"; of features without a promise: {', '.join(features)}" if features else "")
    )


def default_delta(rows: int) -> float:
    """Return 1 / (10 `rows`), rounded down to one digit; raise `InvalidInput` without rows."""
    if rows < 1:
        raise InvalidInput("there is no training row, so there is no default for delta; give one")
    exact = 1 / (10 * rows)
    power = 10.0 ** math.floor(math.log10(exact))
    digit = math.floor(exact / power * (1 + 1e-12))
    return float(f"{digit}e{math.floor(math.log10(exact))}")


def make_ledger(
    charges: Iterable[Charge],
    delta: float,
    unprotected: Mapping[str, PrivateValues] | None = None,
    replaced: Mapping[str, int] | None = None,
    carried: Sequence[str] = (),
) -> Ledger:
    """Return the ledger of `charges` at `delta`.

    `unprotected`: description of what else leaves a data owner -> the private values it depends on. `replaced`: place
    -> number of rows that were not finite there. `carried` as in `Ledger`.
    """
    used = [charge for charge in charges if charge.sum]
    groups = group_pairs((charge.group, charge) for charge in used)
    lines = [line for group in groups.values() for line in _lines(group, delta)]
    totals = [_total(group, groups, delta) for group in groups.values()]
    zeros = [
        f"{rows} row{'' if rows == 1 else 's'} of {place} {'was' if rows == 1 else 'were'} not finite, taken for zeros"
        for place, rows in sorted((replaced or {}).items())
    ]
    uncharged = UNCHARGED if totals else ()
    exposed = {place: str(told) for place, told in (unprotected or {}).items()}
    return Ledger(delta, tuple(lines), tuple(totals), exposed, tuple(zeros), uncharged, tuple(carried))


def _lines(charges: Sequence[Charge], delta: float) -> list[Line]:
    """Return a line for each place, that of the client with the largest cost."""
    lines = []
    for place_charges in group_pairs(((charge.place, charge.defense), charge) for charge in charges).values():
        costs = [_cost([charge], charges, delta) for charge in place_charges]
        worst = max(range(len(place_charges)), key=lambda i: costs[i][0].epsilon)
        charge, (bound, counted) = place_charges[worst], costs[worst]
        # One client may have the same defense twice at a place.
        twice = [c for c in place_charges if c.client == charge.client and not charge.learns]
        if len(twice) > 1:
            bound, counted = _cost(twice, charges, delta)
        uses = (
            sum(c.most for c in twice) if not charge.learns else sum(c.sum for c in _reaching_charges(charge, charges))
        )
        event = charge.event
        lines.append(
            Line(
                charge.party,
                charge.place,
                charge.defense,
                mechanism(event),
                str(event.protects),
                str(event.unit),
                str(event.neighbours),
                len({c.client for c in place_charges}),
                uses,
                bound.epsilon,
                bound.delta,
                counted,
                bound.method,
            )
        )
    return lines


def _total(charges: Sequence[Charge], groups: Mapping[Group, Sequence[Charge]], delta: float) -> Total:
    """Return the cost of the client for which it is largest; it includes the cost of guarded weights in releases."""
    protects, unit, neighbours = charges[0].group
    note = WARNING if any(charge.learns for charge in charges) else ""
    weight_charges: Sequence[Charge] = ()
    if any(charge.guarded for charge in charges):
        weight_charges = [
            replace(c, event=replace(c.event, protects=protects))
            for c in groups.get((Protects.WEIGHTS, unit, neighbours), ())
        ]
        note = note or (
            "the cost of the guarded weights is in this figure"
            if weight_charges
            else "this figure is for given weights; what the weights cost is another line, on top of it"
        )
    everybody = [*charges, *weight_charges]
    clients = dict.fromkeys(charge.client for charge in charges)
    client_costs = [(c, *_cost([one for one in everybody if one.client == c], everybody, delta)) for c in clients]
    client, bound, counted = max(client_costs, key=lambda one: one[1].epsilon)
    only = tuple(sorted({c.client for c in charges})) if any(c.some for c in charges) else ()
    return Total(
        str(protects), str(unit), str(neighbours), client, bound.epsilon, bound.delta, counted, bound.method, note, only
    )


def _cost(client_charges: Sequence[Charge], everybody: Sequence[Charge], delta: float) -> tuple[Bound, str]:
    """Return the cost of one client's charges for its worst row, and the way of counting."""
    if any(charge.some and charge.travels for charge in client_charges):
        # What the weights learnt of a row shows in the releases of clients that have no such mechanism.
        return Bound(math.inf, delta, "shown by clients without the mechanism"), ALL_RELEASES
    fixed: list[tuple[Event, int]] = []
    for charge in client_charges:
        if charge.learns:
            fixed += [(other.event, other.sum) for other in _reaching_charges(charge, everybody)]
        elif charge.every:
            fixed.append((charge.event, charge.every))
    own = [charge for charge in client_charges if not charge.learns and charge.counts]
    bounds = [compose([*fixed, *row], delta) for row in _uses_of_rows(own)]
    counted = ALL_RELEASES if any(c.learns for c in client_charges) else PER_ROW if own else STEPS
    return max(bounds, key=lambda bound: bound.epsilon), counted


def _reaching_charges(charge: Charge, everybody: Sequence[Charge]) -> list[Charge]:
    """Return the charges of this place that may depend on a row of this client: its own, or all clients'."""
    same = [c for c in everybody if (c.place, c.defense) == (charge.place, charge.defense)]
    return same if charge.travels else [c for c in same if c.client == charge.client]


def _uses_of_rows(charges: Sequence[Charge]) -> list[list[tuple[Event, int]]]:
    """Return the distinct lists of uses of rows, without those dominated by another one."""
    if not charges:
        return [[]]
    tables = []
    for part in dict.fromkeys(part for charge in charges for part in charge.counts):
        columns = [charge.counts.get(part, torch.zeros(0, dtype=torch.int32)) for charge in charges]
        table = torch.zeros(max(map(len, columns)), len(charges), dtype=torch.int64)
        for i, column in enumerate(columns):
            table[: len(column), i] = column
        tables.append(table)
    kinds = torch.unique(torch.cat(tables), dim=0)
    if len(kinds) <= 4096:
        beaten = ((kinds[None] >= kinds[:, None]).all(2) & (kinds[None] > kinds[:, None]).any(2)).any(1)
        kinds = kinds[~beaten]
    return [[(charge.event, n) for charge, n in zip(charges, row, strict=True)] for row in kinds.tolist()]


def mechanism(event: Event) -> str:
    """Return a short description of the mechanism of `event`."""
    found = event.mechanism
    text = (
        f"{type(found).__name__}, noise multiplier {found.noise_multiplier:.4g}"
        if isinstance(found, (Gaussian, Laplace))
        else f"epsilon {found.epsilon:.4g} a use"
    )
    return text if event.sampling_rate == 1 else f"{text}, sampling rate {event.sampling_rate:.4g}"
