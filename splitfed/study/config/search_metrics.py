"""What a search goes by: objectives and constraints, each a column of the table of results, of a run or of an attack.

A column of an attack is called by the attack first, `inverse_network.psnr`; where a study has one attack, its name may
be left out. A score with a centre (an AUC) counts as far above it as it is from it: the wrong way round leaks as much.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from splitfed.core.errors import unknown
from splitfed.study.config.mistakes import Mistakes, short_repr

RUN_COLUMNS = (
    *("utility", "utility_validation", "selected_utility", "epsilon", "epsilon_promised", "bytes", "messages"),
    *("simulated_seconds", "seconds", "rounds_to_target", "bytes_to_target", "u_distance_correlation_sqr"),
    *("client_mean", "client_min", "client_max", "client_std", "client_worst_decile"),
)
"""Columns of a run in the table of results that a search may go by."""

OPEN_COLUMNS = ("bytes_", "method_", "across_")
"""How columns begin whose names depend on what is sent and on the method."""

ATTACK_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "INPUTS": ("psnr", "ssim", "r2", "mse"),
    "TOKENS": ("token_accuracy",),
    "LABELS": ("accuracy", "auc"),
    "MEMBERS": ("auc", "tpr_at_fpr_1%", "tpr_at_fpr_0.1%"),
    "SHARES": ("total_variation",),
    "REPRESENTATIVES": ("psnr", "ssim", "r2", "mse", "accuracy"),
}
"""Target of an attack -> its scores."""

IMAGES, TABULAR = ("psnr", "ssim"), ("r2",)
"""Scores of reconstructed images alone, and of rows that are none."""

DIRECTIONS = ("minimize", "maximize")
_CONSTRAINT = re.compile(r"\s*(\S+)\s*(<=|>=)\s*(\S+)\s*")
LARGEST = 1e9
"""The greatest violation of a constraint that is recorded: samplers add violations up."""


@dataclass(frozen=True)
class SearchMetric:
    """A `column` of the table of results: of the run, or of its `attack`."""

    name: str
    column: str
    attack: str | None = None

    @property
    def without_bound(self) -> bool:
        """Whether a run that has no such number has no bound on it: an epsilon, where nothing is promised."""
        return self.column in ("epsilon", "epsilon_promised") and self.attack is None


@dataclass(frozen=True)
class SearchObjective:
    """A metric to `minimize` or `maximize`; beyond `cap` it counts as the cap, None: as it is."""

    metric: SearchMetric
    direction: Literal["minimize", "maximize"]
    cap: float | None = None

    def value_of(self, measured: float) -> float:
        """Return what counts of a mean over seeds."""
        if self.cap is None:
            return measured
        return min(measured, self.cap) if self.direction == "minimize" else max(measured, self.cap)

    @property
    def table(self) -> Any:
        """What stands for it in a study."""
        return self.direction if self.cap is None else {"direction": self.direction, "cap": self.cap}


@dataclass(frozen=True)
class SearchConstraint:
    """`metric` at most, or at least, `bound`; `text` as written."""

    metric: SearchMetric
    sign: str
    bound: float
    text: str

    def violation(self, measured: float) -> float:
        """Return by how much it is violated, as a share of the bound where that is not 0; at most 0: it holds."""
        over = measured - self.bound if self.sign == "<=" else self.bound - measured
        return max(-LARGEST, min(LARGEST, over / (abs(self.bound) or 1.0)))


@dataclass(frozen=True)
class MetricReader:
    """Reads the names of metrics in a study with these `attacks` (key -> name of the target)."""

    mistakes: Mistakes
    attacks: Mapping[str, str]

    def objectives(self, given: Mapping[str, Any]) -> tuple[SearchObjective, ...]:
        """Return the objectives of the table `search.objectives`; what is wrong is noted."""
        flat: dict[str, Any] = {}
        for key, value in given.items():
            # Written without quotes, the dot between attack and score makes a table.
            inner = isinstance(value, Mapping) and not {"direction", "cap"} & set(value)
            flat |= {f"{key}.{k}": v for k, v in value.items()} if inner else {key: value}
        found = [self._objective(f"search.objectives.{name}", name, value) for name, value in flat.items()]
        return tuple(one for one in found if one is not None)

    def constraints(self, given: Sequence[str]) -> tuple[SearchConstraint, ...]:
        """Return the constraints of the list `search.constraints`; what is wrong is noted."""
        found = [self._constraint(f"search.constraints[{i}]", text) for i, text in enumerate(given)]
        return tuple(one for one in found if one is not None)

    def _objective(self, where: str, name: str, value: Any) -> SearchObjective | None:
        table = value if isinstance(value, Mapping) else {"direction": value}
        with self.mistakes.part() as own:
            for key in table:
                if key not in ("direction", "cap"):
                    own.add(f"{where}.{key}", unknown("key", key, ["direction", "cap"]))
            direction, cap = table.get("direction"), table.get("cap")
            if direction not in DIRECTIONS:
                wrong = "is missing" if direction is None else f"{short_repr(direction)} is not allowed"
                own.add(
                    f"{where}.direction" if isinstance(value, Mapping) else where,
                    f"{wrong}; expected 'minimize' or 'maximize'",
                )
            if cap is not None and (
                isinstance(cap, bool) or not isinstance(cap, (int, float)) or not math.isfinite(cap)
            ):
                own.add(f"{where}.cap", f"{short_repr(cap)} is not allowed; expected a number")
            metric = MetricReader(own, self.attacks).metric(where, name)
            if metric is not None and metric.without_bound and cap is None and direction in DIRECTIONS:
                example = '{direction = "minimize", cap = 50}'
                own.add(where, f"has no bound where nothing is promised, so it needs a cap; expected {example}")
            if own or metric is None or direction not in DIRECTIONS:
                return None
            return SearchObjective(metric, direction, None if cap is None else float(cap))

    def _constraint(self, where: str, text: str) -> SearchConstraint | None:
        matched = _CONSTRAINT.fullmatch(text)
        bound = _number(matched[3]) if matched else None
        if matched is None or bound is None:
            self.mistakes.add(where, f"{short_repr(text)} is not allowed; expected text such as 'epsilon <= 3'")
            return None
        metric = self.metric(where, matched[1])
        return None if metric is None else SearchConstraint(metric, matched[2], bound, " ".join(matched.group(1, 2, 3)))

    def metric(self, where: str, name: str) -> SearchMetric | None:
        """Return the metric called `name`; None after a mistake."""
        if name in RUN_COLUMNS or name.startswith(OPEN_COLUMNS):
            return SearchMetric(name, name)
        scores = {score for columns in ATTACK_COLUMNS.values() for score in columns}
        attack, _, column = name.partition(".")
        if name in scores:
            having = [key for key, target in self.attacks.items() if name in ATTACK_COLUMNS[target]]
            if len(having) == 1:
                return SearchMetric(name, name, having[0])
            if not having:
                self.mistakes.add(where, f"{name} is a score of attacks, and no attack of the study has it")
            else:
                self.mistakes.add(where, f"{name} is a score of several attacks; expected {having[0]}.{name}")
            return None
        if column and attack in self.attacks:
            if column in (known := ATTACK_COLUMNS[self.attacks[attack]]):
                return SearchMetric(name, column, attack)
            self.mistakes.add(where, unknown(f"score of {attack}", column, known))
            return None
        if column:
            self.mistakes.add(where, unknown("attack", attack, self.attacks))
            return None
        known_scores = (f"{key}.{score}" for key, target in self.attacks.items() for score in ATTACK_COLUMNS[target])
        self.mistakes.add(where, unknown("metric", name, [*RUN_COLUMNS, *known_scores]))
        return None


def check_measured(
    mistakes: Mistakes,
    metrics: Mapping[str, SearchMetric],
    *,
    images: bool,
    validation: bool,
    clock: bool,
    target: bool,
) -> None:
    """Note every metric (place -> metric) that no run of this study can have.

    `images`: whether rows are images; `validation`: whether there are validation rows; `clock`: whether parties have
    speeds; `target`: whether the study names one.
    """
    for where, metric in metrics.items():
        if metric.attack is not None and metric.column in (TABULAR if images else IMAGES):
            kind = "images" if images else "rows that are no images"
            mistakes.add(where, f"{metric.column} is no score of {kind}; expected {(IMAGES if images else TABULAR)[0]}")
        elif metric.column in ("utility_validation", "selected_utility") and not validation:
            mistakes.add(where, f"{metric.column} needs validation rows; give data.validation = 0.1")
        elif metric.column == "simulated_seconds" and not clock:
            mistakes.add(where, "simulated_seconds needs the speeds of parties; add [training.speeds]")
        elif metric.column in ("rounds_to_target", "bytes_to_target") and not target:
            mistakes.add(where, f"{metric.column} needs study.target")


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
